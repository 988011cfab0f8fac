//! Machines and their restore points, as `list` shows them.

use std::sync::Arc;

use coldrise_block::Result;
use coldrise_session::Catalog;
use coldrise_store::{
    BootCheckDocument, BootVerdict, ClockGuard, MachineName, PointDocument, PointOrigin,
    Quarantine, Repository,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema::{BootVerdictSchema, QuarantineSchema};

/// Machines and their restore points.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Listing {
    /// The machines, sorted by name.
    pub machines: Vec<ListedMachine>,
    /// Addresses of lost points: their marker exists, but the point does not.
    pub lost: Vec<String>,
}

/// A machine with its restore points.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ListedMachine {
    /// The machine's name.
    pub machine: String,
    /// What people call it, by its newest point; absent if that is the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_name: Option<String>,
    /// Its points, oldest first.
    pub points: Vec<ListedPoint>,
}

/// A restore point in a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ListedPoint {
    /// MACHINE/POINT.
    pub address: String,
    /// The point's name.
    pub point: String,
    /// How it was made.
    pub kind: PointKind,
    /// When it was stored or sealed, in milliseconds since 1970-01-01T00:00:00Z.
    pub created_at_ms: u64,
    /// The time of the mark that it shows, in milliseconds since 1970-01-01T00:00:00Z; absent if it
    /// shows the machine as it was when it was stored or sealed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub marked_at_ms: Option<u64>,
    /// The sum of the sizes of its disks, in bytes.
    pub size_bytes: u64,
    /// Neither forget nor prune removes it.
    pub is_protected: bool,
    /// Later than the clock.
    pub is_in_future: bool,
    /// `latest` skips it: it is dated in the future, and a later backup exists.
    pub is_passed_over: bool,
    /// Why it is in quarantine; absent for a normal point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<QuarantineSchema>)]
    pub quarantine: Option<Quarantine>,
    /// The result of the last boot check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<BootVerdictSchema>)]
    pub boot: Option<BootVerdict>,
    /// It came less far than the machine's last good checks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_boot_worse: bool,
    /// The disks.
    #[schema(value_type = Vec<ListedDisk>)]
    pub disks: DiskList,
}

/// A disk in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ListedDisk {
    /// The disk's name.
    pub disk: String,
    /// Its size, in bytes.
    pub size_bytes: u64,
}

/// Disks, shared by all points of a machine that have the same ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskList(pub Arc<[ListedDisk]>);

impl DiskList {
    /// The disks of a point.
    pub fn new(point: &PointDocument) -> DiskList {
        let disks = point.disks.iter();
        let listed =
            disks.map(|d| ListedDisk { disk: d.name.to_string(), size_bytes: d.size_bytes });
        DiskList(listed.collect())
    }

    /// The sum of their sizes, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.0.iter().fold(0, |sum, disk| sum.saturating_add(disk.size_bytes))
    }
}

impl Serialize for DiskList {
    fn serialize<S: serde::Serializer>(&self, out: S) -> std::result::Result<S::Ok, S::Error> {
        self.0.as_ref().serialize(out)
    }
}

impl<'de> Deserialize<'de> for DiskList {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        Vec::deserialize(from).map(|disks| DiskList(disks.into()))
    }
}

/// How a point was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PointKind {
    /// By a backup.
    Backup,
    /// Sealed from a session.
    Synthetic,
}

impl PointKind {
    /// The kind of a point.
    pub fn of(origin: &PointOrigin) -> PointKind {
        match origin {
            PointOrigin::Backup { .. } => PointKind::Backup,
            PointOrigin::Synthetic { .. } => PointKind::Synthetic,
        }
    }

    /// One word for people.
    pub fn as_str(self) -> &'static str {
        match self {
            PointKind::Backup => "backup",
            PointKind::Synthetic => "synthetic",
        }
    }
}

impl ListedPoint {
    fn new(
        point: &PointDocument,
        clock_guard: &ClockGuard,
        boot: Option<&BootCheckDocument>,
    ) -> ListedPoint {
        let disks = DiskList::new(point);
        ListedPoint {
            address: format!("{}/{}", point.machine, point.point),
            point: point.point.to_string(),
            kind: PointKind::of(&point.origin),
            created_at_ms: point.created_at_ms,
            marked_at_ms: point.marked_at_ms(),
            size_bytes: disks.size_bytes(),
            is_protected: point.is_protected,
            is_in_future: clock_guard.is_in_future(&point.point),
            is_passed_over: clock_guard.is_passed_over(&point.point),
            quarantine: point.quarantine,
            boot: boot.map(|check| check.verdict),
            is_boot_worse: boot.is_some_and(|check| check.is_worse),
            disks,
        }
    }
}

impl Listing {
    /// Reads the points of one machine or of all, and the warnings about points dated in the
    /// future.
    ///
    /// # Errors
    /// `NotFound` for an unknown machine, naming the existing ones; `Corrupt` if a document does
    /// not authenticate.
    pub fn read(
        repository: &Arc<Repository>,
        only: Option<&MachineName>,
    ) -> Result<(Listing, Vec<String>)> {
        let catalog = Catalog::new(repository);
        let machines = match only {
            Some(machine) => {
                catalog.check_machine(machine)?;
                vec![machine.clone()]
            }
            None => catalog.machines()?,
        };
        let lost = catalog.lost_points(only)?;
        let lost = lost.iter().map(|(machine, point)| format!("{machine}/{point}")).collect();
        let mut listing = Listing { machines: Vec::with_capacity(machines.len()), lost };
        let mut warnings = Vec::new();
        for machine in machines {
            let points = catalog.points(&machine)?;
            let clock_guard = repository.clock_guard(&machine)?;
            warnings.extend(clock_guard.warning(&machine, points.iter().map(|point| &point.point)));
            let listed = |point| {
                ListedPoint::new(point, &clock_guard, boot_check(repository, point).as_ref())
            };
            let display_name = points.last().and_then(|point| point.display_name.clone());
            listing.machines.push(ListedMachine {
                machine: machine.to_string(),
                display_name: display_name.map(String::from),
                points: points.iter().map(listed).collect(),
            });
        }
        Ok((listing, warnings))
    }
}

/// A boot check that cannot be read is none; verify names it.
fn boot_check(repository: &Repository, point: &PointDocument) -> Option<BootCheckDocument> {
    let check = repository.boot_check(&point.machine, &point.point).ok().flatten();
    check.map(|(check, _)| check)
}
