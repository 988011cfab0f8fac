//! Restores missing entries of the dedup index from the chunks.
//!
//! A chunk without its entry is readable, but is stored again when a backup has its content.
//! Entries are missing if the index lost a file or a part of one, and if a damaged entry was
//! removed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use coldrise_block::{Error, ErrorKind, Result};

use crate::Repository;
use crate::chunk::ChunkId;
use crate::dedup::{self, ChunkHash};
use crate::rocks::{Family, ReadMode};
use crate::verify::IdSet;

/// Ids that one thread handles at once and writes in one batch.
const PIECE_IDS: u64 = 4096;

/// Adds an entry for each of these damaged chunks that has none: healing needs the entry.
pub(super) fn add_damaged(
    repository: &Repository,
    chunks: &HashMap<ChunkHash, ChunkId>,
    indexed: &IdSet,
) -> Result<u64> {
    let mut batch = repository.database().batch();
    let mut added = 0;
    for (hash, id) in chunks.iter().filter(|(_, id)| !indexed.contains(**id)) {
        if !is_known(repository, hash)? {
            dedup::put(repository, &mut batch, hash, *id)?;
            added += 1;
        }
    }
    repository.commit(batch)?;
    Ok(added)
}

/// Adds an entry for every readable chunk below `end` that is not `indexed`. Returns how many.
pub(super) fn add_missing(
    repository: &Repository,
    end: ChunkId,
    indexed: &IdSet,
    unusable: &IdSet,
    cancel: &AtomicBool,
) -> Result<u64> {
    let (next, added) = (AtomicU64::new(0), AtomicU64::new(0));
    let is_wanted = |id: &ChunkId| !indexed.contains(*id) && !unusable.contains(*id);
    let work = || -> Result<()> {
        let mut chunk = vec![0; repository.chunk_size_bytes() as usize];
        loop {
            if cancel.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
            }
            let first = next.fetch_add(PIECE_IDS, Ordering::Relaxed).max(1);
            if first >= end {
                return Ok(());
            }
            let last = (first / PIECE_IDS + 1) * PIECE_IDS;
            let mut batch = repository.database().batch();
            let mut count = 0;
            for id in (first..last.min(end)).filter(|id| is_wanted(id)) {
                // It was authenticated just now. If it is unreadable, the next repair handles it.
                if !read(repository, id, &mut chunk) {
                    continue;
                }
                let hash = dedup::hash_chunk(repository, &chunk);
                // If the content is stored twice, the other chunk's entry stays.
                if !is_known(repository, &hash)? {
                    dedup::put(repository, &mut batch, &hash, id)?;
                    count += 1;
                }
            }
            if count > 0 {
                repository.database().write(batch, false)?;
                added.fetch_add(count, Ordering::Relaxed);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| {
            let panicked = || Error::new(ErrorKind::Internal, "an indexing thread panicked");
            worker.join().unwrap_or_else(|_| Err(panicked()))
        })
    })?;
    repository.database().flush_family(Family::Dedup)?;
    Ok(added.into_inner())
}

fn read(repository: &Repository, id: ChunkId, chunk: &mut [u8]) -> bool {
    let value = repository.database().get(Family::Chunks, &id.to_be_bytes(), ReadMode::Payload);
    let Ok(Some(value)) = value else { return false };
    repository.codec().decode(&repository.keys().chunks, id, &value, chunk).is_ok()
}

fn is_known(repository: &Repository, hash: &ChunkHash) -> Result<bool> {
    match dedup::find(repository, hash) {
        Ok(found) => Ok(found.is_some()),
        Err(error) if error.kind() == ErrorKind::Corrupt => Ok(false),
        Err(error) => Err(error),
    }
}
