//! The end of a switch, also of one that an earlier process began.

use coldrise_block::now_ms;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::SessionNotes;

use super::note::{MoveNote, MovePhase};
use super::qemu_machine::{QemuMachine, job_failed};
use super::{MoveRequest, SEAL_PATIENCE, domain, target};
use crate::libvirt::RecoveryNote;

/// Beside the reason of a failed move.
pub(super) const STILL_IN_SESSION: &str =
    "not moved; all writes of the machine are in the session, as before";

/// The ids of the jobs and target nodes, in the order of the disks.
pub(super) fn ids(note: &MoveNote) -> Vec<String> {
    (0..note.disks.len()).map(|i| format!("{}-{i}", note.prefix())).collect()
}

/// Ends a move that a killed process left. Returns the note if the disks were switched; `None` if the session
/// counts, and nothing of the move is left.
///
/// # Errors
/// As for `move_disks`. The note stays.
pub(super) fn finish_interrupted(
    request: &MoveRequest<'_>,
    notes: &SessionNotes,
    mut note: MoveNote,
) -> Result<Option<MoveNote>> {
    if note.phase != MovePhase::Settled {
        (request.tell)("an earlier move was interrupted: completing or undoing it");
    }
    let recovered = RecoveryNote::read(notes)?.filter(|_| note.monitor.is_none());
    if let (Some(recovered), true) = (&recovered, note.phase != MovePhase::Settled) {
        if !domain::finish_domain(request.host, notes, recovered, &mut note)? {
            return Ok(None);
        }
    }
    match note.phase {
        MovePhase::Copying => {
            if let Some(mut machine) = machine_of(request, &note)? {
                // First: whatever fails then, the machine runs.
                release(&mut machine, &mut note)?;
                machine.cancel_all(&note.prefix())?;
                machine.remove_nodes(&note.prefix())?;
            }
            for disk in &note.disks {
                target::discard(request.host, &disk.target, disk.made);
            }
            MoveNote::remove(notes)?;
            return Ok(None);
        }
        MovePhase::Switching => match machine_of(request, &note)? {
            Some(mut machine) => {
                let finalized = finalize(&mut machine, &note);
                release(&mut machine, &mut note)?;
                finalized?;
                note_sides(&mut machine, notes, &mut note)?;
            }
            // The machine is off: the targets equal or outrun the session.
            None => {
                note.disks.iter_mut().for_each(|disk| disk.is_moved = true);
                note_finished(notes, &mut note)?;
            }
        },
        MovePhase::Settled => {}
    }
    if let Some(recovered) = recovered.filter(|_| note.is_held) {
        domain::release(&recovered.domain(request.host), &mut note);
        note.write(notes)?;
    }
    if note.point.is_none() {
        seal(request, notes, &mut note)?;
    }
    Ok(Some(note))
}

/// The machine of the note; `None` if it is off.
fn machine_of(request: &MoveRequest<'_>, note: &MoveNote) -> Result<Option<QemuMachine>> {
    let Some(socket) = request.monitor.as_ref().or(note.monitor.as_ref()) else { return Ok(None) };
    match QemuMachine::connect(socket) {
        Ok(machine) => Ok(Some(machine)),
        Err(error) if is_off(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether no server listens at a monitor's socket. A socket that we may not use, or a QEMU that does not answer,
/// says nothing about the machine.
fn is_off(error: &Error) -> bool {
    let source = std::error::Error::source(error);
    let reason = source.and_then(|source| source.downcast_ref::<std::io::Error>());
    error.kind() == ErrorKind::NotFound
        || reason.is_some_and(|reason| reason.kind() == std::io::ErrorKind::ConnectionRefused)
}

/// Lets the machine use the targets. If QEMU ends meanwhile, the note `switching` says which side counts.
pub(super) fn finalize(machine: &mut QemuMachine, note: &MoveNote) -> Result<()> {
    let ids = ids(note);
    let pending = |machine: &mut QemuMachine| {
        let jobs = machine.jobs(&note.prefix())?;
        Ok::<_, Error>(
            ids.iter()
                .filter(|id| jobs.get(*id).is_some_and(|job| job.status == "pending"))
                .cloned()
                .collect::<Vec<_>>(),
        )
    };
    for id in pending(machine)? {
        machine.finalize(&id)?;
    }
    for (id, disk) in ids.iter().zip(&note.disks) {
        if let Some(error) = machine.await_end(id)? {
            let what = format!("switching {} to {}", disk.disk, disk.target.display());
            // The other disks switch nevertheless; `note_sides` asks for each.
            tracing::warn!("{}", job_failed(&what, &error).full_message());
        }
    }
    Ok(())
}

/// Lets the machine run on if the move has stopped it.
pub(super) fn release(machine: &mut QemuMachine, note: &mut MoveNote) -> Result<()> {
    if note.is_held {
        machine.resume()?;
        note.is_held = false;
    }
    Ok(())
}

/// Asks QEMU on which side each disk is, and notes it durably.
///
/// # Errors
/// `ToolFailed` if no disk was switched: the session counts again.
pub(super) fn note_sides(
    machine: &mut QemuMachine,
    notes: &SessionNotes,
    note: &mut MoveNote,
) -> Result<()> {
    let used = machine.used_nodes()?;
    let ids = ids(note);
    for (id, disk) in ids.iter().zip(&mut note.disks) {
        disk.is_moved = used.contains(id);
    }
    if note.disks.iter().all(|disk| !disk.is_moved) {
        machine.cancel_all(&note.prefix())?;
        MoveNote::remove(notes)?;
        let error = Error::new(ErrorKind::ToolFailed, "QEMU did not switch the disks");
        return Err(error.context(STILL_IN_SESSION));
    }
    note_finished(notes, note)?;
    for id in &ids {
        let _ = machine.dismiss(id);
    }
    Ok(())
}

pub(super) fn note_finished(notes: &SessionNotes, note: &mut MoveNote) -> Result<()> {
    note.phase = MovePhase::Settled;
    note.settled_at_ms = Some(now_ms());
    note.write(notes)
}

/// Makes a restore point of the session's last state. If that fails, the session keeps it, and the next `move` or
/// `unpublish` tries again.
pub(super) fn seal(
    request: &MoveRequest<'_>,
    notes: &SessionNotes,
    note: &mut MoveNote,
) -> Result<()> {
    let kept = RecoveryNote::read(notes).and_then(|recovered| match recovered {
        Some(recovered) => recovered.keep_parts(request.host, request.repository, request.session),
        None => Ok(()),
    });
    if let Err(error) = kept {
        let text = error.full_message();
        (request.tell)(&format!("warning: not in the last point of the session: {text}"));
    }
    match coldrise_session::seal(request.repository, request.session, SEAL_PATIENCE) {
        Ok(sealed) => {
            note.point = Some(format!("{}/{}", sealed.point.machine, sealed.point.point));
            note.write(notes)
        }
        Err(error) => {
            let text = error.full_message();
            (request.tell)(&format!("warning: the session's last state is not sealed: {text}"));
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_a_socket_without_a_listener_means_that_the_machine_is_off() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("monitor");
        let is_off = |path: &std::path::Path| {
            QemuMachine::connect(path).map(drop).is_err_and(|error| is_off(&error))
        };
        assert!(is_off(&socket), "no such file");
        drop(UnixListener::bind(&socket).unwrap());
        assert!(is_off(&socket), "no server listens");
        std::fs::write(folder.path().join("file"), "").unwrap();
        assert!(!is_off(&folder.path().join("file/monitor")), "the path leads through a file");
    }
}
