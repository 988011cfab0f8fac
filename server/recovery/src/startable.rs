//! Whether a machine may be started from a session.

use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hypervisors::moves::move_state;
use coldrise_hypervisors::vsphere::recovery_note;
use coldrise_session::SessionDocument;
use coldrise_store::{Repository, SessionName};

/// The session, if nothing runs on it and it has the machine's newest state.
///
/// # Errors
/// `Busy` otherwise.
pub fn startable_session(
    repository: &Arc<Repository>,
    session: &SessionName,
) -> Result<SessionDocument> {
    if let Some(note) = recovery_note(repository, session)? {
        return Err(Error::new(ErrorKind::Busy, note.sentence(session)));
    }
    let state = coldrise_session::session(repository, session)?;
    if state.is_served {
        let text = format!("session {session} is in use: end what runs on it first");
        return Err(Error::new(ErrorKind::Busy, text));
    }
    if let Some(moved) = move_state(repository, session)? {
        moved.check_session_counts()?;
    }
    Ok(state.document)
}
