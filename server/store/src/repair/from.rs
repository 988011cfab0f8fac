//! Healing from another repository.
//!
//! The other repository's hashes use another key, so damaged chunks cannot be looked up there.
//! Instead all its chunks are read in storage order, each once, however many points share it.
//! Chunks that are damaged there too are skipped.

use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Error, ErrorKind, Result};

use crate::chunk::ChunkId;
use crate::rocks::{Family, ReadMode};
use crate::state::StoreState;
use crate::verify::{Affected, IdSet, VerifiedDisk, VerifyProgress};
use crate::{Repository, RepositoryWriter};

/// Bytes of content that are compared at once.
const PIECE_BYTES: usize = 1 << 20;

impl RepositoryWriter {
    /// The parts that these disks cannot read until the known damaged chunks are healed.
    ///
    /// # Errors
    /// `Interrupted` once `cancel` is set; errors of the operating system.
    pub fn unhealed(&self, disks: &[VerifiedDisk], cancel: &AtomicBool) -> Result<Vec<Affected>> {
        if self.damaged_chunks() == 0 {
            return Ok(Vec::new());
        }
        let ids = self.shared.damaged.ids();
        let end = ids.iter().max().map_or(0, |last| last + 1);
        let unusable = IdSet::new(end);
        ids.into_iter().for_each(|id| unusable.insert(id));
        self.repository().affected(disks, &unusable, cancel)
    }

    /// Reads all chunks of another repository and stores again those that are known to be damaged
    /// here. Ends as soon as nothing is damaged. Returns the number of healed chunks. `progress`
    /// receives the progress.
    ///
    /// # Errors
    /// `InvalidInput` if the chunks there are smaller than here, or their size is not a multiple of
    /// the size here; `Interrupted` once `cancel` is set: healed chunks stay healed.
    pub fn heal_from(
        &self,
        other: &Repository,
        cancel: &AtomicBool,
        progress: &dyn Fn(VerifyProgress),
    ) -> Result<u64> {
        let chunk_size = other.chunk_size_bytes() as usize;
        if !self.can_heal_from(other) {
            let message = format!("chunks of {chunk_size} bytes do not hold whole chunks of ours");
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        other.catch_up()?;
        let end = StoreState::read(other)?.next_chunk;
        let (mut healed, mut next, mut read_bytes) = (0, 1, 0);
        let mut content = Vec::with_capacity(PIECE_BYTES + chunk_size);
        while next < end && self.damaged_chunks() > 0 {
            if cancel.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
            }
            content.clear();
            if read_piece(other, &mut next, end, &mut content, &mut read_bytes).is_err() {
                // The file is damaged inside: read its chunks one by one.
                next += 1;
            }
            healed += self.heal(&content)?;
            let in_bytes = |ids: u64| ids * chunk_size as u64;
            let done_bytes = in_bytes(next.min(end));
            progress(VerifyProgress { done_bytes, total_bytes: in_bytes(end), read_bytes });
        }
        Ok(healed)
    }

    /// Whether chunks there hold whole chunks of this repository.
    pub fn can_heal_from(&self, other: &Repository) -> bool {
        other.chunk_size_bytes() % self.repository().chunk_size_bytes() == 0
    }
}

/// Decodes chunks from `next` on, and moves `next` past them.
fn read_piece(
    other: &Repository,
    next: &mut ChunkId,
    end: ChunkId,
    content: &mut Vec<u8>,
    read_bytes: &mut u64,
) -> Result<()> {
    let chunk_size = other.chunk_size_bytes() as usize;
    let mut cursor = other.database().cursor(Family::Chunks, ReadMode::Scan)?;
    cursor.seek(&next.to_be_bytes())?;
    while content.len() < PIECE_BYTES {
        let entry = cursor
            .entry()
            .and_then(|(key, value)| Some((ChunkId::from_be_bytes(key.try_into().ok()?), value)));
        let Some((id, value)) = entry.filter(|(id, _)| *id < end) else {
            *next = end;
            return Ok(());
        };
        *read_bytes += value.len() as u64;
        let start = content.len();
        content.resize(start + chunk_size, 0);
        let aead = &other.keys().chunks;
        if other.codec().decode(aead, id, value, &mut content[start..]).is_err() {
            content.truncate(start);
        }
        *next = id + 1;
        cursor.next()?;
    }
    Ok(())
}
