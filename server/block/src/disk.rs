//! The disk as front ends see it.

use crate::{Error, ErrorKind, Extent, Result};

/// A byte-addressable virtual disk. All calls may come from many threads at once.
///
/// A range that leaves the disk is refused with `ErrorKind::OutOfRange` and
/// changes nothing.
pub trait Disk: Send + Sync {
    /// Size in bytes. It never changes while the disk is open, unless what is
    /// shown as a disk is a file that clients may make longer.
    fn size_bytes(&self) -> u64;

    /// True when every write is refused with `ErrorKind::ReadOnly`, as it is where
    /// a disk provides nothing of what changes it.
    fn is_read_only(&self) -> bool {
        true
    }

    /// Fills `buffer` from `offset_bytes` on.
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()>;

    /// The same, from what is in memory: `ErrorKind::WouldWait` where that is not all of
    /// it, and where a disk cannot tell. Then `buffer` holds nothing that may be used.
    fn read_in_memory(&self, _buffer: &mut [u8], _offset_bytes: u64) -> Result<()> {
        Err(would_wait())
    }

    /// Writes `bytes` at `offset_bytes`. Durable after the next [`Disk::flush`].
    fn write_at(&self, _bytes: &[u8], _offset_bytes: u64) -> Result<()> {
        Err(read_only())
    }

    /// Makes a range read as zeroes.
    fn write_zeroes(&self, _offset_bytes: u64, _length_bytes: u64) -> Result<()> {
        Err(read_only())
    }

    /// Tells that a range is no longer needed: it reads as zeroes afterwards
    /// where whole blocks are covered, and is unchanged elsewhere.
    fn trim(&self, _offset_bytes: u64, _length_bytes: u64) -> Result<()> {
        Err(read_only())
    }

    /// Makes durable every write of this session, by any connection, that
    /// completed before the call.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    /// What the range holds, in order and without gaps, joined where
    /// neighbours are of one kind. At most about `limit` extents are returned;
    /// where there are more, the answer ends early.
    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>>;
}

/// What [`Disk::read_in_memory`] fails with.
#[cold]
pub fn would_wait() -> Error {
    Error::new(ErrorKind::WouldWait, "it is not in memory")
}

/// Whether a read may wait for a drive or a lock, or decode anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// It may.
    Allowed,
    /// It fails with `ErrorKind::WouldWait` instead.
    Refused,
}

fn read_only() -> Error {
    Error::new(
        ErrorKind::ReadOnly,
        "a restore point never changes; publish it as a session to write",
    )
}

/// Checks that a range lies within a disk of `size_bytes`.
///
/// # Errors
/// `OutOfRange`.
#[inline]
pub fn check_range(size_bytes: u64, offset_bytes: u64, length_bytes: u64) -> Result<()> {
    match offset_bytes.checked_add(length_bytes) {
        Some(end) if end <= size_bytes => Ok(()),
        _ => Err(Error::new(
            ErrorKind::OutOfRange,
            format!("{length_bytes} bytes at {offset_bytes} leave the disk of {size_bytes} bytes"),
        )),
    }
}
