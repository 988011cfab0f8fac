//! What is known about a range of a disk without reading it.

use std::ops::Range;

use crate::{Disk, Error, ErrorKind, Result};

/// What a range of a disk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Stored bytes: they have to be read.
    Stored,
    /// Reads as zeroes because something wrote zeroes there.
    Zero,
    /// Reads as zeroes because nothing was ever stored there.
    Hole,
}

impl ExtentKind {
    /// True where a read is known to return zeroes.
    pub fn reads_zero(self) -> bool {
        self != ExtentKind::Stored
    }
}

/// A range of a disk of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte of the range.
    pub offset_bytes: u64,
    /// Length of the range; never 0.
    pub length_bytes: u64,
    /// What the range holds.
    pub kind: ExtentKind,
}

impl Extent {
    /// Where the extent ends, for a walk that has come to `at`.
    ///
    /// # Errors
    /// `Internal` where that is not behind `at`: a broken disk would be asked for ever.
    pub fn end_behind(&self, at: u64) -> Result<u64> {
        match self.offset_bytes.checked_add(self.length_bytes) {
            Some(end) if end > at => Ok(end),
            _ => Err(no_progress()),
        }
    }
}

#[cold]
fn no_progress() -> Error {
    Error::new(ErrorKind::Internal, "extents without progress")
}

/// Extents that are asked for at once while a disk is walked.
const WALK_LIMIT: usize = 1024;

/// The ranges of a disk outside of which it is known to read as zeroes, in
/// order. They are found as they are asked for, some at a time, without reading
/// any data. It ends where the disk cannot say; see [`StoredRanges::end`].
pub struct StoredRanges<'a> {
    disk: &'a dyn Disk,
    at: u64,
    found: std::vec::IntoIter<Extent>,
    failed: Option<Error>,
}

impl<'a> StoredRanges<'a> {
    /// Those of the whole disk.
    pub fn of(disk: &'a dyn Disk) -> StoredRanges<'a> {
        StoredRanges { disk, at: 0, found: Vec::new().into_iter(), failed: None }
    }

    /// To be called at the end.
    ///
    /// # Errors
    /// What ended the walk early.
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

/// Appends `next` to `extents`, joining it with the last one where they touch
/// and are of one kind. An empty `next` is dropped.
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
