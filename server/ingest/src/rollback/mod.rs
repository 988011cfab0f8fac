//! Rolls existing disks back to a restore point, and writes only where they differ.
//!
//! ```text
//!   1 check the targets ─▶ 2 safety point ─▶ 3 candidates ─▶ 4 compare and write ─▶ 5 flush ─▶ 6 verify
//! ```
//!
//! Candidates are the ranges where a target can differ: between the safety point and the wanted one, else
//! between the point that a dirty bitmap counts from and the wanted one together with the bitmap, else the
//! whole disk. Candidates are still compared, so equal blocks are never written.
//!
//! Invariants, and why a crash at any step is safe:
//! - Nothing is written before the safety point is stored and durable. A crash before that leaves all
//!   targets as they were.
//! - A block of a target holds its old bytes or the wanted ones. A crash while writing leaves a mixture;
//!   the command says that it is not a whole state, and the safety point holds the old one.
//! - Nothing is remembered for the next run. It finds its candidates again: the safety point of the next
//!   run is read from the mixture, and the bitmap only ever gains bits, so a block that still differs from
//!   the wanted point is a candidate again. Running the command again therefore finishes it.
//! - The next run believes a bitmap for its safety point only if the bitmap counts from the last backup,
//!   which after a crash is the first safety point: it then reads everything.

mod candidates;
mod host_disks;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind, Progress, Result};
use coldrise_session::{Catalog, ReadLease, open_point_disk};
use coldrise_store::{DiskName, PointDocument, PointName, PointSelector, Repository};

use crate::{
    BackupRequest, Differences, ExistingDisk, ImageFormat, Location, Purpose, RestoreTarget,
    SourceSpec,
};

pub use candidates::Bitmap;
pub use host_disks::HostDisks;

/// The program's name in leases, for people.
const PROGRAM: &str = "rollback";

/// A disk of the point and the existing disk that becomes equal to it.
#[derive(Clone, Debug)]
pub struct RollbackDisk {
    /// The disk of the point.
    pub disk: DiskName,
    /// The existing disk: a raw file, a block device or an NBD export of the same size.
    pub target: RestoreTarget,
}

impl RollbackDisk {
    /// Parses `DISK=TARGET`.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub fn parse(text: &str) -> Result<RollbackDisk> {
        let Some((disk, target)) = text.split_once('=') else {
            let text =
                format!("'{text}' names no disk: write DISK=TARGET, such as vda=/dev/vg0/web01");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        };
        Ok(RollbackDisk { disk: DiskName::parse(disk)?, target: RestoreTarget::parse(target)? })
    }
}

/// Options of a rollback.
#[derive(Clone, Debug, Default)]
pub struct RollbackOptions {
    /// Count the differences and write nothing.
    pub is_dry_run: bool,
    /// Store the present state as a restore point first.
    pub takes_safety_point: bool,
    /// Compare whole disks at the end instead of what was written.
    pub verifies_all: bool,
    /// A dirty bitmap that every target exports.
    pub bitmap: Option<Bitmap>,
}

/// How the differences of a disk were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Between two points: the present state was just stored.
    Points,
    /// Between two points, together with a dirty bitmap.
    Bitmap,
    /// By reading the whole target.
    Compare,
}

/// The result for one disk.
#[derive(Clone, Debug)]
pub struct RolledBackDisk {
    /// The disk.
    pub disk: DiskName,
    /// Its target.
    pub target: RestoreTarget,
    /// Its size.
    pub size_bytes: u64,
    /// How the differences were found.
    pub method: Method,
    /// The ranges that differed, and were written unless it was a dry run.
    pub differences: Differences,
    /// Bytes read again at the end.
    pub verified_bytes: u64,
}

/// The result of a rollback.
#[derive(Clone, Debug)]
pub struct RollbackSummary {
    /// The point that holds the state before; `None` if none was taken.
    pub safety_point: Option<PointName>,
    /// The disks.
    pub disks: Vec<RolledBackDisk>,
    /// Remarks for the user.
    pub remarks: Vec<String>,
}

/// Called once, after the checks and before the first write; not in a dry run. Stores the present state of the disks as a
/// restore point if that is requested, and returns its name.
pub type BeforeWriting<'a> = &'a dyn Fn(Option<&BackupRequest>) -> Result<Option<PointName>>;

/// A rollback that is under way.
struct Rollback<'a> {
    repository: &'a Arc<Repository>,
    wanted: &'a PointDocument,
    disks: &'a [RollbackDisk],
    options: &'a RollbackOptions,
    progress: &'a dyn Progress,
    cancel: &'a AtomicBool,
}

/// Makes the targets of `disks` equal to the disks of `wanted`.
///
/// # Errors
/// `InvalidInput` for a contradictory request or a target of another size, `Busy` if a target is in use,
/// `Corrupt` if the verification finds a difference; errors of the targets, of the repository and of
/// `before_writing`. After an error in step 4 or later the message says that the disk is a mixture.
pub fn rollback(
    repository: &Arc<Repository>,
    wanted: &mut PointDocument,
    disks: &[RollbackDisk],
    options: &RollbackOptions,
    before_writing: BeforeWriting<'_>,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<RollbackSummary> {
    check_disks(wanted, disks)?;
    let _held = ReadLease::point(repository, PROGRAM, wanted)?;
    let wanted = &*wanted;
    let rollback = Rollback { repository, wanted, disks, options, progress, cancel };
    if let Some(bitmap) = &options.bitmap {
        bitmap.check(repository, wanted, disks)?;
    }
    let mut remarks = Vec::new();
    // A mistake in the last target shows before anything is stored or written.
    for disk in disks {
        drop(rollback.open(disk)?);
    }
    let mut safety_point = None;
    if !options.is_dry_run {
        let is_wanted = options.takes_safety_point;
        let request = is_wanted.then(|| rollback.safety_request(&mut remarks)).transpose()?;
        safety_point = before_writing(request.as_ref()).map_err(|error| {
            error.context("storing the present state first (nothing was written yet)")
        })?;
    }
    let mut done = Vec::with_capacity(disks.len());
    for disk in disks {
        let result = rollback.roll_back(disk, safety_point.as_ref());
        done.push(result.map_err(|error| rollback.mixture(error, disk, safety_point.as_ref()))?);
    }
    Ok(RollbackSummary { safety_point, disks: done, remarks })
}

fn check_disks(wanted: &PointDocument, disks: &[RollbackDisk]) -> Result<()> {
    let mut names: Vec<&DiskName> = disks.iter().map(|disk| &disk.disk).collect();
    names.sort();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        let text = format!("disk {} is named twice", pair[0]);
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let mut targets: Vec<String> = disks.iter().map(|disk| disk.target.to_string()).collect();
    targets.sort();
    if let Some(pair) = targets.windows(2).find(|pair| pair[0] == pair[1]) {
        let text = format!("{} is the target of two disks", pair[0]);
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    names.into_iter().try_for_each(|name| coldrise_inventory::find_disk(wanted, name).map(|_| ()))
}

impl Rollback<'_> {
    fn size_bytes(&self, disk: &RollbackDisk) -> u64 {
        // The disks were checked.
        self.wanted.disk(&disk.disk).map_or(0, |found| found.size_bytes)
    }

    fn open(&self, disk: &RollbackDisk) -> Result<ExistingDisk<'_>> {
        let bitmap = self.options.bitmap.as_ref().map(|bitmap| bitmap.name.as_str());
        let (size, writes) = (self.size_bytes(disk), !self.options.is_dry_run);
        ExistingDisk::open(&disk.target, size, bitmap, writes, self.cancel)
            .map_err(|error| error.context(&disk.disk))
    }

    /// The backup that stores the present state: incremental if the bitmap counts from the last backup.
    fn safety_request(&self, remarks: &mut Vec<String>) -> Result<BackupRequest> {
        let source = |disk: &RollbackDisk| SourceSpec {
            disk: disk.disk.clone(),
            location: match &disk.target {
                RestoreTarget::Nbd(uri) => Location::Nbd { uri: uri.clone() },
                RestoreTarget::Path(path) => {
                    Location::Image { path: path.clone(), format: ImageFormat::Raw }
                }
            },
        };
        let machine = &self.wanted.machine;
        let last = self.repository.last_backup(machine)?;
        let bitmap = self.options.bitmap.as_ref().filter(|bitmap| {
            let is_usable = last.as_ref() == Some(&bitmap.since);
            if !is_usable {
                remarks.push(format!(
                    "bitmap {} counts from {machine}/{}, which is not the last backup: the safety \
                     point reads everything",
                    bitmap.name, bitmap.since
                ));
            }
            is_usable
        });
        if self.disks.len() < self.wanted.disks.len() {
            remarks.push(format!(
                "the safety point holds {} of {} disks, and is now the latest point of {machine}",
                self.disks.len(),
                self.wanted.disks.len()
            ));
        }
        Ok(BackupRequest {
            machine: machine.clone(),
            disks: self.disks.iter().map(source).collect(),
            bitmap: bitmap.map(|bitmap| bitmap.name.clone()),
            follow_backing: false,
            configuration: self.wanted.configuration.clone(),
            parts: self.wanted.parts.clone(),
            display_name: self.wanted.display_name.clone(),
            point: None,
            threads: 0,
            rate: None,
        })
    }

    /// Steps 3 to 6 for one disk.
    fn roll_back(&self, disk: &RollbackDisk, safety: Option<&PointName>) -> Result<RolledBackDisk> {
        let content = open_point_disk(self.repository, self.wanted, &disk.disk)?;
        let existing = self.open(disk)?;
        let size_bytes = content.size_bytes();
        let (ranges, method) = self.candidates(disk, &existing, safety)?;
        let purpose = if self.options.is_dry_run { Purpose::Count } else { Purpose::Write };
        let differences = existing.compare(content.as_ref(), &ranges, purpose, self.progress)?;
        let mut verified_bytes = 0;
        if !self.options.is_dry_run {
            existing.finish()?;
            let everything: Vec<_> = std::iter::once(0..size_bytes).collect();
            let ranges = if self.options.verifies_all { &everything } else { &differences.touched };
            let check =
                existing.compare(content.as_ref(), ranges, Purpose::Verify, self.progress)?;
            if check.range_count > 0 {
                let text = format!(
                    "{}: {} bytes in {} ranges differ from the point after the rollback",
                    disk.target, check.differing_bytes, check.range_count
                );
                return Err(Error::new(ErrorKind::Corrupt, text));
            }
            verified_bytes = check.compared_bytes;
        }
        let (disk, target) = (disk.disk.clone(), disk.target.clone());
        Ok(RolledBackDisk { disk, target, size_bytes, method, differences, verified_bytes })
    }

    /// Where the target can differ from the wanted point.
    fn candidates(
        &self,
        disk: &RollbackDisk,
        existing: &ExistingDisk<'_>,
        safety: Option<&PointName>,
    ) -> Result<(Vec<Range<u64>>, Method)> {
        let between = |from: &PointName| {
            candidates::between(self.repository, self.wanted, from, &disk.disk, self.cancel)
        };
        if let Some(safety) = safety {
            return Ok((between(safety)?, Method::Points));
        }
        match &self.options.bitmap {
            Some(bitmap) => {
                let mut ranges = between(&bitmap.since)?;
                ranges.extend(existing.dirty_ranges()?);
                Ok((ranges, Method::Bitmap))
            }
            None => Ok((std::iter::once(0..self.size_bytes(disk)).collect(), Method::Compare)),
        }
    }

    /// An error after the first write may have happened.
    fn mixture(&self, error: Error, disk: &RollbackDisk, safety: Option<&PointName>) -> Error {
        if self.options.is_dry_run {
            return error;
        }
        let (machine, wanted, target) = (&self.wanted.machine, &self.wanted.point, &disk.target);
        let before = match safety {
            Some(point) => format!("; the state before is {machine}/{point}"),
            None => String::new(),
        };
        error.advise(format!(
            "{target} may hold a mixture of two states: do not start a machine from it, and roll back \
             to {machine}/{wanted} again{before}"
        ))
    }
}

/// The named point of the wanted point's machine.
fn point_of(
    repository: &Arc<Repository>,
    wanted: &PointDocument,
    name: &PointName,
) -> Result<PointDocument> {
    Catalog::new(repository).point(&wanted.machine, &PointSelector::Exact(name.clone()))
}
