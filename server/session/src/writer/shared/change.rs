//! Changes of points, whichever process holds the writer.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::Result;
use coldrise_store::Repository;

use super::change_through_backup;
use crate::points::change::change_points;
use crate::sockets::point_change::PointChange;
use crate::writer::access::RepositoryAccess;

impl RepositoryAccess {
    /// Makes the change that `choose` decides on, and returns what else it returns.
    ///
    /// # Errors
    /// As for [`RepositoryAccess::write_beside_backups`].
    pub fn change_points<T>(
        &self,
        cancel: &AtomicBool,
        choose: impl Fn(&Arc<Repository>) -> Result<(T, PointChange)>,
    ) -> Result<T> {
        self.write_beside_backups(
            |writer| {
                let (chosen, change) = choose(writer.repository())?;
                change_points(&writer, &change).map(|()| chosen)
            },
            |repository| {
                let (chosen, change) = choose(repository)?;
                Ok(change_through_backup(repository, &change, cancel)?.then_some(chosen))
            },
        )
    }
}
