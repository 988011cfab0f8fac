//! The space that backups leave free on the drive.
//!
//! `forget` and `gc` make room on a full drive, but need some space themselves: to open the
//! database, to flush memory and RocksDB's log to files, and to copy the used part of a file before
//! the file is deleted. So every write of a backup checks the reserve first.

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::fs::statvfs;

use crate::repository::Repository;

/// The reserve is one part in this many of the drive.
const PART_OF_DRIVE: u64 = 64;
/// Minimum reserve. Opening the database takes up to 1 MiB.
const MIN_BYTES: u64 = 2 << 20;
/// Seals and publishes leave this much: they are small, and there can be many.
const ROOM_FOR_GC_BYTES: u64 = MIN_BYTES / 4 * 3;
/// Maximum reserve. A gc copies at most half of a file of chunks.
const MAX_BYTES: u64 = 128 << 20;

const MAKE_ROOM: &str = "free some space on it, or forget points and run coldrise gc";

impl Repository {
    /// Bytes of the drive that are free for this user.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub(crate) fn free_bytes(&self) -> Result<u64> {
        self.space().map(|(free, _)| free)
    }

    /// Free bytes of the drive and its size in bytes.
    fn space(&self) -> Result<(u64, u64)> {
        let what = || format!("asking for the free space of {}", self.path().display());
        let found = statvfs(self.path()).map_err(std::io::Error::from).context(what)?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Ok((bytes(found.f_bavail), bytes(found.f_blocks)))
    }

    /// Refuses a small new document, such as a seal's or a publish's, if the drive has hardly more
    /// space than opening the database for a gc takes.
    ///
    /// # Errors
    /// `NoSpace`.
    pub fn keep_room_for_gc(&self) -> Result<()> {
        let free = self.free_bytes()?;
        if free >= ROOM_FOR_GC_BYTES {
            return Ok(());
        }
        let text = format!(
            "the drive of {} has only {} KiB left, which coldrise gc needs to make room",
            self.path().display(),
            free >> 10
        );
        Err(Error::new(ErrorKind::NoSpace, text).advise(MAKE_ROOM))
    }

    /// Refuses to take the drive's reserve for `file_bytes` in a file and `batch_bytes` in a batch.
    /// A batch takes space in the log now and in a file later, so earlier batches also still need
    /// the space of their files.
    ///
    /// # Errors
    /// `NoSpace`.
    pub(crate) fn keep_reserve(&self, file_bytes: u64, batch_bytes: u64) -> Result<()> {
        let (free, size) = self.space()?;
        let reserve = (size / PART_OF_DRIVE).clamp(MIN_BYTES, MAX_BYTES);
        let needed = file_bytes + 2 * batch_bytes + self.database().unflushed_bytes()?;
        if free >= reserve + needed {
            return Ok(());
        }
        let text = format!(
            "the drive of {} has only {} MiB left, and the last {} MiB are reserved for making room",
            self.path().display(),
            free >> 20,
            reserve >> 20
        );
        Err(Error::new(ErrorKind::NoSpace, text).advise(MAKE_ROOM))
    }
}
