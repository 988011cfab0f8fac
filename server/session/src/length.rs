//! The length of a file over a disk of fixed size that clients make longer or shorter.
//!
//! It stands on the disk itself, in a block of its own behind the longest that the
//! file can become, so that content and length are recovered together. Nothing
//! there means the length that the file had at first.

use coldrise_block::{Disk, Error, ErrorKind, Result, BLOCK_SIZE_BYTES};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// Where the length of one file is kept.
pub struct Length {
    disk: Arc<dyn Disk>,
    limit_bytes: u64,
    first_bytes: u64,
    /// What was read last, for when the disk cannot be read: whoever then
    /// reads the file itself gets the error.
    last: AtomicU64,
    /// Held by whoever changes it.
    changing: Mutex<()>,
}

impl Length {
    /// Bytes of the disk under a file that becomes no longer than `limit_bytes`.
    pub fn disk_bytes(limit_bytes: u64) -> u64 {
        limit_bytes.next_multiple_of(BLOCK_SIZE_BYTES) + BLOCK_SIZE_BYTES
    }

    /// The length of a file over `disk`, which was made with
    /// [`Length::disk_bytes`] of the limit.
    pub fn new(disk: &Arc<dyn Disk>, limit_bytes: u64, first_bytes: u64) -> Length {
        Length {
            disk: Arc::clone(disk),
            limit_bytes,
            first_bytes,
            last: AtomicU64::new(first_bytes),
            changing: Mutex::new(()),
        }
    }

    /// The longest that the file may become, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// The length now, in bytes.
    pub fn get(&self) -> u64 {
        let mut stored = [0; 8];
        match self.disk.read_at(&mut stored, self.offset_bytes()) {
            Ok(()) => {
                let length = match u64::from_le_bytes(stored) {
                    0 => self.first_bytes,
                    length => (length - 1).min(self.limit_bytes),
                };
                self.last.store(length, Ordering::Relaxed);
                length
            }
            Err(_) => self.last.load(Ordering::Relaxed),
        }
    }

    /// Sets it. What is cut off reads as zeroes when the file grows again.
    ///
    /// # Errors
    /// `OutOfRange` above the limit.
    pub fn set(&self, length_bytes: u64) -> Result<()> {
        if length_bytes > self.limit_bytes {
            return Err(Error::new(
                ErrorKind::OutOfRange,
                format!(
                    "{length_bytes} bytes are more than this file may become ({} bytes)",
                    self.limit_bytes
                ),
            ));
        }
        let _changing = self.changing.lock();
        let before = self.get();
        // First: after a crash in between the cut-off part is empty, not back.
        if length_bytes < before {
            self.disk.write_zeroes(length_bytes, before - length_bytes)?;
        }
        self.store(length_bytes)
    }

    /// Makes the file at least so long; what lies between reads as zeroes.
    pub fn reach(&self, length_bytes: u64) -> Result<()> {
        if length_bytes <= self.get() {
            return Ok(());
        }
        let _changing = self.changing.lock();
        if length_bytes <= self.get() {
            return Ok(());
        }
        self.store(length_bytes)
    }

    fn store(&self, length_bytes: u64) -> Result<()> {
        // One more, because 0 stands for a length that was never changed.
        self.disk.write_at(&(length_bytes + 1).to_le_bytes(), self.offset_bytes())
    }

    fn offset_bytes(&self) -> u64 {
        self.disk.size_bytes() - BLOCK_SIZE_BYTES
    }
}
