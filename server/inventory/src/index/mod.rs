//! The index: every restore point of a repository in a few dozen bytes.
//!
//! An index never changes. A newer one takes over what the catalog shows to be the same, and opens
//! only the documents of new and changed points.

mod build;
mod views;

use std::collections::BTreeMap;
use std::sync::Arc;

use coldrise_store::{
    BootVerdict, CatalogDamage, ClockGuard, MachineId, MachineName, MarkerId, PointName, Quarantine,
};

use crate::listing::DiskList;

pub(crate) use build::Sources;

/// Every machine with its points.
#[derive(Debug, Default)]
pub(crate) struct Index {
    machines: BTreeMap<MachineName, Arc<IndexedMachine>>,
    /// Points whose marker exists, but which are missing.
    lost: Vec<(MachineName, PointName)>,
    /// Documents of the catalog that cannot be read.
    damaged: Vec<CatalogDamage>,
}

/// A machine.
#[derive(Debug, Default, PartialEq)]
struct IndexedMachine {
    id: MachineId,
    /// Version of the machine's document; 0 if it is unreadable or waits in a session.
    version: u64,
    /// The backup that was stored last.
    last_backup: Option<PointName>,
    /// Oldest first.
    points: Vec<IndexedPoint>,
    /// The different shapes that its points have.
    shapes: Vec<PointShape>,
    lost: Vec<PointName>,
}

/// Values that many points of a machine share.
#[derive(Clone, Debug, Default, PartialEq)]
struct PointShape {
    disks: DiskList,
    display_name: Option<Arc<str>>,
}

/// A point. 100,000 of them are held in memory.
#[derive(Clone, Debug, PartialEq)]
struct IndexedPoint {
    /// The name: sorts like it.
    key: [u8; 12],
    /// Index in the machine's `shapes`.
    shape: u32,
    /// Version of its document; 0 for a point that waits in its session.
    version: u64,
    created_at_ms: u64,
    /// The time of the mark that it shows; 0 if it shows none.
    marked_at_ms: u64,
    marker: MarkerId,
    boot: Option<Arc<IndexedBoot>>,
    flags: PointFlags,
}

const _: () = assert!(size_of::<IndexedPoint>() <= 72);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PointFlags {
    is_synthetic: bool,
    /// In the document.
    has_protection: bool,
    /// In the document.
    document_quarantine: Option<Quarantine>,
    /// In the document or beside the marker.
    is_protected: bool,
    quarantine: Option<Quarantine>,
}

/// A boot check.
#[derive(Debug, PartialEq, Eq)]
struct IndexedBoot {
    /// Version of its file.
    version: u64,
    /// `None` if it cannot be read.
    result: Option<BootResult>,
}

#[derive(Debug, PartialEq, Eq)]
struct BootResult {
    verdict: BootVerdict,
    is_worse: bool,
    checked_at_ms: u64,
    stage: Option<Box<str>>,
}

impl IndexedMachine {
    /// As [`Repository::clock_guard`](coldrise_store::Repository::clock_guard).
    fn clock_guard(&self) -> ClockGuard {
        let is_offered = |name: &&PointName| {
            self.find(&name.sort_key()).is_some_and(|point| point.flags.quarantine.is_none())
        };
        ClockGuard::new(self.last_backup.as_ref().filter(is_offered))
    }

    fn find(&self, key: &[u8; 12]) -> Option<&IndexedPoint> {
        let at = self.points.binary_search_by(|point| point.key.cmp(key)).ok()?;
        self.points.get(at)
    }
}

impl IndexedPoint {
    /// The name. Every key was made from one.
    fn name(&self) -> Option<PointName> {
        PointName::from_sort_key(&self.key)
    }

    fn marked_at_ms(&self) -> Option<u64> {
        Some(self.marked_at_ms).filter(|time| *time != 0)
    }

    fn boot(&self) -> Option<&BootResult> {
        self.boot.as_ref().and_then(|boot| boot.result.as_ref())
    }
}

impl Index {
    /// The machines that differ, sorted.
    pub(crate) fn changed_since(&self, before: &Index) -> Vec<MachineName> {
        let is_same = |name: &MachineName| self.machines.get(name) == before.machines.get(name);
        let mut changed: Vec<_> = self.machines.keys().chain(before.machines.keys()).collect();
        changed.retain(|name| !is_same(name));
        changed.sort_unstable();
        changed.dedup();
        changed.into_iter().cloned().collect()
    }

    /// The unreadable documents.
    pub(crate) fn damaged(&self) -> &[CatalogDamage] {
        &self.damaged
    }

    /// The lost points.
    pub(crate) fn lost(&self) -> &[(MachineName, PointName)] {
        &self.lost
    }
}
