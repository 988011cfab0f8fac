//! The content of a disk's ranges, as known without reading them.

use crate::{Error, ErrorKind, Result};

/// The content of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Stored bytes: the content is known only by reading.
    Stored,
    /// Reads as zeroes because zeroes were written.
    Zero,
    /// Reads as zeroes because nothing was ever stored.
    Hole,
}

impl ExtentKind {
    /// True when a read is known to return zeroes.
    pub fn reads_zero(self) -> bool {
        self != ExtentKind::Stored
    }
}

/// A range of a disk with one kind of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte of the range.
    pub offset_bytes: u64,
    /// Length of the range; never 0.
    pub length_bytes: u64,
    /// Its kind of content.
    pub kind: ExtentKind,
}

impl Extent {
    /// The end of the extent, for a walk that has reached `at`.
    ///
    /// # Errors
    /// `Internal` if the end is not after `at`: a defective disk would keep the walk
    /// running forever.
    pub fn end_behind(&self, at: u64) -> Result<u64> {
        match self.offset_bytes.checked_add(self.length_bytes) {
            Some(end) if end > at => Ok(end),
            _ => Err(no_progress()),
        }
    }
}

#[cold]
pub(crate) fn no_progress() -> Error {
    Error::new(ErrorKind::Internal, "the disk's extents do not advance")
}

/// Appends `next` to `extents`, joined with the last extent if they touch and are of
/// one kind. Drops an empty `next`.
pub fn push_extent(extents: &mut Vec<Extent>, next: Extent) {
    if next.length_bytes == 0 {
        return;
    }
    if let Some(last) = extents.last_mut() {
        if last.kind == next.kind && last.offset_bytes + last.length_bytes == next.offset_bytes {
            last.length_bytes += next.length_bytes;
            return;
        }
    }
    extents.push(next);
}
