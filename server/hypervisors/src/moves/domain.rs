//! The move of a machine under libvirt, by its block copies.
//!
//! libvirt switches one disk at a time and cannot hold the writes of all. So the machine is suspended for the switch:
//! note that it will be, suspend, wait until both sides are equal, note `switching`, pivot each disk, note `settled`,
//! resume. While the note says `switching` the machine writes nothing, so both sides are equal and no order of pivots
//! matters. If the domain is gone then, the session counts: the targets may not be flushed.
//!
//! A machine that writes faster than the copy follows is suspended earlier, for the rest of the copy. The note
//! `is_held` is durable before each suspend, and stays until the machine runs on: the process that finishes a killed move
//! resumes the machine exactly if the move suspended it, or was about to. One that its owner suspended stays so.

use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Phase, ProgressState, Result};
use coldrise_host::Host;
use coldrise_session::{SessionDocument, SessionNotes};
use coldrise_store::DiskName;

use super::domain_disks::{LiveDisk, abort, live_disks, pivot, start_copy};
use super::finish::{STILL_IN_SESSION, note_finished};
use super::note::{MoveNote, MovePhase, MovedDisk};
use super::pace::{self, Pace, SWITCH_PATIENCE};
use super::target::{OpenTarget, Target, discard};
use super::{MoveReport, MoveRequest, finish, is_cancelled, milliseconds_since};
use crate::libvirt::{Domain, DomainState, PATIENCE, RecoveryNote};

/// Interval of asking for the progress.
const INTERVAL: Duration = Duration::from_millis(200);

/// Longest wait for a libvirt that was restarted, while the machine is suspended.
const RELEASE_PATIENCE: Duration = Duration::from_secs(30);
/// A libvirtd that was restarted knows its domains after this time.
const START_PATIENCE: Duration = Duration::from_secs(5);

/// One move.
struct DomainMove<'a> {
    request: &'a MoveRequest<'a>,
    notes: &'a SessionNotes,
    note: MoveNote,
    domain: Domain,
    /// The domain's names of the disks, in the note's order.
    devices: Vec<String>,
    targets: Vec<OpenTarget>,
    pace: Pace,
}

/// Moves the disks of a recovered machine.
pub(super) fn move_domain(
    request: &MoveRequest<'_>,
    notes: &SessionNotes,
    session: &SessionDocument,
    recovered: &RecoveryNote,
    targets: &[Target],
) -> Result<MoveReport> {
    let domain = recovered.domain(request.host);
    let live = live_disks(&domain)?;
    let device = |disk: &DiskName| {
        let export = format!("live/{}/{disk}", session.name);
        let found = live.iter().find(|live| live.source == export);
        found.map(|live| live.device.clone()).ok_or_else(|| {
            let text = format!("the domain {} does not use {export}", recovered.name);
            Error::new(ErrorKind::NotFound, text)
        })
    };
    let devices = session.disks.iter().map(|disk| device(&disk.name)).collect::<Result<_>>()?;
    let mut note = MoveNote::begin(session, targets, None);
    let targets = reserve(request, session, targets, &mut note)?;
    let pace = Pace::new(Instant::now());
    let mut this = DomainMove { request, notes, note, domain, devices, targets, pace };
    if let Err(error) = this.note.write(notes) {
        return Err(this.withdraw(error));
    }
    let start = Instant::now();
    let copied = this.copy().map_err(|error| this.withdraw(error))?;
    let copy_ms = milliseconds_since(start);
    let held = this.pace.held_since().unwrap_or_else(Instant::now);
    this.switch()?;
    let held_ms = milliseconds_since(held);
    let mut note = this.note;
    finish::seal(request, notes, &mut note)?;
    Ok(MoveReport { note, copied_bytes: copied, copy_ms, held_ms })
}

/// Makes an empty file for each target, which libvirt fills: so the note names exactly the files that are ours. Block
/// devices stay open until the move ends.
fn reserve(
    request: &MoveRequest<'_>,
    session: &SessionDocument,
    targets: &[Target],
    note: &mut MoveNote,
) -> Result<Vec<OpenTarget>> {
    let mut opened: Vec<OpenTarget> = Vec::new();
    for ((target, disk), noted) in targets.iter().zip(&session.disks).zip(&mut note.disks) {
        match target.open_on(request.host, disk.size_bytes, request.force) {
            Ok(target) => {
                noted.made = target.facts.made;
                opened.push(target);
            }
            Err(error) => {
                opened.iter().for_each(|target| target.discard(request.host));
                // The host may have made the file, and no note names it.
                let advice = "an empty file may be there: remove it, or move again with --force";
                return Err(match request.host.is_lost() {
                    true => error
                        .context(format!("making {}", target.path().display()))
                        .context(STILL_IN_SESSION)
                        .advise(advice),
                    false => error,
                });
            }
        }
    }
    Ok(opened)
}

impl DomainMove<'_> {
    /// Copies until all copies have caught up. Returns the copied bytes.
    fn copy(&mut self) -> Result<u64> {
        let disks = u64::try_from(self.devices.len()).unwrap_or(u64::MAX).max(1);
        let rate = self.request.rate.map(|rate| (rate / disks).max(1));
        for (device, target) in self.devices.iter().zip(&self.targets) {
            start_copy(&self.domain, device, target, rate)?;
        }
        (self.request.tell)(
            "copying; the machine runs on. Safe to cancel (Ctrl-C) until the disks switch: the session keeps all \
             writes",
        );
        self.pace = Pace::new(Instant::now());
        loop {
            let (done, total) = self.progress()?;
            let names: Vec<&str> = self.note.disks.iter().map(|disk| disk.disk.as_str()).collect();
            self.request.progress.update(&ProgressState {
                phase: Phase::Moving,
                disk: &names.join("+"),
                done_bytes: done,
                total_bytes: total,
                read_bytes: done,
                stored_bytes: done,
            });
            if self.live()?.iter().all(|live| live.is_ready) {
                // They continued since they were asked.
                return self.progress().map(|(done, _)| done);
            }
            if is_cancelled(self.request) {
                return Err(Error::new(ErrorKind::Interrupted, "the move was cancelled"));
            }
            let left_bytes = total.saturating_sub(done);
            if self.pace.must_hold(Instant::now(), done, left_bytes)? && self.suspend()? {
                (self.request.tell)(&pace::sentence(left_bytes));
                self.unlimit()?;
            }
            std::thread::sleep(INTERVAL);
        }
    }

    /// Suspends the machine. Returns whether it ran: only then it is ours to resume.
    fn suspend(&mut self) -> Result<bool> {
        if self.domain.state()? != DomainState::Running {
            return Ok(false);
        }
        self.note.is_held = true;
        self.note.write(self.notes)?;
        self.pace.hold(Instant::now());
        self.domain.suspend().map(|()| true)
    }

    /// Lets the copies run as fast as they can.
    fn unlimit(&self) -> Result<()> {
        for device in self.devices.iter().filter(|_| self.request.rate.is_some()) {
            let words = ["blockjob", &self.domain.name, device, "--bandwidth", "0"];
            self.domain.virsh.run(&words, PATIENCE)?;
        }
        Ok(())
    }

    /// Copied bytes and all bytes of the jobs.
    fn progress(&self) -> Result<(u64, u64)> {
        let (mut done, mut total) = (0_u64, 0_u64);
        for (device, disk) in self.devices.iter().zip(&self.note.disks) {
            let words = ["blockjob", &self.domain.name, device, "--info", "--raw"];
            let answer = self.domain.virsh.run(&words, PATIENCE)?;
            let number = |name: &str| {
                let mut fields = answer.lines().filter_map(|line| line.trim().split_once('='));
                fields.find(|(field, _)| *field == name).and_then(|(_, value)| value.parse().ok())
            };
            let (Some(current), Some(end)) = (number("cur"), number("end")) else {
                let text = format!(
                    "copying {} to {} failed: libvirt ended the job",
                    disk.disk,
                    disk.target.display()
                );
                return Err(Error::new(ErrorKind::ToolFailed, text)
                    .advise(
                        "is the target full, or was the server of the session ended (coldrise recover)? The log of \
                         libvirtd has the reason",
                    ));
            };
            let (current, end): (u64, u64) = (current, end);
            done = done.saturating_add(current);
            total = total.saturating_add(end);
        }
        Ok((done, total))
    }

    /// The domain's disks, in the note's order.
    fn live(&self) -> Result<Vec<LiveDisk>> {
        let mut live = live_disks(&self.domain)?;
        self.devices
            .iter()
            .map(|device| {
                let at = live.iter().position(|live| live.device == *device);
                at.map(|at| live.swap_remove(at)).ok_or_else(|| {
                    let text = format!("the domain {} lost its disk {device}", self.domain.name);
                    Error::new(ErrorKind::ToolFailed, text)
                })
            })
            .collect()
    }

    /// Suspends the machine, switches all disks, and lets it run on.
    fn switch(&mut self) -> Result<()> {
        (self.request.tell)("switching the disks");
        // One that was resumed meanwhile is suspended again.
        let ready = self.suspend().and_then(|_| self.check_stands_still());
        if let Err(error) = ready.and_then(|()| self.await_equal()) {
            return Err(self.withdraw(error));
        }
        self.note.phase = MovePhase::Switching;
        let noted = self.note.write(self.notes);
        let pivoted = noted.and_then(|()| pivot(&self.domain, &self.devices));
        note_sides(&self.domain, &self.devices, self.notes, &mut self.note)?;
        if let Err(error) = pivoted {
            // Some disks were switched; the note names each.
            tracing::warn!("{}", error.full_message());
        }
        Ok(())
    }

    /// A machine that its disks' errors paused is resumed by `recover` at any time.
    fn check_stands_still(&self) -> Result<()> {
        if matches!(self.domain.state()?, DomainState::Paused(_)) {
            return Ok(());
        }
        let text = "the machine has ended, or errors of its disks have paused it";
        Err(Error::new(ErrorKind::Incomplete, text).advise("move again when it runs"))
    }

    /// Waits until nothing is left to copy. The machine is suspended.
    fn await_equal(&self) -> Result<()> {
        let since = self.pace.held_since().unwrap_or_else(Instant::now);
        loop {
            let (done, total) = self.progress()?;
            if done == total {
                return Ok(());
            }
            if since.elapsed() >= SWITCH_PATIENCE {
                let text = "the copy does not catch up, although the machine is suspended";
                return Err(Error::new(ErrorKind::Incomplete, text).advise("move again"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends the copies; the machine keeps its disks.
    fn withdraw(&mut self, error: Error) -> Error {
        // First: whatever fails then, the machine runs.
        release(&self.domain, &mut self.note);
        match abort(&self.domain, &self.devices) {
            // The next move lets the machine run on.
            Ok(()) if self.note.is_held => error.context(STILL_IN_SESSION),
            Ok(()) => {
                self.note.disks.iter().for_each(|disk| {
                    discard(self.request.host, &disk.target, disk.made);
                });
                match MoveNote::remove(self.notes) {
                    Ok(()) => error.context(STILL_IN_SESSION),
                    Err(also) => also,
                }
            }
            // The note stays: the next move cleans up.
            Err(also) => {
                tracing::debug!(error = %also.full_message(), "the copies could not be ended");
                error.context(STILL_IN_SESSION)
            }
        }
    }
}

/// Ends a move that a killed process left; as [`finish::finish_interrupted`].
pub(super) fn finish_domain(
    host: &Host,
    notes: &SessionNotes,
    recovered: &RecoveryNote,
    note: &mut MoveNote,
) -> Result<bool> {
    let domain = recovered.domain(host);
    let state = domain.state()?;
    let live = if state == DomainState::Off { Vec::new() } else { live_disks(&domain)? };
    // Its disks are still the session's, or already the targets.
    let device = |disk: &MovedDisk| {
        let target = disk.target.to_string_lossy();
        let is_ours = |live: &&LiveDisk| {
            live.source == target || live.source.ends_with(&format!("/{}", disk.disk))
        };
        live.iter().find(is_ours).map(|live| live.device.clone())
    };
    let devices: Vec<String> = note.disks.iter().filter_map(device).collect();
    if note.phase == MovePhase::Switching && devices.len() == note.disks.len() {
        let pivoted = pivot(&domain, &devices);
        note_sides(&domain, &devices, notes, note)?;
        pivoted?;
        return Ok(true);
    }
    if state != DomainState::Off {
        // First: whatever fails then, the machine runs.
        release(&domain, note);
        abort(&domain, &devices)?;
    }
    let host = domain.virsh.host();
    note.disks.iter().for_each(|disk| discard(host, &disk.target, disk.made));
    MoveNote::remove(notes)?;
    Ok(false)
}

/// Lets a machine run on that the move suspended, or was about to. The note that it runs on becomes durable with the
/// next write.
pub(super) fn release(domain: &Domain, note: &mut MoveNote) {
    if !note.is_held {
        return;
    }
    let started = Instant::now();
    loop {
        // A paused one only: the next killed move would find it resumed already.
        let is_released = domain.state().and_then(|state| match state {
            // It is looked at again.
            DomainState::Paused(_) => domain.resume().map(|()| false),
            DomainState::Running | DomainState::DiskError => Ok(true),
            // A libvirtd that starts does not know it yet.
            DomainState::Off => Ok(started.elapsed() >= START_PATIENCE),
        });
        match is_released {
            Ok(true) => {
                note.is_held = false;
                return;
            }
            Err(error) if started.elapsed() >= RELEASE_PATIENCE => {
                return tracing::warn!(
                    "{} may stay suspended: {}; when libvirt answers, coldrise move of its session resumes it",
                    domain.name,
                    error.full_message()
                );
            }
            Ok(false) | Err(_) => std::thread::sleep(INTERVAL),
        }
    }
}

/// Asks libvirt on which side each disk is, notes it durably, and lets the machine run on. It stays suspended if
/// the note fails: a machine that runs while the note says `switching` could lose its writes.
///
/// # Errors
/// `ToolFailed` if no disk was switched: the session counts again.
fn note_sides(
    domain: &Domain,
    devices: &[String],
    notes: &SessionNotes,
    note: &mut MoveNote,
) -> Result<()> {
    let live = live_disks(domain)?;
    for (device, disk) in devices.iter().zip(&mut note.disks) {
        // An export of the session is not a path.
        let is_path = |live: &LiveDisk| live.device == *device && live.source.starts_with('/');
        disk.is_moved = live.iter().any(is_path);
    }
    if note.disks.iter().any(|disk| disk.is_moved) {
        note_finished(notes, note)?;
        release(domain, note);
        return Ok(());
    }
    abort(domain, devices)?;
    release(domain, note);
    let host = domain.virsh.host();
    note.disks.iter().for_each(|disk| discard(host, &disk.target, disk.made));
    MoveNote::remove(notes)?;
    let error = Error::new(ErrorKind::ToolFailed, "libvirt did not switch the disks");
    Err(error.context(STILL_IN_SESSION))
}
