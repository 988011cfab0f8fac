//! `coldrise unpublish`: ends a session.

use std::sync::Arc;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hypervisors::libvirt::{DomainState, RecoveryNote};
use coldrise_hypervisors::moves::move_state;
use coldrise_hypervisors::vsphere::check_no_machine;
use coldrise_session::{SessionNotes, SkippedFile};
use coldrise_store::{advise_room, Repository, SessionName};
use serde::Serialize;

use super::recover::remove_variables;
use super::skipped_files;
use crate::arguments::session_name;
use crate::invocation::Invocation;
use crate::report::Report;
use coldrise_hosting::leftovers;

/// End a session. Its captured writes become a restore point, unless --discard is given.
///
/// No point is made if nothing was captured since the last seal and no file in the session's
/// folder changed that a point carries. Points sealed earlier always stay. A session in use is
/// refused.
#[derive(Debug, Args)]
pub(crate) struct UnpublishArguments {
    /// The session's name, or live/SESSION.
    #[arg(value_name = "SESSION", value_parser = session_name)]
    session: SessionName,

    /// Discard everything captured since the last seal.
    #[arg(long)]
    discard: bool,
}

#[derive(Serialize)]
struct Ended {
    session: String,
    address: Option<String>,
    left_out: Vec<SkippedFile>,
    discarded: bool,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &UnpublishArguments) -> Result<Report> {
    let UnpublishArguments { session, discard } = arguments;
    let repository = invocation.open()?;
    let recovered = match SessionNotes::of(&repository, session) {
        Ok(notes) => {
            check_no_machine(&repository, session)?;
            check_not_held(&repository, session)?;
            check_no_domain_uses(invocation, &notes, session)?
        }
        // A session without its documents can be given up nevertheless.
        Err(_) => None,
    };
    if let Some(recovered) = recovered.as_ref().filter(|_| ends_now(&repository, session)) {
        remove_variables(invocation, recovered);
    }
    let sealed = coldrise_session::unpublish(&repository, session, *discard);
    leftovers::remove(&repository);
    let sealed = sealed.map_err(advise_room)?;
    if let Some(recovered) = recovered {
        // A killed server leaves its socket.
        let _ = std::fs::remove_file(&recovered.socket);
    }
    let (point, left_out) = match sealed {
        Some(sealed) => (Some(sealed.point), sealed.left_out),
        None => (None, Vec::new()),
    };
    skipped_files::tell(&left_out);
    let ended = Ended {
        session: session.to_string(),
        address: point.map(|point| format!("{}/{}", point.machine, point.point)),
        left_out,
        discarded: *discard,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = match (&ended.address, discard) {
        (Some(address), _) => format!("session {session} ended; sealed as {address}"),
        (None, true) => format!("session {session} ended; its captured writes were discarded"),
        (None, false) => format!("session {session} ended; it captured nothing new"),
    };
    Ok(Report::done(&ended, text))
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
/// Returns the note of the recovery.
fn check_no_domain_uses(
    invocation: &Invocation,
    notes: &SessionNotes,
    session: &SessionName,
) -> Result<Option<RecoveryNote>> {
    let Some(note) = RecoveryNote::read(notes)? else { return Ok(None) };
    match note.state(session) {
        Ok(None | Some(DomainState::Off)) => {}
        Ok(Some(_)) => {
            let text = format!("the domain {} of libvirt runs on session {session}", note.name);
            return Err(Error::new(ErrorKind::Busy, text).advise(format!(
                "go on with it: coldrise recover live/{session} --to libvirt; or end both: coldrise recover \
                 live/{session} --undo"
            )));
        }
        Err(error) => invocation.remark(&format!(
            "warning: it is not known whether the domain {} still runs on the session: {}",
            note.name,
            error.full_message()
        )),
    }
    Ok(Some(note))
}
