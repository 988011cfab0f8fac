//! Stores healed chunks again under their ids.

use std::collections::HashMap;

use coldrise_block::Result;

use super::Shared;
use super::pipeline::HealedChunk;
use crate::chunk::ChunkId;
use crate::damage_list;
use crate::dedup::ChunkHash;
use crate::rocks::{Batch, Family};

/// Adds healed chunks to `batch`, and the damage list without them. Returns the remaining damage;
/// `None` if nothing was healed.
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
    damage_list::put(&shared.repository, batch, &still)?;
    Ok(Some(still))
}
