//! The move of a machine under libvirt, by its block copies.
//!
//! libvirt switches one disk at a time and cannot hold the writes of all. So the machine is suspended for the switch:
//! suspend, wait until both sides are equal, note `switching`, pivot each disk, note `settled`, resume. While the
//! note says `switching` the machine writes nothing, so both sides are equal and no order of pivots matters. If the
//! domain is gone then, the session counts: the targets may not be flushed.

use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::{Phase, ProgressState};
use coldrise_session::{SessionDocument, SessionNotes};
use coldrise_store::DiskName;

use super::note::{MoveNote, MovePhase, MovedDisk};
use super::settle::{settled, STILL_IN_SESSION};
use super::target::{discard, ImageFormat, Target};
use super::{is_cancelled, milliseconds_since, settle, MoveReport, MoveRequest};
use crate::libvirt::{Domain, DomainState, RecoveryNote, PATIENCE};

/// Interval of asking for the progress.
const INTERVAL: Duration = Duration::from_millis(200);
/// How long the machine may stand still for the switch, until it is given up.
const SWITCH_PATIENCE: Duration = Duration::from_secs(20);

/// A disk in the domain's present XML.
struct LiveDisk {
    /// Its name in the domain, such as `vda`.
    device: String,
    /// Its export, file or block device.
    source: String,
    /// The copy of a running job has caught up.
    is_ready: bool,
}

/// One move.
struct DomainMove<'a> {
    request: &'a MoveRequest<'a>,
    notes: &'a SessionNotes,
    note: MoveNote,
    domain: Domain,
    /// The domain's names of the disks, in the note's order.
    devices: Vec<String>,
}

/// Moves the disks of a recovered machine.
pub(super) fn move_domain(
    request: &MoveRequest<'_>,
    notes: &SessionNotes,
    session: &SessionDocument,
    recovered: &RecoveryNote,
    targets: &[Target],
) -> Result<MoveReport> {
    let domain = recovered.domain();
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
    reserve(request, session, targets, &mut note)?;
    let mut this = DomainMove { request, notes, note, domain, devices };
    if let Err(error) = this.note.write(notes) {
        return Err(this.withdraw(error));
    }
    let start = Instant::now();
    let copied = this.copy().map_err(|error| this.withdraw(error))?;
    let copy_ms = milliseconds_since(start);
    let held = Instant::now();
    this.switch()?;
    let held_ms = milliseconds_since(held);
    let mut note = this.note;
    settle::seal(request, notes, &mut note)?;
    Ok(MoveReport { note, copied_bytes: copied, copy_ms, held_ms })
}

/// Makes an empty file for each target, which libvirt fills: so the note names exactly the files that are ours.
fn reserve(
    request: &MoveRequest<'_>,
    session: &SessionDocument,
    targets: &[Target],
    note: &mut MoveNote,
) -> Result<()> {
    for (i, (target, disk)) in targets.iter().zip(&session.disks).enumerate() {
        match target.open_empty(disk.size_bytes, request.force) {
            Ok(made) => note.disks.iter_mut().skip(i).take(1).for_each(|disk| disk.made = made),
            Err(error) => {
                note.disks.iter().for_each(discard_made);
                return Err(error);
            }
        }
    }
    Ok(())
}

impl DomainMove<'_> {
    /// Copies until all copies have caught up. Returns the copied bytes.
    fn copy(&mut self) -> Result<u64> {
        let disks = u64::try_from(self.devices.len()).unwrap_or(u64::MAX).max(1);
        for (device, disk) in self.devices.iter().zip(&self.note.disks) {
            let mut words = vec!["blockcopy", &self.domain.name, device, "--xml", "/dev/stdin"];
            let rate = self.request.rate.map(|rate| (rate / disks).max(1).to_string());
            if let Some(rate) = &rate {
                words.extend(["--bytes", "--bandwidth", rate]);
            }
            words.push("--transient-job");
            self.domain.virsh.run_with(&words, Some(&target_xml(disk)), PATIENCE)?;
        }
        (self.request.tell)(
            "copying; the machine runs on. Safe to cancel (Ctrl-C) until the disks switch: the session keeps all \
             writes",
        );
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
                // They went on since they were asked.
                return self.progress().map(|(done, _)| done);
            }
            if is_cancelled(self.request) {
                return Err(Error::new(ErrorKind::Interrupted, "the move was cancelled"));
            }
            std::thread::sleep(INTERVAL);
        }
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
        let was_running = self.domain.state()? == DomainState::Running;
        let ready = self.domain.suspend().and_then(|()| self.await_equal());
        if let Err(error) = ready {
            let error = self.withdraw(error);
            resume_if(&self.domain, was_running);
            return Err(error);
        }
        self.note.phase = MovePhase::Switching;
        let noted = self.note.write(self.notes);
        let pivoted = noted.and_then(|()| pivot(&self.domain, &self.devices));
        let sides = note_sides(&self.domain, &self.devices, self.notes, &mut self.note);
        resume_if(&self.domain, was_running);
        sides?;
        if let Err(error) = pivoted {
            // Some disks were switched; the note names each.
            tracing::warn!("{}", error.full_message());
        }
        Ok(())
    }

    /// Waits until nothing is left to copy. The machine is suspended.
    fn await_equal(&self) -> Result<()> {
        let until = Instant::now() + SWITCH_PATIENCE;
        loop {
            let (done, total) = self.progress()?;
            if done == total {
                return Ok(());
            }
            if Instant::now() >= until {
                let text = "the copy does not catch up, although the machine is suspended";
                return Err(Error::new(ErrorKind::Incomplete, text).advise("move again"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends the copies; the machine keeps its disks.
    fn withdraw(&self, error: Error) -> Error {
        match abort(&self.domain, &self.devices) {
            Ok(()) => {
                self.note.disks.iter().for_each(discard_made);
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

/// Ends a move that a killed process left; as `settle::settle`.
pub(super) fn settle_domain(
    notes: &SessionNotes,
    recovered: &RecoveryNote,
    note: &mut MoveNote,
) -> Result<bool> {
    let domain = recovered.domain();
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
        resume_if(&domain, matches!(state, DomainState::Paused(_)));
        pivoted?;
        return Ok(true);
    }
    if state != DomainState::Off {
        abort(&domain, &devices)?;
        // The killed move may have suspended it just before.
        resume_if(&domain, matches!(state, DomainState::Paused(_)));
    }
    note.disks.iter().for_each(discard_made);
    MoveNote::remove(notes)?;
    Ok(false)
}

/// Lets a machine run on that a move suspended for its switch and left so when it was killed.
pub(super) fn resume_suspended(recovered: &RecoveryNote) -> Result<()> {
    let domain = recovered.domain();
    let state = domain.state()?;
    resume_if(&domain, matches!(state, DomainState::Paused(_)));
    Ok(())
}

/// Switches each disk that is not yet switched.
fn pivot(domain: &Domain, devices: &[String]) -> Result<()> {
    let mut done = Ok(());
    for device in devices {
        let live = live_disks(domain)?;
        if live.iter().any(|live| live.device == *device && live.is_ready) {
            let words = ["blockjob", &domain.name, device, "--pivot"];
            done = done.and(domain.virsh.run(&words, PATIENCE).map(drop));
        }
    }
    done
}

/// Asks libvirt on which side each disk is, and notes it durably.
fn note_sides(
    domain: &Domain,
    devices: &[String],
    notes: &SessionNotes,
    note: &mut MoveNote,
) -> Result<()> {
    let live = live_disks(domain)?;
    for (device, disk) in devices.iter().zip(&mut note.disks) {
        let target = disk.target.to_string_lossy();
        disk.is_moved = live.iter().any(|live| live.device == *device && live.source == target);
    }
    if note.disks.iter().any(|disk| disk.is_moved) {
        return settled(notes, note);
    }
    abort(domain, devices)?;
    note.disks.iter().for_each(discard_made);
    MoveNote::remove(notes)?;
    let error = Error::new(ErrorKind::ToolFailed, "libvirt did not switch the disks");
    Err(error.context(STILL_IN_SESSION))
}

fn abort(domain: &Domain, devices: &[String]) -> Result<()> {
    for device in devices {
        // Fails if there is no job.
        let _ = domain.virsh.run(&["blockjob", &domain.name, device, "--abort"], PATIENCE);
    }
    let with_job = |device: &&String| {
        let words = ["blockjob", &domain.name, device, "--info", "--raw"];
        domain.virsh.run(&words, PATIENCE).is_ok_and(|answer| answer.contains("cur="))
    };
    match devices.iter().find(with_job) {
        None => Ok(()),
        Some(device) => {
            let text = format!("the copy of {device} does not end");
            Err(Error::new(ErrorKind::ToolFailed, text))
        }
    }
}

fn resume_if(domain: &Domain, was_running: bool) {
    if !was_running {
        return;
    }
    if let Err(error) = domain.resume() {
        tracing::warn!("{} stays suspended: {}", domain.name, error.full_message());
    }
}

fn discard_made(disk: &MovedDisk) {
    if let Some(made) = disk.made {
        discard(&disk.target, made);
    }
}

/// The present disks of the domain.
fn live_disks(domain: &Domain) -> Result<Vec<LiveDisk>> {
    let text = domain.virsh.run(&["dumpxml", &domain.name], PATIENCE)?;
    let document = roxmltree::Document::parse(&text).map_err(|error| {
        Error::with_source(ErrorKind::ToolFailed, "libvirt's XML is not well-formed", error)
    })?;
    let disks = document.descendants().filter(|node| node.has_tag_name("disk"));
    let live = disks.filter_map(|disk| {
        let child = |name| disk.children().find(|node| node.has_tag_name(name));
        let device = child("target")?.attribute("dev")?.to_owned();
        let source = child("source")?;
        let source = ["name", "file", "dev"].into_iter().find_map(|name| source.attribute(name))?;
        let is_ready = child("mirror").is_some_and(|node| node.attribute("ready") == Some("yes"));
        Some(LiveDisk { device, source: source.to_owned(), is_ready })
    });
    Ok(live.collect())
}

fn target_xml(disk: &MovedDisk) -> String {
    let path = crate::libvirt::escaped(&disk.target.to_string_lossy());
    let is_device = !disk.target.is_file() && disk.target.exists();
    let (kind, attribute) = if is_device { ("block", "dev") } else { ("file", "file") };
    let format = match disk.format {
        ImageFormat::Qcow2 => "qcow2",
        ImageFormat::Raw => "raw",
    };
    format!(
        "<disk type='{kind}' device='disk'><driver name='qemu' type='{format}' discard='unmap'/>\
         <source {attribute}='{path}'/></disk>"
    )
}
