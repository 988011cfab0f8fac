//! The disk as front ends see it.

use crate::{Extent, Result};

/// A byte-addressable virtual disk. All calls may come from many threads at once.
///
/// A range that leaves the disk is refused with `ErrorKind::OutOfRange` and
/// changes nothing.
pub trait Disk: Send + Sync {
    /// Size in bytes. It never changes while the disk is open.
    fn size_bytes(&self) -> u64;

    /// True when every write is refused with `ErrorKind::ReadOnly`.
    fn is_read_only(&self) -> bool;

    /// Fills `buffer` from `offset_bytes` on.
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()>;

    /// Writes `bytes` at `offset_bytes`. Durable after the next [`Disk::flush`].
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()>;

    /// Makes a range read as zeroes.
    fn write_zeroes(&self, offset_bytes: u64, length_bytes: u64) -> Result<()>;

    /// Tells that a range is no longer needed: it reads as zeroes afterwards
    /// where whole blocks are covered, and is unchanged elsewhere.
    fn trim(&self, offset_bytes: u64, length_bytes: u64) -> Result<()>;

    /// Makes durable every write of this session, by any connection, that
    /// completed before the call.
    fn flush(&self) -> Result<()>;

    /// What the range holds, in order and without gaps, joined where
    /// neighbours are of one kind. At most about `limit` extents are returned;
    /// where there are more, the answer ends early.
    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>>;
}
