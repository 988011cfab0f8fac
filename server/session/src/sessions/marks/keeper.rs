//! Makes and removes the marks of a served session.
//!
//! The guest does not wait for it: a mark pauses the writes of all disks for the time that one cell
//! for each disk takes, and no sync is made for it. Marks are removed by the rule. If the blocks that only
//! marks need take more than their share of the drive, the rule is reduced until they take less: old marks become fewer first.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Disk, PeriodicThread, Result, now_ms};
use coldrise_store::MarkRules;
use parking_lot::{Mutex, MutexGuard};

use super::clock::{GRACE_NOTE, MarkClock, noted_grace, now_ns};
use super::{NS_PER_SECOND, SessionMark, SessionMarks, kept_marks, whole_marks};
use crate::disks::layered_disk::Stack;
use crate::layer::{Layer, RemovedMarks, TimeMark};
use crate::session_folder::document::{SessionDisk, SessionDocument};
use crate::sessions::changes::{HOLD, HeldMarks, there};
use crate::sessions::follow::{Round, RoundTime};
use crate::sessions::session::{Session, newest_mark};

/// Part of the drive that the blocks of marks may take.
const SHARE_OF_DRIVE: u64 = 10;
/// The guest's rewrites cost more after a mark: a block that was captured before goes to another
/// slot, and both are written to the drive. So heavy writers get fewer marks: the next one is made when
/// the blocks kept since the last one are at most this many bytes for each second.
const KEPT_BYTES_PER_S: f64 = (32 << 20) as f64;
/// Room in a small layer for blocks of marks (see `max_slots`).
const LEAST_ROOM_BYTES: u64 = 1 << 30;
/// Interval between two looks at the rule, in marks.
const TURNS_BETWEEN_REMOVALS: u32 = 10;
/// Most doublings of the time between two marks.
const LONGEST_WAIT: u32 = 6;
/// After this time with little held, the rule is reduced by a level less; after the second one with very little, or if intervals are
/// very long, as after a full drive, by half of the levels.
const RELAX_AFTER: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(10));

/// The marks of a session, in the process that serves it.
pub(crate) struct MarkKeeper {
    rules: MarkRules,
    /// Names this opening of the session. Not 0.
    opening: u64,
    state: Mutex<State>,
    /// Held while marks are chosen and removed.
    removing: Mutex<()>,
    thread: Mutex<Option<PeriodicThread>>,
}

struct State {
    clock: MarkClock,
    /// By how many levels the rule is reduced. Above the highest one all marks but the newest are removed.
    level: u32,
    changed: Instant,
    turns: u32,
    limit_bytes: u64,
    /// The bytes kept for marks so far, when the newest mark was made.
    superseded_bytes: u64,
    /// Sealed layers have writes after the newest mark.
    has_sealed_writes: bool,
    /// The times of the marks that others need, and until when.
    held: HashMap<u64, (Vec<u64>, Instant)>,
}

impl MarkKeeper {
    /// A keeper whose thread has not been started. Marks get times after `newest_ns`. `has_clock`: unless they come with the
    /// times of another site's clock: they age by it, or by the one here if that is behind.
    pub(crate) fn new(rules: MarkRules, newest_ns: Option<u64>, has_clock: bool) -> MarkKeeper {
        let state = State {
            clock: MarkClock::new(newest_ns, has_clock),
            level: 0,
            changed: Instant::now(),
            turns: 0,
            limit_bytes: u64::MAX,
            superseded_bytes: 0,
            has_sealed_writes: false,
            held: HashMap::new(),
        };
        MarkKeeper {
            rules,
            opening: now_ns(),
            state: Mutex::new(state),
            removing: Mutex::new(()),
            thread: Mutex::new(None),
        }
    }

    /// Starts the thread, unless the rule makes no marks.
    pub(crate) fn start(&self, session: Weak<Session>) {
        let Some(interval) = self.rules.interval() else { return };
        let turn = move || match session.upgrade() {
            Some(session) => session.mark_turn(),
            None => ControlFlow::Break(()),
        };
        match PeriodicThread::start("session-marks", interval, turn) {
            Ok(thread) => *self.thread.lock() = Some(thread),
            Err(error) => tracing::warn!(%error, "no marks are made: their thread cannot start"),
        }
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(&self) {
        let thread = self.thread.lock().take();
        drop(thread);
    }
}

impl Session {
    /// The time of the mark of a round whose instant is now: in a second without a mark, so that an address always means the
    /// same state. It may be up to a second after the instant, and never before it.
    pub(crate) fn round_time(&self) -> RoundTime {
        let state = self.keeper().state.lock();
        let RoundTime { time_ns, at } = state.clock.next_time();
        let next_second_ns = state
            .clock
            .last
            .map_or(0, |(last_ns, _)| (last_ns / NS_PER_SECOND + 1) * NS_PER_SECOND);
        let ahead_ns = next_second_ns.saturating_sub(time_ns);
        // Later marks have the clock's time again.
        RoundTime { time_ns: time_ns + ahead_ns, at: at + Duration::from_nanos(ahead_ns) }
    }

    fn mark_turn(&self) -> ControlFlow<()> {
        if self.has_stopped() {
            return ControlFlow::Break(());
        }
        if let Err(error) = self.mark_and_remove() {
            // The next write meets the same failure and reports it.
            tracing::debug!(error = %error.full_message(), "no mark was made");
        }
        ControlFlow::Continue(())
    }

    /// What the thread does at each interval.
    #[cfg(test)]
    pub(crate) fn mark_turn_now(&self) {
        self.mark_and_remove().unwrap();
    }

    #[cfg(test)]
    pub(crate) fn mark_turns_now(&self, count: u32) {
        (0..count).for_each(|_| self.mark_turn_now());
    }

    /// Continues the grace of the process that served the session before. Notes which writes of before have no mark.
    pub(crate) fn continue_marks(&self) {
        let noted = noted_grace(&self.notes());
        let document = self.document();
        let marks = self.marks_of(&document);
        let newest = marks.last();
        // A mark that a kill left in some of the disks tells nothing, but its disk counts as marked.
        let is_partial = newest_mark(self.layered()) > newest.map(|mark| mark.time_ns);
        let is_unmarked = is_partial || newest.is_some_and(|mark| has_sealed(&document, mark));
        let is_received = is_partial && document.received.is_some();
        let is_removed = is_received && self.remove_others(&marks).is_ok();
        let mut state = self.keeper().state.lock();
        state.clock.continue_grace(noted);
        state.has_sealed_writes = is_unmarked;
        if is_removed {
            // The other site sends it again.
            state.clock.last = newest.map(|mark| (mark.time_ns, Instant::now()));
        }
    }

    /// Removes the marks that are not among these.
    fn remove_others(&self, kept: &[SessionMark]) -> Result<()> {
        for disk in self.layered() {
            let stack = disk.hold();
            let Some(top) = stack.layers.last() else { continue };
            let is_kept = |mark: &TimeMark| {
                kept.binary_search_by_key(&mark.time_ns, |kept| kept.time_ns).is_ok()
            };
            top.remove_time_marks(&gone(&top.time_marks(), is_kept))?;
        }
        Ok(())
    }

    /// Does not look at the document, which its callers may hold.
    fn look_at_clock(&self) {
        let begun = self.keeper().state.lock().clock.look(Instant::now());
        let Some(grace) = begun else { return };
        if let Err(error) = self.notes().write_json(GRACE_NOTE, &grace) {
            tracing::warn!(error = %error.full_message(), "a note about time marks was not written");
        }
    }

    fn mark_and_remove(&self) -> Result<()> {
        self.look_at_clock();
        let turns = {
            let mut state = self.keeper().state.lock();
            state.turns = state.turns.wrapping_add(1);
            state.turns
        };
        let level = self.keeper().state.lock().level;
        let doublings = self.keeper().rules.doublings(level).min(LONGEST_WAIT);
        let is_due = turns % (1 << doublings) == 0;
        if is_due && !self.is_following() && !self.is_marked_now() && !self.keeps_too_fast() {
            self.mark()?;
        }
        let limit_bytes = self.held_limit()?;
        self.keeper().state.lock().limit_bytes = limit_bytes;
        let held = self.held_bytes();
        if held > limit_bytes || turns % TURNS_BETWEEN_REMOVALS == 0 {
            self.remove_marks(limit_bytes)?;
        }
        Ok(())
    }

    /// Whether this second has its mark: an address names a second, and always means the same state.
    fn is_marked_now(&self) -> bool {
        let state = self.keeper().state.lock();
        let second = state.clock.next_time().time_ns / NS_PER_SECOND;
        state.clock.last.is_some_and(|(last_ns, _)| last_ns / NS_PER_SECOND == second)
    }

    /// Whether too many blocks were kept since the newest mark to make another one now.
    fn keeps_too_fast(&self) -> bool {
        let superseded_bytes = self.superseded_bytes();
        let state = self.keeper().state.lock();
        let Some((_, at)) = state.clock.last else { return false };
        let kept_bytes = superseded_bytes.saturating_sub(state.superseded_bytes);
        kept_bytes as f64 > at.elapsed().as_secs_f64() * KEPT_BYTES_PER_S
    }

    /// Makes a mark of all disks if one of them was written since the last one.
    pub(crate) fn mark(&self) -> Result<()> {
        if !self.has_unmarked_writes() {
            return Ok(());
        }
        self.mark_round(None, None)
    }

    fn has_unmarked_writes(&self) -> bool {
        let is_written = |top: Arc<Layer>| top.has_unmarked_writes();
        // The layers first: a seal in between leaves empty ones, and notes what the others had.
        let is_written = self.layered().filter_map(|disk| disk.top()).any(is_written);
        is_written || self.keeper().state.lock().has_sealed_writes
    }

    /// These layers are sealed, while writes are paused: what they have after the newest mark gets one with the next turn.
    pub(crate) fn keep_unmarked<'a>(&self, mut tops: impl Iterator<Item = &'a Arc<Layer>>) {
        self.keeper().state.lock().has_sealed_writes |= tops.any(|top| top.has_unmarked_writes());
    }

    /// Makes a mark of the present state of a session that is not served, durably: no mark would follow.
    pub(crate) fn mark_idle(&self) -> Result<()> {
        while self.is_marked_now() {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.mark_round(None, None)?;
        self.flush_time_marks()
    }

    /// Makes a mark of all disks: of a round if they were written in one, of this time if no later mark was made, else of
    /// the present time.
    pub(crate) fn mark_round(&self, round: Option<Round>, time: Option<RoundTime>) -> Result<()> {
        let stacks: Vec<_> = self.layered().map(|disk| disk.hold()).collect();
        let tops: Vec<&Layer> =
            stacks.iter().filter_map(|stack| stack.layers.last()).map(|top| &**top).collect();
        for top in &tops {
            top.reserve_time_marks()?;
        }
        let paused = tops.iter().map(|top| top.pause_writes()).collect::<Result<Vec<_>>>()?;
        let mut state = self.keeper().state.lock();
        let taken = time.filter(|time| {
            // A mark was made since: the time of this one has to be later.
            state.clock.last.is_none_or(|(last_ns, _)| last_ns < time.time_ns)
        });
        let RoundTime { time_ns, at } = taken.unwrap_or_else(|| state.clock.next_time());
        state.clock.last = Some((time_ns, at));
        state.superseded_bytes = tops.iter().map(|top| top.superseded_bytes()).sum();
        // If it fails in between, some disks have the mark and count as marked.
        state.has_sealed_writes = true;
        for (top, paused) in tops.iter().zip(&paused) {
            top.add_time_mark(paused, time_ns, round.map_or(0, Round::encode))?;
        }
        state.has_sealed_writes = false;
        Ok(())
    }

    /// The time of the newest mark, in nanoseconds since 1970.
    pub(crate) fn newest_mark_ns(&self) -> Option<u64> {
        self.keeper().state.lock().clock.last.map(|(time_ns, _)| time_ns)
    }

    /// Until the result is dropped no marks are removed. The caller does not hold the document.
    pub(crate) fn keep_all_marks(&self) -> MutexGuard<'_, ()> {
        self.keeper().removing.lock()
    }

    /// Removes the marks that the rule does not keep, and those that not all disks have.
    fn remove_marks(&self, limit_bytes: u64) -> Result<()> {
        // A seal replaces the layers meanwhile, or a mark is read: the next turn removes marks.
        let Some(document) = self.try_document() else { return Ok(()) };
        let Some(_removing) = self.keeper().removing.try_lock() else { return Ok(()) };
        loop {
            let level = self.keeper().state.lock().level;
            let mut kept = self.kept(self.marks_of(&document), level);
            let rules = &self.keeper().rules;
            if level > rules.most_reduced() {
                kept.drain(..kept.len().saturating_sub(1));
            }
            self.remove_others(&kept)?;
            let held_bytes = self.held_bytes();
            let mut state = self.keeper().state.lock();
            if held_bytes > limit_bytes && state.level <= rules.most_reduced() {
                state.level += 1;
                state.changed = Instant::now();
                continue;
            }
            let is_slow = rules.doublings(state.level) > LONGEST_WAIT;
            let passed = state.changed.elapsed();
            let relaxed = relaxed(state.level, is_slow, held_bytes, limit_bytes, passed);
            if relaxed != state.level {
                state.level = relaxed;
                state.changed = Instant::now();
            }
            return Ok(());
        }
    }

    /// The marks that the rule keeps now.
    fn kept(&self, marks: Vec<SessionMark>, level: u32) -> Vec<SessionMark> {
        // Those who ask may come before the first turn of a session that was not served for long.
        self.look_at_clock();
        let mut state = self.keeper().state.lock();
        let now = Instant::now();
        let now_ns = state.clock.age_ns();
        if level == 0 && state.clock.has_grace(now) {
            return marks;
        }
        state.held.retain(|_, (_, until)| now < *until);
        let held = state.held.values().flat_map(|(times, _)| times).copied().collect();
        kept_marks(marks, &self.keeper().rules.reduced(level), now_ns, &held)
    }

    /// Holds the newest mark and those of these times.
    pub(crate) fn hold(&self, holder: u64, times_ns: &[u64]) -> HeldMarks {
        let document = self.document();
        let until = Instant::now() + HOLD;
        // Look at the writes before the marks: a mark that is made in between has more than is claimed here.
        let looked_at_ms = now_ms();
        let is_marked = !self.has_unmarked_writes();
        let newest_ns = self.marks_of(&document).last().map(|mark| mark.time_ns);
        let times = times_ns.iter().copied().chain(newest_ns).collect();
        self.keeper().state.lock().held.insert(holder, (times, until));
        // Marks that a removal had chosen before are not there now, or the newest one.
        let _removed = self.keeper().removing.lock();
        let marks = self.marks_of(&document);
        let newest_ms = newest_ns.map_or(0, |time_ns| time_ns / 1_000_000);
        let current_ms = match self.follow_progress() {
            Some(progress) => progress.current_ms,
            None if is_marked && newest_ns.is_some() => looked_at_ms,
            None => newest_ms,
        };
        let newest = marks.iter().find(|mark| Some(mark.time_ns) == newest_ns).cloned();
        let opening = self.keeper().opening;
        HeldMarks { newest, held_ns: there(&marks, times_ns), current_ms, opening }
    }

    /// Bytes of the blocks that only marks need.
    fn held_bytes(&self) -> u64 {
        self.layered().filter_map(|disk| disk.top()).map(|top| top.kept_bytes()).sum()
    }

    /// Bytes kept for marks so far. Counts from a seal on: then the next mark is not held back.
    fn superseded_bytes(&self) -> u64 {
        self.layered().filter_map(|disk| disk.top()).map(|top| top.superseded_bytes()).sum()
    }

    /// The most bytes that they may take: a share of the drive, never more than half of what it has
    /// left, and never more than the layers have room for.
    fn held_limit(&self) -> Result<u64> {
        let folder = self.repository().layers_dir();
        let drive = rustix::fs::statvfs(&folder).map_err(std::io::Error::from);
        let drive = drive.context(|| format!("reading the free space of {}", folder.display()))?;
        let bytes = |blocks: u64| blocks.saturating_mul(drive.f_frsize);
        let left = bytes(drive.f_bavail).saturating_add(self.held_bytes());
        let disks_bytes: u64 = self.layered().map(|disk| disk.size_bytes()).sum();
        let room = disks_bytes.saturating_mul(2).saturating_add(LEAST_ROOM_BYTES);
        Ok((bytes(drive.f_blocks) / SHARE_OF_DRIVE).min(left / 2).min(room))
    }

    /// The marks of the disks that `document` describes.
    pub(crate) fn marks_of(&self, document: &SessionDocument) -> Vec<SessionMark> {
        let stacks: Vec<_> = self.layered().map(|disk| disk.hold()).collect();
        marks_in(stacks.iter().map(|stack| &**stack), document)
    }

    /// The marks that the rule keeps, and what they take.
    pub(crate) fn marks(&self) -> SessionMarks {
        let document = self.document();
        let (level, limit_bytes) = {
            let state = self.keeper().state.lock();
            (state.level, state.limit_bytes)
        };
        let marks = self.kept(self.marks_of(&document), level);
        SessionMarks {
            marks,
            held_bytes: Some(self.held_bytes()),
            held_bytes_limit: Some(limit_bytes).filter(|limit| *limit < u64::MAX),
            reduced_rule: (level > 0).then(|| self.keeper().rules.reduced(level)),
            progress: self.follow_progress(),
        }
    }
}

/// The marks in these stacks of the disks that `document` describes.
pub(crate) fn marks_in<'a>(
    stacks: impl Iterator<Item = &'a Stack>,
    document: &SessionDocument,
) -> Vec<SessionMark> {
    let marks = |(stack, described): (&Stack, &SessionDisk)| {
        let ids = described.layers.iter().map(|layer| layer.id).chain([described.top]);
        ids.zip(stack.layers.iter().map(|layer| layer.time_marks())).collect()
    };
    whole_marks(&stacks.zip(&document.disks).map(marks).collect::<Vec<_>>())
}

/// The next level, this time after it was changed. If marks are made slowly, what is held is that of the few that were left, and
/// stays until there is a later one: it says nothing of shorter intervals.
fn relaxed(level: u32, is_slow: bool, held_bytes: u64, limit_bytes: u64, after: Duration) -> u32 {
    let is_little = held_bytes < limit_bytes / 16 || is_slow && held_bytes <= limit_bytes;
    if is_little && after > RELAX_AFTER.1 {
        level / 2
    } else if held_bytes < limit_bytes / 4 && after > RELAX_AFTER.0 {
        level.saturating_sub(1)
    } else {
        level
    }
}

/// Whether sealed layers have something after a mark.
fn has_sealed(document: &SessionDocument, mark: &SessionMark) -> bool {
    document.disks.iter().zip(&mark.places).any(|(disk, (id, sequence))| {
        let at = disk.layers.iter().position(|layer| layer.id == *id);
        let is_after =
            |at: usize| disk.layers[at].sealed_sequence > *sequence || at + 1 < disk.layers.len();
        at.is_some_and(is_after)
    })
}

/// The ranges of the marks that are not kept.
fn gone(marks: &[TimeMark], is_kept: impl Fn(&TimeMark) -> bool) -> Vec<RemovedMarks> {
    let runs = marks.chunk_by(|a, b| is_kept(a) == is_kept(b));
    let gone = runs.filter(|run| !is_kept(&run[0]));
    let range = |run: &[TimeMark]| RemovedMarks {
        first: run[0].sequence,
        last: run[run.len() - 1].sequence,
    };
    gone.map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_full_drive_the_one_mark_that_is_left_does_not_keep_intervals_long() {
        let rules = MarkRules::default();
        let mut level = rules.most_reduced() + 1;
        for _ in 0..2 {
            // Its blocks take nearly as much as marks may.
            let is_slow = rules.doublings(level) > LONGEST_WAIT;
            level = relaxed(level, is_slow, 99, 100, Duration::from_secs(11));
        }
        assert!(rules.doublings(level) < 6, "{level}");
        // More than they may.
        assert_eq!(relaxed(29, true, 101, 100, Duration::from_secs(1000)), 29);
        // Short intervals: held bytes grow with the number of marks.
        assert_eq!(relaxed(4, false, 99, 100, Duration::from_secs(1000)), 4);
        assert_eq!(relaxed(4, false, 24, 100, Duration::from_secs(61)), 3);
        assert_eq!(relaxed(4, false, 5, 100, Duration::from_secs(11)), 2);
    }

    #[test]
    fn intervals_are_short_again_within_a_minute_after_a_full_drive() {
        let mut level = MarkRules::default().most_reduced() + 1;
        for _ in 0..5 {
            level = relaxed(level, false, 0, 1 << 30, Duration::from_secs(11));
        }
        assert_eq!(level, 0);
        // With much held they become shorter slowly, or not.
        let mib = |mib: u64| mib << 20;
        assert_eq!(relaxed(5, false, mib(200), mib(1024), Duration::from_secs(11)), 5);
        assert_eq!(relaxed(5, false, mib(200), mib(1024), Duration::from_secs(61)), 4);
        assert_eq!(relaxed(5, false, mib(300), mib(1024), Duration::from_secs(61)), 5);
        assert_eq!(relaxed(3, false, 0, 0, Duration::from_secs(61)), 3);
    }

    #[test]
    fn neighbouring_marks_are_removed_as_one_range() {
        let marks: Vec<_> =
            (1..=6).map(|n| TimeMark { sequence: n * 10, time_ns: n, round: 0 }).collect();
        let ranges = gone(&marks, |mark| [1, 4].contains(&mark.time_ns));
        let range = |first, last| RemovedMarks { first, last };
        assert_eq!(ranges, [range(20, 30), range(50, 60)]);
        assert!(gone(&marks, |_| true).is_empty() && gone(&[], |_| false).is_empty());
    }
}
