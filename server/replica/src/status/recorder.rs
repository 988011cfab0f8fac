//! Records a copy while it runs.

use coldrise_block::now_ms;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind};
use coldrise_store::{MachineName, PointDocument, PointName, Repository, RepositoryId};
use parking_lot::{Condvar, Mutex};

use super::WRITE_INTERVAL;
use super::document::{
    CopyCounts, CopyRecords, CopyTarget, Cut, FailedCopy, LastCopy, MachineRecord,
};
use super::watching::Watching;
use crate::plan::Plan;
use crate::remote::{Remote, Traffic};

/// Points that follow each other faster are written together.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);
/// Rates are means over this number of intervals.
const RATE_SAMPLES: usize = 7;

/// The state of a machine in the other repository.
#[derive(Clone)]
pub(crate) struct Seen {
    pub(crate) newest: Option<Cut>,
    pub(crate) points_there: usize,
    pub(crate) older: Vec<PointName>,
    pub(crate) ahead: Vec<PointName>,
}

impl Seen {
    /// The state by `plan` of the machine with these points.
    pub(crate) fn of(plan: &Plan, points: &[PointDocument]) -> Seen {
        let cut = |at: usize| Cut::of(&points[at]);
        let newest = plan.youngest.map(cut);
        let is_older = |cut: &Cut| newest.as_ref().is_some_and(|newest| cut < newest);
        let missing = plan.missing.iter().map(|at| cut(*at));
        let older = missing.filter(is_older).map(|cut| cut.point).collect();
        let ahead = plan.ahead.iter().map(|at| points[*at].point.clone()).collect();
        Seen { newest, points_there: plan.there, older, ahead }
    }
}

/// Changes of a machine's record that are not written yet.
#[derive(Clone)]
struct Update {
    machine: MachineName,
    seen: Option<(Seen, u64)>,
    last: Option<LastCopy>,
    added: CopyCounts,
    end: Option<std::result::Result<u64, FailedCopy>>,
}

impl Update {
    fn apply(&self, record: &mut MachineRecord) {
        record.machine = self.machine.clone();
        if let Some((seen, at_ms)) = &self.seen {
            record.newest.clone_from(&seen.newest);
            record.points_there = seen.points_there as u64;
            record.older.clone_from(&seen.older);
            record.ahead.clone_from(&seen.ahead);
            record.seen_at_ms = Some(*at_ms);
        }
        if let Some(last) = &self.last {
            record.last.clone_from(last);
        }
        record.total = record.total.plus(self.added);
        // One before was killed.
        if self.last.is_none() && self.end.is_some() && record.last.ended_at_ms.is_none() {
            record.last.ended_at_ms = Some(record.last.updated_at_ms);
        }
        match &self.end {
            Some(Ok(at_ms)) => {
                record.succeeded_at_ms = Some(*at_ms);
                record.failure = None;
            }
            Some(Err(failure)) => record.failure = Some(failure.clone()),
            None => {}
        }
    }
}

/// The machine whose turn it is.
struct Current {
    far_machine: MachineName,
    /// The traffic at the beginning; `None` without a line.
    before: Option<Traffic>,
    /// The counts that are recorded already.
    counted: CopyCounts,
    /// The part of the point that had arrived before this copy.
    begun_bytes: u64,
    /// The sizes of the present disk, and of those of its point before.
    disk_bytes: u64,
    disk_read_bytes: u64,
    point_bytes: u64,
    point_read_bytes: u64,
    /// The sizes of the points before.
    done_bytes: u64,
    counts: CopyCounts,
    /// Times, with the bytes done and sent since the beginning.
    samples: VecDeque<(Instant, u64, u64)>,
}

impl Current {
    /// The counts of this copy.
    fn done_bytes(&self) -> u64 {
        self.done_bytes + self.point_done_bytes().saturating_sub(self.begun_bytes)
    }

    fn point_done_bytes(&self) -> u64 {
        self.point_bytes + self.disk_bytes
    }

    /// With what has been read of the point on its way.
    fn counts(&self) -> CopyCounts {
        let read_bytes = self.counts.read_bytes + self.point_read_bytes + self.disk_read_bytes;
        CopyCounts { read_bytes, ..self.counts }
    }

    /// Adds a sample, and computes the rates since the oldest one.
    fn rates(&mut self) -> (u64, Option<u64>) {
        let sent = self.counts.line.map(|line| line.sent_bytes);
        let now = (Instant::now(), self.done_bytes(), sent.unwrap_or(0));
        self.samples.push_back(now);
        while self.samples.len() > RATE_SAMPLES {
            self.samples.pop_front();
        }
        let then = self.samples.front().copied().unwrap_or(now);
        let seconds = (now.0 - then.0).as_secs_f64();
        let rate = |bytes: u64| match seconds > 0.0 {
            true => (bytes as f64 / seconds) as u64,
            false => 0,
        };
        (rate(now.1.saturating_sub(then.1)), sent.map(|_| rate(now.2.saturating_sub(then.2))))
    }
}

struct State {
    updates: BTreeMap<MachineName, Update>,
    current: Option<Current>,
    remote: Option<RepositoryId>,
    written: Option<Instant>,
    has_warned: bool,
}

struct Shared {
    records: CopyRecords,
    target: CopyTarget,
    is_of_all: bool,
    state: Mutex<State>,
    /// Held while a document is written: an older state must not replace a younger one.
    writing: Mutex<()>,
}

/// Records what a copy does. Without a target it records nothing. A record that cannot be written fails no copy.
pub(crate) struct Recorder {
    shared: Option<Shared>,
}

impl Recorder {
    /// A recorder for a copy to `target`, in the repository that keeps the record; `is_of_all` if no machine was named.
    pub(crate) fn new(target: Option<&(Arc<Repository>, CopyTarget)>, is_of_all: bool) -> Recorder {
        let shared = target.map(|(repository, target)| Shared {
            records: CopyRecords::of(repository),
            target: target.clone(),
            is_of_all,
            state: Mutex::new(State {
                updates: BTreeMap::new(),
                current: None,
                remote: None,
                written: None,
                has_warned: false,
            }),
            writing: Mutex::new(()),
        });
        Recorder { shared }
    }

    /// Does `work`. Beside it, writes the record, and tells of the progress.
    pub(crate) fn beside<T>(&self, watching: &Watching<'_>, work: impl FnOnce() -> T) -> T {
        let end = End::default();
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("copy-record".to_owned());
            // Without the thread, the ends of points and machines are written.
            let _ = thread.spawn_scoped(scope, || self.follow(watching, &end));
            let _ending = Ending(&end);
            work()
        })
    }

    fn follow(&self, watching: &Watching<'_>, end: &End) {
        while !end.wait(SHORTEST_INTERVAL) {
            watching.tell_again();
            let Some(shared) = &self.shared else { continue };
            let mut state = shared.state.lock();
            if state.written.get_or_insert_with(Instant::now).elapsed() < WRITE_INTERVAL {
                continue;
            }
            if let Some(current) = &mut state.current {
                current.sample(watching.remote);
            }
            drop(state);
            shared.write();
        }
    }

    /// The present disk has reached this. `pending_bytes` of it are not stored at the other site yet.
    pub(super) fn reached(&self, done_bytes: u64, read_bytes: u64, pending_bytes: u64) {
        self.change(|state| {
            let Some(current) = &mut state.current else { return };
            current.disk_read_bytes = read_bytes;
            current.disk_bytes = done_bytes.saturating_sub(pending_bytes);
        });
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        if let Some(shared) = &self.shared {
            change(&mut shared.state.lock());
        }
    }

    /// The turn of a machine begins.
    pub(crate) fn begin_machine(&self, machine: &MachineName, far_machine: &MachineName) {
        self.change(|state| {
            let machine = machine.clone();
            let (seen, last, end) = (None, None, None);
            let update = Update { machine, seen, last, added: CopyCounts::default(), end };
            state.updates.insert(far_machine.clone(), update);
        });
    }

    /// The other side has said what it has; `is_busy` if something is to be copied.
    pub(crate) fn planned(
        &self,
        remote: &dyn Remote,
        id: RepositoryId,
        far_machine: &MachineName,
        seen: Seen,
        is_busy: bool,
    ) {
        let is_line = self.shared.as_ref().is_some_and(|shared| shared.is_line());
        self.change(|state| {
            state.remote = Some(id);
            let now = now_ms();
            let Some(update) = state.updates.get_mut(far_machine) else { return };
            update.seen = Some((seen, now));
            if !is_busy {
                return;
            }
            let (started_at_ms, updated_at_ms) = (now, now);
            let begun = LastCopy { started_at_ms, updated_at_ms, ..LastCopy::default() };
            update.last.get_or_insert(begun);
            state.current.get_or_insert_with(|| Current {
                far_machine: far_machine.clone(),
                before: is_line.then(|| remote.traffic()),
                counted: CopyCounts::default(),
                begun_bytes: 0,
                disk_bytes: 0,
                disk_read_bytes: 0,
                point_bytes: 0,
                point_read_bytes: 0,
                done_bytes: 0,
                counts: CopyCounts::default(),
                samples: VecDeque::from([(Instant::now(), 0, 0)]),
            });
        });
        if is_busy {
            self.write_soon();
        }
    }

    /// A point begins.
    pub(crate) fn begin_point(&self, remote: &dyn Remote, point: &PointName) {
        self.change(|state| {
            let Some(current) = &mut state.current else { return };
            current.sample(remote);
            (current.point_bytes, current.disk_bytes) = (0, 0);
            (current.point_read_bytes, current.disk_read_bytes) = (0, 0);
            current.begun_bytes = 0;
            let last = state.updates.get_mut(&current.far_machine).and_then(|u| u.last.as_mut());
            if let Some(last) = last {
                last.point = Some(point.clone());
            }
        });
    }

    /// A disk of the point begins, of which `begun_bytes` have arrived before.
    pub(super) fn begin_disk(&self, begun_bytes: u64) {
        self.change(|state| {
            let Some(current) = &mut state.current else { return };
            current.point_bytes += std::mem::take(&mut current.disk_bytes);
            current.point_read_bytes += std::mem::take(&mut current.disk_read_bytes);
            current.begun_bytes += begun_bytes;
        });
    }

    /// A point is there. `counts` are those of it.
    pub(crate) fn end_point(&self, remote: &dyn Remote, cut: Cut, counts: CopyCounts) {
        self.change(|state| {
            let Some(current) = &mut state.current else { return };
            current.sample(remote);
            current.done_bytes = current.done_bytes();
            (current.point_bytes, current.disk_bytes) = (0, 0);
            (current.point_read_bytes, current.disk_read_bytes) = (0, 0);
            current.begun_bytes = 0;
            current.counts.points += 1;
            current.counts.size_bytes += counts.size_bytes;
            current.counts.read_bytes += counts.read_bytes;
            current.counts.stored_bytes += counts.stored_bytes;
            let Some(update) = state.updates.get_mut(&current.far_machine) else { return };
            if let Some((seen, at_ms)) = &mut update.seen {
                seen.older.retain(|point| *point != cut.point);
                seen.points_there += 1;
                seen.newest = seen.newest.take().max(Some(cut));
                *at_ms = now_ms();
            }
            if let Some(last) = &mut update.last {
                last.point = None;
            }
        });
        self.write_soon();
    }

    /// The turn of a machine ends.
    pub(crate) fn end_machine(
        &self,
        remote: &dyn Remote,
        far_machine: &MachineName,
        error: Option<&Error>,
    ) {
        self.change(|state| {
            let now = now_ms();
            if let Some(current) = &mut state.current {
                current.sample(remote);
            }
            state.gather();
            state.current = None;
            let Some(update) = state.updates.get_mut(far_machine) else { return };
            update.end = match error {
                None => Some(Ok(now)),
                // The user ended it, or a window has closed: it is neither.
                Some(error) if error.kind() == ErrorKind::Interrupted || remote.is_paused() => None,
                Some(error) => Some(Err(FailedCopy::of(error, now))),
            };
            if let Some(last) = &mut update.last {
                (last.ended_at_ms, last.point) = (Some(now), None);
            }
        });
        self.write_soon();
    }

    /// Writes unless that was done just now: then the thread does, or the end.
    fn write_soon(&self) {
        let Some(shared) = &self.shared else { return };
        let written = shared.state.lock().written;
        if written.is_none_or(|at| at.elapsed() >= SHORTEST_INTERVAL) {
            shared.write();
        }
    }
}

/// Whether the copy is over.
#[derive(Default)]
struct End {
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl End {
    fn wait(&self, limit: Duration) -> bool {
        let mut is_over = self.is_over.lock();
        self.changed.wait_while_for(&mut is_over, |is_over| !*is_over, limit);
        *is_over
    }
}

/// Ends the thread that writes, also if the copy panics.
struct Ending<'a>(&'a End);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        *self.0.is_over.lock() = true;
        self.0.changed.notify_all();
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.write();
        }
    }
}

impl Current {
    fn sample(&mut self, remote: &dyn Remote) {
        self.counts.line = self.before.map(|before| remote.traffic() - before);
    }
}

impl State {
    /// Brings the update of the present machine up to date.
    fn gather(&mut self) {
        let Some(current) = &mut self.current else { return };
        let Some(update) = self.updates.get_mut(&current.far_machine) else { return };
        let Some(last) = &mut update.last else { return };
        let rates = current.rates();
        (last.bytes_per_second, last.sent_bytes_per_second) = rates;
        last.updated_at_ms = now_ms();
        last.done_bytes = current.point_done_bytes();
        last.counts = current.counts();
        update.added = update.added.plus(last.counts.minus(current.counted));
        current.counted = last.counts;
    }
}

impl Shared {
    fn is_line(&self) -> bool {
        matches!(self.target, CopyTarget::Link(_))
    }

    fn write(&self) {
        let _one = self.writing.lock();
        let mut state = self.state.lock();
        state.written = Some(Instant::now());
        state.gather();
        if state.updates.is_empty() {
            return;
        }
        let updates = state.updates.clone();
        // The machine whose turn it is continues; those that ended are done.
        state.updates.retain(|_, update| update.end.is_none());
        state.updates.values_mut().for_each(|update| update.added = CopyCounts::default());
        let remote = state.remote;
        drop(state);
        let written = self.records.change(&self.target, |document| {
            if let Some(remote) = remote {
                if document.repository.replace(remote).is_some_and(|before| before != remote) {
                    document.machines.clear();
                }
                document.failure = None;
                document.is_of_all |= self.is_of_all;
            }
            for (far_machine, update) in &updates {
                let new = || MachineRecord::new(update.machine.clone());
                // The record of a copy that failed before its name there was known.
                let unknown = new();
                document.machines.retain(|_, record| *record != unknown);
                update.apply(document.machines.entry(far_machine.clone()).or_insert_with(new));
            }
        });
        let Err(error) = written else { return };
        let mut state = self.state.lock();
        for (far_machine, update) in updates {
            let added = update.added;
            let none = CopyCounts::default();
            let kept = state.updates.entry(far_machine);
            let kept = kept.or_insert(Update { added: none, ..update });
            kept.added = kept.added.plus(added);
        }
        if !std::mem::replace(&mut state.has_warned, true) {
            tracing::warn!("the progress of the copy cannot be recorded: {}", error.full_message());
        }
    }
}
