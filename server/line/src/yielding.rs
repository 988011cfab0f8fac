//! Pauses bulk traffic for blocks that a reader waits for.
//!
//! Connections share a line as the network likes, and two that are full leave a third one little. So bulk stands still from
//! the moment that a second block is asked for until none was for a while. A sequential reader asks for the next block
//! when the last one has come: a round trip later. Bulk keeps a part of the line, because a machine can keep reading for days.
//! A single block is not worth it: on a line of 200 ms bulk would stand still for 400 ms.

use std::time::{Duration, Instant};

/// Bulk continues when no block was asked for or sent for two round trips, but not before this time.
const SHORTEST_HOLD: Duration = Duration::from_millis(100);
/// And after this time at the latest.
const LONGEST_HOLD: Duration = Duration::from_secs(1);
/// A block that is asked for in this time after another one belongs to a series.
const SERIES: Duration = Duration::from_secs(2);
/// Longest time without bulk.
const LONGEST_STAND: Duration = Duration::from_secs(1);
/// The time that bulk gets then.
const SLICE: Duration = Duration::from_millis(100);

/// Whether bulk may be sent.
#[derive(Default)]
pub(crate) struct Yielding {
    last_fetch: Option<Instant>,
    /// No fetch since then: bulk continues.
    quiet_at: Option<Instant>,
    standing_since: Option<Instant>,
    slice_ends: Option<Instant>,
}

impl Yielding {
    /// A block was asked for.
    pub(crate) fn fetched(&mut self, now: Instant, round_trip: Duration) {
        let last = self.last_fetch.replace(now);
        if last.is_none_or(|last| now - last > SERIES) {
            return;
        }
        self.quiet_at = Some(now + (2 * round_trip).clamp(SHORTEST_HOLD, LONGEST_HOLD));
    }

    /// When to ask again, if bulk stands still now.
    pub(crate) fn wait(&mut self, now: Instant) -> Option<Instant> {
        let Some(quiet_at) = self.quiet_at.filter(|at| now < *at) else {
            self.standing_since = None;
            return None;
        };
        if self.slice_ends.is_some_and(|end| now < end) {
            return None;
        }
        let until = *self.standing_since.get_or_insert(now) + LONGEST_STAND;
        if now < until {
            return Some(quiet_at.min(until));
        }
        (self.standing_since, self.slice_ends) = (None, Some(now + SLICE));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bulk_traffic_pauses_for_fetches_and_keeps_a_share() {
        let mut yielding = Yielding::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(yielding.wait(start), None);
        yielding.fetched(start, Duration::from_millis(60));
        assert_eq!(yielding.wait(at(1)), None);
        yielding.fetched(at(10), Duration::from_millis(60));
        assert_eq!(yielding.wait(at(11)), Some(at(130)));
        assert_eq!(yielding.wait(at(130)), None);
        // One block after the other, for five seconds.
        let (mut sent, mut last) = (0, None);
        for ms in 1000..6000 {
            if ms % 80 == 0 {
                yielding.fetched(at(ms), Duration::from_millis(60));
            }
            if yielding.wait(at(ms)).is_none() {
                sent += u32::from(ms >= 1040);
                last = Some(ms);
            }
        }
        assert!((300..=600).contains(&sent), "{sent} ms of 5 s");
        assert!(last.is_some_and(|last| last > 4800));
        assert_eq!(yielding.wait(at(9000)), None);
        yielding.fetched(at(9000), Duration::from_millis(60));
        assert_eq!(yielding.wait(at(9001)), None);
    }
}
