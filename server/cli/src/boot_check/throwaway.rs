//! Sessions for boots that are never kept.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::SessionDocument;
use coldrise_store::{MachineName, PointDocument, Repository, SessionName};

use crate::signals::ChildSignals;
use crate::units::unix_ms;

/// The end of the session's name. A session of this name is discarded without a question.
const SUFFIX: &str = "-check-boot-throwaway";
/// Maximum length of a session's name, in bytes.
const MAX_NAME_BYTES: usize = 63;
/// After a check was killed, its servers may take so long to end. Before a check's server opens
/// the session, it may be published and unused for so long.
const LEFTOVER_PATIENCE: Duration = Duration::from_secs(10);
const LEFTOVER_INTERVAL: Duration = Duration::from_millis(100);

/// A session whose captured writes are never kept. Dropping it discards it.
pub(crate) struct ThrowawaySession<'a> {
    repository: &'a Arc<Repository>,
    pub(crate) document: SessionDocument,
    has_ended: bool,
}

impl<'a> ThrowawaySession<'a> {
    /// Publishes the point. `slot` tells sessions apart that boot the same machine side by side. A
    /// session that a killed check left is removed first.
    ///
    /// # Errors
    /// `Busy` if another check of the machine runs; the errors of `publish`; `Interrupted`.
    pub(crate) fn publish(
        repository: &'a Arc<Repository>,
        point: &PointDocument,
        slot: Option<usize>,
        signals: &mut ChildSignals,
    ) -> Result<ThrowawaySession<'a>> {
        let name = session_name(&point.machine, slot)?;
        remove_leftover(repository, &name, &point.machine, signals)?;
        let document = coldrise_session::publish(repository, point, Some(name))?;
        Ok(ThrowawaySession { repository, document, has_ended: false })
    }

    /// Discards it.
    ///
    /// # Errors
    /// The errors of `unpublish`.
    pub(crate) fn end(mut self) -> Result<()> {
        self.has_ended = true;
        coldrise_session::unpublish(self.repository, &self.document.name, true).map(|_| ())
    }
}

impl Drop for ThrowawaySession<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let _ = coldrise_session::unpublish(self.repository, &self.document.name, true);
        }
    }
}

fn session_name(machine: &MachineName, slot: Option<usize>) -> Result<SessionName> {
    let machine = machine.as_str();
    let suffix = slot.map_or_else(|| SUFFIX.to_owned(), |slot| format!("-{slot}{SUFFIX}"));
    let kept = machine.len().min(MAX_NAME_BYTES - suffix.len());
    SessionName::parse(&format!("{}{suffix}", machine.get(..kept).unwrap_or(machine)))
}

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
        let age_ms = unix_ms().saturating_sub(state.document.created_at_ms);
        let is_old = u128::from(age_ms) >= LEFTOVER_PATIENCE.as_millis();
        let is_patient = began.elapsed() < LEFTOVER_PATIENCE;
        if state.document.machine != *machine || (state.is_served && !is_patient) {
            let text =
                format!("another check of {} runs, as session {name}", state.document.machine);
            let error = Error::new(ErrorKind::Busy, text);
            return Err(error.advise("wait for its end; coldrise runs shows it"));
        }
        if !state.is_served && (is_old || !is_patient) {
            match coldrise_session::unpublish(repository, name, true) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                ended => return ended.map(|_| ()),
            }
        }
        if signals.was_asked_to_end() {
            return Err(Error::new(ErrorKind::Interrupted, "interrupted before the boot"));
        }
        std::thread::sleep(LEFTOVER_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_session_says_what_it_is() {
        let machine = MachineName::parse("web01").unwrap();
        let name = |slot| session_name(&machine, slot).unwrap().to_string();
        assert_eq!(name(None), "web01-check-boot-throwaway");
        assert_eq!(name(Some(1)), "web01-1-check-boot-throwaway");
        let machine = MachineName::parse(&"a".repeat(63)).unwrap();
        let name = session_name(&machine, Some(15)).unwrap().to_string();
        assert!(name.ends_with("a-15-check-boot-throwaway"));
    }
}
