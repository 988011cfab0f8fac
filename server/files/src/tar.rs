//! A tar file (POSIX 1003.1-2001: ustar with extended headers where needed).

use std::io::Write;

use coldrise_block::{Context, Result};
use coldrise_files_protocol::{Entry, EntryKind};

/// The context of errors of writing.
pub(super) const WRITING: fn() -> &'static str = || "writing the archive";

const BLOCK_BYTES: usize = 512;
/// The largest number in 11 octal digits.
const MAX_OCTAL: u64 = 0o777_7777_7777;
/// The largest number in 7 octal digits.
const MAX_SHORT_OCTAL: u64 = 0o777_7777;
/// Length of a name's field, in bytes.
const NAME_BYTES: usize = 100;

/// A tar file that is being written.
pub(super) struct Tar<W: Write> {
    out: W,
    /// Bytes that complete the last file's block.
    padding: usize,
}

impl<W: Write> Tar<W> {
    pub(super) fn new(out: W) -> Tar<W> {
        Tar { out, padding: 0 }
    }

    /// Adds an entry under that path.
    pub(super) fn add(&mut self, entry: &Entry, path: &[u8], mode: u32) -> Result<()> {
        self.complete()?;
        let kind = match entry.kind {
            EntryKind::Folder => b'5',
            EntryKind::Link => b'2',
            EntryKind::File | EntryKind::Special => b'0',
        };
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
        self.write(&header(path, mode, owners, entry.size_bytes, modified, kind, &entry.target))?;
        let rest = (entry.size_bytes % BLOCK_BYTES as u64) as usize;
        self.padding = if rest == 0 { 0 } else { BLOCK_BYTES - rest };
        Ok(())
    }

    /// Adds content of the last file.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).context(WRITING)
    }

    fn complete(&mut self) -> Result<()> {
        let padding = std::mem::take(&mut self.padding);
        self.write([0; BLOCK_BYTES].get(..padding).unwrap_or_default())
    }

    /// Ends the archive.
    pub(super) fn finish(mut self) -> Result<W> {
        self.complete()?;
        self.write(&[0; 2 * BLOCK_BYTES])?;
        Ok(self.out)
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
}
