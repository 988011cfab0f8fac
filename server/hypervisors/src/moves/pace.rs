//! Whether the copy follows the machine's writes; see docs/decisions/0055.

use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};

/// How long the machine may stand still, or its writes may wait for the switch, until the move is abandoned.
pub(super) const SWITCH_PATIENCE: Duration = Duration::from_secs(10);
/// A copy whose rest has not become smaller for this long does not catch up.
const STALL: Duration = Duration::from_secs(5);
/// A copy without progress for this long waits for its server.
const PAUSE: Duration = Duration::from_millis(500);

/// Whether a copy catches up.
pub(super) struct Pace {
    began: Instant,
    first_done_bytes: Option<u64>,
    /// The smallest rest so far, and when it was seen.
    least: (u64, Instant),
    /// The last progress.
    latest: (u64, Instant),
    held_since: Option<Instant>,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Pace {
        Pace {
            began: now,
            first_done_bytes: None,
            least: (u64::MAX, now),
            latest: (0, now),
            held_since: None,
        }
    }

    /// Since when the move lets the machine stand still.
    pub(super) fn held_since(&self) -> Option<Instant> {
        self.held_since
    }

    /// The machine stands still from now on.
    pub(super) fn hold(&mut self, now: Instant) {
        self.held_since = Some(now);
    }

    /// Whether the copy runs, but its rest has not become smaller for a while. A copy that waits for its server has
    /// not stalled.
    pub(super) fn has_stalled(&mut self, now: Instant, done_bytes: u64, left_bytes: u64) -> bool {
        // The job does not know its length yet.
        if done_bytes + left_bytes == 0 {
            return false;
        }
        if done_bytes > self.latest.0 {
            self.latest = (done_bytes, now);
        }
        self.first_done_bytes.get_or_insert(done_bytes);
        if left_bytes < self.least.0 - self.least.0 / 100 {
            self.least = (left_bytes, now);
            return false;
        }
        now - self.least.1 >= STALL && now - self.latest.1 < PAUSE
    }

    /// Whether the machine has to be stopped now: the copy has stalled, and the rest is small enough to be copied while
    /// the machine stands still, in half the time that the switch may take.
    ///
    /// # Errors
    /// `Incomplete` if the machine stands still for too long.
    pub(super) fn must_hold(
        &mut self,
        now: Instant,
        done_bytes: u64,
        left_bytes: u64,
    ) -> Result<bool> {
        if let Some(since) = self.held_since {
            if now - since < SWITCH_PATIENCE {
                return Ok(false);
            }
            let text = "the rest of the copy took too long while the machine was paused";
            return Err(Error::new(ErrorKind::Incomplete, text)
                .advise("move again when the machine writes less"));
        }
        let has_stalled = self.has_stalled(now, done_bytes, left_bytes);
        let copied = done_bytes.saturating_sub(self.first_done_bytes.unwrap_or(done_bytes));
        let bytes_per_s = copied as f64 / (now - self.began).as_secs_f64();
        let is_small = left_bytes as f64 <= bytes_per_s * SWITCH_PATIENCE.as_secs_f64() / 2.0;
        Ok(has_stalled && is_small)
    }
}

/// Reported when the machine is stopped.
pub(super) fn sentence(left_bytes: u64) -> String {
    format!(
        "the machine writes faster than the copy follows: it is paused for the last {} MiB",
        left_bytes >> 20
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Asks every 100 ms. `at` tells copied and remaining MiB at a moment. Returns when the machine must be held.
    fn held_after(at: impl Fn(u64) -> (u64, u64)) -> Option<u64> {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        (1..600).map(|tenths| tenths * 100).find(|ms| {
            let (done, left) = at(*ms);
            pace.must_hold(start + Duration::from_millis(*ms), done * MIB, left * MIB).unwrap()
        })
    }

    #[test]
    fn a_machine_is_held_if_a_running_copy_stops_converging() {
        // 100 MiB/s; after 10 s the machine writes as fast.
        let copies = |ms: u64| (ms / 10, (1000 - (ms / 10).min(950)));
        assert!(held_after(copies).is_some_and(|ms| (14_000..15_500).contains(&ms)));
        // The rest would take longer than the machine may stand still.
        assert_eq!(held_after(|ms| (ms / 10, 700)), None);
        assert_eq!(held_after(|ms| (ms / 10, 6000 - ms / 10)), None, "it becomes smaller");
        let unknown_first = |ms: u64| if ms < 300 { (0, 0) } else { (ms / 10, 6000 - ms / 10) };
        assert_eq!(held_after(unknown_first), None, "the first length is unknown");
    }

    #[test]
    fn a_copy_waiting_for_its_server_does_not_hold_the_machine() {
        assert_eq!(held_after(|ms| (ms.min(5_000) / 10, 1000 - ms.min(5_000) / 10)), None);
        // The server is back, and the copy too: only a rest that then stays is one.
        let away = |ms: u64| ms.min(5_000) + ms.saturating_sub(20_000);
        assert_eq!(held_after(|ms| (away(ms) / 10, 10_000 - away(ms) / 10)), None);
    }

    #[test]
    fn a_machine_stands_still_for_a_bounded_time() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        pace.hold(start);
        assert!(!pace.must_hold(start + Duration::from_secs(9), 0, MIB).unwrap());
        let late = pace.must_hold(start + SWITCH_PATIENCE, MIB, MIB).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Incomplete);
    }
}
