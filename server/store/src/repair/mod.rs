//! Repair: finds damaged chunks and lists them. A listed chunk is healed when its content is
//! written again: by a backup, or from a source given for that.
//!
//! # Order of writes, and why a crash is safe after each
//!
//! 0. If any part of the database is damaged, or older than the high-water mark, a flag is set that
//!    keeps all other writers out, and a new database is made from the readable parts, see `fresh`.
//!    Data that is stored twice is restored from its other copy, see `redundancy`.
//! 1. The chunks are verified.
//! 2. One synced batch writes the list of damaged chunks, and deletes dedup entries that are
//!    damaged themselves or lead to a damaged, unreferenced chunk. Nothing readable changes.
//! 3. Missing dedup entries are added from the chunks, durably, see `index`. Then the flag is
//!    removed: backups no longer refer to missing chunks. As long as the flag is set, the next
//!    repair repeats all of this.
//! 4. A healed chunk is stored under its id again, in one synced batch with the list without it.
//!    The old value was unreadable; a crash leaves both unchanged.

mod fresh;
mod from;
mod index;
mod open;
mod redundancy;

pub use open::ReopenReport;
pub(crate) use open::WaitingPoints;

use std::collections::HashMap;

use coldrise_block::{Error, ErrorKind, Result};

use crate::chunk::ChunkId;
use crate::damage_list::{self, MAX_DAMAGED};
use crate::dedup::{self, ChunkHash};
use crate::gc::Reachable;
use crate::rocks::{Batch, Family};
use crate::verify::{Affected, IdSet, VerifiedDisk, VerifyOptions, VerifyReport};
use crate::writer::heal::heal;
use crate::writer::pipeline::HealedChunk;
use crate::{Repository, RepositoryWriter};

/// The result of a repair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepairReport {
    /// The damage, and the disks that it affects.
    pub found: VerifyReport,
    /// Damaged and missing chunks that heal when their content is written again.
    pub healable_chunks: u64,
    /// Damaged and missing chunks without references. They no longer count as damage, because no
    /// later backup can refer to them.
    pub unreferenced_chunks: u64,
    /// Ranges of disks that nothing can heal, because the content's hash is unknown.
    pub lost: Vec<Affected>,
    /// Damaged dedup entries that were removed. Their contents are stored again when they are next
    /// written.
    pub removed_entries: u64,
    /// Missing dedup entries that were restored.
    pub added_entries: u64,
}

impl RepositoryWriter {
    /// Verifies all chunks and the chunk maps of `disks`, and lists the damaged chunks: from then
    /// on any write of their content heals them. A damaged chunk that is not `in_use` is not
    /// listed; its dedup entry is removed, so that later backups do not find it. Without `in_use`,
    /// because not all references are known, every damaged chunk is listed.
    ///
    /// # Errors
    /// As [`Repository::verify`]; `Corrupt` if the dedup index cannot be walked.
    pub fn find_damage(
        &self,
        disks: &[VerifiedDisk],
        in_use: Option<&Reachable>,
        options: &VerifyOptions<'_>,
    ) -> Result<RepairReport> {
        let repository = self.repository();
        let (found, unusable) = repository.verify_chunks(disks, options)?;
        let mut report = RepairReport { found, ..RepairReport::default() };
        // Already listed chunks: the index may have lost their entries since.
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
        damage_list::put(repository, &mut batch, &chunks)?;
        repository.commit(batch)?;
        report.added_entries = index::add_damaged(repository, &chunks, &indexed)?;
        let cancel = options.cancel;
        report.added_entries += index::add_missing(repository, end, &indexed, &unreadable, cancel)?;
        self.shared.damaged.set(chunks);
        crate::repair_flag::lower_flag(repository.path())?;
        Ok(report)
    }

    /// The number of chunks that are known to be damaged and heal when their content is written
    /// again.
    pub fn damaged_chunks(&self) -> u64 {
        self.shared.damaged.len() as u64
    }

    /// Heals known damaged chunks with exactly this content: `content` is a whole number of chunks,
    /// and a disk's last chunk is padded with zeroes. Returns how many were healed, all in one
    /// durable batch.
    ///
    /// # Errors
    /// `InvalidInput` for another length; `NoSpace`.
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
            let aead = &repository.keys().chunks;
            repository.codec().encode(&mut encoder, aead, id, chunk, &mut value)?;
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

/// Removes chunks that are not in use, and their dedup entries, so that their content is stored
/// again when it is next written. Returns how many there were.
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
            // Another chunk may hold that content by now, and the entry leads to it.
            Ok(found) if found != Some(*id) => {}
            Ok(_) => batch.delete(Family::Dedup, hash)?,
            // `find_damage` removes it with the other damaged entries.
            Err(error) if error.kind() == ErrorKind::Corrupt => {}
            Err(error) => return Err(error),
        }
    }
    Ok(gone.len() as u64)
}

#[cfg(test)]
mod tests;
