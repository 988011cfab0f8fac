//! The dedup index in a gc: entries are deleted before their chunks.

use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};

use crate::rocks::{Family, ReadMode};
use crate::writer::{Condemned, Shared};

/// Entries that are deleted in one batch.
const BATCH_ENTRIES: usize = 32 << 10;
/// The index is rewritten, instead of written to, if at least one of this many entries is deleted.
const REWRITTEN_SHARE: u64 = 4;

/// Bytes that one entry takes in the index, and those that its deletion takes in the log and
/// then in a file: approximately.
const ENTRY_BYTES: u64 = 64;
const DELETION_BYTES: u64 = 128;

/// Whether the index is rewritten if `deleted` of `stored` entries are deleted.
pub(super) fn is_rewritten(deleted: u64, stored: u64) -> bool {
    deleted.saturating_mul(REWRITTEN_SHARE) >= stored
}

/// Bytes that [`forget`] writes, approximately.
pub(super) fn written_bytes(deleted: u64, stored: u64, is_rewritten: bool) -> u64 {
    if is_rewritten {
        stored.saturating_sub(deleted) * ENTRY_BYTES
    } else {
        deleted * DELETION_BYTES
    }
}

/// Deletes the entries of the condemned chunks, about `deleted`: one by one, or by rewriting
/// the index. Durable on return: only then may the chunks be deleted. A backup after a crash
/// stores those chunks again. Entries that a backup writes meanwhile stay.
pub(super) fn forget(
    writer: &Shared,
    goes: &Condemned,
    deleted: u64,
    is_rewritten: bool,
) -> Result<()> {
    if deleted == 0 {
        return Ok(());
    }
    if !is_rewritten {
        return delete_one_by_one(writer, goes);
    }
    let database = writer.repository.database();
    let goes = Arc::clone(goes);
    let rule = move |_hash: &[u8], value: &[u8]| chunk_of(value).is_some_and(|id| goes(id));
    let _filtering = database.filter(Family::Dedup, Arc::new(rule))?;
    database.compact(Family::Dedup, None)
}

fn delete_one_by_one(writer: &Shared, goes: &Condemned) -> Result<()> {
    let database = writer.repository.database();
    // The cursor sees a snapshot of the index, whatever is deleted meanwhile.
    let mut cursor = database.cursor(Family::Dedup, ReadMode::Scan)?;
    cursor.seek(&[])?;
    let mut hashes: Vec<Vec<u8>> = Vec::new();
    while let Some((hash, value)) = cursor.entry() {
        let Some(id) = chunk_of(value) else {
            let message = "an entry of the dedup index is damaged; nothing was deleted";
            return Err(Error::new(ErrorKind::Corrupt, message));
        };
        if goes(id) {
            hashes.push(hash.to_vec());
            if hashes.len() >= BATCH_ENTRIES {
                delete(writer, goes, &std::mem::take(&mut hashes), false)?;
            }
        }
        cursor.next()?;
    }
    // The sync of the last batch covers the earlier ones.
    delete(writer, goes, &hashes, true)
}

/// Deletes entries, except those that a backup has meanwhile pointed to a new
/// chunk.
fn delete(writer: &Shared, goes: &Condemned, hashes: &[Vec<u8>], is_synced: bool) -> Result<()> {
    let database = writer.repository.database();
    let _changing = writer.referred.changing_index();
    let mut batch = database.batch();
    for hash in hashes {
        let entry = database.get(Family::Dedup, hash, ReadMode::Scan)?;
        if entry.is_some_and(|value| chunk_of(&value).is_some_and(|id| goes(id))) {
            batch.delete(Family::Dedup, hash)?;
        }
    }
    database.write(batch, is_synced)
}

fn chunk_of(value: &[u8]) -> Option<u64> {
    value.first_chunk::<8>().map(|id| u64::from_be_bytes(*id))
}
