//! `recover --undo`: under libvirt here, under vCenter and ESXi in [`crate::vsphere`].

use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hosting::Caller;
use coldrise_hosts::host_of;
use coldrise_hypervisors::libvirt::{DomainState, RecoveryNote, note_left};
use coldrise_hypervisors::moves::move_state;
use coldrise_hypervisors::vsphere::recovery_note;
use coldrise_session::SessionNotes;
use coldrise_store::{Repository, SessionName};

use crate::end::{
    MachineEnd, UndoRequest, Undone, check_can_seal, end_session, remove_parts, remove_socket,
};
use crate::vsphere;

/// How long the server of an ended machine may take to close the session.
const CLOSE_PATIENCE: Duration = Duration::from_secs(30);

/// Ends the machine that was recovered on a session, and the session.
///
/// # Errors
/// `NotFound` if no machine was recovered on it; `Busy` if its newest state is elsewhere, or cannot be sealed yet;
/// those of its hypervisor.
pub fn undo(
    caller: &Caller,
    repository: &Arc<Repository>,
    session: &SessionName,
    request: &UndoRequest<'_>,
) -> Result<Undone> {
    if !request.discards {
        check_can_seal(repository, session)?;
    }
    if recovery_note(repository, session)?.is_some() {
        return vsphere::undo(caller, repository, session, request);
    }
    if let Some(moved) = move_state(repository, session)? {
        moved.check_session_counts()?;
    }
    let notes = SessionNotes::of(repository, session)?;
    let Some(note) = RecoveryNote::read(&notes)? else {
        let text = format!("no machine was recovered on session {session}");
        let advice = format!("coldrise unpublish {session} ends a session");
        return Err(Error::new(ErrorKind::NotFound, text).advise(advice));
    };
    if let Some(host) = note.host.as_ref().filter(|_| request.is_without_server) {
        let end = MachineEnd::Unknown(host.to_string());
        note_left(repository, session, &note, host)?;
        let sealed = end_session(repository, session, request.discards, CLOSE_PATIENCE)?;
        remove_socket(repository, session, &note);
        return Ok(Undone { machine: note.name, end, sealed });
    }
    let host = host_of(repository, note.host.as_ref()).map_err(|error| match &note.host {
        // It answers, or is not known here.
        Some(_) if error.is_advised() && error.kind() != ErrorKind::ToolFailed => error,
        Some(_) => Error::new(error.kind(), error.message()).advise(format!(
            "if the host is gone for good: coldrise recover live/{session} --undo --without-server"
        )),
        None => error,
    })?;
    let end = match note.state(&host, session)? {
        Some(DomainState::Off) => MachineEnd::NotThere,
        Some(_) => note.domain(&host).destroy().map(|()| MachineEnd::Ended)?,
        None => {
            caller.remark(&format!(
                "the domain {} is another machine, without a disk of this session: it is left alone",
                note.name
            ));
            MachineEnd::NotThere
        }
    };
    remove_parts(caller, repository, session, &note, &host);
    let (end, sealed) = match end_session(repository, session, request.discards, CLOSE_PATIENCE) {
        Err(error) if error.kind() == ErrorKind::NotFound => (MachineEnd::ByAnother, None),
        sealed => (end, sealed?),
    };
    let _ = host.remove_file(&note.socket);
    remove_socket(repository, session, &note);
    Ok(Undone { machine: note.name, end, sealed })
}
