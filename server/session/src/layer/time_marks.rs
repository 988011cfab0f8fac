//! Time marks of a layer that is open for writing: see `history` for what they keep.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use coldrise_block::{BLOCK_SIZE_BYTES, Result};
use parking_lot::RwLockWriteGuard;

use super::format::{RecordKind, RemovedMarks, SLOTS_PER_SEGMENT, TimeMark, segments_in};
use super::keys::LayerKeys;
use super::mark::Mark;
use super::open::length_of;
use super::recovery::{self, RecoveryFacts};
use super::{Layer, LayerFile, Writer};

/// Keeps all writes of a layer waiting. None is unfinished.
pub(crate) struct PausedWrites<'a> {
    _gate: RwLockWriteGuard<'a, ()>,
}

impl LayerFile {
    /// Waits for the writes that have begun, and keeps later ones waiting.
    pub(crate) fn pause_writes(&self) -> Result<PausedWrites<'_>> {
        Ok(PausedWrites { _gate: self.writer()?.gate.write() })
    }

    /// Makes room for the next marks. Without this, `add_time_mark` may grow the file.
    pub(crate) fn reserve_time_marks(&self) -> Result<()> {
        let writer = self.writer()?;
        writer.poison.check()?;
        if self.reserve_cells(writer)? {
            writer.history.count_own();
        }
        Ok(())
    }

    /// Whether something was written since the last mark, or since the opening.
    pub(crate) fn has_unmarked_writes(&self) -> bool {
        self.writer().is_ok_and(|writer| {
            writer.history.is_behind(writer.next_sequence.load(Ordering::Relaxed))
        })
    }

    /// Adds a mark: the disk's present content, under this time. It counts after a crash once a sync
    /// has covered it.
    pub(crate) fn add_time_mark(
        &self,
        _paused: &PausedWrites<'_>,
        time_ns: u64,
        round: u64,
    ) -> Result<()> {
        let writer = self.writer()?;
        writer.poison.check()?;
        let (block, payload) = TimeMark::cell(round, time_ns);
        let sequence = self.store_cell(writer, RecordKind::TimeMark, block, payload)?;
        // From here on a rewrite of an older block takes another slot.
        writer.covered_sequence.fetch_max(sequence, Ordering::SeqCst);
        let next = writer.next_sequence.load(Ordering::SeqCst);
        writer.history.add(TimeMark { sequence, time_ns, round }, next);
        Ok(())
    }

    /// Removes the marks in these ranges. The slots that only they need are free after the next
    /// sync.
    pub(crate) fn remove_time_marks(&self, ranges: &[RemovedMarks]) -> Result<()> {
        let writer = self.writer()?;
        writer.poison.check()?;
        for range in ranges {
            let (block, payload) = range.cell();
            self.store_cell(writer, RecordKind::TimeMark, block, payload)?;
            writer.history.count_own();
        }
        writer.slots.supersede(&writer.history.remove(ranges));
        Ok(())
    }

    /// Removes all marks, and syncs: their slots are free. Returns false if there was none.
    pub(crate) fn remove_all_time_marks(&self) -> Result<bool> {
        let marks = self.time_marks();
        let (Some(first), Some(last)) = (marks.first(), marks.last()) else { return Ok(false) };
        self.remove_time_marks(&[RemovedMarks { first: first.sequence, last: last.sequence }])?;
        self.flush()?;
        Ok(true)
    }

    /// The marks, the oldest first.
    pub(crate) fn time_marks(&self) -> Vec<TimeMark> {
        match &self.writer {
            Some(writer) => writer.history.marks(),
            None => self.marks.clone(),
        }
    }

    /// The slots that only marks need, in a layer that was opened for reading: read again from its records.
    ///
    /// # Errors
    /// `Corrupt` if a record is damaged.
    pub(crate) fn slots_of_marks(&self, keys: LayerKeys) -> Result<Vec<u32>> {
        if self.marks.is_empty() {
            return Ok(Vec::new());
        }
        // The file of a sealed layer is closed, except during a read.
        let layer = self.reopened(keys)?;
        let mark = Mark::read(&layer.file, &layer.path, layer.keys.marks())?;
        let known = RecoveryFacts { rebuilds_history: true, ..RecoveryFacts::of_mark(&mark) };
        let slots = segments_in(length_of(&layer.file, &layer.path)?) * SLOTS_PER_SEGMENT;
        let mut found = recovery::scan(&layer, slots, &known)?;
        let highest_sequence = found.highest_sequence;
        Ok(found.history(&layer, highest_sequence).slots())
    }

    /// The layer as it was at a mark that is kept, for reading. No write may be unfinished.
    ///
    /// # Errors
    /// `Corrupt` if a record is damaged.
    pub(crate) fn as_of(&self, keys: LayerKeys, sequence: u64) -> Result<Arc<Layer>> {
        let layer = self.reopened(keys)?;
        let mark = Mark::read(&layer.file, &layer.path, layer.keys.marks())?;
        let known = RecoveryFacts { as_of: sequence, ..RecoveryFacts::of_mark(&mark) };
        let slots = segments_in(length_of(&layer.file, &layer.path)?) * SLOTS_PER_SEGMENT;
        recovery::scan(&layer, slots, &known)?;
        Ok(Arc::new(Layer { file: Arc::new(layer), ahead: None }))
    }

    /// Bytes of all blocks so far that were kept for marks when they were captured again.
    pub(crate) fn superseded_bytes(&self) -> u64 {
        self.writer.as_ref().map_or(0, |w| w.slots.marked() * BLOCK_SIZE_BYTES)
    }

    /// Bytes of the slots that only marks need; 0 for a layer that is open for reading.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let slots = |w: &Writer| w.history.kept_slots() + w.slots.marked_unsynced();
        self.writer.as_ref().map_or(0, |writer| slots(writer) * BLOCK_SIZE_BYTES)
    }
}
