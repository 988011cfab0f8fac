//! Checks of a VHD before QEMU opens it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::raw::file_length;

/// Length of the footer at the end of the file.
const FOOTER_BYTES: u64 = 512;
/// The first bytes of a footer, and of its copy at the start of a dynamic or
/// differencing disk.
pub(super) const COOKIE: &[u8] = b"conectix";
/// Disk types (u32, big endian, at 60 of the footer).
const FIXED: u32 = 2;
const DIFFERENCING: u32 = 4;

/// A footer, or its copy.
pub(super) struct Footer([u8; FOOTER_BYTES as usize]);

impl Footer {
    /// The footer at `offset`; `None` if there is no footer, or the file ends before.
    fn read(file: &File, offset: u64) -> std::io::Result<Option<Footer>> {
        let mut footer = Footer([0; FOOTER_BYTES as usize]);
        match file.read_exact_at(&mut footer.0, offset) {
            Ok(()) => Ok(footer.0.starts_with(COOKIE).then_some(footer)),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The last footer of a file of that length.
    fn read_last(file: &File, length: u64) -> std::io::Result<Option<Footer>> {
        match length.checked_sub(FOOTER_BYTES) {
            Some(offset) => Footer::read(file, offset),
            None => Ok(None),
        }
    }

    fn number<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.0[at..at + N]);
        bytes
    }

    fn current_size_bytes(&self) -> u64 {
        u64::from_be_bytes(self.number(48))
    }

    fn disk_type(&self) -> u32 {
        u32::from_be_bytes(self.number(60))
    }

    /// The complement of the sum of all bytes but the checksum's own.
    fn has_right_checksum(&self) -> bool {
        let sum = |bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).sum::<u32>();
        !(sum(&self.0[..64]) + sum(&self.0[68..])) == u32::from_be_bytes(self.number(64))
    }
}

/// Refuses files that QEMU would read wrongly: a differencing disk (the parent's data
/// would read as zeroes) and a truncated file.
pub(super) fn check_vhd(path: &Path) -> Result<()> {
    let what = || format!("reading {}", path.display());
    let file = File::open(path).context(what)?;
    let length = file_length(&file).context(what)?;
    let copy = Footer::read(&file, 0).context(what)?;
    let last = Footer::read_last(&file, length).context(what)?;
    // Either may be damaged; QEMU uses the copy.
    if [&copy, &last].into_iter().flatten().any(|footer| footer.disk_type() == DIFFERENCING) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} is a differencing VHD: its parent cannot be followed. Merge the two (Hyper-V: \
                 Convert-VHD, or Merge-VHD on a copy) and back up the result",
                path.display()
            ),
        ));
    }
    let Some(last) = last else {
        return Err(Error::new(
            ErrorKind::Io,
            format!("{} does not end like a VHD: it is truncated, or not a VHD", path.display()),
        ));
    };
    if copy.is_none() && last.disk_type() != FIXED {
        return Err(Error::new(
            ErrorKind::Io,
            format!(
                "{} is damaged: a VHD of its type begins with a copy of its footer, and this one \
                 does not",
                path.display()
            ),
        ));
    }
    let held = length - FOOTER_BYTES;
    if copy.is_none() && last.current_size_bytes() > held {
        return Err(Error::new(
            ErrorKind::Io,
            format!(
                "{} is truncated: it has {held} of {} bytes",
                path.display(),
                last.current_size_bytes()
            ),
        ));
    }
    Ok(())
}

/// True for a file that is exactly a fixed VHD.
pub(super) fn is_fixed_vhd(file: &File, length: u64) -> std::io::Result<bool> {
    let last = Footer::read_last(file, length)?;
    Ok(last.is_some_and(|footer| {
        footer.disk_type() == FIXED
            && footer.has_right_checksum()
            && footer.current_size_bytes() == length - FOOTER_BYTES
    }))
}
