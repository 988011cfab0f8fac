//! The end of a recovery, and of any session on which a machine may run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::domain_server::socket_on_way;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::Host;
use coldrise_hosting::{Caller, uefi};
use coldrise_hosts::host_of;
use coldrise_hypervisors::libvirt::{DomainState, RecoveryNote};
use coldrise_hypervisors::moves::move_state;
use coldrise_hypervisors::vsphere::{AccessOptions, check_no_machine};
use coldrise_session::{SealReport, SessionNotes, incoming_sentence};
use coldrise_store::{Repository, SessionName};

/// How a recovery is undone.
pub struct UndoRequest<'a> {
    /// Discard the machine's writes.
    pub discards: bool,
    /// For a machine under vCenter or ESXi: options that replace those of its note.
    pub access: &'a AccessOptions,
    /// The server of the machine, or its host, is gone for good: nothing is changed there.
    pub is_without_server: bool,
}

/// The result of an undo for the machine.
pub enum MachineEnd {
    /// It was ended.
    Ended,
    /// It was off, or there was none.
    NotThere,
    /// Another command has ended the session meanwhile, such as a recovery that failed.
    ByAnother,
    /// This server was not asked.
    Unknown(String),
}

/// The result of an undo.
pub struct Undone {
    /// The machine's name.
    pub machine: String,
    /// The outcome.
    pub end: MachineEnd,
    /// The point with its writes, if there is one.
    pub sealed: Option<SealReport>,
}

/// Before a machine is ended: its writes cannot become a restore point while the point below them is on its way.
///
/// # Errors
/// `Busy` then; `NotFound` without such a session.
pub(crate) fn check_can_seal(repository: &Arc<Repository>, session: &SessionName) -> Result<()> {
    let document = coldrise_session::session(repository, session)?.document;
    match incoming_sentence(repository, &document)? {
        None => Ok(()),
        Some(sentence) => Err(Error::new(ErrorKind::Busy, sentence).advise(format!(
            "wait for the end of the copy, or discard the machine's writes: coldrise recover live/{session} --undo --discard"
        ))),
    }
}

/// Keeps the firmware variables and the TPM's state of the machine on a session, as it left them, for the next seal.
pub fn keep_parts(caller: &Caller, repository: &Arc<Repository>, session: &SessionName) {
    let notes = match SessionNotes::of(repository, session) {
        // The seal reports it.
        Err(error) if error.kind() == ErrorKind::NotFound => return,
        notes => notes,
    };
    let kept = notes.and_then(|notes| match RecoveryNote::read(&notes)? {
        Some(note) => {
            let host = host_of(repository, note.host.as_ref())?;
            note.keep_parts(&host, repository, session)
        }
        None => uefi::keep_of_running(repository, session, &notes),
    });
    warn_unless_kept(caller, kept);
}

fn warn_unless_kept(caller: &Caller, kept: Result<()>) {
    if let Err(error) = kept {
        let why = error.full_message();
        caller.remark(&format!(
            "warning: the machine's firmware variables or its TPM could not be read and are stored in their earlier state: {why}"
        ));
    }
}

/// Removes the firmware variables and the TPM's state of a recovered machine that is off, before its session ends: after a kill in
/// between, the session is still there to be ended, and has them.
pub(crate) fn remove_parts(
    caller: &Caller,
    repository: &Arc<Repository>,
    session: &SessionName,
    note: &RecoveryNote,
    host: &Host,
) {
    warn_unless_kept(caller, note.keep_parts(host, repository, session));
    if let Err(error) = note.remove_parts(host) {
        let text = error.full_message();
        caller.remark(&format!(
            "warning: the machine's firmware variables or TPM state could not be removed: {text}"
        ));
    }
}

/// Removes the socket of a session's NBD server, which a killed server leaves.
pub fn remove_socket(repository: &Repository, session: &SessionName, note: &RecoveryNote) {
    let socket = match &note.host {
        None => Ok(note.socket.clone()),
        Some(_) => socket_on_way(repository, session),
    };
    let _ = socket.map(std::fs::remove_file);
}

/// Ends a session. Its server closes it when the machine is gone, within `patience`.
///
/// # Errors
/// As [`coldrise_session::unpublish`].
pub(crate) fn end_session(
    repository: &Arc<Repository>,
    session: &SessionName,
    discard: bool,
    patience: Duration,
) -> Result<Option<SealReport>> {
    let start = Instant::now();
    loop {
        match coldrise_session::unpublish(repository, session, discard) {
            Err(error) if error.kind() == ErrorKind::Busy && start.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(50));
            }
            ended => return ended,
        }
    }
}

/// Checks that no machine runs on a session that is about to end, and removes what its end would leave on this host.
/// Returns the note of the machine that was recovered on it under libvirt.
///
/// # Errors
/// `Busy` if a machine runs on it, or waits to be resumed.
pub fn prepare_end(
    caller: &Caller,
    repository: &Arc<Repository>,
    session: &SessionName,
) -> Result<Option<RecoveryNote>> {
    // A session without its documents can be discarded nevertheless.
    let Ok(notes) = SessionNotes::of(repository, session) else { return Ok(None) };
    check_no_machine(repository, session)?;
    check_not_held(repository, session)?;
    let Some(note) = RecoveryNote::read(&notes)? else { return Ok(None) };
    let host = check_no_domain_uses(caller, repository, &note, session)?;
    if let Some(host) = host.filter(|_| ends_now(repository, session)) {
        remove_parts(caller, repository, session, &note, &host);
    }
    Ok(Some(note))
}

/// Whether a recovered machine ends with its session: the session is free, and the machine was not moved.
fn ends_now(repository: &Arc<Repository>, session: &SessionName) -> bool {
    let is_free =
        coldrise_session::session(repository, session).is_ok_and(|state| !state.is_served);
    is_free && matches!(move_state(repository, session), Ok(None))
}

/// Checks that no moved machine still waits to be resumed: only the session's note knows of it.
fn check_not_held(repository: &Arc<Repository>, session: &SessionName) -> Result<()> {
    match move_state(repository, session)? {
        Some(state) if state.note.is_held => Err(Error::new(ErrorKind::Busy, state.sentence)),
        _ => Ok(()),
    }
}

/// Checks that no domain of libvirt runs on the session: a killed `recover` leaves one that waits for its disks.
/// Returns its host, if that answers.
fn check_no_domain_uses(
    caller: &Caller,
    repository: &Arc<Repository>,
    note: &RecoveryNote,
    session: &SessionName,
) -> Result<Option<Host>> {
    let host = host_of(repository, note.host.as_ref());
    let state = host.and_then(|host| Ok((note.state(&host, session)?, host)));
    match state {
        Ok((None | Some(DomainState::Off), host)) => Ok(Some(host)),
        Ok((Some(_), _)) => {
            let text = format!("the domain {} of libvirt runs on session {session}", note.name);
            Err(Error::new(ErrorKind::Busy, text).advise(format!(
                "continue with it: coldrise recover live/{session} --to libvirt; or end both: coldrise recover \
                 live/{session} --undo"
            )))
        }
        Err(error) if note.host.is_some() && move_state(repository, session)?.is_none() => {
            let text = format!(
                "the domain {} may run on session {session}: {}",
                note.name,
                error.full_message()
            );
            Err(Error::new(ErrorKind::Busy, text).advise(format!(
                "end it when its host is back; if that is gone for good: coldrise recover live/{session} --undo --without-server"
            )))
        }
        Err(error) => {
            caller.remark(&format!(
                "warning: cannot determine whether the domain {} still runs on the session: {}",
                note.name,
                error.full_message()
            ));
            Ok(None)
        }
    }
}
