//! The length of an image file that clients make longer or shorter.
//!
//! Only the text of a flat VMDK is one: clients write it anew as a whole. Its
//! length stands in the side file, in a block of its own behind the longest
//! text that there can be; nothing there means the layout's length.

use coldrise_block::{Disk, Error, ErrorKind, Result, BLOCK_SIZE_BYTES};
use coldrise_formats::Layout;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// Where the length of one file is kept.
pub(crate) struct Length {
    side: Arc<dyn Disk>,
    limit_bytes: u64,
    layout_bytes: u64,
    /// What was read last, for when the side file cannot be read: whoever then
    /// reads the file itself gets the error.
    last: AtomicU64,
    /// Held by whoever changes it.
    changing: Mutex<()>,
}

impl Length {
    /// Bytes of the side file of an image file: what the file may hold, and the
    /// block with the length where that can change.
    pub(crate) fn side_file_bytes(layout: &Layout) -> u64 {
        if layout.growth_limit_bytes() == layout.size_bytes() {
            layout.size_bytes()
        } else {
            layout.growth_limit_bytes().next_multiple_of(BLOCK_SIZE_BYTES) + BLOCK_SIZE_BYTES
        }
    }

    /// The length of a file of that layout; `None` where it never changes.
    pub(crate) fn of(layout: &Layout, side: &Arc<dyn Disk>) -> Option<Length> {
        let (limit_bytes, layout_bytes) = (layout.growth_limit_bytes(), layout.size_bytes());
        (limit_bytes != layout_bytes).then(|| Length {
            side: Arc::clone(side),
            limit_bytes,
            layout_bytes,
            last: AtomicU64::new(layout_bytes),
            changing: Mutex::new(()),
        })
    }

    /// The longest that the file may become, in bytes.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// The length now, in bytes.
    pub(crate) fn get(&self) -> u64 {
        let mut stored = [0; 8];
        match self.side.read_at(&mut stored, self.offset_bytes()) {
            Ok(()) => {
                let length = match u64::from_le_bytes(stored) {
                    0 => self.layout_bytes,
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
    pub(crate) fn set(&self, length_bytes: u64) -> Result<()> {
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
            self.side.write_zeroes(length_bytes, before - length_bytes)?;
        }
        self.store(length_bytes)
    }

    /// Makes the file at least so long; what lies between reads as zeroes.
    pub(crate) fn reach(&self, length_bytes: u64) -> Result<()> {
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
        self.side.write_at(&(length_bytes + 1).to_le_bytes(), self.offset_bytes())
    }

    fn offset_bytes(&self) -> u64 {
        self.side.size_bytes() - BLOCK_SIZE_BYTES
    }
}
