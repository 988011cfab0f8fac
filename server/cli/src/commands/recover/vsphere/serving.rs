//! The NFS server of a recovery, while machines run from it.
//!
//! All sessions of a repository share the server. So it goes on after its own machine is undone or moved, until
//! no other machine needs it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hypervisors::vsphere::{recovery_note, VsphereNote};
use coldrise_store::{Repository, SessionName};

use super::answer::{record, report, tell_serves_on};
use crate::invocation::Invocation;
use crate::report::Report;
use crate::run_record;
use coldrise_hosting::ganesha::Ganesha;
use coldrise_hosting::signals::ChildSignals;

/// Interval of looking after the server.
const INTERVAL: Duration = Duration::from_millis(100);
/// Interval of reading the note.
const NOTE_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of recording that it serves: readers look at the end of the run's log only.
const RECORD_INTERVAL: Duration = Duration::from_secs(60);

/// A session and its note.
type Recovered = (SessionName, VsphereNote);

/// Serves until a signal ends this program (`stalled`), or the machine was undone or moved and no other one uses
/// the server.
pub(super) fn serve(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    own: Recovered,
    mut ganesha: Ganesha,
    signals: &mut ChildSignals,
) -> Result<Report> {
    let mut served = own.clone();
    let mut end = None;
    let (mut read, mut recorded) = (Instant::now(), None::<Instant>);
    loop {
        let (session, note) = &served;
        let is_known = recorded.is_some_and(|at| at.elapsed() < RECORD_INTERVAL);
        if !is_known && run_record::is_progress_due() {
            recorded = Some(Instant::now());
            record(session, note);
        }
        if signals.was_asked_to_end() {
            ganesha.stop(Some(signals))?;
            return Ok(report(invocation, session, note, "stalled"));
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
                    return Ok(report(invocation, &own.0, &own.1, end));
                };
                tell_serves_on(invocation, session, &other.0, &other.1);
                (served, recorded) = (other, None);
            }
        }
        std::thread::sleep(INTERVAL);
    }
}

/// Whether a machine needs its server no longer, and why.
fn end_of(repository: &Arc<Repository>, session: &SessionName) -> Result<Option<&'static str>> {
    Ok(match recovery_note(repository, session)? {
        None => Some("undone"),
        Some(note) if !note.is_needed() => Some("moved"),
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
