//! The names of sessions for boots that are never kept, and what older checks left of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::{CaptureLimit, OwnedSession};
use coldrise_store::{MachineName, PointDocument, Repository, SessionName};

use crate::leftovers;
use crate::signals::ChildSignals;

/// The end of the session's name. A session of this name is discarded without a question.
const SUFFIX: &str = "-check-boot-throwaway";
/// A machine may update itself at its boot, and check its disks. Then its writes fail.
const CAPTURE_LIMIT: CaptureLimit = CaptureLimit { most_bytes: 32 << 30, free_space_divisor: 4 };
/// Maximum length of a session's name, in bytes.
const MAX_NAME_BYTES: usize = 63;
/// After a check was killed, its servers may take this long to end.
const LEFTOVER_PATIENCE: Duration = Duration::from_secs(10);
const LEFTOVER_INTERVAL: Duration = Duration::from_millis(100);

/// Publishes the point for a boot. `slot` tells sessions apart that boot the same machine side by
/// side. What killed checks left is removed first.
///
/// # Errors
/// `Busy` if another check of the machine runs; the errors of [`OwnedSession::publish`];
/// `Interrupted`.
pub(super) fn publish(
    repository: &Arc<Repository>,
    point: &PointDocument,
    slot: Option<usize>,
    signals: &mut ChildSignals,
) -> Result<OwnedSession> {
    let name = session_name(&point.machine, slot)?;
    leftovers::remove(repository);
    remove_leftover(repository, &name, &point.machine, signals)?;
    OwnedSession::publish(repository, point, name, CAPTURE_LIMIT)
}

fn session_name(machine: &MachineName, slot: Option<usize>) -> Result<SessionName> {
    let machine = machine.as_str();
    let suffix = slot.map_or_else(|| SUFFIX.to_owned(), |slot| format!("-{slot}{SUFFIX}"));
    let kept = machine.len().min(MAX_NAME_BYTES - suffix.len());
    SessionName::parse(&format!("{}{suffix}", machine.get(..kept).unwrap_or(machine)))
}

/// Removes the session of this name, whose server may still be ending.
fn remove_leftover(
    repository: &Arc<Repository>,
    name: &SessionName,
    machine: &MachineName,
    signals: &mut ChildSignals,
) -> Result<()> {
    let began = Instant::now();
    loop {
        let state = match coldrise_session::session(repository, name) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            state => state?,
        };
        let is_foreign = state.document.machine != *machine;
        if is_foreign || (state.is_served && began.elapsed() >= LEFTOVER_PATIENCE) {
            return Err(busy(&state.document.machine, name));
        }
        if !state.is_served {
            match coldrise_session::unpublish(repository, name, true) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                // Its check lives, or has opened it just now.
                Err(error) if error.kind() == ErrorKind::Busy => return Err(busy(machine, name)),
                ended => return ended.map(|_| ()),
            }
        }
        if signals.was_asked_to_end() {
            return Err(Error::new(ErrorKind::Interrupted, "interrupted before the boot"));
        }
        std::thread::sleep(LEFTOVER_INTERVAL);
    }
}

fn busy(machine: &MachineName, name: &SessionName) -> Error {
    let text = format!("another check of {machine} runs, as session {name}");
    Error::new(ErrorKind::Busy, text).advise("wait for its end; coldrise runs shows it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throwaway_session_names_contain_machine_and_slot() {
        let machine = MachineName::parse("web01").unwrap();
        let name = |slot| session_name(&machine, slot).unwrap().to_string();
        assert_eq!(name(None), "web01-check-boot-throwaway");
        assert_eq!(name(Some(1)), "web01-1-check-boot-throwaway");
        let machine = MachineName::parse(&"a".repeat(63)).unwrap();
        let name = session_name(&machine, Some(15)).unwrap().to_string();
        assert!(name.ends_with("a-15-check-boot-throwaway"));
    }
}
