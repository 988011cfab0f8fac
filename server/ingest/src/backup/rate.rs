//! The limit on the bytes that a backup reads from its sources.
//!
//! ```text
//!  reader ──take(piece)──▶ RateLimit ──▶ sleeps until its turn ──▶ reads the piece
//! ```
//!
//! The limit is a token bucket that holds the bytes of 100 ms, in the form of one time: when the next
//! piece may start. Readers reserve their turn under the lock and sleep outside of it. Long reads are
//! split into pieces of at most 100 ms, so the load on the source is even.

use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};

use coldrise_block::units::parse_size;

/// The bytes of this time can be read at once.
const BURST: Duration = Duration::from_millis(100);
/// The length of a piece without a limit: one may come while it is read.
const FREE_PIECE_BYTES: u64 = 1 << 20;
/// Longest sleep before the next look at the reason to end.
const SLEEP: Duration = Duration::from_millis(50);

/// Bytes per second that a backup may read from its sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(u64);

impl Rate {
    /// The lowest rate: slower backups of real disks never end.
    pub const MIN_BYTES_PER_SECOND: u64 = 64 << 10;

    /// A rate in bytes per second.
    ///
    /// # Errors
    /// `InvalidInput` below [`Rate::MIN_BYTES_PER_SECOND`].
    pub fn from_bytes_per_second(bytes: u64) -> Result<Rate> {
        if bytes < Rate::MIN_BYTES_PER_SECOND {
            let text = format!("{bytes} bytes per second is too slow: use 64K or more");
            return Err(Error::new(ErrorKind::InvalidInput, text)
                .advise("for no limit, leave the rate out"));
        }
        Ok(Rate(bytes))
    }

    /// Bytes per second.
    pub fn bytes_per_second(self) -> u64 {
        self.0
    }

    /// The time that reading `bytes` takes at this rate.
    fn time_of(self, bytes: u64) -> Duration {
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(self.0);
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

impl FromStr for Rate {
    type Err = Error;

    fn from_str(text: &str) -> Result<Rate> {
        Rate::from_bytes_per_second(parse_size(text)?)
    }
}

/// The present rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Flow {
    /// Nothing.
    Stopped,
    /// At most this rate.
    At(Rate),
    /// All that can.
    Free,
}

impl From<Option<Rate>> for Flow {
    fn from(rate: Option<Rate>) -> Flow {
        rate.map_or(Flow::Free, Flow::At)
    }
}

/// The limit of one backup: all readers of all its disks share it. It may change while they wait.
#[derive(Debug)]
pub struct RateLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    flow: Flow,
    /// When the next piece may start.
    next: Instant,
}

impl RateLimit {
    /// A limit that begins with this.
    pub fn new(flow: Flow) -> RateLimit {
        RateLimit(Mutex::new(State { flow, next: Instant::now() }))
    }

    /// Changes it.
    pub fn set(&self, flow: Flow) {
        let mut state = self.state();
        // No piece waits for a turn that an earlier rate gave.
        (state.flow, state.next) = (flow, Instant::now());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The length of one piece: the bytes of 100 ms in whole units, but at least one unit.
    pub(super) fn piece_bytes(&self, unit_bytes: u64) -> u64 {
        let burst_bytes = match self.state().flow {
            Flow::Stopped => 0,
            Flow::At(rate) => rate.0 / 10,
            Flow::Free => FREE_PIECE_BYTES,
        };
        (burst_bytes - burst_bytes % unit_bytes.max(1)).max(unit_bytes)
    }

    /// Waits until `bytes` may be read. Returns false at once if `is_over` becomes true.
    pub(super) fn take(&self, bytes: u64, is_over: &dyn Fn() -> bool) -> bool {
        let mut turn = None;
        loop {
            if is_over() {
                return false;
            }
            let now = Instant::now();
            turn = turn.or_else(|| self.reserve(bytes, now));
            let wait = turn.map(|turn| turn.saturating_duration_since(now));
            if wait.is_some_and(|wait| wait.is_zero()) {
                return true;
            }
            std::thread::sleep(wait.unwrap_or(SLEEP).min(SLEEP));
        }
    }

    /// Takes the next turn, and returns when it is; `None` while nothing flows. What was not used earlier than 100 ms ago
    /// is lost.
    fn reserve(&self, bytes: u64, now: Instant) -> Option<Instant> {
        let mut state = self.state();
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let turn = state.next.max(earliest);
        match state.flow {
            Flow::Stopped => return None,
            Flow::At(rate) => state.next = turn + rate.time_of(bytes),
            Flow::Free => {}
        }
        Some(turn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn limit(bytes: u64) -> RateLimit {
        RateLimit::new(Flow::At(Rate::from_bytes_per_second(bytes).unwrap()))
    }

    #[test]
    fn rates_that_never_end_are_refused() {
        for bytes in [0, 1, (64 << 10) - 1] {
            let error = Rate::from_bytes_per_second(bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.message().contains("too slow"), "{error}");
        }
    }

    #[test]
    fn pieces_are_whole_units_of_at_most_100_ms() {
        assert_eq!(limit(10 * MIB).piece_bytes(16 << 10), MIB);
        assert_eq!(limit(MIB).piece_bytes(16 << 10), 96 << 10);
        assert_eq!(limit(64 << 10).piece_bytes(16 << 10), 16 << 10, "at least one");
        assert_eq!(limit(u64::MAX).piece_bytes(16 << 10) % (16 << 10), 0);
    }

    #[test]
    fn turns_are_spaced_by_the_rate_and_idle_time_is_not_saved_up() {
        let limit = limit(MIB);
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let first = limit.reserve(MIB, start).unwrap();
        assert!(first <= start);
        assert_eq!(limit.reserve(MIB, start), Some(first + second));
        assert_eq!(limit.reserve(MIB, start), Some(first + 2 * second));
        // After an hour without a read, only 100 ms are ahead.
        let later = start + 3600 * second;
        let next = limit.reserve(MIB, later).unwrap();
        assert_eq!(next, later - BURST);
        assert_eq!(limit.reserve(MIB, later), Some(next + second));
    }

    #[test]
    fn a_limit_that_changes_holds_at_once() {
        let limit = limit(64 << 10);
        limit.reserve(1 << 30, Instant::now());
        limit.set(Flow::Free);
        assert!(limit.take(1 << 30, &|| false));
        limit.set(Flow::Stopped);
        assert_eq!(limit.reserve(1, Instant::now()), None);
        assert!(!limit.take(1, &|| true));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| limit.take(1, &|| false));
            limit.set(Flow::Free);
            assert!(waiting.join().unwrap());
        });
        let rate = Rate::from_bytes_per_second(MIB).unwrap();
        assert!(Flow::Stopped < Flow::At(rate) && Flow::At(rate) < Flow::Free);
    }

    #[test]
    fn a_wait_ends_with_its_backup() {
        let limit = limit(64 << 10);
        limit.reserve(1 << 30, Instant::now());
        assert!(!limit.take(1, &|| true));
    }
}
