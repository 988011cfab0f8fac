//! Makes changes of points. Whichever process holds the writer does.

use coldrise_block::Result;
use coldrise_store::RepositoryWriter;

use crate::points::catalog::enter_sealed_points;
use crate::points::forget::PointRemoval;
use crate::points::quarantine::set_quarantine;
use crate::sockets::point_change::PointChange;

/// Makes the change. Durable on return.
///
/// # Errors
/// `NotFound` if a point is not in the catalog; `Busy` if a point to be removed is published; `NoSpace`.
pub(crate) fn change_points(writer: &RepositoryWriter, change: &PointChange) -> Result<()> {
    match change {
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
