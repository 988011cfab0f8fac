//! The limit of what is sent, and the meters of what was.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::frame::Class;

/// Lowest rate, in bytes per second: a slower line looks dead.
const LEAST_RATE: u64 = 16 << 10;
/// What may go out at once, in time of the rate.
const BURST: Duration = Duration::from_millis(20);
/// Most that goes out at once, in bytes.
const PIECE_BYTES: u64 = 64 << 10;

/// A token bucket for all connections of a line.
pub(crate) struct Pace {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    rate: Option<u64>,
    /// Until then the line is full.
    free_at: Instant,
    /// Pieces of [`Class::Fetch`] that wait: bulk lets them pass.
    waiting_fetches: usize,
    is_ended: bool,
}

impl Pace {
    pub(crate) fn new(rate: Option<u64>) -> Pace {
        let state = State {
            rate: limited(rate),
            free_at: Instant::now(),
            waiting_fetches: 0,
            is_ended: false,
        };
        Pace { state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(crate) fn set(&self, rate: Option<u64>) {
        let mut state = self.state.lock();
        state.rate = limited(rate);
        state.free_at = Instant::now();
        drop(state);
        self.changed.notify_all();
    }

    pub(crate) fn rate(&self) -> Option<u64> {
        self.state.lock().rate
    }

    /// How much to send at a time, in bytes: less on a slow line, so that it flows evenly.
    pub(crate) fn piece_bytes(&self) -> usize {
        let piece = self.rate().map_or(PIECE_BYTES, |rate| (rate / 20).clamp(4 << 10, PIECE_BYTES));
        piece as usize
    }

    /// Counts bytes that go out. Waits until the rate has room for them; [`Class::Control`], which is
    /// little, never waits.
    pub(crate) fn send(&self, class: Class, bytes: usize) {
        let mut state = self.state.lock();
        state.waiting_fetches += usize::from(class == Class::Fetch);
        while let Some(rate) = state.rate {
            let now = Instant::now();
            let free_at = state.free_at.max(now.checked_sub(BURST).unwrap_or(now));
            let has_turn = match class {
                Class::Control => true,
                Class::Fetch => free_at <= now,
                Class::Bulk => free_at <= now && state.waiting_fetches == 0,
            };
            if has_turn || state.is_ended {
                state.free_at = free_at + Duration::from_secs_f64(bytes as f64 / rate as f64);
                break;
            }
            // Fetches that wait have a turn at `free_at`, and wake bulk when they have had it.
            let until = free_at.max(now + Duration::from_millis(1));
            self.changed.wait_until(&mut state, until);
        }
        if class == Class::Fetch {
            state.waiting_fetches -= 1;
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Lets nobody wait any longer.
    pub(crate) fn end(&self) {
        self.state.lock().is_ended = true;
        self.changed.notify_all();
    }
}

fn limited(rate: Option<u64>) -> Option<u64> {
    rate.map(|rate| rate.max(LEAST_RATE))
}

/// Seconds that a meter looks at.
const METERED_SECONDS: usize = 5;

/// Counts bytes, and those of the last seconds.
pub(crate) struct Meter(Mutex<Counts>);

struct Counts {
    total: u64,
    since: Instant,
    last: Instant,
    /// The current second and the ones before it, by second modulo the length.
    seconds: [(u64, u64); METERED_SECONDS + 1],
}

impl Meter {
    pub(crate) fn new() -> Meter {
        let now = Instant::now();
        Meter(Mutex::new(Counts {
            total: 0,
            since: now,
            last: now,
            seconds: [(0, 0); METERED_SECONDS + 1],
        }))
    }

    pub(crate) fn add(&self, bytes: u64) {
        let mut counts = self.0.lock();
        counts.total += bytes;
        counts.last = Instant::now();
        let second = counts.last.duration_since(counts.since).as_secs();
        let slot = &mut counts.seconds[second as usize % (METERED_SECONDS + 1)];
        if slot.0 != second {
            *slot = (second, 0);
        }
        slot.1 += bytes;
    }

    /// Time since the last bytes.
    pub(crate) fn idle(&self) -> Duration {
        self.0.lock().last.elapsed()
    }

    /// All bytes, and the mean of each of the last complete seconds.
    pub(crate) fn read(&self) -> (u64, u64) {
        let counts = self.0.lock();
        let now = counts.since.elapsed().as_secs();
        let complete = now.min(METERED_SECONDS as u64);
        let recent =
            counts.seconds.iter().filter(|(second, _)| (now - complete..now).contains(second));
        let bytes: u64 = recent.map(|(_, bytes)| bytes).sum();
        (counts.total, bytes.checked_div(complete).unwrap_or(0))
    }
}
