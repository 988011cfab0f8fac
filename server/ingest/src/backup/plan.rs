//! The action for each range of a disk, in order, computed on demand.
//!
//! A source answers in runs of bytes; the store takes whole chunks. So every span begins
//! and ends at a multiple of a unit or at the disk's end, and a unit is read completely if
//! any of its bytes must be read.

use std::collections::VecDeque;

use coldrise_block::{Error, ErrorKind, Extent, Result};

use crate::source::{DirtyRun, Source, round_down};

/// The action for a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing: the base has the same content.
    Keep,
    /// Store zeroes.
    Hole,
    /// Read and store.
    Read,
}

/// A range of the disk, in whole units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) offset_bytes: u64,
    pub(super) length_bytes: u64,
    pub(super) action: Action,
}

/// The spans of one disk.
pub(crate) struct Plan<'s> {
    source: &'s dyn Source,
    size_bytes: u64,
    unit_bytes: u64,
    /// Maximum length of one span to read; a multiple of the unit.
    read_bytes: u64,
    /// The end of the range that the dirty bitmap covers; everything behind it is new.
    bitmap_end: u64,
    next_offset: u64,
    extents: VecDeque<Extent>,
    dirty_runs: VecDeque<DirtyRun>,
}

impl<'s> Plan<'s> {
    /// Spans are whole units, but for the disk's end.
    pub(super) fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// `bitmap_end`: the end of the range for which the dirty bitmap has the changes since
    /// the base; 0 without a bitmap. A multiple of the unit.
    pub(crate) fn new(source: &'s dyn Source, unit_bytes: u64, bitmap_end: u64) -> Plan<'s> {
        Plan {
            source,
            size_bytes: source.size_bytes(),
            unit_bytes,
            read_bytes: source.useful_read_bytes().next_multiple_of(unit_bytes),
            bitmap_end,
            next_offset: 0,
            extents: VecDeque::new(),
            dirty_runs: VecDeque::new(),
        }
    }

    /// The next span; `None` at the end of the disk.
    pub(super) fn next(&mut self) -> Result<Option<Span>> {
        let offset_bytes = self.next_offset;
        if offset_bytes >= self.size_bytes {
            return Ok(None);
        }
        let (action, run_end) = self.run_at(offset_bytes)?;
        let unit_end = (offset_bytes + self.unit_bytes).min(self.size_bytes);
        // A run that ends within the unit shares it with other runs, and one of them may
        // need reading: check all of them.
        let (action, end) = if run_end < unit_end {
            (self.action_of_unit(action, run_end, unit_end)?, unit_end)
        } else if run_end == self.size_bytes {
            (action, run_end)
        } else {
            (action, round_down(run_end, self.unit_bytes))
        };
        let end = match action {
            Action::Read => end.min(round_down(offset_bytes, self.read_bytes) + self.read_bytes),
            _ => end,
        };
        self.next_offset = end;
        Ok(Some(Span { offset_bytes, length_bytes: end - offset_bytes, action }))
    }

    /// The action for a unit whose first run, of `action`, ends at `at`.
    fn action_of_unit(&mut self, action: Action, mut at: u64, unit_end: u64) -> Result<Action> {
        let mut result = action;
        while at < unit_end {
            let (action, run_end) = self.run_at(at)?;
            if action != result {
                // Partly kept, partly zero: only the source knows the unit's content.
                result = Action::Read;
            }
            at = run_end;
        }
        Ok(result)
    }

    /// The action for the byte at `offset`, and the end of its run.
    fn run_at(&mut self, offset: u64) -> Result<(Action, u64)> {
        let mut end = self.size_bytes;
        if offset < self.bitmap_end {
            let run = self.dirty_run_at(offset)?;
            end = (run.offset_bytes + run.length_bytes).min(self.bitmap_end);
            if !run.is_dirty {
                return Ok((Action::Keep, end));
            }
        }
        let extent = self.extent_at(offset, end)?;
        let action = if extent.kind.reads_zero() { Action::Hole } else { Action::Read };
        Ok((action, end.min(extent.offset_bytes + extent.length_bytes)))
    }

    fn extent_at(&mut self, offset: u64, end: u64) -> Result<Extent> {
        let ends_before = |extent: &Extent| extent.offset_bytes + extent.length_bytes <= offset;
        while self.extents.front().is_some_and(ends_before) {
            self.extents.pop_front();
        }
        if self.extents.is_empty() {
            self.extents.extend(self.source.extents(offset, end - offset)?);
        }
        match self.extents.front() {
            Some(extent) if extent.offset_bytes <= offset && !ends_before(extent) => Ok(*extent),
            _ => Err(empty_answer("extents", offset)),
        }
    }

    fn dirty_run_at(&mut self, offset: u64) -> Result<DirtyRun> {
        let ends_before = |run: &DirtyRun| run.offset_bytes + run.length_bytes <= offset;
        while self.dirty_runs.front().is_some_and(ends_before) {
            self.dirty_runs.pop_front();
        }
        if self.dirty_runs.is_empty() {
            let runs = self.source.dirty_runs(offset, self.bitmap_end - offset)?;
            self.dirty_runs.extend(runs);
        }
        match self.dirty_runs.front() {
            Some(run) if run.offset_bytes <= offset && !ends_before(run) => Ok(*run),
            _ => Err(empty_answer("bitmap", offset)),
        }
    }
}

fn empty_answer(what: &str, offset: u64) -> Error {
    Error::new(ErrorKind::Io, format!("the source reported no {what} at offset {offset}"))
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
