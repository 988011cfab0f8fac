//! Verifies only recently stored chunks.
//!
//! Chunk ids are in storage order. All chunks that a backup refers to existed when it was stored,
//! so every chunk stored after it has a higher id than any of them. Chunks below that, which new
//! points share with old ones, are left to earlier verifies.

use coldrise_block::Result;

use super::{Coverage, VerifiedDisk, VerifyOptions, VerifyReport, chunks, maps};
use crate::Repository;

/// The disks of a verify of recent chunks, by role.
#[derive(Clone, Copy, Debug)]
pub struct RecentDisks<'a> {
    /// Disks of backups that are no longer new: everything stored since has higher ids than their
    /// chunks. Do not pass chunk maps of folded points, because a fold comes later than the point.
    /// If this is empty, everything is new.
    pub before: &'a [VerifiedDisk],
    /// Disks whose chunk maps are read completely.
    pub recent: &'a [VerifiedDisk],
    /// All disks; they are read only after damage, to name the affected ones.
    pub all: &'a [VerifiedDisk],
}

impl Repository {
    /// Verifies the chunks that were stored after those of `disks.before`, and the chunk maps of
    /// `disks.recent`; `options.coverage` is ignored.
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
        let of_chunks = report.clone();
        maps::find_affected(self, disks.recent, &unusable, options.cancel, &mut report)?;
        if !report.is_clean() {
            report = of_chunks;
            maps::find_affected(self, disks.all, &unusable, options.cancel, &mut report)?;
        }
        Ok(report)
    }
}
