//! The pace of a copy beside a machine that works.
//!
//! A copy at full speed has megabytes under way, and each request of the machine waits behind them: a machine that
//! works with its disks all the time was left a fiftieth of its requests. So the copy takes a share of the time
//! only, by a limit on its rate. A machine that leaves its disks alone does not slow it down.

use std::time::{Duration, Instant};

#[cfg(test)]
use super::mirror::INTERVAL;

/// The share of its full speed that a copy takes beside a busy machine.
const BUSY_SHARE: f64 = 0.2;
/// From this mean number of requests under way a machine counts as busy.
const BUSY_REQUESTS: f64 = 0.2;
/// Intervals at full speed at the start. The first ones have the start of QEMU's job in them.
const FIRST_PROBES: u32 = 3;
/// How often the copy runs at full speed again, to see how fast that is, and for how many intervals: in the first
/// one it begins late.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
const PROBES: u32 = 2;
/// The factor of the last measurement if the next one is lower.
const PROBE_MEMORY: f64 = 0.9;
/// The limit of the rate is never lower, in bytes per second.
const LEAST_BYTES_PER_S: f64 = (8 << 20) as f64;
/// A limit that differs less from the last one is not set.
const SMALLEST_CHANGE: f64 = 0.1;

/// Finds the rate that leaves a machine most of the time of its disks.
pub(super) struct RateLimit {
    /// The last observation: when, copied bytes, and time of the machine's requests.
    latest: Option<(Instant, u64, u64)>,
    /// The copy's rate without a limit, in bytes per second, and when it was measured.
    full: Option<(f64, Instant)>,
    /// Intervals at full speed that are still needed to measure it.
    probes: u32,
    /// The present limit in bytes per second; 0 for none.
    limit: u64,
}

impl RateLimit {
    pub(super) fn new() -> RateLimit {
        RateLimit { latest: None, full: None, probes: FIRST_PROBES, limit: 0 }
    }

    /// The limit in bytes per second, 0 for none, if it changes. To be called every `INTERVAL` with the bytes
    /// copied so far and the time that the machine's requests took so far, summed over all of them.
    pub(super) fn speed(&mut self, now: Instant, done_bytes: u64, busy_ns: u64) -> Option<u64> {
        let (before, done_before, busy_before) =
            self.latest.replace((now, done_bytes, busy_ns)).unwrap_or((now, done_bytes, busy_ns));
        let passed = now.saturating_duration_since(before);
        if passed.is_zero() {
            return None;
        }
        let rate = done_bytes.saturating_sub(done_before) as f64 / passed.as_secs_f64();
        if self.limit == 0 && rate > 0.0 {
            // One lower measurement may be chance.
            let before = self.full.map_or(0.0, |(full, _)| full * PROBE_MEMORY);
            self.full = Some((rate.max(before), now));
            self.probes = self.probes.saturating_sub(1);
        }
        let (full, measured) = self.full?;
        let under_way = busy_ns.saturating_sub(busy_before) as f64 / passed.as_nanos() as f64;
        if now.saturating_duration_since(measured) >= PROBE_INTERVAL {
            self.probes = PROBES;
        }
        let limit = match share(under_way) {
            share if share >= 1.0 || self.probes > 0 => 0,
            share => (full * share).max(LEAST_BYTES_PER_S) as u64,
        };
        let change = limit.abs_diff(self.limit) as f64;
        let is_new =
            (limit == 0) != (self.limit == 0) || change > self.limit as f64 * SMALLEST_CHANGE;
        is_new.then(|| {
            self.limit = limit;
            limit
        })
    }
}

/// The copy's share of the time, by the mean number of the machine's requests under way.
fn share(under_way: f64) -> f64 {
    let busy = (under_way / BUSY_REQUESTS).min(1.0);
    // A few requests now and then do not justify a lower limit.
    if busy < 0.05 { 1.0 } else { 1.0 - (1.0 - BUSY_SHARE) * busy }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The limits of ten intervals beside a machine with this many requests under way, for a copy that reaches 100
    /// MiB per interval.
    fn limits(rate_limit: &mut RateLimit, start: Instant, under_way: f64) -> Vec<u64> {
        let mut limit = 0;
        let (mut done, mut busy_ns) = (0, 0);
        (0..10)
            .map(|turn| {
                let now = start + INTERVAL * turn;
                limit = rate_limit.speed(now, done, busy_ns).unwrap_or(limit);
                done += if limit == 0 { 100 * MIB } else { limit / 10 };
                busy_ns += (INTERVAL.as_nanos() as f64 * under_way) as u64;
                limit
            })
            .collect()
    }

    #[test]
    fn a_copy_leaves_a_busy_machine_most_of_the_time_and_an_idle_one_none() {
        let start = Instant::now();
        let idle = limits(&mut RateLimit::new(), start, 0.001);
        assert!(idle.iter().all(|limit| *limit == 0), "{idle:?}");
        let mut rate_limit = RateLimit::new();
        let busy = limits(&mut rate_limit, start, 1.0);
        let fifth = 200 * MIB;
        assert!(busy[4..].iter().all(|limit| limit.abs_diff(fifth) < MIB), "{busy:?}");
        // After a while it looks how fast the copy can be.
        let later = limits(&mut rate_limit, start + PROBE_INTERVAL, 1.0);
        assert!(later.contains(&0) && later[9].abs_diff(fifth) < MIB, "{later:?}");
    }
}
