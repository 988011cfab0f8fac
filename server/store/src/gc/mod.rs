//! Garbage collection: finds unreferenced chunks and pages and frees their space.
//!
//! ```text
//!   roots ─▶ mark: every page once ─▶ Reachable: page and chunk ids in use
//!                                        │
//!   files of the database ─▶ Unit: number of chunks, number of used chunks
//!                                        ├─ none in use ──────▶ dropped whole
//!                                        ├─ half or less ─────▶ rewritten without the unused
//!                                        └─ more ─────────────▶ kept, with its unused chunks
//! ```
//!
//! Payload is read only if at least as much of it is freed. So the work is in proportion to the
//! deleted data and the live maps, not to the stored data. [`MaxUnused`] can ask for more.

mod check;
mod dedup_index;
mod reachable;
mod room;
mod sweep;
mod units;

pub use check::{GcOptions, GcProgress, MaxUnused};
pub use reachable::Reachable;
pub use sweep::GcReport;

use units::Fate;

use coldrise_block::{ErrorKind, Result};

use crate::repository::Repository;
use crate::rocks::Family;

/// How often the files are listed again if a writer deletes some meanwhile.
const LISTING_ATTEMPTS: u32 = 5;

/// The estimated result of a gc that is not run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GcEstimate {
    /// Chunks that would be deleted.
    pub chunks: u64,
    /// Pages of chunk maps that would be deleted.
    pub pages: u64,
    /// Bytes freed in the file system by both: an estimate from the average entry size of each
    /// file.
    pub bytes: u64,
    /// Files of chunks that would be dropped whole.
    pub dropped_files: u64,
    /// Files of chunks that would be rewritten.
    pub rewritten_files: u64,
    /// Unreferenced chunks that would stay, because most of their file is in use. A later backup of
    /// the same content uses them again.
    pub kept_chunks: u64,
    /// An estimate of their size in bytes.
    pub kept_bytes: u64,
}

impl Repository {
    /// The estimated result of a gc if only `reachable` were in use, with files rewritten by
    /// `max_unused`. Reads no payload. Ignores data that is only in RocksDB's log.
    ///
    /// # Errors
    /// The errors of reading the database.
    pub fn estimate_gc(&self, reachable: &Reachable, max_unused: MaxUnused) -> Result<GcEstimate> {
        for _ in 0..LISTING_ATTEMPTS {
            match self.try_estimate(reachable, max_unused) {
                // The writer deleted a file between its listing and its reading.
                Err(error) if error.kind() == ErrorKind::NotFound => self.catch_up()?,
                other => return other,
            }
        }
        self.try_estimate(reachable, max_unused)
    }

    fn try_estimate(&self, reachable: &Reachable, max_unused: MaxUnused) -> Result<GcEstimate> {
        let mut sum = GcEstimate::default();
        for unit in units::of_family(self, Family::Chunks, reachable, max_unused)? {
            match unit.fate {
                Fate::Kept => {
                    sum.kept_chunks += unit.dead();
                    sum.kept_bytes += unit.dead_bytes();
                    continue;
                }
                Fate::Dropped => sum.dropped_files += unit.files.len() as u64,
                Fate::Rewritten => sum.rewritten_files += unit.files.len() as u64,
            }
            sum.chunks += unit.dead();
            sum.bytes += unit.dead_bytes();
        }
        for unit in units::of_family(self, Family::Maps, reachable, max_unused)? {
            if unit.fate != Fate::Kept {
                sum.pages += unit.dead();
                sum.bytes += unit.dead_bytes();
            }
        }
        Ok(sum)
    }
}

/// The id in the key of a chunk or a page.
fn id_of_key(key: &[u8]) -> Option<u64> {
    key.try_into().ok().map(u64::from_be_bytes)
}

#[cfg(test)]
mod beside_tests;
#[cfg(test)]
mod tests;
