//! The move of a machine's disks by QEMU's mirror jobs; see the module for the invariants.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Phase, ProgressState, Result};
use coldrise_session::SessionNotes;

use super::note::{MoveNote, MovePhase};
use super::pace::{Pace, SWITCH_PATIENCE};
use super::qemu_machine::{Job, QemuMachine, Source, job_failed};
use super::rate_limit::RateLimit;
use super::target::OpenTarget;
use super::{MoveReport, MoveRequest, finish, is_cancelled, milliseconds_since, pace};

/// Interval of asking for the progress.
pub(super) const INTERVAL: Duration = Duration::from_millis(100);
/// How long the end of a killed QEMU may take.
const END_PATIENCE: Duration = Duration::from_secs(3);

/// One move.
pub(super) struct MirrorRun<'a> {
    pub(super) request: &'a MoveRequest<'a>,
    pub(super) notes: &'a SessionNotes,
    pub(super) note: MoveNote,
    pub(super) machine: QemuMachine,
    pub(super) sources: Vec<Source>,
    pub(super) targets: Vec<(OpenTarget, File)>,
    pub(super) pace: Pace,
}

impl MirrorRun<'_> {
    /// Does the whole move. After an error before the switch, the machine and the files are as before.
    pub(super) fn run(&mut self) -> Result<MoveReport> {
        let start = Instant::now();
        let copied = self.copy();
        let copy_ms = milliseconds_since(start);
        let copied = copied.and_then(|bytes| self.hold().map(|held| (bytes, held)));
        let (copied_bytes, held) = match copied {
            Ok(copied) => copied,
            Err(error) => return Err(self.withdraw(error)),
        };
        self.note.phase = MovePhase::Switching;
        if let Err(error) = self.note.write(self.notes) {
            self.note.phase = MovePhase::Copying;
            // The new note may be durable in spite of the error.
            return match self.note.write(self.notes) {
                Ok(()) => Err(self.withdraw(error)),
                Err(_) => Err(error),
            };
        }
        let finalized = finish::finalize(&mut self.machine, &self.note);
        finish::release(&mut self.machine, &mut self.note)?;
        finalized?;
        let held_ms = milliseconds_since(self.pace.held_since().unwrap_or(held));
        finish::note_sides(&mut self.machine, self.notes, &mut self.note)?;
        // Closes the session in QEMU. A disk of `-drive` is closed already.
        for source in &self.sources {
            let _ = self.machine.remove_node(&source.node);
        }
        finish::seal(self.request, self.notes, &mut self.note)?;
        Ok(MoveReport { note: self.note.clone(), copied_bytes, copy_ms, held_ms })
    }

    fn ids(&self) -> Vec<String> {
        finish::ids(&self.note)
    }

    /// Copies until all jobs are ready. Returns the copied bytes.
    fn copy(&mut self) -> Result<u64> {
        for (disk, (target, _)) in self.note.disks.iter_mut().zip(&self.targets) {
            disk.made = target.facts.made;
        }
        self.note.write(self.notes)?;
        let ids = self.ids();
        for ((id, source), (target, file)) in ids.iter().zip(&self.sources).zip(&self.targets) {
            self.machine.add_target(id, target, file, source.size_bytes)?;
        }
        let disks = u64::try_from(ids.len()).unwrap_or(u64::MAX).max(1);
        let rate = self.request.rate.map_or(0, |rate| (rate / disks).max(1));
        for (id, source) in ids.iter().zip(&self.sources) {
            self.machine.mirror(source, id, rate)?;
        }
        (self.request.tell)(
            "copying; the machine runs on. Safe to cancel (Ctrl-C) until the disks switch: the session keeps all \
             writes",
        );
        self.pace = Pace::new(Instant::now());
        // A rate that people ask for is theirs to choose.
        let mut rate_limit = (rate == 0).then(RateLimit::new);
        loop {
            let jobs = self.jobs()?;
            self.show(&jobs);
            if jobs.values().all(|job| job.status == "ready") {
                return Ok(jobs.values().map(|job| job.done_bytes).sum());
            }
            if is_cancelled(self.request) {
                return Err(Error::new(ErrorKind::Interrupted, "the move was cancelled"));
            }
            self.follow(&jobs, &mut rate_limit)?;
            let until = Instant::now() + INTERVAL;
            self.machine.wait(INTERVAL)?;
            std::thread::sleep(until.saturating_duration_since(Instant::now()) / 4);
        }
    }

    /// Leaves time to the machine while the copy catches up, then none, and at last holds the machine.
    fn follow(
        &mut self,
        jobs: &BTreeMap<String, Job>,
        rate_limit: &mut Option<RateLimit>,
    ) -> Result<()> {
        let sum = |bytes: fn(&Job) -> u64| jobs.values().map(bytes).fold(0, u64::saturating_add);
        let done_bytes = sum(|job| job.done_bytes);
        let left_bytes = sum(|job| job.total_bytes).saturating_sub(done_bytes);
        let now = Instant::now();
        let Some(limit) = rate_limit else {
            return match self.pace.must_hold(now, done_bytes, left_bytes)? {
                true => self.hold_machine(left_bytes),
                false => Ok(()),
            };
        };
        if self.pace.has_stalled(now, done_bytes, left_bytes) {
            *rate_limit = None;
            self.pace = Pace::new(now);
            return self.set_speed(0);
        }
        let busy_ns = self.machine.busy_ns()?;
        let running = jobs.values().filter(|job| job.status == "running").count();
        match limit.speed(now, done_bytes, busy_ns) {
            Some(speed) => self.set_speed(speed / running.max(1) as u64),
            None => Ok(()),
        }
    }

    /// Limits each copy, in bytes per second; 0 for no limit.
    fn set_speed(&mut self, bytes_per_s: u64) -> Result<()> {
        for id in self.ids() {
            // A copy that has just failed takes no limit; the next look at the jobs says why.
            let _ = self.machine.set_speed(&id, bytes_per_s);
        }
        Ok(())
    }

    /// Stops the machine, so that the copy catches up. The note is durable before: the process that finishes an interrupted
    /// move lets the machine run on.
    fn hold_machine(&mut self, left_bytes: u64) -> Result<()> {
        // A machine that stands still already writes nothing; it is not ours to continue.
        if !self.machine.is_running()? {
            return Ok(());
        }
        (self.request.tell)(&pace::sentence(left_bytes));
        self.note.is_held = true;
        self.note.write(self.notes)?;
        self.pace.hold(Instant::now());
        self.machine.stop()?;
        self.set_speed(0)
    }

    /// All jobs, which run.
    ///
    /// # Errors
    /// `NoSpace` or `ToolFailed` if one has ended.
    fn jobs(&mut self) -> Result<BTreeMap<String, Job>> {
        let jobs = self.machine.jobs(&self.note.prefix())?;
        for (id, disk) in self.ids().iter().zip(&self.note.disks) {
            let what = || format!("copying {} to {}", disk.disk, disk.target.display());
            let job = jobs.get(id).ok_or_else(|| job_failed(&what(), "QEMU lost the job"))?;
            let is_ended = ["aborting", "concluded", "null"].contains(&job.status.as_str());
            if !is_ended {
                continue;
            }
            let error = job.error.as_deref().unwrap_or("it was cancelled by others");
            return Err(match error.contains("No space left") {
                true => Error::new(ErrorKind::NoSpace, format!("{} failed: {error}", what()))
                    .advise("make room, or choose another target, and move again"),
                false => job_failed(&what(), error),
            });
        }
        Ok(jobs)
    }

    fn show(&self, jobs: &BTreeMap<String, Job>) {
        let sum = |bytes: fn(&Job) -> u64| jobs.values().map(bytes).fold(0, u64::saturating_add);
        let names: Vec<&str> = self.note.disks.iter().map(|disk| disk.disk.as_str()).collect();
        let done = sum(|job| job.done_bytes);
        self.request.progress.update(&ProgressState {
            phase: Phase::Moving,
            disk: &names.join("+"),
            done_bytes: done,
            total_bytes: sum(|job| job.total_bytes),
            read_bytes: done,
            stored_bytes: done,
        });
    }

    /// Brings both sides of all disks to the same state, and holds the machine's writes. Returns since when.
    fn hold(&mut self) -> Result<Instant> {
        (self.request.tell)("switching the disks");
        self.set_speed(0)?;
        let start = Instant::now();
        let still_since = self.pace.held_since().unwrap_or(start);
        for id in self.ids() {
            self.machine.complete(&id)?;
        }
        loop {
            let jobs = self.jobs()?;
            if jobs.values().all(|job| job.status == "pending") {
                return Ok(start);
            }
            if still_since.elapsed() >= SWITCH_PATIENCE {
                let text =
                    "the machine writes faster than the targets take, so the disks cannot switch";
                return Err(Error::new(ErrorKind::Incomplete, text)
                    .advise("move again when the machine writes less, without --rate"));
            }
            self.machine.wait(Duration::from_millis(5))?;
        }
    }

    /// Ends the copy. The machine continues with the session; the files that this move has made are removed.
    fn withdraw(&mut self, error: Error) -> Error {
        let prefix = self.note.prefix();
        // First: whatever fails then, the machine runs.
        let cleaned = finish::release(&mut self.machine, &mut self.note)
            .and_then(|()| self.machine.cancel_all(&prefix))
            .and_then(|()| self.machine.remove_nodes(&prefix));
        if let Err(left) = &cleaned {
            tracing::debug!(error = %left.full_message(), "QEMU could not be cleaned up");
            // QEMU has ended, or hangs. If it hangs, its jobs may still write the files, and the note names them.
            if self.is_running() {
                return error.context(finish::STILL_IN_SESSION);
            }
        }
        self.targets.iter().for_each(|(target, _)| target.discard(self.request.host));
        match MoveNote::remove(self.notes) {
            Ok(()) => error.context(finish::STILL_IN_SESSION),
            Err(also) => also,
        }
    }

    /// Whether QEMU listens still, after a while: a killed one closes its sockets one after the other.
    fn is_running(&self) -> bool {
        let until = Instant::now() + END_PATIENCE;
        let listens = |socket: &Path| std::os::unix::net::UnixStream::connect(socket).is_ok();
        while self.note.monitor.as_deref().is_some_and(listens) {
            if Instant::now() >= until {
                return true;
            }
            std::thread::sleep(INTERVAL);
        }
        false
    }
}
