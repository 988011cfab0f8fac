//! Credit: how much the peer still has room for, for each class.

use coldrise_block::Result;
use parking_lot::{Condvar, Mutex};

use crate::failure::{End, Failure};
use crate::frame::Class;

/// Credit of [`Class::Control`] and of [`Class::Fetch`], in bytes.
const SMALL_WINDOW_BYTES: u64 = 8 << 20;
/// Largest credit of [`Class::Bulk`], in bytes.
const MAX_WINDOW_BYTES: u64 = 1 << 30;
/// Credit of [`Class::Bulk`] unless options say otherwise, in bytes: the product of 1 Gbit/s and
/// 500 ms.
pub const DEFAULT_BULK_WINDOW_BYTES: u64 = 64 << 20;

/// The windows of all classes.
pub(crate) fn windows(bulk_window_bytes: u64) -> [u64; 3] {
    let bulk = bulk_window_bytes.clamp(SMALL_WINDOW_BYTES, MAX_WINDOW_BYTES);
    [SMALL_WINDOW_BYTES, SMALL_WINDOW_BYTES, bulk]
}

/// The bytes that may still be sent.
pub(crate) struct Credit {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    left_bytes: [u64; 3],
    end: Option<End>,
}

impl Credit {
    /// Begins with the peer's first grants.
    pub(crate) fn new(windows: [u64; 3]) -> Credit {
        Credit {
            state: Mutex::new(State { left_bytes: windows, end: None }),
            changed: Condvar::new(),
        }
    }

    /// Takes credit; waits for it.
    ///
    /// # Errors
    /// If the line has ended.
    pub(crate) fn take(&self, class: Class, cost_bytes: u64, peer: &str) -> Result<()> {
        let mut state = self.state.lock();
        loop {
            if let Some(end) = &state.end {
                return Err(end.error(peer));
            }
            let left = &mut state.left_bytes[class.index()];
            if *left >= cost_bytes {
                *left -= cost_bytes;
                return Ok(());
            }
            self.changed.wait(&mut state);
        }
    }

    /// Adds what the peer grants.
    pub(crate) fn add(&self, class: Class, bytes: u64) -> std::result::Result<(), Failure> {
        let mut state = self.state.lock();
        let left = &mut state.left_bytes[class.index()];
        *left = left
            .checked_add(bytes)
            .filter(|sum| *sum <= MAX_WINDOW_BYTES)
            .ok_or_else(|| Failure::protocol("it granted credit without bound"))?;
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Lets all that wait fail.
    pub(crate) fn end(&self, end: End) {
        self.state.lock().end.get_or_insert(end);
        self.changed.notify_all();
    }
}
