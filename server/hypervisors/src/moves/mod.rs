//! Moves the disks of a running machine from its session to production storage, while it runs.
//!
//! ```text
//!   session live/S/vda ──mirror job──▶ target file     the machine reads and writes the session
//!   all jobs READY, completed, PENDING                 its writes stand still; both sides are equal
//!   note "switching", finalize, note "settled"         the machine reads and writes the target
//!   seal                                               the session's last state is a restore point
//! ```
//!
//! # Invariants
//!
//! 1. While the note says `copying`, all writes of the machine are in the session. The targets are incomplete.
//! 2. The note says `switching` only after all jobs were PENDING: each target was flushed and equals its session
//!    disk, and the machine's writes wait. No job is cancelled from then on. So the targets have every write that
//!    was acknowledged to the guest, whether its disks were switched already or not.
//! 3. `settled` names the side of each disk, as QEMU said after the jobs had ended.
//! 4. No client writes the session after the switch: it is sealed then, not while the machine waits.
//!
//! # A crash at each step
//!
//! | dies | note | the machine's writes are in | the next `move` |
//! |---|---|---|---|
//! | we, before the switch | copying | the session | cancels the jobs, removes our files, begins again |
//! | we, while the machine stands still | copying, held | the session | lets it run on, then the same |
//! | we, while jobs are PENDING | copying | the session, and wait | the same: the machine keeps running |
//! | we, between the notes | switching | the targets | finalizes the other jobs, asks QEMU, seals |
//! | QEMU, before the switch | copying | the session | needs the machine to run again |
//! | QEMU, later | switching | the targets (2.) | notes that |
//! | the server of the session | copying | the session | not needed: the job continues when it is back |
//!
//! One process at a time moves a session: it holds the lock of the notes.

mod domain;
mod domain_disks;
mod finish;
mod mirror;
mod note;
mod pace;
mod qemu_machine;
mod rate_limit;
mod target;

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Progress, Result};
use coldrise_host::Host;
use coldrise_session::{SessionDocument, SessionNotes};
use coldrise_store::{Repository, SessionName};

pub use note::{MoveNote, MovePhase, MovedDisk};
pub use target::{Target, parse_target};

use qemu_machine::QemuMachine;
use target::OpenTarget;

/// How long a seal may wait for the server of the session.
const SEAL_PATIENCE: Duration = Duration::from_secs(30);

/// A move that a user asks for.
pub struct MoveRequest<'a> {
    /// The repository.
    pub repository: &'a Arc<Repository>,
    /// The session whose disks are moved.
    pub session: &'a SessionName,
    /// The host of a machine that was recovered under libvirt, and of its targets; else this host.
    pub host: &'a Host,
    /// A target for each disk, or one folder. Empty to finish an interrupted move.
    pub targets: &'a [Target],
    /// QEMU's monitor; `None` for that of the machine that `boot` started.
    pub monitor: Option<PathBuf>,
    /// Maximum rate of all disks together, in bytes per second; `None` for a copy that leaves a busy machine most
    /// of the time of its disks.
    pub rate: Option<u64>,
    /// Overwrite existing files, and block devices with content.
    pub force: bool,
    /// Set to cancel the move. Not looked at while the disks switch.
    pub cancel: &'a AtomicBool,
    /// Shows the copied bytes.
    pub progress: &'a dyn Progress,
    /// Tells people about the steps.
    pub tell: &'a dyn Fn(&str),
}

/// The result of a move.
pub struct MoveReport {
    /// To where each disk was moved.
    pub note: MoveNote,
    /// Bytes that were copied, those that the machine wrote meanwhile included; 0 if an earlier move was finished.
    pub copied_bytes: u64,
    /// The time of the copy, in milliseconds.
    pub copy_ms: u64,
    /// How long the machine's writes waited for the switch, in milliseconds.
    pub held_ms: u64,
}

/// Moves all disks of a session, or finishes a move that was interrupted.
///
/// # Errors
/// `Busy` while another process moves it; `NotFound` if no machine runs on it; `AlreadyExists` for an existing
/// target; `Interrupted` if the user cancelled; `ToolFailed` and `Incomplete` if the copy failed. The machine runs on
/// the session then, unless the message says something else.
pub fn move_disks(request: &MoveRequest<'_>) -> Result<MoveReport> {
    let name = request.session;
    let notes = SessionNotes::of(request.repository, name)?;
    let _lock = notes.lock()?.ok_or_else(|| {
        let text = format!("another coldrise move works on session {name}");
        Error::new(ErrorKind::Busy, text).advise("coldrise runs shows it")
    })?;
    if let Some(note) = MoveNote::read(&notes)? {
        let withdrawn = note.clone();
        let finished = finish::finish_interrupted(request, &notes, note)?;
        if finished.is_none() && request.targets.is_empty() {
            let note = MoveNote { phase: MovePhase::Copying, ..withdrawn };
            return Ok(MoveReport { note, copied_bytes: 0, copy_ms: 0, held_ms: 0 });
        }
        if let Some(note) = finished {
            return if request.targets.is_empty() {
                Ok(MoveReport { note, copied_bytes: 0, copy_ms: 0, held_ms: 0 })
            } else {
                Err(Error::new(ErrorKind::AlreadyExists, note.sentence(name, false)))
            };
        }
    }
    let (session, targets) =
        session_and_targets(request.host, request.repository, name, request.targets)?;
    match crate::libvirt::RecoveryNote::read(&notes)? {
        Some(recovered) if request.monitor.is_none() => {
            domain::move_domain(request, &notes, &session, &recovered, &targets)
        }
        _ => move_qemu(request, &notes, &session, targets),
    }
}

/// The session, on which a machine runs, and the target of each of its disks.
fn session_and_targets(
    host: &Host,
    repository: &Arc<Repository>,
    name: &SessionName,
    targets: &[Target],
) -> Result<(SessionDocument, Vec<Target>)> {
    let session = coldrise_session::session(repository, name)?;
    if targets.is_empty() {
        let text =
            format!("no move of session {name} was interrupted: name a target for its disks");
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    if !session.is_served {
        check_not_paused(host, repository, name)?;
        let text =
            format!("no machine runs on session {name}: its disks can be copied while it is off");
        let advice = format!("coldrise restore live/{name}/DISK TARGET");
        return Err(Error::new(ErrorKind::NotFound, text).advise(advice));
    }
    let targets = target::of_disks(host, &session.document, targets)?;
    Ok((session.document, targets))
}

/// # Errors
/// `Busy` if the session's machine is on, but has no connection to its disks.
fn check_not_paused(host: &Host, repository: &Arc<Repository>, name: &SessionName) -> Result<()> {
    let note = crate::libvirt::RecoveryNote::read(&SessionNotes::of(repository, name)?)?;
    let Some(note) = note else { return Ok(()) };
    match note.state(host, name)? {
        None | Some(crate::libvirt::DomainState::Off) => Ok(()),
        Some(_) => {
            let text = format!("{} is paused: it has no connection to its disks", note.name);
            Err(Error::new(ErrorKind::Busy, text).advise(format!(
                "coldrise recover live/{name} continues it, unless a command still serves session {name} (coldrise runs): that \
                 resumes it by itself"
            )))
        }
    }
}

/// Checks the targets of a move that is to be started, and changes nothing.
///
/// # Errors
/// Those of [`move_disks`] that are known before: no machine on the session, a disk without a target, existing
/// files, missing folders.
pub fn check_targets(
    host: &Host,
    repository: &Arc<Repository>,
    session: &SessionName,
    targets: &[Target],
    force: bool,
) -> Result<()> {
    let (session, targets) = session_and_targets(host, repository, session, targets)?;
    let mut pairs = targets.iter().zip(&session.disks);
    pairs.try_for_each(|(target, disk)| host.check_disk(target.path(), disk.size_bytes, force))
}

fn move_qemu(
    request: &MoveRequest<'_>,
    notes: &SessionNotes,
    session: &SessionDocument,
    targets: Vec<Target>,
) -> Result<MoveReport> {
    let socket = request.monitor.clone().or_else(|| notes.monitor()).ok_or_else(|| {
        let text = format!("cannot determine which QEMU runs on session {}", session.name);
        Error::new(ErrorKind::NotFound, text).advise(
            "start QEMU with -qmp unix:SOCKET,server=on,wait=off, and give --qmp SOCKET; \
             coldrise boot does this by itself",
        )
    })?;
    let mut machine = QemuMachine::connect(&socket)?;
    let sources = machine.sources(session)?;
    let note = MoveNote::begin(session, &targets, Some(socket));
    let opened = open_targets(&targets, &sources, request)?;
    let mut run = mirror::MirrorRun {
        request,
        notes,
        note,
        machine,
        sources,
        targets: opened,
        pace: pace::Pace::new(Instant::now()),
    };
    run.run()
}

fn open_targets(
    targets: &[Target],
    sources: &[qemu_machine::Source],
    request: &MoveRequest<'_>,
) -> Result<Vec<(OpenTarget, File)>> {
    let mut opened: Vec<(OpenTarget, File)> = Vec::new();
    for (target, source) in targets.iter().zip(sources) {
        match target.open(source.size_bytes, request.force) {
            Ok(target) => opened.push(target),
            Err(error) => {
                opened.iter().for_each(|(target, _)| target.discard(request.host));
                return Err(error);
            }
        }
    }
    Ok(opened)
}

/// The state of a session's move as one sentence for lists; `None` if it never was moved.
///
/// # Errors
/// `Corrupt` if the note does not authenticate.
pub fn move_state(
    repository: &Arc<Repository>,
    session: &SessionName,
) -> Result<Option<MoveState>> {
    let notes = match SessionNotes::of(repository, session) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        notes => notes?,
    };
    // Before the note: a move that ends meanwhile is not taken for an interrupted one.
    let is_running = notes.is_locked()?;
    let Some(note) = MoveNote::read(&notes)? else { return Ok(None) };
    let sentence = note.sentence(session, is_running);
    Ok(Some(MoveState { note, is_running, sentence }))
}

/// The state of a session's move.
pub struct MoveState {
    /// The note.
    pub note: MoveNote,
    /// Whether a process works on it.
    pub is_running: bool,
    /// For people: which side counts.
    pub sentence: String,
}

impl MoveState {
    /// Checks that a machine may be started from the session.
    ///
    /// # Errors
    /// `Busy` if its newest state is or may be elsewhere.
    pub fn check_session_counts(&self) -> Result<()> {
        match self.note.phase {
            MovePhase::Copying => Ok(()),
            MovePhase::Switching | MovePhase::Settled => {
                Err(Error::new(ErrorKind::Busy, self.sentence.clone()))
            }
        }
    }
}

fn is_cancelled(request: &MoveRequest<'_>) -> bool {
    request.cancel.load(Ordering::SeqCst)
}

fn milliseconds_since(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX)
}
