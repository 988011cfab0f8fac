//! Archives of what a walk brings: tar, tar.zst and zip.
//!
//! The archive is harmless to extract: [`super::client::Client`] lets only a tree pass. Here links that
//! lead out of the folder, devices and the bits for foreign rights (set-user-ID) are left out, unless
//! an exact archive is asked for.

use std::io::Write;

use coldrise_block::{Context, Result};
use coldrise_files_protocol::{Entry, EntryKind};

use super::tar::{Tar, WRITING};
use super::zip::Zip;

/// zstd's own default.
const ZSTD_LEVEL: i32 = 3;

/// The format of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArchiveFormat {
    /// POSIX tar.
    Tar,
    /// The same, compressed with Zstandard.
    TarZst,
    /// Zip with compressed files.
    Zip,
}

impl ArchiveFormat {
    /// All of them.
    pub const ALL: [ArchiveFormat; 3] =
        [ArchiveFormat::TarZst, ArchiveFormat::Tar, ArchiveFormat::Zip];

    /// The end of its files' names.
    pub fn extension(self) -> &'static str {
        match self {
            ArchiveFormat::Tar => ".tar",
            ArchiveFormat::TarZst => ".tar.zst",
            ArchiveFormat::Zip => ".zip",
        }
    }

    /// The format of a file of that name. Capitals do not matter.
    pub fn of_name(name: &[u8]) -> Option<ArchiveFormat> {
        ArchiveFormat::ALL.into_iter().find(|format| has_end(name, format.extension()))
    }
}

/// Ends of names of archives that are not made here.
const OTHER_ARCHIVES: [&str; 11] =
    [".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".lz4", ".7z", ".rar", ".tzst", ".zst"];

/// The end of a name that says it is an archive of a format that is not made here.
pub fn other_archive(name: &[u8]) -> Option<&'static str> {
    let is_ours = ArchiveFormat::of_name(name).is_some();
    OTHER_ARCHIVES.into_iter().find(|end| !is_ours && has_end(name, end))
}

fn has_end(name: &[u8], end: &str) -> bool {
    let at = name.len().checked_sub(end.len());
    at.is_some_and(|at| name[at..].eq_ignore_ascii_case(end.as_bytes()))
}

/// Numbers of entries that are not in the archive as they are in the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeftOut {
    /// Links that lead out of the folder.
    pub links: u64,
    /// Devices, pipes and sockets.
    pub special: u64,
}

/// The bytes of an archive.
enum Packer<W: Write> {
    Tar(Tar<W>),
    TarZst(Tar<zstd::Encoder<'static, W>>),
    Zip(Box<Zip<W>>),
}

/// An archive that is being written.
pub struct Archive<W: Write> {
    packer: Packer<W>,
    /// The name of the top folder; empty for none.
    top: Vec<u8>,
    is_exact: bool,
    left_out: LeftOut,
}

impl<W: Write> Archive<W> {
    /// An archive whose entries lie in the folder `top`, if that is not empty.
    ///
    /// # Errors
    /// Those of writing.
    pub fn new(out: W, format: ArchiveFormat, top: &[u8], is_exact: bool) -> Result<Archive<W>> {
        let packer = match format {
            ArchiveFormat::Tar => Packer::Tar(Tar::new(out)),
            ArchiveFormat::TarZst => {
                let encoder = zstd::Encoder::new(out, ZSTD_LEVEL).context(WRITING)?;
                Packer::TarZst(Tar::new(encoder))
            }
            ArchiveFormat::Zip => Packer::Zip(Box::new(Zip::new(out))),
        };
        Ok(Archive { packer, top: top.to_vec(), is_exact, left_out: LeftOut::default() })
    }

    /// Adds an entry. The content of a file follows.
    ///
    /// # Errors
    /// Those of writing; `Unsupported` if there are too many for a zip file.
    pub fn add(&mut self, entry: &Entry) -> Result<()> {
        let mut path = self.top.clone();
        if !path.is_empty() && !entry.path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&entry.path);
        if path.is_empty() {
            return Ok(());
        }
        let top = usize::from(!self.top.is_empty());
        match entry.kind {
            EntryKind::Link if !self.is_exact && !stays_inside(&path, &entry.target, top) => {
                self.left_out.links += 1;
                return Ok(());
            }
            EntryKind::Special => {
                self.left_out.special += 1;
                return Ok(());
            }
            EntryKind::Folder => path.push(b'/'),
            EntryKind::File | EntryKind::Link => {}
        }
        let mode = if self.is_exact { entry.mode } else { entry.mode & 0o777 };
        match &mut self.packer {
            Packer::Tar(tar) => tar.add(entry, &path, mode),
            Packer::TarZst(tar) => tar.add(entry, &path, mode),
            Packer::Zip(zip) => zip.add(entry, &path, mode),
        }
    }

    /// Adds a text of ours, beside the top folder.
    ///
    /// # Errors
    /// Those of writing.
    pub fn add_text(&mut self, name: &str, text: &str) -> Result<()> {
        let entry = Entry {
            path: name.as_bytes().to_vec(),
            kind: EntryKind::File,
            mode: 0o644,
            owner: 0,
            group: 0,
            size_bytes: text.len() as u64,
            modified_s: 0,
            modified_ns: 0,
            target: Vec::new(),
        };
        let top = std::mem::take(&mut self.top);
        let added = self.add(&entry).and_then(|()| self.write(text.as_bytes()));
        self.top = top;
        added
    }

    /// What is left out so far.
    pub fn left_out(&self) -> LeftOut {
        self.left_out
    }

    /// Adds content of the last file.
    ///
    /// # Errors
    /// Those of writing.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.packer {
            Packer::Tar(tar) => tar.write(bytes),
            Packer::TarZst(tar) => tar.write(bytes),
            Packer::Zip(zip) => zip.write(bytes),
        }
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// Those of writing.
    pub fn finish(self) -> Result<(W, LeftOut)> {
        let mut out = match self.packer {
            Packer::Tar(tar) => tar.finish()?,
            Packer::TarZst(tar) => tar.finish()?.finish().context(WRITING)?,
            Packer::Zip(zip) => zip.finish()?,
        };
        out.flush().context(WRITING)?;
        Ok((out, self.left_out))
    }
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
    fn names_claim_formats() {
        assert_eq!(ArchiveFormat::of_name(b"X.ZIP"), Some(ArchiveFormat::Zip));
        assert_eq!(ArchiveFormat::of_name(b"a.tar.zst"), Some(ArchiveFormat::TarZst));
        assert_eq!(ArchiveFormat::of_name(b"zip"), None);
        assert_eq!(other_archive(b"a.tar.GZ"), Some(".gz"));
        assert_eq!(other_archive(b"a.tar.zst"), None);
        assert_eq!(other_archive(b"etc"), None);
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
