//! The variable length of a file over a disk of fixed size.
//!
//! The length is stored on the disk itself, in its own block after the file's maximum size, so that
//! content and length are recovered together. An empty block means that the file has its initial
//! length.

use coldrise_block::{BLOCK_SIZE_BYTES, Disk, Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The stored length of one file.
pub struct Length {
    disk: Arc<dyn Disk>,
    limit_bytes: u64,
    first_bytes: u64,
    /// The last length read, used while the disk cannot be read. A read of the file itself then
    /// returns the error.
    last: AtomicU64,
    /// Held while the length changes.
    changing: Mutex<()>,
}

impl Length {
    /// Size in bytes of the disk under a file of at most `limit_bytes`.
    pub fn disk_bytes(limit_bytes: u64) -> u64 {
        limit_bytes.next_multiple_of(BLOCK_SIZE_BYTES) + BLOCK_SIZE_BYTES
    }

    /// The length of a file over `disk`. The disk has the size [`Length::disk_bytes`] of the limit.
    pub fn new(disk: &Arc<dyn Disk>, limit_bytes: u64, first_bytes: u64) -> Length {
        Length {
            disk: Arc::clone(disk),
            limit_bytes,
            first_bytes,
            last: AtomicU64::new(first_bytes),
            changing: Mutex::new(()),
        }
    }

    /// The maximum length of the file, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// The current length, in bytes.
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

    /// Sets the length. Truncated parts read as zeroes if the file grows again.
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
        // Zero first: after a crash in between, the truncated part is zeroes and does not return.
        if length_bytes < before {
            self.disk.write_zeroes(length_bytes, before - length_bytes)?;
        }
        self.store(length_bytes)
    }

    /// Extends the file to at least this length. The new part reads as zeroes.
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
        // Store the length plus one: 0 stands for a length that never changed.
        self.disk.write_at(&(length_bytes + 1).to_le_bytes(), self.offset_bytes())
    }

    fn offset_bytes(&self) -> u64 {
        self.disk.size_bytes() - BLOCK_SIZE_BYTES
    }
}
