//! A tar file of what a walk brings (POSIX 1003.1-2001: ustar with extended headers where needed).
//!
//! The archive is harmless to extract: [`super::client::Client`] lets only a tree pass. Here links that
//! lead out of the folder, devices and the bits for foreign rights (set-user-ID) are left out, unless
//! an exact archive is asked for.

use std::io::Write;

use coldrise_block::{Context, Result};
use coldrise_files::{Entry, EntryKind};

const BLOCK_BYTES: usize = 512;
/// The largest number in 11 octal digits.
const MAX_OCTAL: u64 = 0o777_7777_7777;
/// The largest number in 7 octal digits.
const MAX_SHORT_OCTAL: u64 = 0o777_7777;
/// Lengths of fields, in bytes.
const NAME_BYTES: usize = 100;

/// Numbers of entries that are not in the archive as they are in the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeftOut {
    /// Links that lead out of the folder.
    pub links: u64,
    /// Devices, pipes and sockets.
    pub special: u64,
}

/// A tar file that is being written.
pub struct Archive<W: Write> {
    out: W,
    /// The name of the top folder; empty for none.
    top: Vec<u8>,
    is_exact: bool,
    /// Bytes that complete the last file's block.
    padding: usize,
    left_out: LeftOut,
}

impl<W: Write> Archive<W> {
    /// An archive whose entries lie in the folder `top`, if that is not empty.
    pub fn new(out: W, top: &[u8], is_exact: bool) -> Archive<W> {
        Archive { out, top: top.to_vec(), is_exact, padding: 0, left_out: LeftOut::default() }
    }

    /// Adds an entry. The content of a file follows.
    ///
    /// # Errors
    /// Those of writing.
    pub fn add(&mut self, entry: &Entry) -> Result<()> {
        self.complete()?;
        let mut path = self.top.clone();
        if !path.is_empty() && !entry.path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&entry.path);
        if path.is_empty() {
            return Ok(());
        }
        let top = usize::from(!self.top.is_empty());
        let kind = match entry.kind {
            EntryKind::File => b'0',
            EntryKind::Link if self.is_exact || stays_inside(&path, &entry.target, top) => b'2',
            EntryKind::Link => {
                self.left_out.links += 1;
                return Ok(());
            }
            EntryKind::Folder => {
                path.push(b'/');
                b'5'
            }
            EntryKind::Special => {
                self.left_out.special += 1;
                return Ok(());
            }
        };
        self.write_headers(entry, &path, kind)?;
        let rest = (entry.size_bytes % BLOCK_BYTES as u64) as usize;
        self.padding = if rest == 0 { 0 } else { BLOCK_BYTES - rest };
        Ok(())
    }

    fn write_headers(&mut self, entry: &Entry, path: &[u8], kind: u8) -> Result<()> {
        let mode = if self.is_exact { entry.mode } else { entry.mode & 0o777 };
        let mut records = Vec::new();
        if path.len() > NAME_BYTES {
            record(&mut records, b"path", path);
        }
        if entry.target.len() > NAME_BYTES {
            record(&mut records, b"linkpath", &entry.target);
        }
        for (name, number, most) in [
            (b"size".as_slice(), entry.size_bytes, MAX_OCTAL),
            (b"uid", u64::from(entry.owner), MAX_SHORT_OCTAL),
            (b"gid", u64::from(entry.group), MAX_SHORT_OCTAL),
        ] {
            if number > most {
                record(&mut records, name, number.to_string().as_bytes());
            }
        }
        let modified = u64::try_from(entry.modified_s).ok().filter(|seconds| *seconds <= MAX_OCTAL);
        if modified.is_none() {
            record(&mut records, b"mtime", entry.modified_s.to_string().as_bytes());
        }
        if !records.is_empty() {
            // Readers take names for UTF-8 otherwise.
            let is_text =
                [path, &entry.target].iter().all(|name| std::str::from_utf8(name).is_ok());
            if !is_text {
                record(&mut records, b"hdrcharset", b"BINARY");
            }
            let header = header(b"extended", 0o600, (0, 0), records.len() as u64, 0, b'x', b"");
            let padding = records.len().next_multiple_of(BLOCK_BYTES);
            records.resize(padding, 0);
            self.write(&header)?;
            self.write(&records)?;
        }
        let owners = (entry.owner, entry.group);
        let modified = modified.unwrap_or_default();
        self.write(&header(path, mode, owners, entry.size_bytes, modified, kind, &entry.target))
    }

    /// Adds content of the last file.
    ///
    /// # Errors
    /// Those of writing.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).context(|| "writing the archive")
    }

    fn complete(&mut self) -> Result<()> {
        let padding = std::mem::take(&mut self.padding);
        self.write([0; BLOCK_BYTES].get(..padding).unwrap_or_default())
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// Those of writing.
    pub fn finish(mut self) -> Result<(W, LeftOut)> {
        self.complete()?;
        self.write(&[0; 2 * BLOCK_BYTES])?;
        self.out.flush().context(|| "writing the archive")?;
        Ok((self.out, self.left_out))
    }
}

/// An extended header's record, which begins with its own length.
fn record(records: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    let rest = name.len() + value.len() + 3;
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(length.to_string().as_bytes());
    records.push(b' ');
    records.extend_from_slice(name);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

fn header(
    path: &[u8],
    mode: u32,
    (owner, group): (u32, u32),
    size_bytes: u64,
    modified_s: u64,
    kind: u8,
    target: &[u8],
) -> [u8; BLOCK_BYTES] {
    let mut header = [0; BLOCK_BYTES];
    let mut put = |offset: usize, length: usize, bytes: &[u8]| {
        let count = bytes.len().min(length);
        if let (Some(field), Some(bytes)) =
            (header.get_mut(offset..offset + count), bytes.get(..count))
        {
            field.copy_from_slice(bytes);
        }
    };
    // A number that is too large stands in an extended header.
    let short = |number: u64| format!("{:07o}", number.min(MAX_SHORT_OCTAL));
    let long = |number: u64| format!("{:011o}", number.min(MAX_OCTAL));
    put(0, NAME_BYTES, path);
    put(100, 8, short(u64::from(mode)).as_bytes());
    put(108, 8, short(u64::from(owner)).as_bytes());
    put(116, 8, short(u64::from(group)).as_bytes());
    put(124, 12, long(size_bytes).as_bytes());
    put(136, 12, long(modified_s).as_bytes());
    put(148, 8, b"        ");
    put(156, 1, &[kind]);
    put(157, NAME_BYTES, target);
    put(257, 8, b"ustar\x0000");
    let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
    let text = format!("{sum:06o}\0 ");
    if let Some(field) = header.get_mut(148..156) {
        field.copy_from_slice(text.as_bytes());
    }
    header
}

/// Whether a link at `path`, which lies in at least `top` folders, leads to a place in those. Links
/// may lead through links: `..` is only safe at the beginning, where the folders are real ones.
fn stays_inside(path: &[u8], target: &[u8], top: usize) -> bool {
    let names = || target.split(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b"."));
    let up = names().take_while(|name| *name == b"..").count();
    let folders = path.iter().filter(|byte| **byte == b'/').count();
    !target.starts_with(b"/") && up + top <= folders && !names().skip(up).any(|name| name == b"..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_counts_its_own_length() {
        let mut records = Vec::new();
        record(&mut records, b"path", &[b'a'; 88]);
        record(&mut records, b"path", &[b'a'; 91]);
        assert!(records.starts_with(b"97 path=a") && records.get(96) == Some(&b'\n'));
        assert!(records.get(97..).unwrap().starts_with(b"101 path=a") && records.len() == 198);
    }

    #[test]
    fn links_that_lead_out_are_recognised() {
        for (path, target, stays) in [
            ("etc/a", "b", true),
            ("etc/a/b", "../c", true),
            ("etc/a", "../c", false),
            ("etc/a/b", "../../../etc/passwd", false),
            ("etc/a", "/etc/passwd", false),
            ("etc/a", "x/../y", false),
            ("etc/a", "./x/y", true),
        ] {
            assert_eq!(
                stays_inside(path.as_bytes(), target.as_bytes(), 1),
                stays,
                "{path} {target}"
            );
        }
        assert!(stays_inside(b"bin/sh", b"../usr", 0) && !stays_inside(b"sh", b"../usr", 0));
    }
}
