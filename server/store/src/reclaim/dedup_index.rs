//! The dedup index in a gc: entries go before the chunks that they name.

use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};

use crate::repository::Repository;
use crate::rocks::{Family, ReadMode};

/// Entries that are deleted in one batch.
const BATCH_ENTRIES: u64 = 32 << 10;
/// The index is rewritten, and not written to, when one entry of so many goes.
const REWRITTEN_SHARE: u64 = 4;

/// Deletes the entries of the chunks that go, about `deleted` of `stored`. Durable
/// on return: only then may the chunks go, and a backup that is made after a crash
/// stores them anew.
pub(super) fn forget(
    repository: &Repository,
    goes: impl Fn(u64) -> bool + Send + Sync + 'static,
    deleted: u64,
    stored: u64,
) -> Result<()> {
    if deleted == 0 {
        return Ok(());
    }
    if deleted.saturating_mul(REWRITTEN_SHARE) < stored {
        return delete_one_by_one(repository, goes);
    }
    let database = repository.database();
    let rule = move |_hash: &[u8], value: &[u8]| chunk_of(value).is_some_and(&goes);
    let _filtering = database.filter(Family::Dedup, Arc::new(rule))?;
    database.compact(Family::Dedup, None)
}

fn delete_one_by_one(repository: &Repository, goes: impl Fn(u64) -> bool) -> Result<()> {
    let database = repository.database();
    // It sees the index as it is now, whatever is deleted meanwhile.
    let mut cursor = database.cursor(Family::Dedup, ReadMode::Scan)?;
    cursor.seek(&[])?;
    let mut batch = database.batch();
    let mut deleted: u64 = 0;
    while let Some((hash, value)) = cursor.entry() {
        let Some(id) = chunk_of(value) else {
            let message = "an entry of the dedup index is damaged; nothing was deleted";
            return Err(Error::new(ErrorKind::Corrupt, message));
        };
        if goes(id) {
            batch.delete(Family::Dedup, hash)?;
            deleted += 1;
            if deleted % BATCH_ENTRIES == 0 {
                database.write(std::mem::replace(&mut batch, database.batch()), false)?;
            }
        }
        cursor.next()?;
    }
    // The sync of the last batch covers those before it.
    database.write(batch, true)
}

fn chunk_of(value: &[u8]) -> Option<u64> {
    value.first_chunk::<8>().map(|id| u64::from_be_bytes(*id))
}
