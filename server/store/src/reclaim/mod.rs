//! Giving space back: what nothing refers to any more is found, and goes.
//!
//! ```text
//!   roots ─▶ mark: every page once ─▶ Reachable: page and chunk ids in use
//!                                        │
//!   files of the database ─▶ Unit: so many chunks, so many of them in use
//!                                        ├─ none in use ──────▶ dropped whole
//!                                        ├─ half or less ─────▶ rewritten without the rest
//!                                        └─ more ─────────────▶ left alone, and so is what
//!                                                               nothing refers to in it
//! ```
//!
//! Payload is read only where at least as much of it is given back, so the work
//! follows what was deleted and the live maps, not what is stored. Whoever wants more back
//! says so: see [`MaxUnused`].

mod check;
mod dedup_index;
mod reachable;
mod sweep;
mod units;

pub use check::{MaxUnused, ReclaimOptions, ReclaimProgress};
pub use reachable::Reachable;
pub use sweep::Reclaimed;

use units::Fate;

use coldrise_block::{ErrorKind, Result};

use crate::repository::Repository;
use crate::rocks::Family;

/// How often the files are listed anew beside a writer that deletes some.
const LISTING_ATTEMPTS: u32 = 5;

/// What a gc would do, told without doing it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimable {
    /// Chunks that would be deleted.
    pub chunks: u64,
    /// Pages of chunk maps that would be deleted.
    pub pages: u64,
    /// Bytes that the file system would get back for both: an estimate, from the
    /// average size of what lies in a file.
    pub bytes: u64,
    /// Files of chunks that would be dropped whole.
    pub dropped_files: u64,
    /// Files of chunks that would be rewritten.
    pub rewritten_files: u64,
    /// Chunks that nothing refers to and that would stay: most of what lies around
    /// them is in use. A later backup of the same content uses them again.
    pub kept_chunks: u64,
    /// An estimate of what those take, in bytes.
    pub kept_bytes: u64,
}

impl Repository {
    /// What a gc would give back if nothing but `reachable` were in use, and it rewrote the
    /// files that `max_unused` says. Reads no payload. What is only in RocksDB's log is not looked at.
    ///
    /// # Errors
    /// As reading the database.
    pub fn reclaimable(&self, reachable: &Reachable, max_unused: MaxUnused) -> Result<Reclaimable> {
        for _ in 0..LISTING_ATTEMPTS {
            match self.try_reclaimable(reachable, max_unused) {
                // The writer deleted a file between its listing and its reading.
                Err(error) if error.kind() == ErrorKind::NotFound => self.catch_up()?,
                told => return told,
            }
        }
        self.try_reclaimable(reachable, max_unused)
    }

    fn try_reclaimable(&self, reachable: &Reachable, max_unused: MaxUnused) -> Result<Reclaimable> {
        let mut sum = Reclaimable::default();
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

/// The id that is the key of a chunk or of a page.
fn id_of_key(key: &[u8]) -> Option<u64> {
    key.try_into().ok().map(u64::from_be_bytes)
}

#[cfg(test)]
mod beside_tests;
#[cfg(test)]
mod tests;
