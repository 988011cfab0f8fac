//! The move of a machine's disks by QEMU's mirror jobs; see the module for the invariants.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::{Phase, ProgressState};
use coldrise_session::SessionNotes;

use super::note::{MoveNote, MovePhase};
use super::qemu_machine::{job_failed, Job, QemuMachine, Source};
use super::target::OpenTarget;
use super::{is_cancelled, milliseconds_since, settle, MoveReport, MoveRequest};

/// Interval of asking for the progress.
const INTERVAL: Duration = Duration::from_millis(100);
/// How long the end of a killed QEMU may take.
const END_PATIENCE: Duration = Duration::from_secs(3);
/// How long the machine may stand still, or its writes may wait for the switch, until the move is given up.
const SWITCH_PATIENCE: Duration = Duration::from_secs(10);

/// A copy whose rest has not become smaller for so long does not catch up.
const STALL: Duration = Duration::from_secs(5);

/// One move.
pub(super) struct MirrorRun<'a> {
    pub(super) request: &'a MoveRequest<'a>,
    pub(super) notes: &'a SessionNotes,
    pub(super) note: MoveNote,
    pub(super) machine: QemuMachine,
    pub(super) sources: Vec<Source>,
    pub(super) targets: Vec<OpenTarget>,
    /// Since when the machine stands still.
    pub(super) held_since: Option<Instant>,
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
        let finalized = settle::finalize(&mut self.machine, &self.note);
        settle::release(&mut self.machine, &self.note)?;
        finalized?;
        let held_ms = milliseconds_since(self.held_since.unwrap_or(held));
        settle::note_sides(&mut self.machine, self.notes, &mut self.note)?;
        // Closes the session in QEMU. A disk of `-drive` is closed already.
        for source in &self.sources {
            let _ = self.machine.remove_node(&source.node);
        }
        settle::seal(self.request, self.notes, &mut self.note)?;
        Ok(MoveReport { note: self.note.clone(), copied_bytes, copy_ms, held_ms })
    }

    fn ids(&self) -> Vec<String> {
        settle::ids(&self.note)
    }

    /// Copies until all jobs are ready. Returns the copied bytes.
    fn copy(&mut self) -> Result<u64> {
        for (disk, target) in self.note.disks.iter_mut().zip(&self.targets) {
            disk.made = target.made;
        }
        self.note.write(self.notes)?;
        let ids = self.ids();
        for ((id, source), target) in ids.iter().zip(&self.sources).zip(&self.targets) {
            self.machine.add_target(id, target, source.size_bytes)?;
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
        let mut pace = Pace::new(Instant::now());
        loop {
            let jobs = self.jobs()?;
            self.show(&jobs);
            if jobs.values().all(|job| job.status == "ready") {
                return Ok(jobs.values().map(|job| job.done_bytes).sum());
            }
            if is_cancelled(self.request) {
                return Err(Error::new(ErrorKind::Interrupted, "the move was cancelled"));
            }
            match self.held_since {
                None => {
                    let sum = |bytes: fn(&Job) -> u64| jobs.values().map(bytes).sum::<u64>();
                    let (done, total) = (sum(|job| job.done_bytes), sum(|job| job.total_bytes));
                    if pace.must_hold(Instant::now(), done, total.saturating_sub(done)) {
                        self.hold_machine(total.saturating_sub(done))?;
                    }
                }
                Some(since) if since.elapsed() >= SWITCH_PATIENCE => {
                    let text = "the rest of the copy took too long while the machine stood still";
                    return Err(Error::new(ErrorKind::Incomplete, text)
                        .advise("move again when the machine writes less"));
                }
                Some(_) => {}
            }
            let until = Instant::now() + INTERVAL;
            self.machine.wait(INTERVAL)?;
            std::thread::sleep(until.saturating_duration_since(Instant::now()) / 4);
        }
    }

    /// Stops the machine, so that the copy catches up. The note is durable before: whoever settles an interrupted
    /// move lets the machine run on.
    fn hold_machine(&mut self, left_bytes: u64) -> Result<()> {
        // A machine that stands still already writes nothing; it is not ours to continue.
        if !self.machine.is_running()? {
            return Ok(());
        }
        (self.request.tell)(&format!(
            "the machine writes faster than the copy follows: it stands still for the last {} MiB",
            left_bytes >> 20
        ));
        self.note.is_held = true;
        self.note.write(self.notes)?;
        self.held_since = Some(Instant::now());
        self.machine.stop()?;
        self.ids().iter().try_for_each(|id| self.machine.unlimit(id))
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
        let start = Instant::now();
        let still_since = self.held_since.unwrap_or(start);
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

    /// Ends the copy. The machine goes on with the session; the files that this move has made are removed.
    fn withdraw(&mut self, error: Error) -> Error {
        let prefix = self.note.prefix();
        // First: whatever fails then, the machine runs.
        let cleaned = settle::release(&mut self.machine, &self.note)
            .and_then(|()| self.machine.cancel_all(&prefix))
            .and_then(|()| self.machine.remove_nodes(&prefix));
        if let Err(left) = &cleaned {
            tracing::debug!(error = %left.full_message(), "QEMU could not be cleaned up");
            // QEMU has ended, or hangs. If it hangs, its jobs may still write the files, and the note names them.
            if self.is_running() {
                return error.context(settle::STILL_IN_SESSION);
            }
        }
        self.targets.iter().for_each(OpenTarget::discard);
        match MoveNote::remove(self.notes) {
            Ok(()) => error.context(settle::STILL_IN_SESSION),
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

/// Whether a copy catches up.
struct Pace {
    began: Instant,
    first_done_bytes: Option<u64>,
    /// The smallest rest so far, and when it was seen.
    least: (u64, Instant),
    /// The last progress.
    latest: (u64, Instant),
}

impl Pace {
    fn new(now: Instant) -> Pace {
        Pace { began: now, first_done_bytes: None, least: (u64::MAX, now), latest: (0, now) }
    }

    /// Whether the rest has not become smaller for a while, and is small enough to be copied while the machine
    /// stands still: in half the time that the switch may take. A copy that waits for its server is no reason.
    fn must_hold(&mut self, now: Instant, done_bytes: u64, left_bytes: u64) -> bool {
        // The job does not know its length yet.
        if done_bytes + left_bytes == 0 {
            return false;
        }
        if done_bytes > self.latest.0 {
            self.latest = (done_bytes, now);
        }
        let first = *self.first_done_bytes.get_or_insert(done_bytes);
        if left_bytes < self.least.0 - self.least.0 / 100 {
            self.least = (left_bytes, now);
            return false;
        }
        let bytes_per_s =
            done_bytes.saturating_sub(first) as f64 / (now - self.began).as_secs_f64();
        let is_small = left_bytes as f64 <= bytes_per_s * SWITCH_PATIENCE.as_secs_f64() / 2.0;
        let is_copying = now - self.latest.1 < 5 * INTERVAL;
        now - self.least.1 >= STALL && is_small && is_copying
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Asks every 100 ms. `at` tells copied and remaining MiB at a moment. Returns when the machine must be held.
    fn held_after(at: impl Fn(u64) -> (u64, u64)) -> Option<u64> {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        (1..600).map(|tenths| tenths * 100).find(|ms| {
            let (done, left) = at(*ms);
            pace.must_hold(start + Duration::from_millis(*ms), done * MIB, left * MIB)
        })
    }

    #[test]
    fn a_machine_is_held_if_the_copy_runs_but_its_rest_stays_small() {
        // 100 MiB/s; after 10 s the machine writes as fast.
        let copies = |ms: u64| (ms / 10, (1000 - (ms / 10).min(950)));
        assert!(held_after(copies).is_some_and(|ms| (14_000..15_500).contains(&ms)));
        // The rest would take longer than the machine may stand still.
        assert_eq!(held_after(|ms| (ms / 10, 700)), None);
        assert_eq!(held_after(|ms| (ms / 10, 6000 - ms / 10)), None, "it becomes smaller");
        let unknown_first = |ms: u64| if ms < 300 { (0, 0) } else { (ms / 10, 6000 - ms / 10) };
        assert_eq!(held_after(unknown_first), None, "the first length is unknown");
    }

    #[test]
    fn a_copy_that_waits_for_its_server_is_no_reason() {
        assert_eq!(held_after(|ms| (ms.min(5_000) / 10, 1000 - ms.min(5_000) / 10)), None);
        // The server is back, and the copy too: only a rest that then stays is one.
        let away = |ms: u64| ms.min(5_000) + ms.saturating_sub(20_000);
        assert_eq!(held_after(|ms| (away(ms) / 10, 10_000 - away(ms) / 10)), None);
    }
}
