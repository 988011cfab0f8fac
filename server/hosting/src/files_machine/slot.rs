//! The bound of machines that read file systems, of one user on this host.
//!
//! Each machine holds the lock of one of the files `slot-0` to `slot-3` beside the places. Locks are freed by
//! the kernel, so a kill leaves nothing. If all are taken, the machine ends that is unused longest.

use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, HeldLock, Result};

use super::place::{end_unused, try_slot};
use crate::signals::ChildSignals;

/// Maximum number of machines. Each needs 512 MiB of memory.
const MAX_MACHINES: usize = 4;
/// A machine that is unused ends within this time.
const PATIENCE: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_millis(50);

/// Takes a slot, and holds it until it is dropped.
///
/// # Errors
/// `Busy` if commands use all machines; `Interrupted`.
pub(super) fn take(signals: &mut ChildSignals) -> Result<HeldLock> {
    let until = Instant::now() + PATIENCE;
    loop {
        for number in 0..MAX_MACHINES {
            if let Some(slot) = try_slot(number)? {
                return Ok(slot);
            }
        }
        end_unused()?;
        if signals.was_asked_to_end() {
            return Err(Error::new(ErrorKind::Interrupted, "interrupted"));
        }
        if Instant::now() > until {
            let text =
                format!("{MAX_MACHINES} machines read file systems already, for other commands");
            return Err(Error::new(ErrorKind::Busy, text).advise("wait for the end of one"));
        }
        std::thread::sleep(INTERVAL);
    }
}
