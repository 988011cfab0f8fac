//! The times of marks, and the clock by which they age.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::session_folder::notes::SessionNotes;
use crate::sessions::follow::RoundTime;

/// A clock that goes this much further than the time that has passed was set: then the age of marks is not known.
const CLOCK_STEP: Duration = Duration::from_secs(60);
/// Most by which marks of rounds are ahead of the clock.
const QUICK_RESTARTS: Duration = Duration::from_secs(10);
/// After the clock was set, or the session was not served for a while, marks do not end by their age for this time.
const GRACE: Duration = Duration::from_secs(3600);
/// The note of a session about it. It outlives the process.
pub(super) const GRACE_NOTE: &str = "marks.grace";

/// A grace, as the note says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Grace {
    /// The clock's time at its end, in nanoseconds since 1970.
    pub(super) end_ns: u64,
    /// How far the clock went without the time that passed, in nanoseconds.
    pub(super) jumped_ns: u64,
}

/// The grace that is noted; one that is over without a note that can be read.
pub(super) fn noted_grace(notes: &SessionNotes) -> Grace {
    let noted = notes.read_json(GRACE_NOTE).unwrap_or_else(|error| {
        tracing::warn!(error = %error.full_message(), "a note about time marks cannot be read");
        None
    });
    noted.unwrap_or_default()
}

/// The times of the marks of a session that is open.
pub(super) struct MarkClock {
    /// Marks have the times of this site's clock, not those of another site.
    has_clock: bool,
    /// The time of the newest mark, and when it was made by the monotonic clock.
    pub(super) last: Option<(u64, Instant)>,
    /// The clock at the last look.
    seen: Option<(u64, Instant)>,
    /// No mark ends by its age until then.
    grace_until: Option<Instant>,
    /// How far the clock went in the grace without the time that passed, in nanoseconds.
    jumped_ns: u64,
    /// The clock was looked at since the opening.
    has_looked: bool,
}

impl MarkClock {
    /// `newest_ns`: the newest mark that was made before.
    pub(super) fn new(newest_ns: Option<u64>, has_clock: bool) -> MarkClock {
        let now = Instant::now();
        MarkClock {
            has_clock,
            last: newest_ns.map(|newest_ns| (newest_ns, now + ahead(newest_ns))),
            seen: newest_ns.map(|newest_ns| (newest_ns, now)),
            grace_until: None,
            jumped_ns: 0,
            has_looked: false,
        }
    }

    /// The time of a mark that is made now.
    pub(super) fn next_time(&self) -> RoundTime {
        let at = Instant::now();
        let clock_ns = if self.has_clock { now_ns() } else { 0 };
        RoundTime { time_ns: next_time_ns(self.last, clock_ns, at), at }
    }

    /// The time by which marks age now. Of marks with the times of another site, it is that of the clock that is behind: one that
    /// was set forward ends no mark. In a grace the clock counts as if it had not been set.
    pub(super) fn age_ns(&self) -> u64 {
        let jumped_ns = if self.has_grace(Instant::now()) { self.jumped_ns } else { 0 };
        self.time_ns().saturating_sub(jumped_ns)
    }

    fn time_ns(&self) -> u64 {
        let most_ns = if self.has_clock { u64::MAX } else { now_ns() };
        self.next_time().time_ns.min(most_ns)
    }

    /// Looks whether the clock was set since the last look. Returns the grace that begins now.
    pub(super) fn look(&mut self, now: Instant) -> Option<Grace> {
        let clock_ns = self.time_ns();
        let grace_ns = u64::try_from(GRACE.as_nanos()).unwrap_or(u64::MAX);
        let end_ns = clock_ns.saturating_add(grace_ns);
        self.take(clock_ns, now).then_some(Grace { end_ns, jumped_ns: self.jumped_ns })
    }

    /// Continues the grace that an earlier process noted.
    pub(super) fn continue_grace(&mut self, noted: Grace) {
        let left = Duration::from_nanos(noted.end_ns.saturating_sub(self.time_ns())).min(GRACE);
        if !left.is_zero() {
            self.grace_until = Some(Instant::now() + left);
            self.jumped_ns = noted.jumped_ns;
        }
    }

    pub(super) fn has_grace(&self, now: Instant) -> bool {
        self.grace_until.is_some_and(|until| now < until)
    }

    /// Whether a grace begins.
    fn take(&mut self, clock_ns: u64, now: Instant) -> bool {
        let before = self.seen.replace((clock_ns, now));
        let step_ns = u64::try_from(CLOCK_STEP.as_nanos()).unwrap_or(u64::MAX);
        let expected_ns = before.map_or(clock_ns, |_| next_time_ns(before, 0, now));
        let jumped_ns = clock_ns.saturating_sub(expected_ns);
        let is_first = !std::mem::replace(&mut self.has_looked, true);
        if jumped_ns <= step_ns {
            let fallen_ns = expected_ns.saturating_sub(clock_ns);
            if fallen_ns > step_ns {
                self.jumped_ns = self.jumped_ns.saturating_sub(fallen_ns);
            }
            return false;
        }
        let earlier_ns = if self.has_grace(now) { self.jumped_ns } else { 0 };
        self.jumped_ns = match is_first {
            // Both begin with the newest mark.
            true => earlier_ns.max(jumped_ns),
            false => earlier_ns.saturating_add(jumped_ns),
        };
        self.grace_until = Some(now + GRACE);
        true
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
    let ahead = Duration::from_nanos(newest_ns.saturating_sub(now_ns()));
    if ahead <= QUICK_RESTARTS { ahead } else { Duration::ZERO }
}

/// The clock, to the nanosecond: no two marks have one time.
pub(super) fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
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
    fn a_clock_that_was_set_ends_no_mark() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let second = 1_000_000_000;
        let mut clock = MarkClock::new(Some(1000 * second), true);
        clock.seen = Some((1000 * second, start));
        assert!(!clock.take(1001 * second, at(1)));
        // A busy machine: the turn comes late, by both clocks.
        assert!(!clock.take(1501 * second, at(501)));
        assert!(!clock.has_grace(at(501)));
        // Three hours forward, and back again.
        assert!(clock.take(12_302 * second, at(502)));
        assert!(clock.has_grace(at(502)));
        assert!(!clock.take(1503 * second, at(503)));
        assert!(clock.has_grace(at(4101)) && !clock.has_grace(at(4103)));
        // An opening after a day.
        let mut opened = MarkClock::new(Some(1000 * second), true);
        assert!(opened.take(87_400 * second, Instant::now()) && opened.has_grace(Instant::now()));
    }

    #[test]
    fn marks_of_another_site_that_was_off_for_days_end_no_mark() {
        let mut clock = MarkClock::new(Some(1_000_000_000_000), false);
        assert_eq!(clock.look(Instant::now()), None);
        clock.last = Some((173_800_000_000_000, Instant::now()));
        let grace = clock.look(Instant::now()).unwrap();
        assert!(grace.end_ns > 173_800_000_000_000 && clock.has_grace(Instant::now()));
        // Until its end they have the age that they had.
        assert!(clock.age_ns() < 1_001_000_000_000, "{}", clock.age_ns());
    }

    #[test]
    fn another_process_continues_a_grace_and_makes_none_of_one_that_is_over() {
        let mut clock = MarkClock::new(None, true);
        let jumped_ns = 7_000_000_000_000;
        clock.continue_grace(Grace { end_ns: now_ns() - 1, jumped_ns });
        assert!(!clock.has_grace(Instant::now()) && clock.age_ns() + 1_000_000_000 > now_ns());
        clock.continue_grace(Grace { end_ns: u64::MAX, jumped_ns });
        assert!(clock.has_grace(Instant::now()) && clock.age_ns() + jumped_ns <= now_ns());
        assert!(!clock.has_grace(Instant::now() + GRACE + Duration::from_secs(1)));
    }
}
