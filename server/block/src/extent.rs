//! The content of a disk's ranges, as known without reading them.

use std::ops::Range;

use crate::{Disk, Error, ErrorKind, Result};

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
fn no_progress() -> Error {
    Error::new(ErrorKind::Internal, "the disk's extents do not advance")
}

/// Extents per request while a disk is walked.
const WALK_LIMIT: usize = 1024;

/// The ranges of a disk that may hold data, in order; all other bytes are known to read
/// as zeroes. The ranges are found on demand, without reading data. The iterator ends
/// early on an error; see [`StoredRanges::end`].
pub struct StoredRanges<'a> {
    disk: &'a dyn Disk,
    at: u64,
    found: std::vec::IntoIter<Extent>,
    failed: Option<Error>,
}

impl<'a> StoredRanges<'a> {
    /// The stored ranges of the whole disk.
    pub fn of(disk: &'a dyn Disk) -> StoredRanges<'a> {
        StoredRanges { disk, at: 0, found: Vec::new().into_iter(), failed: None }
    }

    /// Call this at the end.
    ///
    /// # Errors
    /// The error that ended the walk early.
    pub fn end(self) -> Result<()> {
        self.failed.map_or(Ok(()), Err)
    }

    fn find_more(&mut self) -> Result<()> {
        let left = self.disk.size_bytes() - self.at;
        let found = self.disk.extents(self.at, left, WALK_LIMIT)?;
        self.at = found.last().ok_or_else(no_progress)?.end_behind(self.at)?;
        self.found = found.into_iter();
        Ok(())
    }
}

impl Iterator for StoredRanges<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        loop {
            if let Some(stored) = self.found.find(|extent| !extent.kind.reads_zero()) {
                return Some(stored.offset_bytes..stored.offset_bytes + stored.length_bytes);
            }
            if self.failed.is_some() || self.at >= self.disk.size_bytes() {
                return None;
            }
            self.failed = self.find_more().err();
        }
    }
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
