//! How much a point differs from the one before, without holes: bytes that a copy of it has to read.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use coldrise_block::Result;
use coldrise_session::{Catalog, ReadLease};
use coldrise_store::{MachineName, PointDocument, PointName, Repository};

use super::document::Cut;
use crate::changes::PointChanges;
use crate::plan::base_of;

/// The program's name in leases, for people.
const PROGRAM: &str = "copies";
/// Time for one machine. Points that are not compared by then count with their size.
const PATIENCE: Duration = Duration::from_millis(500);

/// The differences between points. Points never change, so it is computed once.
#[derive(Default)]
pub(super) struct Sizes(HashMap<(MachineName, PointName), Difference>);

struct Difference {
    base: Option<PointName>,
    bytes: u64,
    is_used: bool,
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bytes {
    pub(super) bytes: u64,
    /// It is what differs; otherwise it is the size of disks that were not compared, an upper bound.
    pub(super) is_exact: bool,
}

impl Sizes {
    /// The bytes that a copy of the points `missing` (oldest first) has to read, if `newest` is there.
    pub(super) fn of(
        &mut self,
        repository: &Arc<Repository>,
        machine: &MachineName,
        newest: Option<&Cut>,
        missing: &[Cut],
    ) -> Result<Bytes> {
        let mut sum = Bytes { bytes: 0, is_exact: true };
        if missing.is_empty() {
            return Ok(sum);
        }
        let is_named = |point: &PointDocument| {
            missing.iter().chain(newest).any(|cut| cut.point == point.point)
        };
        let mut points = Catalog::new(repository).points(machine)?;
        points.retain(is_named);
        points.sort_by_key(|point| (point.created_at_ms, point.point.clone()));
        let until = Instant::now() + PATIENCE;
        let mut known: Vec<&PointDocument> = Vec::new();
        for point in &points {
            if missing.iter().any(|cut| cut.point == point.point) {
                let base = base_of(point, &known).map(|place| known[place]);
                let found = self.difference(repository, point, base, until);
                let size_bytes = || point.disks.iter().map(|disk| disk.size_bytes).sum();
                sum.is_exact &= found.is_some();
                sum.bytes += found.unwrap_or_else(size_bytes);
            }
            known.push(point);
        }
        Ok(sum)
    }

    /// `None` if there is no time, or it cannot be read.
    fn difference(
        &mut self,
        repository: &Arc<Repository>,
        point: &PointDocument,
        base: Option<&PointDocument>,
        until: Instant,
    ) -> Option<u64> {
        let key = (point.machine.clone(), point.point.clone());
        let base_name = base.map(|base| base.point.clone());
        if let Some(known) = self.0.get_mut(&key).filter(|known| known.base == base_name) {
            known.is_used = true;
            return Some(known.bytes);
        }
        if Instant::now() >= until {
            return None;
        }
        let bytes = compare(repository, point.clone(), base.cloned()).ok()?;
        self.0.insert(key, Difference { base: base_name, bytes, is_used: true });
        Some(bytes)
    }

    /// Forgets what was not asked for since the last call.
    pub(super) fn forget_unused(&mut self) {
        self.0.retain(|_, known| std::mem::take(&mut known.is_used));
    }
}

fn compare(
    repository: &Arc<Repository>,
    mut point: PointDocument,
    mut base: Option<PointDocument>,
) -> Result<u64> {
    let _held = ReadLease::point(repository, PROGRAM, &mut point)?;
    let hold = |base: &mut PointDocument| ReadLease::point(repository, PROGRAM, base);
    let _held_base = base.as_mut().map(hold).transpose()?;
    let never = AtomicBool::new(false);
    let mut bytes = 0;
    for disk in &point.disks {
        let base_disk = base.as_ref().and_then(|base| base.disk(&disk.name));
        let base = base.as_ref().filter(|_| base_disk.is_some());
        let changes = PointChanges::open(repository, &point, base, &disk.name, &never)?;
        bytes += changes.content(base_disk.map(|disk| disk.size_bytes), &never)?.bytes();
    }
    Ok(bytes)
}
