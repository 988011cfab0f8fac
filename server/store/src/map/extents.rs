//! The extents of a range of a disk, by its map.

use coldrise_block::{Extent, ExtentKind, Result, push_extent};

/// The map's answer for one chunk.
pub struct Place {
    /// 0: a hole.
    pub id: u64,
    /// The number of chunks from here on with the same answer: 1, or the rest of an absent subtree.
    pub known_chunks: u64,
}

/// The content of `offset_bytes..end_bytes` at chunk granularity, cut to the range: in order, without gaps, neighbours of one kind
/// joined. Ends early at about `limit` extents, but returns at least one.
///
/// # Errors
/// Those of `place`, which looks a chunk up by its index.
pub fn extents_of(
    chunk_size: u64,
    (offset_bytes, end_bytes): (u64, u64),
    limit: usize,
    mut place: impl FnMut(u64) -> Result<Place>,
) -> Result<Vec<Extent>> {
    let (mut extents, mut at) = (Vec::new(), offset_bytes);
    while at < end_bytes {
        let index = at / chunk_size;
        let place = place(index)?;
        let known = index.saturating_add(place.known_chunks);
        let known_end = known.saturating_mul(chunk_size).min(end_bytes);
        let kind = if place.id == 0 { ExtentKind::Hole } else { ExtentKind::Stored };
        let is_full = extents.len() >= limit.max(1);
        if is_full && extents.last().is_some_and(|last: &Extent| last.kind != kind) {
            break;
        }
        let next = Extent { offset_bytes: at, length_bytes: known_end - at, kind };
        push_extent(&mut extents, next);
        at = known_end;
    }
    Ok(extents)
}
