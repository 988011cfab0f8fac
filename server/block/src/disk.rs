//! The disk as front ends see it.

use crate::{Error, ErrorKind, Extent, ReadContext, Result, Waiting};

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

    /// Fills `buffer` from `offset_bytes` on, and adds to `context` where the bytes came from, if the
    /// disk knows. If `context` refuses to wait, the bytes come from memory; `ErrorKind::WouldWait` if
    /// they are not all there or the disk cannot tell. After an error the content of `buffer` is
    /// undefined.
    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()>;

    /// [`Disk::read`] for a caller that can wait.
    #[inline]
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.read(buffer, offset_bytes, &mut ReadContext::new(Waiting::Allowed))
    }

    /// [`Disk::read`] for a caller that cannot wait.
    #[inline]
    fn read_in_memory(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.read(buffer, offset_bytes, &mut ReadContext::new(Waiting::Refused))
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
