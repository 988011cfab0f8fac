//! The disk as front ends see it.

use crate::{Error, ErrorKind, Extent, ReadSource, ReadTally, Result};

/// A byte-addressable virtual disk. All calls may come from many threads at once.
///
/// A range that leaves the disk fails with `ErrorKind::OutOfRange` and changes nothing.
pub trait Disk: Send + Sync {
    /// Size in bytes. It never changes while the disk is open, except for a disk that is
    /// a file which clients can extend.
    fn size_bytes(&self) -> u64;

    /// True when every write fails with `ErrorKind::ReadOnly`. This is the default for a
    /// disk that implements no write methods.
    fn is_read_only(&self) -> bool {
        true
    }

    /// Fills `buffer` from `offset_bytes` on.
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()>;

    /// Like [`Disk::read_at`], but only from memory. Fails with `ErrorKind::WouldWait`
    /// if the bytes are not all in memory or the disk cannot tell; the content of
    /// `buffer` is then undefined.
    fn read_in_memory(&self, _buffer: &mut [u8], _offset_bytes: u64) -> Result<()> {
        Err(would_wait())
    }

    /// Like [`Disk::read_at`] or, without waiting, [`Disk::read_in_memory`]. Adds to `tally` where
    /// the bytes came from. A disk that does not know its sources is its own backup.
    fn read_tallied(
        &self,
        buffer: &mut [u8],
        offset_bytes: u64,
        waiting: Waiting,
        tally: &mut ReadTally,
    ) -> Result<()> {
        match waiting {
            Waiting::Allowed => self.read_at(buffer, offset_bytes)?,
            Waiting::Refused => self.read_in_memory(buffer, offset_bytes)?,
        }
        tally.add(ReadSource::Backup, offset_bytes, buffer.len() as u64);
        Ok(())
    }

    /// Writes `bytes` at `offset_bytes`. Durable after the next [`Disk::flush`].
    fn write_at(&self, _bytes: &[u8], _offset_bytes: u64) -> Result<()> {
        Err(read_only())
    }

    /// Makes a range read as zeroes.
    fn write_zeroes(&self, _offset_bytes: u64, _length_bytes: u64) -> Result<()> {
        Err(read_only())
    }

    /// Declares that a range is no longer needed. Whole blocks in it then read as
    /// zeroes; the rest is unchanged.
    fn trim(&self, _offset_bytes: u64, _length_bytes: u64) -> Result<()> {
        Err(read_only())
    }

    /// Makes every completed write of this session durable, on any connection.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    /// The content of the range, in order and without gaps; neighbours of one kind are
    /// joined. Returns about `limit` extents at most; if there are more, the answer ends
    /// early.
    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>>;
}

/// The error of [`Disk::read_in_memory`].
#[cold]
pub fn would_wait() -> Error {
    Error::new(ErrorKind::WouldWait, "the bytes are not in memory")
}

/// Whether a read may wait for a drive or a lock, or decode chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// The read may wait.
    Allowed,
    /// The read fails with `ErrorKind::WouldWait` instead.
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
