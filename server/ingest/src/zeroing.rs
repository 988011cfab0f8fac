//! Zeroing ranges of targets.

use std::fs::File;
use std::path::Path;

use coldrise_block::{Error, Result};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

/// Longest write of zeroes, in bytes.
const WRITE_BYTES: u64 = 1 << 20;

/// Zeroes a range of a file or device without writing it: `kind` punches a hole or allocates. The
/// length stays. Returns false if the file system or device cannot, or not at this alignment.
///
/// # Errors
/// Errors of the operating system.
pub(crate) fn zero_in_place(
    (file, path): (&File, &Path),
    kind: FallocateFlags,
    offset_bytes: u64,
    length_bytes: u64,
) -> Result<bool> {
    let flags = kind | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, flags, offset_bytes, length_bytes) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => Ok(false),
        Err(error) => {
            let what = format!("zeroing {} at offset {offset_bytes}", path.display());
            Err(Error::io(what, error.into()))
        }
    }
}

/// Writes zeroes to a range, in pieces, by `write`.
///
/// # Errors
/// Those of `write`.
pub(crate) fn write_zero_bytes(
    offset_bytes: u64,
    length_bytes: u64,
    mut write: impl FnMut(&[u8], u64) -> Result<()>,
) -> Result<()> {
    let zeroes = vec![0; WRITE_BYTES.min(length_bytes) as usize];
    let end = offset_bytes + length_bytes;
    let mut at = offset_bytes;
    while at < end {
        let piece = &zeroes[..WRITE_BYTES.min(end - at) as usize];
        write(piece, at)?;
        at += piece.len() as u64;
    }
    Ok(())
}
