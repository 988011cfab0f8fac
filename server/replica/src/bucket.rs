//! A bucket as the place to which points are copied, and as the one from which they come back.
//!
//! The way back is a line in memory, as from another site: parts that have arrived are kept when the copy is
//! killed, and machines boot from a point while it comes.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Disk, Error, ErrorKind, Result};
use coldrise_bucket::{BucketDisk, BucketRepository, BucketWriter};
use coldrise_ingest::RateLimit;
use coldrise_inventory::{MachinePattern, Range};
use coldrise_line::pair;
use coldrise_session::{CarriedFiles, SharedWriter};
use coldrise_store::{
    BackupTarget, ClockGuard, DiskName, MachineName, PointDocument, Repository, RepositoryId,
};
use parking_lot::Mutex;

use crate::remote::{
    Announced, Announcement, CopyProgress, CopySummary, FetchRequest, Opening, Remote, fetch,
};
use crate::serve_fetch::serve_fetch;
use crate::source::CopySource;

/// A bucket to which points are copied.
pub struct BucketRemote {
    writer: BucketWriter,
    /// The machine whose boot trace was put last.
    traced: Mutex<Option<MachineName>>,
}

impl BucketRemote {
    /// Begins to write. The index of the bucket's contents is kept beside `source`.
    ///
    /// # Errors
    /// As for [`BucketWriter::begin`].
    pub fn begin(bucket: &Arc<BucketRepository>, source: &Repository) -> Result<BucketRemote> {
        let writer = BucketWriter::begin(bucket, source)?;
        Ok(BucketRemote { writer, traced: Mutex::default() })
    }
}

/// Fetches points from a bucket. `prefix` begins the names that the machines get; `limit`: on the bytes read there.
///
/// # Errors
/// `NotFound` for an unknown machine; errors of reaching the bucket, and of the repository; `Interrupted` once `cancel` is set.
pub fn fetch_from_bucket(
    bucket: &Arc<BucketRepository>,
    remote: &SharedWriter<'_>,
    request: &FetchRequest,
    (prefix, limit): (&str, Option<Arc<RateLimit>>),
    progress: &dyn CopyProgress,
    cancel: &Arc<AtomicBool>,
) -> Result<CopySummary> {
    request.machines.iter().try_for_each(|machine| bucket.check_machine(machine))?;
    let (near, there) = pair();
    let fetched = std::thread::scope(|scope| {
        scope.spawn(|| {
            let all = [MachinePattern::all()];
            // The question, which is known here.
            let asked = Opening::of(&there, cancel);
            let served = asked
                .and_then(|_| serve_fetch(Arc::new(there), bucket, request, &all, limit, cancel));
            if let Err(error) = served {
                // This side hears it, too.
                tracing::debug!("{}", error.full_message());
            }
        });
        fetch(&near, remote, request, prefix, progress, cancel)
    });
    match fetched.loss {
        Some(loss) => Err(loss),
        None => fetched.copied,
    }
}

impl Remote for BucketRemote {
    fn target(&self) -> &dyn BackupTarget {
        &self.writer
    }

    fn id(&self) -> Result<RepositoryId> {
        Ok(*BucketRepository::id(self.writer.repository()))
    }

    /// There is nothing that could be claimed: points of two copies lie side by side.
    fn claim(&self, _machine: &MachineName) -> Result<Box<dyn Any>> {
        Ok(Box::new(()))
    }

    fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        BucketRepository::points(self.writer.repository(), machine)
    }

    /// While this writes, no space is returned there. A point of which something was lost is not a base: the next one would lack
    /// it, too.
    fn keep_base(&self, base: &PointDocument) -> Result<bool> {
        let found = self.writer.repository().point(&base.machine, &base.point)?;
        let is_whole = found.as_ref().map(|found| self.writer.is_whole(found)).transpose()?;
        if is_whole == Some(false) {
            tracing::warn!(
                "{}: {}/{} is damaged and cannot be a base: coldrise bucket verify shows the damage",
                self.writer.repository().place(),
                base.machine,
                base.point
            );
        }
        Ok(is_whole == Some(true))
    }

    /// A trace of the machine's boots is kept beside the points.
    fn announce(&self, announcement: &Announcement<'_>) -> Result<Announced> {
        let machine = &announcement.document.machine;
        let mut traced = self.traced.lock();
        if let (Some(trace), true) = (&announcement.trace, traced.as_ref() != Some(machine)) {
            self.writer.repository().put_boot_trace(machine, trace)?;
            *traced = Some(machine.clone());
        }
        Ok(Announced::nothing(announcement.disks.len()))
    }

    fn add_point(
        &self,
        mut document: PointDocument,
        files: &CarriedFiles,
    ) -> Result<PointDocument> {
        let encoded = match files.files.is_empty() {
            true => None,
            false => Some(files.encode()?),
        };
        document.files = encoded.as_ref().map(|encoded| {
            let contents = files.files.iter().filter_map(|file| file.content.as_ref());
            let size_bytes = contents.map(|content| content.len() as u64).sum();
            self.writer.repository().facts_of_files(files.files.len(), size_bytes, encoded)
        });
        self.writer.put_point(&document, encoded.as_deref())?;
        Ok(document)
    }

    fn pending_bytes(&self) -> u64 {
        self.writer.pending_bytes()
    }

    fn begin_again(&self) -> Result<bool> {
        Ok(false)
    }
}

impl CopySource for Arc<BucketRepository> {
    fn id(&self) -> RepositoryId {
        *BucketRepository::id(self)
    }

    fn machines(&self) -> Result<Vec<MachineName>> {
        BucketRepository::machines(self)
    }

    fn check_machine(&self, machine: &MachineName) -> Result<()> {
        if !BucketRepository::points(self, machine)?.is_empty() {
            return Ok(());
        }
        let machines = BucketRepository::machines(self)?;
        let names: Vec<_> = machines.iter().map(MachineName::as_str).collect();
        let there = match names.is_empty() {
            true => "there are none".to_owned(),
            false => format!("there are {}", names.join(", ")),
        };
        let text = format!("{}: there is no machine {machine}; {there}", self.place());
        Err(Error::new(ErrorKind::NotFound, text))
    }

    fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        BucketRepository::points(self, machine)
    }

    fn clock_guard(&self, _machine: &MachineName) -> Result<ClockGuard> {
        Ok(ClockGuard::new(None))
    }

    fn hold(&self, point: &mut PointDocument) -> Result<Box<dyn Any>> {
        let found = self.point(&point.machine, &point.point)?;
        *point = found.ok_or_else(|| {
            let text = format!("{}/{} no longer exists", point.machine, point.point);
            Error::new(ErrorKind::NotFound, text)
        })?;
        Ok(Box::new(()))
    }

    fn disk(&self, point: &PointDocument, name: &DiskName) -> Result<Arc<dyn Disk>> {
        Ok(Arc::new(disk_of(self, point, name)?))
    }

    fn changed(
        &self,
        base: &PointDocument,
        point: &PointDocument,
        name: &DiskName,
        cancel: &AtomicBool,
    ) -> Result<Vec<Range>> {
        if cancel.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
        let changed = disk_of(self, point, name)?.changed_since(&disk_of(self, base, name)?)?;
        let range = |(offset_bytes, length_bytes)| Range { offset_bytes, length_bytes };
        Ok(changed.into_iter().map(range).collect())
    }

    fn files(&self, point: &PointDocument) -> Result<CarriedFiles> {
        match self.point_files(point)? {
            Some(encoded) => CarriedFiles::decode(&encoded),
            None => Ok(CarriedFiles::default()),
        }
    }

    fn boot_trace(&self, machine: &MachineName) -> Option<Vec<u8>> {
        let read = BucketRepository::boot_trace(self, machine);
        read.inspect_err(|error| tracing::debug!("{}", error.full_message())).ok()?
    }
}

/// A disk of a point.
fn disk_of(
    bucket: &Arc<BucketRepository>,
    point: &PointDocument,
    name: &DiskName,
) -> Result<BucketDisk> {
    let disk = point.disk(name).ok_or_else(|| {
        let text = format!("{}/{} has no disk {name}", point.machine, point.point);
        Error::new(ErrorKind::NotFound, text)
    })?;
    Ok(BucketRepository::disk(bucket, disk))
}
