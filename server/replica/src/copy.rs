//! The copy of machines to another repository.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::{Pace, RateLimit, StoredDisk, Watch, store_source};
use coldrise_store::{DiskDocument, MachineName, PointDocument, PointName, Repository};

use crate::disk_copy::{Common, DiskCopy};
use crate::plan::{Plan, Side, Wanted, base_of, came_by, comes_back, made_in, places_before};
use crate::remote::{
    Announced, Announcement, CopiedPoint, CopyProgress, CopyStep, CopySummary, MachineCopy,
    PartialMap, Remote,
};
use crate::source::CopySource;
use crate::status::{CopyCounts, CopyTarget, Cut, Recorder, Seen, Watching};

/// The points to copy.
#[derive(Clone, Default)]
pub struct CopyRequest {
    /// The machines; empty: all.
    pub machines: Vec<MachineName>,
    /// The name that the only machine of `machines` gets there.
    pub rename: Option<MachineName>,
    /// The prefix of machine names there.
    pub prefix: String,
    /// Also points that are older than the youngest one that is there.
    pub is_all: bool,
    /// Of each machine only the newest points that are not there.
    pub last: Option<usize>,
    /// This point alone, also if it is older than the youngest one there.
    pub only: Option<PointName>,
    /// The limit on the bytes read; `None`: no limit.
    pub limit: Option<Arc<RateLimit>>,
    /// Under which target the copy is recorded, and in which repository; `None`: it is not.
    pub target: Option<(Arc<Repository>, CopyTarget)>,
}

/// Copies points to the repository of `remote`, machine after machine, oldest point first. What one machine prevents
/// is in its [`MachineCopy::error`]; the others are copied.
///
/// # Errors
/// `InvalidInput` for names that are not possible there, or if both are one repository; `NotFound` for an unknown
/// machine; `Interrupted` once `cancel` is set, `NoSpace`: copied points stay, and the next copy continues.
pub fn copy(
    source: &dyn CopySource,
    remote: &dyn Remote,
    request: &CopyRequest,
    progress: &dyn CopyProgress,
    cancel: &AtomicBool,
) -> Result<CopySummary> {
    if source.id() == remote.id()? {
        let text = "both are the same repository, or one is a copy of the other's files";
        return Err(Error::new(ErrorKind::InvalidInput, text)
            .advise("make a new repository there with coldrise init"));
    }
    request.machines.iter().try_for_each(|machine| source.check_machine(machine))?;
    let machines = match request.machines.is_empty() {
        true => source.machines()?,
        false => request.machines.clone(),
    };
    let machines = machines
        .into_iter()
        .map(|m| Ok((m.clone(), far_name(request, &m)?)))
        .collect::<Result<Vec<_>>>()?;
    progress.reached(&CopyStep::Machines(&machines));
    let recorder = Recorder::new(request.target.as_ref(), request.machines.is_empty());
    let watching = Watching::new(&recorder, remote, progress);
    let run = CopyRun {
        source,
        remote,
        request,
        progress,
        watched: &watching,
        recorder: &recorder,
        cancel,
    };
    recorder.beside(&watching, || run.copy_machines(machines))
}

/// State that the copies of all machines share.
struct CopyRun<'a> {
    source: &'a dyn CopySource,
    remote: &'a dyn Remote,
    request: &'a CopyRequest,
    progress: &'a dyn CopyProgress,
    watched: &'a Watching<'a>,
    recorder: &'a Recorder,
    cancel: &'a AtomicBool,
}

impl CopyRun<'_> {
    /// `machines`: the names here and there.
    fn copy_machines(&self, machines: Vec<(MachineName, MachineName)>) -> Result<CopySummary> {
        let CopyRun { source, remote, request, progress, watched, recorder, cancel } = *self;
        let mut summary = CopySummary::default();
        for (machine, far_machine) in machines {
            let mut run = MachineRun {
                source,
                remote,
                request,
                pace: Pace { threads: 0, limit: request.limit.as_deref() },
                watched,
                progress,
                recorder,
                cancel,
                result: MachineCopy::new(machine, far_machine),
            };
            recorder.begin_machine(&run.result.machine, &run.result.far_machine);
            let before = remote.traffic();
            let done = run.copy_machine();
            run.result.traffic = remote.traffic() - before;
            recorder.end_machine(remote, &run.result.far_machine, done.as_ref().err());
            match done {
                // These stop every machine.
                Err(error)
                    if [ErrorKind::Interrupted, ErrorKind::NoSpace].contains(&error.kind()) =>
                {
                    return Err(error);
                }
                done => run.result.error = done.err(),
            }
            progress.reached(&CopyStep::Machine(&run.result));
            summary.machines.push(run.result);
        }
        Ok(summary)
    }
}

fn far_name(request: &CopyRequest, machine: &MachineName) -> Result<MachineName> {
    match &request.rename {
        Some(name) => Ok(name.clone()),
        None => format!("{}{machine}", request.prefix).parse(),
    }
}

struct MachineRun<'a> {
    source: &'a dyn CopySource,
    remote: &'a dyn Remote,
    request: &'a CopyRequest,
    pace: Pace<'a>,
    /// Gets the progress within disks.
    watched: &'a Watching<'a>,
    progress: &'a dyn CopyProgress,
    recorder: &'a Recorder,
    cancel: &'a AtomicBool,
    result: MachineCopy,
}

impl MachineRun<'_> {
    fn copy_machine(&mut self) -> Result<()> {
        loop {
            let claim = self.remote.claim(&self.result.far_machine)?;
            let done = self.copy_missing();
            if done.is_ok() || self.cancel.load(Ordering::Relaxed) {
                return done;
            }
            drop(claim);
            if !self.remote.begin_again()? {
                return done;
            }
        }
    }

    /// Plans, and copies what is missing.
    fn copy_missing(&mut self) -> Result<()> {
        let mut points = self.source.points(&self.result.machine)?;
        let (here_id, far_id) = (self.source.id(), self.remote.id()?);
        // Unless the request names this machine.
        if self.request.machines.is_empty() {
            let far_machine = &self.result.far_machine;
            points.retain(|point| !comes_back(&places_before(point), &far_id, far_machine));
        }
        let far_points = self.remote.points(&self.result.far_machine)?;
        let here = Side { repository: &here_id, machine: &self.result.machine, points: &points };
        let there =
            Side { repository: &far_id, machine: &self.result.far_machine, points: &far_points };
        let clock_guard = Some(self.source.clock_guard(&self.result.machine)?);
        let is_all = self.request.is_all || self.request.only.is_some();
        let wanted = Wanted { is_all, last: self.request.last, clock_guard };
        let mut plan = Plan::make(&here, &there, wanted)?;
        if let Some(only) = &self.request.only {
            plan.missing.retain(|at| points[*at].point == *only);
        }
        let names = |places: &[usize]| places.iter().map(|at| points[*at].point.clone()).collect();
        self.result.there = plan.there - self.result.copied.len().min(plan.there);
        self.result.passed_over = names(&plan.passed_over);
        self.result.quarantined = names(&plan.quarantined);
        self.recorder.planned(
            self.remote,
            far_id,
            &self.result.far_machine,
            Seen::of(&plan, &points),
            !plan.missing.is_empty(),
        );
        let common = |(here, there): (usize, usize)| Common {
            here: points[here].clone(),
            there: far_points[there].clone(),
        };
        let mut commons: Vec<Common> = plan.common.into_iter().map(common).collect();
        for at in plan.missing {
            let copied = self.copy_point(points[at].clone(), &mut commons);
            let address = format!("{}/{}", self.result.machine, points[at].point);
            match copied {
                // It was forgotten meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    tracing::warn!("{address} is not copied: {}", error.full_message());
                }
                copied => {
                    let copied = copied.map_err(|error| error.context(address))?;
                    self.progress.reached(&CopyStep::Point {
                        machine: &self.result.machine,
                        point: &copied,
                    });
                    self.result.copied.push(copied);
                }
            }
        }
        Ok(())
    }

    /// Copies one point.
    fn copy_point(
        &self,
        mut point: PointDocument,
        commons: &mut Vec<Common>,
    ) -> Result<CopiedPoint> {
        let started = Instant::now();
        self.recorder.begin_point(self.remote, &point.point);
        let _held = self.source.hold(&mut point)?;
        let base = self.lease_base(&point, commons)?;
        let (common, _held_base) = match base {
            Some((at, lease)) => (Some(&commons[at]), Some(lease)),
            None => (None, None),
        };
        let mut copied = CopiedPoint {
            point: point.point.clone(),
            base: common.map(|common| common.here.point.clone()),
            size_bytes: 0,
            read_bytes: 0,
            stored_bytes: 0,
            elapsed_ms: 0,
        };
        let parts = point.disks.iter().map(|disk| {
            DiskCopy::open(self.source, &point, disk, common, self.cancel)
                .map_err(|error| error.context(&disk.name))
        });
        let mut parts = parts.collect::<Result<Vec<_>>>()?;
        let announced = self.announce(&point, &parts)?;
        let mut disks = Vec::with_capacity(point.disks.len());
        for ((disk, part), begun) in point.disks.iter().zip(&mut parts).zip(&announced.begun) {
            let stored = self
                .copy_disk(&point, disk, part, *begun)
                .map_err(|error| error.context(&disk.name))?;
            copied.size_bytes += disk.size_bytes;
            copied.read_bytes += stored.read_bytes;
            copied.stored_bytes += stored.counts.stored_bytes;
            let (name, size_bytes) = (disk.name.clone(), disk.size_bytes);
            disks.push(DiskDocument { name, size_bytes, root: stored.root, layers: Vec::new() });
        }
        let there = self.put_point(&point, disks)?;
        self.recorder.end_point(
            self.remote,
            Cut::of(&point),
            CopyCounts {
                size_bytes: copied.size_bytes,
                read_bytes: copied.read_bytes,
                stored_bytes: copied.stored_bytes,
                ..CopyCounts::default()
            },
        );
        commons.push(Common { here: point, there });
        copied.elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Ok(copied)
    }

    /// Chooses the base of `point` and leases it on both sides. One that was forgotten meanwhile is none.
    fn lease_base(
        &self,
        point: &PointDocument,
        commons: &mut Vec<Common>,
    ) -> Result<Option<(usize, Box<dyn Any>)>> {
        loop {
            let candidates: Vec<_> = commons.iter().map(|common| &common.here).collect();
            let Some(at) = base_of(point, &candidates) else { return Ok(None) };
            match self.source.hold(&mut commons[at].here) {
                Ok(lease) if self.remote.keep_base(&commons[at].there)? => {
                    return Ok(Some((at, lease)));
                }
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => drop(commons.remove(at)),
            }
        }
    }

    /// Tells the remote side what comes.
    fn announce(&self, point: &PointDocument, parts: &[DiskCopy]) -> Result<Announced> {
        let document = self.document_there(point, &point.disks);
        let announcement = Announcement {
            document: &document,
            machine: &point.machine,
            disks: parts.iter().map(|part| part.announced(parts.len())).collect::<Result<_>>()?,
            files: &self.source.files(point)?,
            trace: self.source.boot_trace(&point.machine),
        };
        self.remote.announce(&announcement)
    }

    fn copy_disk(
        &self,
        point: &PointDocument,
        disk: &DiskDocument,
        part: &mut DiskCopy,
        begun: Option<PartialMap>,
    ) -> Result<StoredDisk> {
        let content = part.source.content(part.base_end_bytes, self.cancel)?;
        let address = format!("{}/{}/{}", point.machine, point.point, disk.name);
        let watch = Watch { disk: &address, progress: self.watched, cancel: self.cancel };
        let (mut root, mut end_bytes) = (part.base, part.base_end_bytes);
        // The range behind the end of a smaller base counts as changed, and no range covers it.
        let is_same_size = end_bytes.is_none_or(|end_bytes| end_bytes == disk.size_bytes);
        let begun = begun.filter(|_| is_same_size);
        self.watched.begin_disk(content, begun.map_or(0, |begun| begun.end_bytes));
        if let Some(begun) = begun {
            part.source.continue_at(begun.end_bytes);
            (root, end_bytes) = (Some(begun.root), Some(disk.size_bytes));
        }
        self.remote.compare_with(part.compared.take());
        let target = self.remote.target();
        let stored = store_source(target, &part.source, root, end_bytes, self.pace, &watch);
        self.watched.end_disk(stored.is_ok());
        stored
    }

    /// Adds the point to the remote side's catalog. Returns its document.
    fn put_point(&self, point: &PointDocument, disks: Vec<DiskDocument>) -> Result<PointDocument> {
        let files = self.source.files(point)?;
        self.remote.add_point(self.document_there(point, &disks), &files)
    }

    fn document_there(&self, point: &PointDocument, disks: &[DiskDocument]) -> PointDocument {
        PointDocument {
            machine: self.result.far_machine.clone(),
            point: point.point.clone(),
            created_at_ms: point.created_at_ms,
            origin: point.origin.clone(),
            disks: disks.to_vec(),
            configuration: point.configuration.clone(),
            parts: point.parts.clone(),
            // Protection and quarantine are the remote side's own.
            is_protected: false,
            files: None,
            quarantine: None,
            made_in: Some(made_in(&self.source.id(), point)),
            display_name: point.display_name.clone(),
            came_by: came_by(&self.source.id(), point),
        }
    }
}
