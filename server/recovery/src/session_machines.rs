//! Sessions by the machines on them: which may be started, which stand still.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::Host;
use coldrise_hypervisors::libvirt::{DomainState, RecoveryNote};
use coldrise_hypervisors::moves::move_state;
use coldrise_hypervisors::vsphere::{VspherePhase, recovery_note};
use coldrise_session::{SessionDocument, SessionNotes, SessionState};
use coldrise_store::{Repository, SessionName};

use crate::domain_server::socket_on_way;
use coldrise_hosting::ganesha;

/// The sentence about a session whose machine stands still or is off. libvirt is asked only if nothing has the session open.
///
/// # Errors
/// Those of the notes, and of libvirt.
pub fn unserved(repository: &Arc<Repository>, session: &SessionState) -> Result<Option<String>> {
    let name = &session.document.name;
    if session.is_served {
        return Ok(None);
    }
    if let Some(note) = recovery_note(repository, name)? {
        let is_on = matches!(note.phase, VspherePhase::Running | VspherePhase::Moving { .. });
        // A server closes the files of an idle machine.
        let stands = is_on && !ganesha::is_serving(repository.path());
        return Ok(stands.then(|| {
            format!(
                "no NFS server serves the disks of {} on this host, so it is paused if it is on: coldrise recover \
                 live/{name} --to vcenter:{} starts one",
                note.name, note.access.server
            )
        }));
    }
    let Some(note) = RecoveryNote::read(&SessionNotes::of(repository, name)?)? else {
        return Ok(None);
    };
    let machine = &note.name;
    if let Some(host) = &note.host {
        // A list does not wait for other hosts.
        let socket = socket_on_way(repository, name);
        if socket.is_ok_and(|socket| UnixStream::connect(socket).is_ok()) {
            return Ok(Some(format!(
                "{machine} on host {host} has no connection to its disks: it is off, or its host is away; the command that \
                 serves them connects again (coldrise runs)"
            )));
        }
        let is_moved = move_state(repository, name)?.is_some();
        return Ok((!is_moved).then(|| {
            format!(
                "nothing serves the disks of {machine}, so it is paused if it is on (host {host}): coldrise recover \
                 live/{name} --to libvirt serves them and resumes it; coldrise recover live/{name} --undo ends it"
            )
        }));
    }
    Ok(match note.state(&Host::here(), name)? {
        None => None,
        // After a move its session is over.
        Some(DomainState::Off) if move_state(repository, name)?.is_some() => None,
        Some(DomainState::Off) => Some(format!(
            "{machine} is off: coldrise recover live/{name} --to libvirt starts it from session {name}; \
             coldrise recover live/{name} --undo ends the session"
        )),
        Some(DomainState::Running | DomainState::DiskError | DomainState::Paused(_)) => {
            Some(format!(
                "nothing serves the disks of {machine}, so it is paused: coldrise recover live/{name} --to libvirt \
                 serves them and resumes it; coldrise recover live/{name} --undo ends it"
            ))
        }
    })
}

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
