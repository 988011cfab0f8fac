//! The NFS server of a recovery, while machines run from it.
//!
//! All sessions of a repository share the server. So it keeps running after its own machine is undone or moved, until
//! no other machine needs it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hosting::Caller;
use coldrise_hosting::ganesha::Ganesha;
use coldrise_hosting::signals::ChildSignals;
use coldrise_hypervisors::vsphere::{VsphereNote, recovery_note};
use coldrise_runs::process_run;
use coldrise_store::{Repository, SessionName};
use serde_json::json;

use crate::RecoveryEnd;

/// Interval of looking after the server.
const INTERVAL: Duration = Duration::from_millis(100);
/// Interval of reading the note.
const NOTE_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of recording that it serves: readers look at the end of the run's log only.
const RECORD_INTERVAL: Duration = Duration::from_secs(60);

/// A session and its note.
pub(crate) type Recovered = (SessionName, VsphereNote);

/// Serves until a signal ends this program ([`RecoveryEnd::Stalled`]), or the machine was undone or moved and no other one uses
/// the server.
pub(crate) fn serve(
    caller: &Caller,
    repository: &Arc<Repository>,
    own: Recovered,
    mut ganesha: Ganesha,
    signals: &mut ChildSignals,
) -> Result<(Recovered, RecoveryEnd)> {
    let mut served = own.clone();
    let mut end = None;
    let (mut read, mut recorded) = (Instant::now(), None::<Instant>);
    loop {
        let (session, note) = &served;
        let is_known = recorded.is_some_and(|at| at.elapsed() < RECORD_INTERVAL);
        if !is_known && process_run::is_progress_due() {
            recorded = Some(Instant::now());
            record(session, note);
        }
        if signals.was_asked_to_end() {
            ganesha.stop(Some(signals))?;
            return Ok((served, RecoveryEnd::Stalled));
        }
        if let Some(status) = ganesha.keep_up()? {
            let text = format!("nfs-ganesha ended ({status}) while the machine was running");
            return Err(Error::new(ErrorKind::ToolFailed, text).advise(format!(
                "the machine's disks do not answer: coldrise recover live/{session} continues"
            )));
        }
        if read.elapsed() >= NOTE_INTERVAL {
            read = Instant::now();
            if let Some(reason) = end_of(repository, session)? {
                // The answer is about the command's own machine.
                let end = *end.get_or_insert(reason);
                let mut other = None;
                let is_kept = ganesha.is_kept(|| {
                    other = another(repository, note)?;
                    Ok(other.is_some())
                })?;
                let Some(other) = other.filter(|_| is_kept) else {
                    ganesha.stop(Some(signals))?;
                    return Ok((own, end));
                };
                caller.remark(&format!(
                    "the machine of session {session} needs this NFS server no longer; {} of session {} does: \
                     leave this command running",
                    other.1.name, other.0
                ));
                (served, recorded) = (other, None);
            }
        }
        std::thread::sleep(INTERVAL);
    }
}

/// Records in the run that it serves the machine's disks.
fn record(session: &SessionName, note: &VsphereNote) {
    process_run::progress(
        json!({ "phase": "serving", "session": session.as_str(), "domain": note.name,
                                 "server": note.access.server, "datastore": note.datastore }),
    );
}

/// Whether a machine needs its server no longer, and why.
fn end_of(repository: &Arc<Repository>, session: &SessionName) -> Result<Option<RecoveryEnd>> {
    Ok(match recovery_note(repository, session)? {
        None => Some(RecoveryEnd::Undone),
        Some(note) if !note.is_needed() => Some(RecoveryEnd::Moved),
        Some(_) => None,
    })
}

/// Another machine that needs the same server.
fn another(repository: &Arc<Repository>, ended: &VsphereNote) -> Result<Option<Recovered>> {
    for session in coldrise_session::sessions(repository)? {
        let name = session.document.name;
        match recovery_note(repository, &name) {
            Ok(Some(note)) if note.is_needed() && note.nfs_host == ended.nfs_host => {
                return Ok(Some((name, note)));
            }
            // doctor names notes that cannot be read.
            _ => {}
        }
    }
    Ok(None)
}
