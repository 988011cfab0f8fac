//! Where a target can differ from a point.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::Difference;
use coldrise_store::{Address, DiskName, PointDocument, PointName, PointSelector, Repository};

use super::{RollbackDisk, point_of};

/// Names of this prefix say from which point the bitmap counts: `coldrise-POINT`, or
/// `coldrise-REPOSITORY/MACHINE/DISK/POINT`, as backups of running machines name them.
const PREFIX: &str = "coldrise-";
/// Maximum number of ranges; more are joined, and the gaps between them compared, too.
const MAX_RANGES: usize = 1_000_000;

/// A dirty bitmap, and the point that it counts from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// The name under which the targets export it.
    pub name: String,
    /// All writes since this point are in the bitmap.
    pub since: PointName,
}

impl Bitmap {
    /// The bitmap that counts from `since`; its name by default is `coldrise-SINCE`.
    ///
    /// # Errors
    /// `InvalidInput` for the name of a bitmap that counts from another point.
    pub fn new(name: Option<String>, since: PointName) -> Result<Bitmap> {
        let usual = format!("{PREFIX}{since}");
        let name = name.unwrap_or_else(|| usual.clone());
        let is_other = name != usual && !name.ends_with(&format!("/{since}"));
        if name.starts_with(PREFIX) && is_other {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "bitmap {name} does not count from {since}: its name contains another point"
                ),
            ));
        }
        Ok(Bitmap { name, since })
    }

    /// Checks that the bitmap can be believed: its name names the point, or the point is the machine's
    /// last backup, from which backups with a bitmap of any name count.
    pub(super) fn check(
        &self,
        repository: &Arc<Repository>,
        wanted: &PointDocument,
        disks: &[RollbackDisk],
    ) -> Result<()> {
        let (machine, since) = (&wanted.machine, &self.since);
        let point = point_of(repository, wanted, since)?;
        disks
            .iter()
            .try_for_each(|disk| coldrise_inventory::find_disk(&point, &disk.disk).map(|_| ()))?;
        if self.name.starts_with(PREFIX) {
            return self.check_names(repository, wanted, disks);
        }
        if repository.last_backup(machine)?.as_ref() == Some(since) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "bitmap {} cannot be trusted: its name does not show that it counts from {since}, \
                 and {machine}/{since} is not the last backup",
                self.name
            ),
        )
        .advise("leave out --since and --bitmap: the target is then read and compared"))
    }

    /// A name with slashes is of one disk of this repository.
    fn check_names(
        &self,
        repository: &Arc<Repository>,
        wanted: &PointDocument,
        disks: &[RollbackDisk],
    ) -> Result<()> {
        let (machine, since, id) = (&wanted.machine, &self.since, repository.id());
        let is_of = |disk: &RollbackDisk| {
            self.name == format!("{PREFIX}{id:.8}/{machine}/{}/{since}", disk.disk)
        };
        match self.name.contains('/') && !disks.iter().all(is_of) {
            true => Err(Error::new(
                ErrorKind::InvalidInput,
                format!("bitmap {} is of another disk: roll disks back one by one", self.name),
            )),
            false => Ok(()),
        }
    }
}

/// The ranges in which a disk differs between point `from` and the wanted point.
pub(super) fn between(
    repository: &Arc<Repository>,
    wanted: &PointDocument,
    from: &PointName,
    disk: &DiskName,
    cancel: &AtomicBool,
) -> Result<Vec<Range<u64>>> {
    let address = |point: &PointName| Address::Point {
        machine: wanted.machine.clone(),
        selector: PointSelector::Exact(point.clone()),
        disk: Some(disk.clone()),
    };
    let (from, to) = (address(from), address(&wanted.point));
    let difference = Difference::read(repository, &from, &to, MAX_RANGES, cancel)?;
    let ranges = difference.disks.into_iter().flat_map(|disk| disk.ranges);
    Ok(ranges.map(|range| range.offset_bytes..range.offset_bytes + range.length_bytes).collect())
}
