//! Changes of points in the catalog. Whichever process holds the writer makes them.

use coldrise_block::Result;
use coldrise_store::{MachineName, PointName, Quarantine, RepositoryWriter};
use serde::{Deserialize, Serialize};

use crate::catalog::enter_sealed_points;
use crate::forget::PointRemoval;
use crate::quarantine::set_quarantine;

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

impl PointChange {
    /// Makes the change. Durable on return.
    ///
    /// # Errors
    /// `NotFound` if a point is not in the catalog; `Busy` if a point to be removed is published; `NoSpace`.
    pub fn apply(&self, writer: &RepositoryWriter) -> Result<()> {
        match self {
            PointChange::Remove { points, lost } => {
                // Lost points need no look at the sessions, which may be damaged.
                if !points.is_empty() {
                    PointRemoval::begin(writer)?.commit(points)?;
                }
                writer.forget_lost(lost)
            }
            // A recently sealed point may still be only in its session's document.
            PointChange::Protect { points, is_protected } => {
                enter_sealed_points(writer)?;
                writer.set_protected(points, *is_protected)
            }
            PointChange::Quarantine { points, quarantine } => {
                enter_sealed_points(writer)?;
                set_quarantine(writer, points, *quarantine)
            }
        }
    }
}
