//! Makes and removes the marks of a served session.
//!
//! The guest does not wait for it: a mark pauses the writes of all disks for the time that one cell
//! for each disk takes, and no sync is made for it. Marks are removed by the rule. If the blocks that only
//! marks need take more than their share of the drive, intervals become twice as long, and again,
//! until they take less.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use coldrise_block::{Context, Disk, PeriodicThread, Result, now_ms};
use coldrise_store::{MarkRules, Repository, SessionName};
use parking_lot::Mutex;

use super::{NS_PER_SECOND, SessionMark, SessionMarks, kept_marks, whole_marks};
use crate::disks::layered_disk::Stack;
use crate::layer::{Layer, RemovedMarks, TimeMark};
use crate::session_folder::document::{SessionDisk, SessionDocument};
use crate::session_folder::notes::SessionNotes;
use crate::sessions::changes::{HOLD, HeldMarks, there};
use crate::sessions::follow::{Round, RoundTime};
use crate::sessions::session::Session;

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
/// Intervals grow at most by this power of two. Above it all marks but the newest are removed.
const MOST_COARSE: u32 = 16;
/// Above this power of two the next mark is minutes away.
const VERY_COARSE: u32 = 6;
/// After this time with little held, intervals become shorter again; after the second one with very little, or if they are
/// very long, as after a full drive, much shorter.
const RELAX_AFTER: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(10));

/// A clock that goes this much further than the time that has passed was set: then the age of marks is not known.
const CLOCK_STEP: Duration = Duration::from_secs(60);
/// Most by which marks of rounds are ahead of the clock.
const QUICK_RESTARTS: Duration = Duration::from_secs(10);
/// After the clock was set, or the session was not served for a while, marks do not end by their age for this time.
const GRACE: Duration = Duration::from_secs(3600);
/// The note of a session about it: the clock's time at its end, in nanoseconds since 1970. It outlives the process.
const GRACE_NOTE: &str = "marks.grace";

/// The marks of a session, in the process that serves it.
pub(crate) struct MarkKeeper {
    rules: MarkRules,
    state: Mutex<State>,
    /// Held while marks are chosen and removed.
    removing: Mutex<()>,
    thread: Mutex<Option<PeriodicThread>>,
}

struct State {
    has_clock: bool,
    /// The time of the newest mark, and when it was made by the monotonic clock.
    last: Option<(u64, Instant)>,
    /// The clock at the last turn.
    clock: Option<(u64, Instant)>,
    /// No mark ends by its age until then.
    grace_until: Option<Instant>,
    coarser: u32,
    changed: Instant,
    turns: u32,
    limit_bytes: u64,
    /// The bytes kept for marks so far, when the newest mark was made.
    superseded_bytes: u64,
    /// The times of the marks that others need, and until when.
    held: HashMap<u64, (Vec<u64>, Instant)>,
}

impl MarkKeeper {
    /// A keeper whose thread has not been started. Marks get times after `newest_ns`. `has_clock`: unless they come with the
    /// times of another site's clock: they age by it, or by the one here if that is behind.
    pub(crate) fn new(rules: MarkRules, newest_ns: Option<u64>, has_clock: bool) -> MarkKeeper {
        let now = Instant::now();
        let state = State {
            has_clock,
            last: newest_ns.map(|newest_ns| (newest_ns, now + ahead(newest_ns))),
            clock: newest_ns.map(|newest_ns| (newest_ns, now)),
            grace_until: None,
            coarser: 0,
            changed: now,
            turns: 0,
            limit_bytes: u64::MAX,
            superseded_bytes: 0,
            held: HashMap::new(),
        };
        MarkKeeper {
            rules,
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

/// The time of the next mark: the clock's, or if that was set back the last mark's plus the time
/// that has passed since. So marks stay in order.
fn next_time_ns(last: Option<(u64, Instant)>, clock_ns: u64, now: Instant) -> u64 {
    let since = |at: Instant| {
        let elapsed = now.saturating_duration_since(at).as_nanos();
        u64::try_from(elapsed).unwrap_or(u64::MAX)
    };
    let after = |(time_ns, at): (u64, Instant)| time_ns.saturating_add(since(at).max(1));
    last.map_or(clock_ns, |last| clock_ns.max(after(last)))
}

/// How far a mark of a round that was made before the opening is ahead of the clock. Each opening may add a second; if it is more
/// than by some of them, the clock was set back.
fn ahead(newest_ns: u64) -> Duration {
    let ahead = Duration::from_nanos(newest_ns.saturating_sub(clock_ns()));
    if ahead <= QUICK_RESTARTS { ahead } else { Duration::ZERO }
}

/// To the nanosecond: no two marks have one time, also if the clock is set back.
fn clock_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

fn grace_ns(grace: Duration) -> u64 {
    u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX)
}

/// The clock's time at which the grace of a session ends, in nanoseconds since 1970; 0 if none is noted.
pub(super) fn noted_grace_ns(repository: &Arc<Repository>, name: &SessionName) -> Result<u64> {
    Ok(SessionNotes::of(repository, name)?.read_json(GRACE_NOTE)?.unwrap_or_default())
}

impl State {
    /// The clock by which marks age: that of this site; of marks with the times of another site, the one that is behind.
    fn age_clock_ns(&self) -> u64 {
        if self.has_clock { clock_ns() } else { self.next_time().time_ns.min(clock_ns()) }
    }

    /// Looks whether the clock was set since the last look. Returns the clock's time at which a grace ends that has begun now.
    fn look_at_clock(&mut self, now: Instant) -> Option<u64> {
        let before = self.grace_until;
        let clock_ns = self.age_clock_ns();
        self.take_clock(clock_ns, now);
        (self.grace_until != before).then(|| clock_ns.saturating_add(grace_ns(GRACE)))
    }

    /// Goes on with the grace that an earlier process noted.
    fn continue_grace(&mut self, end_ns: u64) {
        let left = Duration::from_nanos(end_ns.saturating_sub(self.age_clock_ns())).min(GRACE);
        if !left.is_zero() {
            self.grace_until = Some(Instant::now() + left);
        }
    }

    fn take_clock(&mut self, clock_ns: u64, now: Instant) {
        let before = self.clock.replace((clock_ns, now));
        let step_ns = u64::try_from(CLOCK_STEP.as_nanos()).unwrap_or(u64::MAX);
        let is_set = before.is_some_and(|before| {
            let passed_ns = next_time_ns(Some(before), 0, now);
            clock_ns > passed_ns.saturating_add(step_ns)
        });
        if is_set {
            self.grace_until = Some(now + GRACE);
        }
    }

    fn has_grace(&self, now: Instant) -> bool {
        self.grace_until.is_some_and(|until| now < until)
    }

    fn next_time(&self) -> RoundTime {
        let at = Instant::now();
        let clock_ns = if self.has_clock { clock_ns() } else { 0 };
        RoundTime { time_ns: next_time_ns(self.last, clock_ns, at), at }
    }
}

impl Session {
    /// The time of the mark of a round whose instant is now: in a second without a mark, so that an address always means the
    /// same state. It may be up to a second after the instant, and never before it.
    pub(crate) fn round_time(&self) -> RoundTime {
        let state = self.keeper().state.lock();
        let RoundTime { time_ns, at } = state.next_time();
        let next_second_ns =
            state.last.map_or(0, |(last_ns, _)| (last_ns / NS_PER_SECOND + 1) * NS_PER_SECOND);
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

    /// Goes on with the grace of the process that served the session before. Without its note, marks age as usual.
    pub(crate) fn continue_grace(&self) {
        let noted = noted_grace_ns(self.repository(), &self.document().name);
        match noted {
            Ok(end_ns) => self.keeper().state.lock().continue_grace(end_ns),
            Err(error) => {
                tracing::warn!(error = %error.full_message(), "a note about time marks cannot be read")
            }
        }
    }

    fn look_at_clock(&self) {
        let begun = self.keeper().state.lock().look_at_clock(Instant::now());
        let Some(end_ns) = begun else { return };
        let noted = SessionNotes::of(self.repository(), &self.document().name)
            .and_then(|notes| notes.write_json(GRACE_NOTE, &end_ns));
        if let Err(error) = noted {
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
        let coarser = self.keeper().state.lock().coarser;
        let is_due = turns % (1 << coarser.min(MOST_COARSE)) == 0;
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
        let second = state.next_time().time_ns / NS_PER_SECOND;
        state.last.is_some_and(|(last_ns, _)| last_ns / NS_PER_SECOND == second)
    }

    /// Whether too many blocks were kept since the newest mark to make another one now.
    fn keeps_too_fast(&self) -> bool {
        let superseded_bytes = self.superseded_bytes();
        let state = self.keeper().state.lock();
        let Some((_, at)) = state.last else { return false };
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
        self.layered().filter_map(|disk| disk.top()).any(is_written)
    }

    /// Marks what was written since the newest mark: after a seal it is in no layer that takes writes, and a mark there would
    /// make a layer without writes one that is kept.
    pub(crate) fn mark_before_seal(&self) {
        let has_marks = self.keeper().rules.interval().is_some() && !self.is_following();
        // A second has one mark, and no time that is later than its writes: what follows it within the second has none before
        // the next write.
        if !has_marks || !self.has_unmarked_writes() || self.is_marked_now() {
            return;
        }
        if let Err(error) = self.mark_round(None, None) {
            tracing::debug!(error = %error.full_message(), "no mark was made before a seal");
        }
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
            state.last.is_none_or(|(last_ns, _)| last_ns < time.time_ns)
        });
        let RoundTime { time_ns, at } = taken.unwrap_or_else(|| state.next_time());
        state.last = Some((time_ns, at));
        state.superseded_bytes = tops.iter().map(|top| top.superseded_bytes()).sum();
        for (top, paused) in tops.iter().zip(&paused) {
            top.add_time_mark(paused, time_ns, round.map_or(0, Round::encode))?;
        }
        Ok(())
    }

    /// Removes the marks that the rule does not keep, and those that not all disks have.
    fn remove_marks(&self, limit_bytes: u64) -> Result<()> {
        // A seal replaces the layers meanwhile: the next turn removes marks.
        let Some(document) = self.try_document() else { return Ok(()) };
        let _removing = self.keeper().removing.lock();
        loop {
            let coarser = self.keeper().state.lock().coarser;
            let mut kept = self.kept(self.marks_of(&document), coarser);
            if coarser > MOST_COARSE {
                kept.drain(..kept.len().saturating_sub(1));
            }
            for disk in self.layered() {
                let stack = disk.hold();
                let Some(top) = stack.layers.last() else { continue };
                let is_kept = |mark: &TimeMark| {
                    kept.binary_search_by_key(&mark.time_ns, |kept| kept.time_ns).is_ok()
                };
                top.remove_time_marks(&gone(&top.time_marks(), is_kept))?;
            }
            let held_bytes = self.held_bytes();
            let mut state = self.keeper().state.lock();
            if held_bytes > limit_bytes && state.coarser <= MOST_COARSE {
                state.coarser += 1;
                state.changed = Instant::now();
                continue;
            }
            let relaxed = relaxed(state.coarser, held_bytes, limit_bytes, state.changed.elapsed());
            if relaxed != state.coarser {
                state.coarser = relaxed;
                state.changed = Instant::now();
            }
            return Ok(());
        }
    }

    /// The marks that the rule keeps now.
    fn kept(&self, marks: Vec<SessionMark>, coarser: u32) -> Vec<SessionMark> {
        // Those who ask may come before the first turn of a session that was not served for long.
        self.look_at_clock();
        let mut state = self.keeper().state.lock();
        let now = Instant::now();
        // The other site's clock may have been set forward: that ends no mark.
        let most_ns = if state.has_clock { u64::MAX } else { clock_ns() };
        let now_ns = state.next_time().time_ns.min(most_ns);
        if coarser == 0 && state.has_grace(now) {
            return marks;
        }
        state.held.retain(|_, (_, until)| now < *until);
        let held = state.held.values().flat_map(|(times, _)| times).copied().collect();
        kept_marks(marks, &self.keeper().rules, now_ns, coarser, &held)
    }

    /// Holds the newest mark and those of these times.
    pub(crate) fn hold(&self, holder: u64, times_ns: &[u64]) -> HeldMarks {
        let document = self.document();
        let until = Instant::now() + HOLD;
        // Look at the writes before the marks: a mark that is made in between has more than is claimed here.
        let is_marked = !self.has_unmarked_writes();
        let looked_at_ms = now_ms();
        let newest_ns = self.marks_of(&document).last().map(|mark| mark.time_ns);
        let times = times_ns.iter().copied().chain(newest_ns).collect();
        self.keeper().state.lock().held.insert(holder, (times, until));
        // Marks that a removal had chosen before are not there now, or the newest one.
        let _removed = self.keeper().removing.lock();
        let marks = self.marks_of(&document);
        let newest_ms = newest_ns.map_or(0, |time_ns| time_ns / 1_000_000);
        let current_ms = match self.follow_progress() {
            Some(progress) => progress.current_ms,
            None if is_marked => looked_at_ms,
            None => newest_ms,
        };
        let newest = marks.iter().find(|mark| Some(mark.time_ns) == newest_ns).cloned();
        HeldMarks { newest, held_ns: there(&marks, times_ns), current_ms }
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
        let (coarser, limit_bytes) = {
            let state = self.keeper().state.lock();
            (state.coarser, state.limit_bytes)
        };
        let marks = self.kept(self.marks_of(&document), coarser);
        SessionMarks {
            marks,
            held_bytes: Some(self.held_bytes()),
            held_bytes_limit: Some(limit_bytes).filter(|limit| *limit < u64::MAX),
            coarser,
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

/// The next power of two of the intervals, this time after it was changed. If they are very long, what is held is that of the few
/// marks that were left, and stays until there is a later one: it says nothing of shorter ones.
fn relaxed(coarser: u32, held_bytes: u64, limit_bytes: u64, after: Duration) -> u32 {
    let is_little =
        held_bytes < limit_bytes / 16 || coarser > VERY_COARSE && held_bytes <= limit_bytes;
    if is_little && after > RELAX_AFTER.1 {
        coarser / 2
    } else if held_bytes < limit_bytes / 4 && after > RELAX_AFTER.0 {
        coarser.saturating_sub(1)
    } else {
        coarser
    }
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
    fn times_of_marks_grow_whatever_the_clock_says() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let day = 86_400_000_000_000;
        assert_eq!(next_time_ns(None, 5, start), 5);
        // The clock is set back by a day, then forward by two.
        assert_eq!(next_time_ns(Some((2 * day, start)), day, at(1)), 2 * day + 1_000_000_000);
        assert_eq!(next_time_ns(Some((2 * day, start)), 3 * day, at(1)), 3 * day);
        // Two marks at one instant.
        assert_eq!(next_time_ns(Some((day, start)), day, start), day + 1);
    }

    #[test]
    fn after_a_full_drive_the_one_mark_that_is_left_does_not_keep_intervals_long() {
        let mut coarser = MOST_COARSE + 1;
        for _ in 0..2 {
            // Its blocks take nearly as much as marks may.
            coarser = relaxed(coarser, 99, 100, Duration::from_secs(11));
        }
        assert!(1 << coarser < 60, "{coarser}");
        // More than they may.
        assert_eq!(relaxed(17, 101, 100, Duration::from_secs(1000)), 17);
        // Short intervals: held bytes grow with the number of marks.
        assert_eq!(relaxed(4, 99, 100, Duration::from_secs(1000)), 4);
        assert_eq!(relaxed(4, 24, 100, Duration::from_secs(61)), 3);
        assert_eq!(relaxed(4, 5, 100, Duration::from_secs(11)), 2);
    }

    #[test]
    fn a_clock_that_was_set_ends_no_mark() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let second = 1_000_000_000;
        let keeper = MarkKeeper::new(MarkRules::default(), Some(1000 * second), true);
        let mut state = keeper.state.into_inner();
        state.clock = Some((1000 * second, start));
        state.take_clock(1001 * second, at(1));
        // A busy machine: the turn comes late, by both clocks.
        state.take_clock(1501 * second, at(501));
        assert!(!state.has_grace(at(501)));
        // Three hours forward, and back again.
        state.take_clock(12_302 * second, at(502));
        assert!(state.has_grace(at(502)));
        state.take_clock(1503 * second, at(503));
        assert!(state.has_grace(at(4101)) && !state.has_grace(at(4103)));
        // Marks of another site come two days later, as after both were off.
        let received = MarkKeeper::new(MarkRules::default(), Some(1000 * second), false);
        let mut state = received.state.into_inner();
        assert_eq!(state.look_at_clock(Instant::now()), None);
        state.last = Some((173_800 * second, Instant::now()));
        assert!(state.look_at_clock(Instant::now()).is_some() && state.has_grace(Instant::now()));
        // An opening after a day.
        let opened = MarkKeeper::new(MarkRules::default(), Some(1000 * second), true);
        let mut state = opened.state.into_inner();
        state.take_clock(87_400 * second, Instant::now());
        assert!(state.has_grace(Instant::now()));
    }

    #[test]
    fn intervals_are_short_again_within_a_minute_after_a_full_drive() {
        let mut coarser = MOST_COARSE + 1;
        for _ in 0..5 {
            coarser = relaxed(coarser, 0, 1 << 30, Duration::from_secs(11));
        }
        assert_eq!(coarser, 0);
        // With much held they become shorter slowly, or not.
        let mib = |mib: u64| mib << 20;
        assert_eq!(relaxed(5, mib(200), mib(1024), Duration::from_secs(11)), 5);
        assert_eq!(relaxed(5, mib(200), mib(1024), Duration::from_secs(61)), 4);
        assert_eq!(relaxed(5, mib(300), mib(1024), Duration::from_secs(61)), 5);
        assert_eq!(relaxed(3, 0, 0, Duration::from_secs(61)), 3);
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
