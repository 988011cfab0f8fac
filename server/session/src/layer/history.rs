//! Time marks, and the slots that keep the blocks as they were at a mark.
//!
//! A mark is a cell. Its state of a block is the newest record of that block with a lower sequence
//! number. Let a block be captured by record `a` and next by record `b`: the slot of `a` is kept
//! while there is a mark `m` with `a < m < b`. So for each mark the record that it needs is intact,
//! and no record between it and the mark exists: if one did, it would be the needed one.
//!
//! # Invariants
//!
//! 1. A slot that a mark needs is neither overwritten nor free. A mark counts as the start of a
//!    sync (`covered_sequence`), so a rewrite after it takes another slot; and `release` passes
//!    superseded slots through `keep`.
//! 2. The slots of a removed mark are free only after a sync that began when the removal's cell was
//!    stored. So after a crash a mark that is found has its slots.
//! 3. After a crash a mark counts only if it is known to be durable: then every write before it is.
//!
//! Each kept slot is in the list of the newest mark that needs it. If that mark is removed, the slot
//! moves to the newest remaining mark before it, or becomes free if that one is older than the
//! slot's record. So a slot moves once for each pass of the retention, and adding a mark costs the
//! same whatever is kept.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::format::{RemovedMarks, TimeMark};

/// A slot whose block was captured again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superseded {
    pub(crate) slot: u32,
    /// Sequence number of the last mark when it was superseded; 0 if no mark needs it.
    mark: u64,
    /// Sequence number of its record.
    written: u64,
}

impl Superseded {
    /// Whether a mark needed it when it was superseded.
    pub(crate) fn is_marked(&self) -> bool {
        self.mark != 0
    }

    /// A slot that no mark needs.
    pub(crate) fn unneeded(slot: u32) -> Superseded {
        Superseded { slot, mark: 0, written: 0 }
    }
}

/// A slot that a mark needs.
#[derive(Clone, Copy, Debug)]
struct Kept {
    slot: u32,
    written: u64,
}

struct Marked {
    time_ns: u64,
    round: u64,
    kept: Vec<Kept>,
}

#[derive(Default)]
struct State {
    marks: BTreeMap<u64, Marked>,
    kept: u64,
}

impl State {
    /// Adds a slot to the newest mark up to `mark` that needs it. Returns false if none does.
    fn keep(&mut self, mark: u64, kept: Kept) -> bool {
        if mark < kept.written {
            return false;
        }
        let Some((_, marked)) = self.marks.range_mut(kept.written..=mark).next_back() else {
            return false;
        };
        marked.kept.push(kept);
        self.kept += 1;
        true
    }
}

/// The history of a layer that is open for writing.
#[derive(Default)]
pub(crate) struct History {
    state: Mutex<State>,
    /// Sequence number of the newest mark; 0 if there is none. Changes only while `gate` is held
    /// exclusively.
    newest: AtomicU64,
    /// Sequence numbers that were taken for marks and removals.
    own: AtomicU64,
    /// The number of all others when the newest mark was made.
    marked: AtomicU64,
}

/// A valid record in a slot, for the reconstruction of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Capture {
    pub(crate) block: u64,
    pub(crate) sequence: u64,
    pub(crate) slot: u32,
}

impl History {
    /// Rebuilds the history after the opening of a layer. `is_current` tells whether the slot holds
    /// its block's content. A slot whose block was zeroed later counts as needed by all marks from
    /// its record on: it stays longer than necessary, and never too short.
    pub(crate) fn rebuild(
        marks: &[TimeMark],
        mut captures: Vec<Capture>,
        is_current: impl Fn(&Capture) -> bool,
        highest_sequence: u64,
    ) -> History {
        let mut state = State::default();
        for mark in marks {
            let marked = Marked { time_ns: mark.time_ns, round: mark.round, kept: Vec::new() };
            state.marks.insert(mark.sequence, marked);
        }
        let newest = state.marks.keys().next_back().copied().unwrap_or(0);
        captures.sort_unstable();
        let next = captures.iter().skip(1).map(Some).chain([None]);
        for (capture, next) in captures.iter().zip(next) {
            if is_current(capture) {
                continue;
            }
            let successor = next.filter(|next| next.block == capture.block);
            let before = successor.map_or(u64::MAX, |next| next.sequence);
            let kept = Kept { slot: capture.slot, written: capture.sequence };
            state.keep(newest.min(before), kept);
        }
        // What was written since the newest mark gets a mark.
        let marked = if newest == highest_sequence { newest + 1 } else { 0 };
        History {
            state: Mutex::new(state),
            newest: AtomicU64::new(newest),
            own: AtomicU64::new(0),
            marked: AtomicU64::new(marked),
        }
    }

    /// Describes a slot that was superseded just now. The caller holds `gate`, shared or
    /// exclusively. `written` returns the sequence number of the slot's record.
    pub(crate) fn supersede(&self, slot: u32, written: impl FnOnce() -> u64) -> Superseded {
        let mark = self.newest.load(Ordering::Relaxed);
        if mark == 0 {
            return Superseded::unneeded(slot);
        }
        let written = written();
        Superseded { slot, mark: if written < mark { mark } else { 0 }, written }
    }

    /// Keeps the slots that marks need. Appends the slots that are free after the finished sync to
    /// `free`, and those that are free after the next one to `later`: the removal of their marks
    /// may not be durable.
    pub(crate) fn keep(
        &self,
        superseded: &[Superseded],
        free: &mut Vec<u32>,
        later: &mut Vec<Superseded>,
    ) {
        let mut state = self.state.lock();
        for &Superseded { slot, mark, written } in superseded {
            if mark == 0 {
                free.push(slot);
            } else if !state.keep(mark, Kept { slot, written }) {
                later.push(Superseded::unneeded(slot));
            }
        }
    }

    /// Counts a sequence number that was taken for no write.
    pub(crate) fn count_own(&self) {
        self.own.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether a sequence number below `next` was taken for a write after the newest mark.
    pub(crate) fn is_behind(&self, next: u64) -> bool {
        next - self.own.load(Ordering::Relaxed) != self.marked.load(Ordering::Relaxed)
    }

    /// Adds a mark; `next` is the next sequence number. The caller holds `gate` exclusively.
    pub(crate) fn add(&self, mark: TimeMark, next: u64) {
        self.count_own();
        self.marked.store(next - self.own.load(Ordering::Relaxed), Ordering::Relaxed);
        let marked = Marked { time_ns: mark.time_ns, round: mark.round, kept: Vec::new() };
        self.state.lock().marks.insert(mark.sequence, marked);
        self.newest.store(mark.sequence, Ordering::Relaxed);
    }

    /// Removes marks whose removal has been stored. Returns the slots that no mark needs any more.
    pub(crate) fn remove(&self, removed: &[RemovedMarks]) -> Vec<Superseded> {
        let mut state = self.state.lock();
        let mut kept = Vec::new();
        for range in removed {
            let mut rest = state.marks.split_off(&range.first);
            let mut after = rest.split_off(&range.last.saturating_add(1));
            state.marks.append(&mut after);
            for (mark, marked) in rest {
                kept.extend(marked.kept.into_iter().map(|kept| (mark, kept)));
            }
        }
        state.kept -= kept.len() as u64;
        let is_unneeded = |(mark, kept): &(u64, Kept)| !state.keep(*mark, *kept);
        let unneeded = kept.into_iter().filter(is_unneeded);
        unneeded.map(|(_, kept)| Superseded::unneeded(kept.slot)).collect()
    }

    /// The marks, the oldest first.
    pub(crate) fn marks(&self) -> Vec<TimeMark> {
        let state = self.state.lock();
        let mark = |(sequence, marked): (&u64, &Marked)| TimeMark {
            sequence: *sequence,
            time_ns: marked.time_ns,
            round: marked.round,
        };
        state.marks.iter().map(mark).collect()
    }

    /// Number of slots that only marks need.
    pub(crate) fn kept_slots(&self) -> u64 {
        self.state.lock().kept
    }

    /// The kept slots, in no order.
    pub(crate) fn slots(&self) -> Vec<u32> {
        let state = self.state.lock();
        state.marks.values().flat_map(|marked| &marked.kept).map(|kept| kept.slot).collect()
    }
}
