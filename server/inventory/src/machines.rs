//! The state of each machine in a few words, and its points page by page.

use coldrise_store::{BootVerdict, PointName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::listing::{ListedPoint, PointKind};
use crate::schema::BootVerdictSchema;

/// The state of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineSummary {
    /// The machine's name, which addresses it.
    pub machine: String,
    /// What people call it, by its newest point; absent if that is the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_name: Option<String>,
    /// Number of its restore points.
    pub points: u64,
    /// The point that `latest` means; absent if all are in quarantine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latest: Option<PointSummary>,
    /// The newest point that is neither in quarantine nor dated in the future.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_good: Option<PointSummary>,
    /// The newest such point that a backup made. A sealed session says nothing about the age of the
    /// backups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_good_backup: Option<PointSummary>,
    /// The newest point whose last boot check succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_verified_boot: Option<BootBadge>,
    /// The last boot check of the newest point that has one. Until a newer one is checked, its result stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_boot_check: Option<BootBadge>,
    /// The last boot check of `latest`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootBadge>,
    /// Number of protected points.
    pub protected: u64,
    /// Number of points in quarantine.
    pub quarantined: u64,
    /// Addresses of lost points: their marker exists, but the point does not.
    pub lost: Vec<String>,
    /// Sum of the sizes of all disks of all points, in bytes.
    pub total_bytes: u64,
    /// A warning about points dated in the future.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// A restore point in a few words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PointSummary {
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
    /// The age of its content, in seconds: since the time in the name for a backup, since the mark
    /// or the seal for a synthetic point. 0 if that is in the future.
    pub age_seconds: u64,
    /// The sum of the sizes of its disks, in bytes.
    pub size_bytes: u64,
}

/// A boot check in a few words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BootBadge {
    /// The point that was checked.
    pub address: String,
    /// Whether it boots.
    #[schema(value_type = BootVerdictSchema)]
    pub verdict: BootVerdict,
    /// It came less far than the machine's last good checks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_worse: bool,
    /// The end of the check, in milliseconds since 1970-01-01T00:00:00Z.
    pub checked_at_ms: u64,
    /// The highest stage that was reached; absent if none was.
    #[serde(default, rename = "rung", skip_serializing_if = "Option::is_none")]
    pub stage: Option<String>,
}

/// The part of a machine's points that is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PointQuery {
    /// Only points later than this one.
    pub after: Option<PointName>,
    /// Only points earlier than this one.
    pub before: Option<PointName>,
    /// Only the newest of these, at most this many; `None` for all.
    pub limit: Option<usize>,
}

/// Restore points of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PointPage {
    /// The machine's name.
    pub machine: String,
    /// Number of all its points.
    pub total: u64,
    /// The points of this page, oldest first.
    pub points: Vec<ListedPoint>,
    /// The `before` of the page with earlier points; absent if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_before: Option<String>,
}
