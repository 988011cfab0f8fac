//! Verifying only what was stored lately.
//!
//! Chunk ids are in the order of storing. All chunks that a backup refers to were there
//! when it was stored; so whatever was stored after it has ids above the highest one
//! that it refers to. Chunks below that, which new points share with old ones, are left
//! to the verifies before.

use coldrise_block::Result;

use super::{chunks, maps, Coverage, VerifiedDisk, VerifyOptions, VerifyReport};
use crate::Repository;

/// Which disks are what to a verify of what is new.
#[derive(Clone, Copy, Debug)]
pub struct RecentDisks<'a> {
    /// Disks of backups that are no longer new: what was stored since lies above their
    /// chunks. Chunk maps of folded points do not belong here: a fold comes later than
    /// the point. With none of them everything is new.
    pub before: &'a [VerifiedDisk],
    /// Disks whose chunk maps are read whole.
    pub recent: &'a [VerifiedDisk],
    /// Every disk there is: looked at where something is damaged, to name what that
    /// affects.
    pub all: &'a [VerifiedDisk],
}

impl Repository {
    /// Verifies the chunks that were stored after those of `disks.before`, and the
    /// chunk maps of `disks.recent`; `options.coverage` does not count.
    ///
    /// # Errors
    /// As [`Repository::verify`].
    pub fn verify_recent(
        &self,
        disks: &RecentDisks<'_>,
        options: &VerifyOptions<'_>,
    ) -> Result<VerifyReport> {
        self.catch_up()?;
        let end = self.next_chunk()?;
        let first = maps::highest(self, disks.before, options.cancel)?.saturating_add(1).min(end);
        let options = VerifyOptions { coverage: Coverage::Everything, ..*options };
        let mut report = VerifyReport::default();
        let unusable = chunks::verify(self, first..end, None, &options, &mut report)?;
        maps::find_affected(self, disks.recent, &unusable, options.cancel, &mut report)?;
        if !report.is_clean() {
            report.damaged_pages.clear();
            report.affected.clear();
            maps::find_affected(self, disks.all, &unusable, options.cancel, &mut report)?;
        }
        Ok(report)
    }
}
