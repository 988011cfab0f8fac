//! Walks the ranges of a disk that may hold data.

use std::ops::Range;

use crate::extent::no_progress;
use crate::{Disk, Error, Extent, Result};

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
