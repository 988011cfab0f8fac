//! The dedup family: finds the chunk with a given content.
//!
//! Key: the keyed BLAKE3 of the plaintext's BLAKE3 (32 bytes). Without the key it does not confirm
//! a guessed content. The inner hash has no key, so that two repositories with different keys can
//! identify the same content to each other. Value: chunk id (8, big endian), and a tag (16): the
//! keyed BLAKE3 of key and id. The tag reveals a redirected entry before a disk is built from it.

use coldrise_block::{Context, Error, ErrorKind, Result};

use crate::advice::REPAIR;
use crate::chunk::ChunkId;
use crate::repository::Repository;
use crate::rocks::{Batch, Family, ReadMode};

/// The keyed hash of the BLAKE3 of a chunk's plaintext.
pub(crate) type ChunkHash = [u8; 32];

const TAG_BYTES: usize = 16;

pub(crate) fn hash_chunk(repository: &Repository, chunk: &[u8]) -> ChunkHash {
    hash_of_name(repository, blake3::hash(chunk).as_bytes())
}

/// The key of the content with this BLAKE3.
pub(crate) fn hash_of_name(repository: &Repository, name: &[u8; 32]) -> ChunkHash {
    *blake3::keyed_hash(&repository.keys().chunk_hash, name).as_bytes()
}

fn tag(repository: &Repository, hash: &ChunkHash, id: ChunkId) -> [u8; TAG_BYTES] {
    let mut hasher = blake3::Hasher::new_keyed(&repository.keys().dedup_tag);
    hasher.update(hash);
    hasher.update(&id.to_be_bytes());
    let mut tag = [0; TAG_BYTES];
    tag.copy_from_slice(&hasher.finalize().as_bytes()[..TAG_BYTES]);
    tag
}

/// The committed chunk with that content.
///
/// # Errors
/// `Corrupt` for an entry that was changed.
pub(crate) fn find(repository: &Repository, hash: &ChunkHash) -> Result<Option<ChunkId>> {
    let value = repository.database().get(Family::Dedup, hash, ReadMode::Cached);
    let value = value.context(|| "the dedup index cannot be read")?;
    let Some(value) = value else { return Ok(None) };
    match parse(repository, hash, &value) {
        Some(id) => Ok(Some(id)),
        None => {
            let message = "an entry of the dedup index is damaged";
            Err(Error::new(ErrorKind::Corrupt, message).advise(REPAIR))
        }
    }
}

/// Calls `each` with the key of every entry and its chunk id, or `None` if the entry is damaged.
///
/// # Errors
/// `Corrupt` if the files of the index are damaged; the errors of `each`.
pub(crate) fn for_each(
    repository: &Repository,
    mut each: impl FnMut(&[u8], Option<(ChunkHash, ChunkId)>) -> Result<()>,
) -> Result<()> {
    let mut cursor = repository.database().cursor(Family::Dedup, ReadMode::Scan)?;
    cursor.seek(&[])?;
    while let Some((key, value)) = cursor.entry() {
        let hash: Option<ChunkHash> = key.try_into().ok();
        let entry = hash.and_then(|hash| parse(repository, &hash, value).map(|id| (hash, id)));
        each(key, entry)?;
        cursor.next()?;
    }
    Ok(())
}

/// Whether this is an entry of the index as it was written.
pub(crate) fn is_entry(repository: &Repository, key: &[u8], value: &[u8]) -> bool {
    key.try_into().is_ok_and(|hash| parse(repository, &hash, value).is_some())
}

/// The chunk that an entry names; `None` if the entry was changed.
fn parse(repository: &Repository, hash: &ChunkHash, value: &[u8]) -> Option<ChunkId> {
    value.split_first_chunk::<8>().and_then(|(id, found)| {
        let id = ChunkId::from_be_bytes(*id);
        (id != 0 && *found == tag(repository, hash, id)).then_some(id)
    })
}

/// Adds an entry to `batch`.
pub(crate) fn put(
    repository: &Repository,
    batch: &mut Batch<'_>,
    hash: &ChunkHash,
    id: ChunkId,
) -> Result<()> {
    let mut value = [0; 8 + TAG_BYTES];
    value[..8].copy_from_slice(&id.to_be_bytes());
    value[8..].copy_from_slice(&tag(repository, hash, id));
    batch.put(Family::Dedup, hash, &value)
}
