//! The dedup index in a gc: entries go before the chunks that they name.

use coldrise_block::{Error, ErrorKind, Result};

use crate::repository::Repository;
use crate::rocks::{Family, ReadMode};

/// Entries that are deleted in one batch.
const BATCH_ENTRIES: u64 = 32 << 10;
/// The index is rewritten when at least one entry of so many was deleted.
const REWRITTEN_SHARE: u64 = 4;

/// What became of the index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Forgotten {
    /// Entries that were there.
    entries: u64,
    /// Entries that were deleted.
    deleted: u64,
}

impl Forgotten {
    /// Whether the index is worth rewriting.
    pub(super) fn is_much(&self) -> bool {
        self.deleted > 0 && self.deleted.saturating_mul(REWRITTEN_SHARE) >= self.entries
    }
}

/// Deletes the entries of chunks that are to go. Durable on return: only then may
/// the chunks go, and a backup that is made after a crash stores them anew.
pub(super) fn forget(repository: &Repository, goes: &dyn Fn(u64) -> bool) -> Result<Forgotten> {
    let database = repository.database();
    let mut forgotten = Forgotten::default();
    // It sees the index as it is now, whatever is deleted meanwhile.
    let mut cursor = database.cursor(Family::Dedup, ReadMode::Scan)?;
    cursor.seek(&[])?;
    let mut batch = database.batch();
    while let Some((key, value)) = cursor.entry() {
        forgotten.entries += 1;
        let id = value.first_chunk::<8>().map(|id| u64::from_be_bytes(*id));
        let Some(id) = id else {
            return Err(Error::new(
                ErrorKind::Corrupt,
                "an entry of the dedup index is damaged; nothing was deleted",
            ));
        };
        if goes(id) {
            batch.delete(Family::Dedup, key)?;
            forgotten.deleted += 1;
            if forgotten.deleted % BATCH_ENTRIES == 0 {
                database.write(std::mem::replace(&mut batch, database.batch()), false)?;
            }
        }
        cursor.next()?;
    }
    if forgotten.deleted > 0 {
        // The sync of the last batch covers those before it.
        database.write(batch, true)?;
    }
    Ok(forgotten)
}
