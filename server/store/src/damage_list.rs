//! The list of known damaged chunks. A chunk heals the next time its content is written: it is then
//! stored under its id again.
//!
//! The `default` family holds the list as one sealed document: a version (8, little endian), then
//! per chunk its id (8, little endian) and the keyed hash of its content (32), ascending by id. It
//! exists only while something is damaged.
//!
//! A chunk is healed in place because points and maps name it by its id, and the nonce of a value
//! is derived from its content: the same content under the same id is the same value.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::RwLock;

use crate::chunk::ChunkId;
use crate::dedup::ChunkHash;
use crate::repository::Repository;
use crate::rocks::{Batch, Family, ReadMode};

const KEY: &[u8] = b"damaged chunks";
const PURPOSE: &str = "damaged chunks";
const VERSION: u64 = 1;
const HEAD_BYTES: usize = 8;
const ENTRY_BYTES: usize = 8 + 32;
/// Maximum number of listed chunks: the capacity of one document. If more are damaged, the rest is
/// found again after these are healed.
pub(crate) const MAX_DAMAGED: usize = 400_000;

/// The damaged chunks of an open repository, by hash of their content.
#[derive(Default)]
pub(crate) struct DamagedChunks {
    by_content: RwLock<HashMap<ChunkHash, ChunkId>>,
    /// Checked for every chunk that is written.
    is_any: AtomicBool,
}

pub(crate) fn is_key(key: &[u8]) -> bool {
    key == KEY
}

impl DamagedChunks {
    /// The list as stored in the repository.
    pub(crate) fn read(repository: &Repository) -> Result<DamagedChunks> {
        let damaged = DamagedChunks::default();
        let Some(value) = repository.database().get(Family::State, KEY, ReadMode::Cached)? else {
            return Ok(damaged);
        };
        let plaintext = repository.decrypt_document(PURPOSE, &value)?;
        let unknown = || Error::new(ErrorKind::Corrupt, "the list of damaged chunks is unknown");
        let (head, entries) = plaintext.split_at_checked(HEAD_BYTES).ok_or_else(unknown)?;
        if head != VERSION.to_le_bytes() || entries.len() % ENTRY_BYTES != 0 {
            return Err(unknown());
        }
        let found = entries.chunks_exact(ENTRY_BYTES).filter_map(|entry| {
            let (id, hash) = entry.split_first_chunk::<8>()?;
            Some((hash.try_into().ok()?, ChunkId::from_le_bytes(*id)))
        });
        damaged.set(found.collect());
        Ok(damaged)
    }

    pub(crate) fn set(&self, chunks: HashMap<ChunkHash, ChunkId>) {
        self.is_any.store(!chunks.is_empty(), Ordering::Release);
        *self.by_content.write() = chunks;
    }

    /// True if the chunk with this content is damaged.
    #[inline]
    pub(crate) fn holds(&self, hash: &ChunkHash, id: ChunkId) -> bool {
        self.is_any.load(Ordering::Acquire) && self.by_content.read().get(hash) == Some(&id)
    }

    /// The damaged chunk of this content.
    pub(crate) fn find(&self, hash: &ChunkHash) -> Option<ChunkId> {
        self.by_content.read().get(hash).copied()
    }

    /// The listed chunks that are `unusable`.
    pub(crate) fn still(&self, unusable: impl Fn(ChunkId) -> bool) -> HashMap<ChunkHash, ChunkId> {
        let mut chunks = self.by_content.read().clone();
        chunks.retain(|_, id| unusable(*id));
        chunks
    }

    pub(crate) fn ids(&self) -> Vec<ChunkId> {
        self.by_content.read().values().copied().collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.by_content.read().len()
    }

    /// The list without `healed`.
    pub(crate) fn without(&self, healed: &[ChunkHash]) -> HashMap<ChunkHash, ChunkId> {
        let mut chunks = self.by_content.read().clone();
        for hash in healed {
            chunks.remove(hash);
        }
        chunks
    }
}

impl Repository {
    /// The number of chunks that are known to be damaged, as stored.
    ///
    /// # Errors
    /// `Corrupt` if the list does not authenticate.
    pub fn damaged_chunk_count(&self) -> Result<u64> {
        DamagedChunks::read(self).map(|damaged| damaged.len() as u64)
    }
}

/// Adds the list to `batch`.
pub(crate) fn put(
    repository: &Repository,
    batch: &mut Batch<'_>,
    chunks: &HashMap<ChunkHash, ChunkId>,
) -> Result<()> {
    if chunks.is_empty() {
        return batch.delete(Family::State, KEY);
    }
    let mut entries: Vec<_> = chunks.iter().map(|(hash, id)| (*id, hash)).collect();
    entries.sort_unstable();
    let mut plaintext = Vec::with_capacity(HEAD_BYTES + entries.len() * ENTRY_BYTES);
    plaintext.extend_from_slice(&VERSION.to_le_bytes());
    for (id, hash) in entries {
        plaintext.extend_from_slice(&id.to_le_bytes());
        plaintext.extend_from_slice(hash);
    }
    batch.put(Family::State, KEY, &repository.encrypt_document(PURPOSE, &plaintext)?)
}
