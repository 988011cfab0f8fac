//! The content of a disk of a point, and its differences from another point.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Disk, Error, ErrorKind, Extent, Result, StoredRanges};
use coldrise_ingest::source::{DirtyRun, Reader, Source};
use coldrise_inventory::Range;
use coldrise_session::ByteRanges;
use coldrise_store::{DiskName, PointDocument};

use crate::source::CopySource;

use crate::content::Content;

/// Bytes of one read.
const READ_BYTES: u64 = 1 << 20;
/// Maximum number of extents or runs in one answer.
const MAX_RUNS: usize = 4096;
/// Bytes of a disk of which one answer says what is content: a large disk takes a while.
const WALK_BYTES: u64 = 64 << 30;

/// A disk of a point as the source of a copy. It is not limited to blocks: any range can be read.
pub(crate) struct PointChanges {
    disk: Arc<dyn Disk>,
    /// The differences from the base, ascending and apart; `None` without a base.
    changed: Option<Vec<Range>>,
}

impl PointChanges {
    /// Opens a disk of `point`. The caller holds `point` and `base`, which has a disk of the same name.
    ///
    /// # Errors
    /// `Corrupt` for damage; `Interrupted` once `cancel` is set.
    pub(crate) fn open(
        source: &dyn CopySource,
        point: &PointDocument,
        base: Option<&PointDocument>,
        name: &DiskName,
        cancel: &AtomicBool,
    ) -> Result<PointChanges> {
        let changed = base.map(|base| source.changed(base, point, name, cancel)).transpose()?;
        Ok(PointChanges { disk: source.disk(point, name)?, changed })
    }

    /// The disk.
    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// The ranges that may differ from the base, or from zeroes.
    pub(crate) fn differences(&self) -> Result<ByteRanges> {
        if let Some(changed) = &self.changed {
            let ranges = changed.iter().map(|range| (range.offset_bytes, range.end()));
            return Ok(ByteRanges::union(ranges.collect()));
        }
        let mut stored = StoredRanges::of(&*self.disk);
        let ranges = stored.by_ref().map(|range| (range.start, range.end)).collect();
        stored.end()?;
        Ok(ByteRanges::union(ranges))
    }

    /// The changed ranges that may have content; behind the end of a smaller base all do.
    ///
    /// # Errors
    /// As for [`PointChanges::open`].
    pub(crate) fn content(
        &self,
        base_end_bytes: Option<u64>,
        cancel: &AtomicBool,
    ) -> Result<Content> {
        let size_bytes = self.disk.size_bytes();
        let changed = self.changed.iter().flatten();
        let mut ranges: Vec<_> = changed.map(|range| (range.offset_bytes, range.end())).collect();
        ranges.push((base_end_bytes.unwrap_or(0), size_bytes));
        let mut content = Content::default();
        for (mut at, end) in Vec::from(ByteRanges::union(ranges)) {
            while at < end.min(size_bytes) {
                if cancel.load(Ordering::Relaxed) {
                    return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
                }
                let length_bytes = (end.min(size_bytes) - at).min(WALK_BYTES);
                for extent in self.disk.extents(at, length_bytes, MAX_RUNS)? {
                    let start = at;
                    at = extent.end_behind(at)?;
                    if !extent.kind.reads_zero() {
                        content.add(start, at);
                    }
                }
            }
        }
        Ok(content)
    }

    /// Says of everything before `end_bytes` that it has not changed, and what has behind it.
    pub(crate) fn continue_at(&mut self, end_bytes: u64) {
        let size_bytes = self.disk.size_bytes();
        let all = vec![Range { offset_bytes: 0, length_bytes: size_bytes }];
        self.changed = Some(behind(self.changed.take().unwrap_or(all), end_bytes));
    }
}

impl Source for PointChanges {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn alignment_bytes(&self) -> u64 {
        1
    }

    fn useful_readers(&self) -> usize {
        std::thread::available_parallelism().map_or(2, |count| count.get().min(4))
    }

    fn useful_read_bytes(&self) -> u64 {
        READ_BYTES
    }

    fn reader(&self) -> Result<Box<dyn Reader + '_>> {
        Ok(Box::new(PointReader(self.disk.as_ref())))
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<Extent>> {
        self.disk.extents(offset_bytes, length_bytes, MAX_RUNS)
    }

    fn dirty_runs(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<DirtyRun>> {
        let end = offset_bytes + length_bytes;
        let changed = self.changed.as_deref().unwrap_or_default();
        Ok(runs(changed, offset_bytes, end, MAX_RUNS))
    }

    fn check_after_reading(&self) -> Result<Option<String>> {
        Ok(None)
    }
}

/// The part of the ranges behind `at`.
fn behind(ranges: Vec<Range>, at: u64) -> Vec<Range> {
    let cut = |range: Range| {
        let start = range.offset_bytes.max(at);
        let length_bytes = range.end().checked_sub(start).filter(|length| *length > 0)?;
        Some(Range { offset_bytes: start, length_bytes })
    };
    ranges.into_iter().filter_map(cut).collect()
}

/// The runs from `at` to `end`, at least one and about `most`.
fn runs(changed: &[Range], mut at: u64, end: u64, most: usize) -> Vec<DirtyRun> {
    let mut runs = Vec::new();
    let mut add = |at: &mut u64, to: u64, is_dirty| {
        let to = to.min(end);
        if to > *at {
            runs.push(DirtyRun { offset_bytes: *at, length_bytes: to - *at, is_dirty });
            *at = to;
        }
    };
    let first = changed.partition_point(|range| range.end() <= at);
    for range in changed[first..].iter().take(most / 2) {
        add(&mut at, range.offset_bytes, false);
        add(&mut at, range.end(), true);
    }
    if changed.len() - first <= most / 2 {
        add(&mut at, end, false);
    }
    runs
}

struct PointReader<'a>(&'a dyn Disk);

impl Reader for PointReader<'_> {
    fn read_at(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.0.read_at(buffer, offset_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(offset_bytes: u64, length_bytes: u64) -> Range {
        Range { offset_bytes, length_bytes }
    }

    #[test]
    fn ranges_before_an_offset_are_cut_off() {
        let ranges = || vec![range(4, 4), range(10, 2), range(20, 8)];
        assert_eq!(behind(ranges(), 0), ranges());
        assert_eq!(behind(ranges(), 6), [range(6, 2), range(10, 2), range(20, 8)]);
        assert_eq!(behind(ranges(), 12), [range(20, 8)]);
        assert_eq!(behind(ranges(), 28), []);
    }

    #[test]
    fn runs_cover_the_range_without_gaps() {
        let changed = [range(4, 4), range(10, 2), range(20, 8)];
        let answer = |at, end, most| {
            let runs = runs(&changed, at, end, most);
            runs.iter().map(|run| (run.offset_bytes, run.length_bytes, run.is_dirty)).collect()
        };
        let all: Vec<_> = answer(0, 30, 100);
        let (same, differs) = (false, true);
        assert_eq!(
            all,
            [
                (0, 4, same),
                (4, 4, differs),
                (8, 2, same),
                (10, 2, differs),
                (12, 8, same),
                (20, 8, differs),
                (28, 2, same)
            ]
        );
        let within: Vec<_> = answer(5, 7, 100);
        assert_eq!(within, [(5, 2, differs)]);
        let behind: Vec<_> = answer(28, 40, 100);
        assert_eq!(behind, [(28, 12, same)]);
        // A bounded answer ends early; the next one continues there.
        let first: Vec<_> = answer(0, 30, 2);
        assert_eq!(first, [(0, 4, same), (4, 4, differs)]);
        assert_eq!(runs(&[], 3, 9, 2).len(), 1);
    }
}
