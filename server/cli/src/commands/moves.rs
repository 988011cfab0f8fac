//! `coldrise move`: moves the disks of a running machine to production storage.

mod vsphere;

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::Host;
use coldrise_hosts::host_of;
use coldrise_hypervisors::libvirt::RecoveryNote;
use coldrise_hypervisors::moves::{
    MoveNote, MovePhase, MoveReport, MoveRequest, MovedDisk, move_disks, parse_target,
};
use coldrise_hypervisors::vsphere::recovery_note;
use coldrise_ingest::RestoreTarget;
use coldrise_requests::{Move, live_session};
use coldrise_session::SessionNotes;
use coldrise_store::{Repository, SessionName};
use serde::Serialize;

use super::restore;
use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::Report;
use crate::units::{show_duration, show_moment, show_size};
use coldrise_hosting::signals::cancel_flag;

/// Move the disks of a running machine from its session to production storage.
///
/// The machine keeps running meanwhile. QEMU copies the disks; holes stay holes. When all copies are
/// complete, the machine's writes wait for some milliseconds, all disks switch together, and the
/// session's last state becomes a restore point. Until the switch, cancelling or any crash leaves
/// the machine on the session, and nothing is lost.
///
/// Finds a machine that coldrise boot started by itself. After an interrupted move, run
/// coldrise move live/SESSION without targets: it says where the disks are, and completes a switch
/// that had begun. docs/recovery.md has the details.
#[derive(Debug, Args)]
pub(crate) struct MoveArguments {
    #[command(flatten)]
    request: Move,

    /// Socket of QEMU's monitor (-qmp unix:SOCKET,server=on,wait=off) that no other program uses.
    /// Default: that of the machine that coldrise boot started on the session.
    #[arg(long, value_name = "SOCKET", conflicts_with = "to")]
    qmp: Option<PathBuf>,
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
    let MoveArguments { request, qmp } = arguments;
    let session = live_session(&request.address)?;
    let repository = invocation.open()?;
    if let Some(note) = recovery_note(&repository, &session)? {
        return vsphere::run(invocation, &repository, (&session, &request), &note, &cancel);
    }
    if request.to.is_some() {
        let text = format!("no machine was recovered under vCenter on session {session}");
        return Err(Error::new(ErrorKind::InvalidInput, text)
            .advise("give a folder, or DISK=PATH for each disk"));
    }
    let targets = request.targets.iter().map(|text| parse_target(text));
    let targets = targets.collect::<Result<Vec<_>>>()?;
    for target in &targets {
        restore::refuse_inside(repository.path(), &RestoreTarget::Path(target.path().to_owned()))?;
    }
    coldrise_session::session(&repository, &session)?;
    let recovered = RecoveryNote::read(&SessionNotes::of(&repository, &session)?)?;
    let host = host_of(&repository, recovered.and_then(|note| note.host).as_ref())?;
    let view = ProgressView::new(invocation);
    let done = move_disks(&MoveRequest {
        repository: &repository,
        session: &session,
        host: &host,
        targets: &targets,
        monitor: qmp,
        rate: request.rate_bytes_per_second.filter(|rate| *rate > 0),
        force: request.replace,
        cancel: &cancel,
        progress: &view,
        tell: &|text| invocation.remark(text),
    });
    drop(view);
    let done = done.map_err(|error| ended(&repository, &session).unwrap_or(error))?;
    let note = &done.note;
    let moved = Moved {
        session: session.as_str(),
        disks: &note.disks,
        address: note.point.as_deref(),
        usable_since_ms: note.usable_since_ms,
        copied_bytes: done.copied_bytes,
        copy_ms: done.copy_ms,
        held_ms: done.held_ms,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let mut report = Report::done(&moved, text(&host, &session, &done));
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
        let advice = "the command that ended the session has reported where its writes are, and its machine if it still runs";
        Error::new(ErrorKind::NotFound, text).advise(advice)
    })
}

fn text(host: &Host, session: &SessionName, done: &MoveReport) -> String {
    let note = &done.note;
    if note.phase == MovePhase::Copying {
        return format!(
            "the interrupted move was withdrawn: its copies were stopped and removed, and session {session} has all \
             writes of the machine. If it is paused (coldrise sessions), serve the session again"
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
        let bytes = allocated_bytes(host, note).unwrap_or(done.copied_bytes);
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

/// The space of the targets; `None` if one is a device, or on another host.
fn allocated_bytes(host: &Host, note: &MoveNote) -> Option<u64> {
    if host.name().is_some() {
        return None;
    }
    note.disks.iter().try_fold(0u64, |sum, disk| {
        let found = std::fs::metadata(&disk.target).ok().filter(|found| found.is_file())?;
        Some(sum.saturating_add(found.blocks().saturating_mul(512)))
    })
}
