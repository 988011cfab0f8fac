//! `coldrise move`: moves the disks of a running machine to production storage.

mod vsphere;

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::RestoreTarget;
use coldrise_recovery::relocation::{
    move_disks, parse_target, MoveNote, MovePhase, MoveReport, MoveRequest, MovedDisk, Target,
};
use coldrise_recovery::vsphere::recovery_note;
use coldrise_store::{Address, Repository, SessionName};
use serde::Serialize;

use super::restore;
use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::Report;
use crate::units::{parse_size, show_duration, show_moment, show_size};
use coldrise_hosting::signals::cancel_flag;

/// Move the disks of a running machine from its session to production storage.
///
/// The machine runs on meanwhile. QEMU copies the disks, holes stay holes. When all copies are
/// complete, the machine's writes wait for some milliseconds, all disks switch together, and the
/// session's last state becomes a restore point. Until the switch, cancelling or any crash leaves
/// the machine on the session, and nothing is lost.
///
/// Finds a machine that coldrise boot started by itself. After an interrupted move, run
/// coldrise move live/SESSION without targets: it says where the disks are, and completes a switch
/// that had begun. docs/recovery.md has the details.
#[derive(Debug, Args)]
pub(crate) struct MoveArguments {
    /// live/SESSION.
    #[arg(value_name = "live/SESSION", value_parser = live_session)]
    session: SessionName,

    /// DISK=PATH for each disk: a new file, or an empty block device. DISK=qcow2:PATH and
    /// DISK=raw:PATH give the format; otherwise .raw and .img files are raw, others qcow2.
    /// A folder takes all disks as MACHINE-DISK.qcow2.
    #[arg(value_name = "TARGET", value_parser = parse_target)]
    targets: Vec<Target>,

    /// Datastore for a machine that was recovered under vCenter. vCenter copies, by Storage vMotion.
    #[arg(long, value_name = "DATASTORE", conflicts_with_all = ["targets", "qmp", "rate", "force"])]
    to: Option<String>,

    /// Socket of QEMU's monitor (-qmp unix:SOCKET,server=on,wait=off) that no other program uses.
    /// Default: that of the machine that coldrise boot started on the session.
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,

    /// Copy at most this many bytes per second, such as 50M, all disks together. Without it the copy leaves a
    /// machine that works with its disks most of their time.
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    rate: Option<u64>,

    /// Overwrite existing files, and block devices that are not empty.
    #[arg(long)]
    force: bool,
}

fn live_session(text: &str) -> Result<SessionName> {
    match text.parse::<Address>()? {
        Address::Live { session, disk: None } => Ok(session),
        _ => {
            let text = format!("{text}: all disks of a session move together: give live/SESSION");
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
    }
}

#[derive(Serialize)]
struct Moved<'a> {
    session: &'a str,
    disks: &'a [MovedDisk],
    /// The restore point of the session's last state.
    address: Option<&'a str>,
    usable_since_ms: u64,
    copied_bytes: u64,
    copy_ms: u64,
    held_ms: u64,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: MoveArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let repository = invocation.open()?;
    if let Some(note) = recovery_note(&repository, &arguments.session)? {
        return vsphere::run(invocation, &repository, &arguments, &note, &cancel);
    }
    if arguments.to.is_some() {
        let text =
            format!("no machine was recovered under vCenter on session {}", arguments.session);
        return Err(Error::new(ErrorKind::InvalidInput, text)
            .advise("give a folder, or DISK=PATH for each disk"));
    }
    for target in &arguments.targets {
        restore::refuse_inside(repository.path(), &RestoreTarget::Path(target.path().to_owned()))?;
    }
    coldrise_session::session(&repository, &arguments.session)?;
    let view = ProgressView::new(invocation);
    let done = move_disks(&MoveRequest {
        repository: &repository,
        session: &arguments.session,
        targets: &arguments.targets,
        monitor: arguments.qmp,
        rate: arguments.rate.filter(|rate| *rate > 0),
        force: arguments.force,
        cancel: &cancel,
        progress: &view,
        tell: &|text| invocation.remark(text),
    });
    drop(view);
    let done = done.map_err(|error| ended(&repository, &arguments.session).unwrap_or(error))?;
    let note = &done.note;
    let moved = Moved {
        session: arguments.session.as_str(),
        disks: &note.disks,
        address: note.point.as_deref(),
        usable_since_ms: note.usable_since_ms,
        copied_bytes: done.copied_bytes,
        copy_ms: done.copy_ms,
        held_ms: done.held_ms,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let mut report = Report::done(&moved, text(&arguments.session, &done));
    let is_withdrawn = note.phase == MovePhase::Copying;
    let is_left = note.disks.iter().any(|disk| !disk.is_moved) || note.is_held;
    if is_left && !is_withdrawn {
        report.exit_code = coldrise_runs::exit_code(ErrorKind::Incomplete);
    }
    Ok(report)
}

/// The error of a move whose session was ended meanwhile; `None` if the session is there.
fn ended(repository: &Arc<Repository>, session: &SessionName) -> Option<Error> {
    let found = coldrise_session::session(repository, session);
    let is_gone = found.is_err_and(|error| error.kind() == ErrorKind::NotFound);
    is_gone.then(|| {
        let text =
            format!("not moved: session {session} was ended meanwhile");
        let advice = "its writes, and its machine if that runs on, are where the command that ended it has said";
        Error::new(ErrorKind::NotFound, text).advise(advice)
    })
}

fn text(session: &SessionName, done: &MoveReport) -> String {
    let note = &done.note;
    if note.phase == MovePhase::Copying {
        return format!(
            "the interrupted move was withdrawn: its copies are ended and removed, and session {session} has all \
             writes of the machine. If it stands still (coldrise sessions), serve the session again"
        );
    }
    let mut text = note.sentence(session, false);
    let until = note.settled_at_ms.unwrap_or(note.started_at_ms);
    let usable = Duration::from_millis(until.saturating_sub(note.usable_since_ms));
    text.push_str(&format!(
        "\nusable     since {}, {} before the switch\n",
        show_moment(note.usable_since_ms),
        show_duration(usable)
    ));
    if done.copy_ms > 0 {
        // QEMU counts holes as copied.
        let bytes = allocated_bytes(note).unwrap_or(done.copied_bytes);
        let rate = u128::from(bytes) * 1000 / u128::from(done.copy_ms);
        text.push_str(&format!(
            "moved      {} in {} ({}/s); writes waited {} ms\n",
            show_size(bytes),
            show_duration(Duration::from_millis(done.copy_ms)),
            show_size(u64::try_from(rate).unwrap_or(u64::MAX)),
            done.held_ms
        ));
    }
    text.push_str(&format!("end it     coldrise unpublish {session}"));
    text
}

/// What the targets occupy; `None` if one is a device.
fn allocated_bytes(note: &MoveNote) -> Option<u64> {
    note.disks.iter().try_fold(0u64, |sum, disk| {
        let found = std::fs::metadata(&disk.target).ok().filter(|found| found.is_file())?;
        Some(sum.saturating_add(found.blocks().saturating_mul(512)))
    })
}
