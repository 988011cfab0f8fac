//! The limit of what is sent, and the meters of what was.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::frame::Class;

/// Lowest rate, in bytes per second: a slower line looks dead.
const LEAST_RATE: u64 = 16 << 10;
/// The burst, in time of the rate.
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
    /// Who waits, in order: a connection that never had its turn would look dead to the other side.
    fetches: VecDeque<u64>,
    bulk: VecDeque<u64>,
    next_ticket: u64,
    is_ended: bool,
}

impl State {
    fn queue(&mut self, class: Class) -> &mut VecDeque<u64> {
        match class {
            Class::Fetch => &mut self.fetches,
            _ => &mut self.bulk,
        }
    }

    fn enter(&mut self, class: Class) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.queue(class).push_back(ticket);
        ticket
    }

    fn leave(&mut self, class: Class, ticket: u64) {
        self.queue(class).retain(|other| *other != ticket);
    }

    /// Whether this one is first in line: bulk lets all fetches pass.
    fn is_next(&mut self, class: Class, ticket: u64) -> bool {
        self.queue(class).front() == Some(&ticket)
            && (class == Class::Fetch || self.fetches.is_empty())
    }
}

impl Pace {
    pub(crate) fn new(rate: Option<u64>) -> Pace {
        let state = State {
            rate: limited(rate),
            free_at: Instant::now(),
            fetches: VecDeque::new(),
            bulk: VecDeque::new(),
            next_ticket: 0,
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

    /// Counts bytes that go out. Waits until the rate has room for them, behind those who wait already;
    /// [`Class::Control`], which is little, never waits.
    pub(crate) fn send(&self, class: Class, bytes: usize) {
        let mut state = self.state.lock();
        let ticket = (class != Class::Control).then(|| state.enter(class));
        while let Some(rate) = state.rate {
            let now = Instant::now();
            let free_at = state.free_at.max(now.checked_sub(BURST).unwrap_or(now));
            let is_next = ticket.is_none_or(|ticket| state.is_next(class, ticket));
            if ticket.is_none() || is_next && free_at <= now || state.is_ended {
                state.free_at = free_at + Duration::from_secs_f64(bytes as f64 / rate as f64);
                break;
            }
            match is_next {
                true => drop(self.changed.wait_until(&mut state, free_at)),
                // The one whose turn ends wakes the others.
                false => self.changed.wait(&mut state),
            }
        }
        if let Some(ticket) = ticket {
            state.leave(class, ticket);
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Ends all waits.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_take_turns_and_bulk_lets_fetches_pass() {
        let pace = Pace::new(Some(1 << 20));
        let mut state = pace.state.lock();
        let first = state.enter(Class::Bulk);
        let second = state.enter(Class::Bulk);
        let fetch = state.enter(Class::Fetch);
        let next = |state: &mut State| {
            let all = [(Class::Bulk, first), (Class::Bulk, second), (Class::Fetch, fetch)];
            all.map(|(class, ticket)| state.is_next(class, ticket))
        };
        assert_eq!(next(&mut state), [false, false, true]);
        state.leave(Class::Fetch, fetch);
        assert_eq!(next(&mut state), [true, false, false]);
        state.leave(Class::Bulk, first);
        // One that had a turn is behind those that wait.
        let again = state.enter(Class::Bulk);
        assert!(state.is_next(Class::Bulk, second) && !state.is_next(Class::Bulk, again));
        drop(state);
        pace.end();
        pace.send(Class::Bulk, 1 << 20);
        assert_eq!(pace.state.lock().bulk, [second, again]);
    }

    #[test]
    fn all_that_wait_have_their_turns_at_the_rate() {
        let pace = Pace::new(Some(1 << 20));
        let started = Instant::now();
        std::thread::scope(|scope| {
            for class in [Class::Bulk, Class::Bulk, Class::Fetch, Class::Control] {
                let pace = &pace;
                scope.spawn(move || (0..8).for_each(|_| pace.send(class, 8 << 10)));
            }
        });
        // 256 KiB, less what may go out at once.
        assert!(started.elapsed() >= Duration::from_millis(200));
        let state = pace.state.lock();
        assert!(state.bulk.is_empty() && state.fetches.is_empty());
    }
}
