//! Changes of points in the catalog, as processes tell them to the one that holds the writer.

use coldrise_store::{MachineName, PointName, Quarantine};
use serde::{Deserialize, Serialize};

/// Machines and names of points.
type PointNames = Vec<(MachineName, PointName)>;

/// A change of points, all or none.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PointChange {
    /// Removes points from the catalog; then points of which only the marker survived.
    Remove {
        /// In the catalog.
        points: PointNames,
        /// Only their markers are left.
        lost: PointNames,
    },
    /// Protects points from forget and prune, or removes the protection.
    Protect {
        /// The points.
        points: PointNames,
        /// Whether they are protected from now on.
        is_protected: bool,
    },
    /// Quarantines points, or releases them.
    Quarantine {
        /// The points.
        points: PointNames,
        /// `None` to release them.
        quarantine: Option<Quarantine>,
    },
}
