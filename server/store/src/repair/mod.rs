//! Repair: damaged chunks are found, remembered, and healed when their content comes
//! by again: in a backup, or from a source that is given for that.
//!
//! # Order of writes, and why a crash is safe after each
//!
//! 0. If anything of the database is damaged, or older than the high-water mark, a flag is
//!    raised, which keeps all other writers out, and a new database is made from what can be
//!    read, see `fresh`. What is stored twice is put back where it is lost, see `redundancy`.
//! 1. The chunks are verified.
//! 2. One synced batch: the list of damaged chunks; entries of the dedup index go that
//!    are damaged themselves, or lead to a damaged chunk that nothing refers to. Nothing
//!    that is readable changes.
//! 3. What the dedup index lacks is added from the chunks, see `index`, durably. Then the
//!    flag goes: a backup no longer refers to what is missing. As long as it is there the
//!    next repair does all of this again.
//! 4. A healed chunk is put under its id again, in one synced batch with the list
//!    without it. The value before could not be read; a crash leaves both as they were.

mod flag;
mod fresh;
mod from;
mod index;
mod open;
mod redundancy;

pub(crate) use flag::refuse_unfinished;
pub(crate) use fresh::{leave_out_uncommitted, FRESH_NAME};
pub use open::Reopened;

use std::collections::HashMap;

use coldrise_block::{Error, ErrorKind, Result};

use crate::chunk::ChunkId;
use crate::damaged::{self, MAX_DAMAGED};
use crate::dedup::{self, ChunkHash};
use crate::reclaim::Reachable;
use crate::rocks::{Batch, Family};
use crate::verify::{Affected, IdSet, VerifiedDisk, VerifyOptions, VerifyReport};
use crate::writer::pipeline::HealedChunk;
use crate::writer::Shared;
use crate::{Repository, RepositoryWriter};

/// What was found and remembered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepairReport {
    /// What is damaged, and what it affects.
    pub found: VerifyReport,
    /// Damaged and missing chunks that heal when their content comes by.
    pub healable_chunks: u64,
    /// Damaged and missing chunks that nothing refers to: no damage any more, since no
    /// later backup comes to refer to them.
    pub unreferenced_chunks: u64,
    /// What the disks miss and nothing can heal: nobody knows what it was.
    pub lost: Vec<Affected>,
    /// Entries of the dedup index that were damaged and are gone: what they stood for
    /// is stored once more when it comes by.
    pub removed_entries: u64,
    /// Entries that were missing from the dedup index and were made anew.
    pub added_entries: u64,
}

impl RepositoryWriter {
    /// Verifies all chunks and the chunk maps of `disks`, and remembers the damaged
    /// ones: from then on whatever writes their content heals them. Of those that are not
    /// among `in_use` nothing is left but what later backups cannot find; without it, where
    /// not all that is in use can be told, every one is remembered.
    ///
    /// # Errors
    /// As [`Repository::verify`]; `Corrupt` where the dedup index cannot be walked.
    pub fn find_damage(
        &self,
        disks: &[VerifiedDisk],
        in_use: Option<&Reachable>,
        options: &VerifyOptions<'_>,
    ) -> Result<RepairReport> {
        let repository = self.repository();
        let (found, unusable) = repository.verify_chunks(disks, options)?;
        let mut report = RepairReport { found, ..RepairReport::default() };
        // By entries that the index may have lost since.
        let mut chunks = self.shared.damaged.still(|id| unusable.contains(id));
        let end = repository.next_chunk()?;
        let indexed = IdSet::new(end);
        let mut batch = repository.database().batch();
        dedup::for_each(repository, |key, entry| {
            match entry {
                Some((hash, id)) => {
                    indexed.insert(id);
                    if unusable.contains(id) {
                        chunks.insert(hash, id);
                    }
                }
                None => {
                    batch.delete(Family::Dedup, key)?;
                    report.removed_entries += 1;
                }
            }
            Ok(())
        })?;
        if let Some(in_use) = in_use {
            report.unreferenced_chunks =
                give_up_unreferenced(repository, &mut batch, &mut chunks, in_use)?;
        }
        if chunks.len() > MAX_DAMAGED {
            let mut entries: Vec<_> = chunks.into_iter().collect();
            entries.sort_unstable_by_key(|(_, id)| *id);
            entries.truncate(MAX_DAMAGED);
            chunks = entries.into_iter().collect();
        }
        report.healable_chunks = chunks.len() as u64;
        let unreadable = unusable.snapshot();
        chunks.values().for_each(|id| unusable.remove(*id));
        report.lost = repository.affected(disks, &unusable, options.cancel)?;
        damaged::put(repository, &mut batch, &chunks)?;
        repository.commit(batch)?;
        report.added_entries = index::add_damaged(repository, &chunks, &indexed)?;
        let cancel = options.cancel;
        report.added_entries += index::add_missing(repository, end, &indexed, &unreadable, cancel)?;
        self.shared.damaged.set(chunks);
        flag::lower_flag(repository.path())?;
        Ok(report)
    }

    /// Chunks that are known to be damaged and heal when their content comes by.
    pub fn damaged_chunks(&self) -> u64 {
        self.shared.damaged.len() as u64
    }

    /// Heals the chunks that hold exactly these bytes, as far as they are known to be
    /// damaged: `content` is a number of whole chunks, the last one of a disk filled up
    /// with zeroes. Returns how many were healed, all in one batch, durably.
    ///
    /// # Errors
    /// `InvalidInput` for another length, `NoSpace`.
    pub fn heal(&self, content: &[u8]) -> Result<u64> {
        let repository = self.repository();
        let chunk_size = repository.chunk_size_bytes() as usize;
        if content.len() % chunk_size != 0 {
            let message = format!("{} bytes are not whole chunks", content.len());
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        let mut encoder = repository.codec().encoder()?;
        let mut healed = Vec::new();
        for chunk in content.chunks(chunk_size) {
            let hash = dedup::hash_chunk(repository, chunk);
            let Some(id) = self.shared.damaged.find(&hash) else { continue };
            let mut value = Vec::new();
            let sealer = &repository.keys().chunks;
            repository.codec().encode(&mut encoder, sealer, id, chunk, &mut value)?;
            healed.push(HealedChunk { id, hash, value });
        }
        let before = self.damaged_chunks();
        let mut batch = repository.database().batch();
        if let Some(still) = heal(&self.shared, &mut batch, &healed)? {
            repository.commit(batch)?;
            self.shared.damaged.set(still);
        }
        Ok(before - self.damaged_chunks())
    }
}

/// Takes chunks out that are not in use, and their entries from the dedup index, so that
/// their content is stored anew when it comes by. Returns how many there were.
fn give_up_unreferenced(
    repository: &Repository,
    batch: &mut Batch<'_>,
    chunks: &mut HashMap<ChunkHash, ChunkId>,
    in_use: &Reachable,
) -> Result<u64> {
    let unreferenced = |(_, id): &(&ChunkHash, &ChunkId)| !in_use.has(Family::Chunks, **id);
    let gone: Vec<_> = chunks.iter().filter(unreferenced).map(|(hash, id)| (*hash, *id)).collect();
    for (hash, id) in &gone {
        chunks.remove(hash);
        match dedup::find(repository, hash) {
            // By now another chunk may hold that content, and is found by the entry.
            Ok(found) if found != Some(*id) => {}
            Ok(_) => batch.delete(Family::Dedup, hash)?,
            // It goes with the damaged ones.
            Err(error) if error.kind() == ErrorKind::Corrupt => {}
            Err(error) => return Err(error),
        }
    }
    Ok(gone.len() as u64)
}

/// Adds healed chunks to `batch`, and the list without them; what is still damaged
/// then. None where nothing is healed.
pub(crate) fn heal(
    shared: &Shared,
    batch: &mut Batch<'_>,
    healed: &[HealedChunk],
) -> Result<Option<HashMap<ChunkHash, ChunkId>>> {
    if healed.is_empty() {
        return Ok(None);
    }
    for chunk in healed {
        batch.put(Family::Chunks, &chunk.id.to_be_bytes(), &chunk.value)?;
    }
    let hashes: Vec<ChunkHash> = healed.iter().map(|chunk| chunk.hash).collect();
    let still = shared.damaged.without(&hashes);
    damaged::put(&shared.repository, batch, &still)?;
    Ok(Some(still))
}

#[cfg(test)]
mod tests;
