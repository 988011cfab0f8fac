//! The chunks and pages that this writer refers to before a restore point names them. They protect
//! a backup from a gc that runs beside it.
//!
//! A gc knows what points, sessions and leases name. Only the writer knows what a backup has stored
//! so far, and which older chunks it has found to equal its own content. Three rules keep
//! everything that a backup needs:
//!
//! 1. Everything that this writer has stored stays. Ids ascend, so it owns all ids from the first
//!    one that was free when it was opened.
//! 2. An older chunk is *claimed* before its id gets into a map.
//! 3. A gc *condemns* all chunks that it will remove in one step, before it deletes the first dedup
//!    entry. Chunks claimed until then stay. A condemned chunk can no longer be claimed; a worker
//!    that has just found one in the dedup index stores the content again.
//!
//! A condemned chunk stays condemned as long as the writer is open, even if the gc was interrupted.
//! So a slow look-up cannot bypass the rule.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use roaring::RoaringTreemap;

use crate::chunk::ChunkId;
use crate::map::PageId;
use crate::state::StoreState;

/// Whether a gc has condemned a chunk.
pub(crate) type Condemned = Arc<dyn Fn(ChunkId) -> bool + Send + Sync>;

/// The chunks and pages that a writer refers to.
pub(crate) struct Referred {
    first_chunk: ChunkId,
    first_page: PageId,
    claims: Mutex<Claims>,
    /// Held while entries of the dedup index are replaced or deleted.
    index: Mutex<()>,
}

#[derive(Default)]
struct Claims {
    chunks: RoaringTreemap,
    condemned: Vec<Condemned>,
}

impl Referred {
    /// For a writer that was opened at `state`.
    pub(super) fn new(state: &StoreState) -> Referred {
        Referred {
            first_chunk: state.next_chunk,
            first_page: state.next_page,
            claims: Mutex::default(),
            index: Mutex::default(),
        }
    }

    /// Chunks from this one on were stored by this writer.
    pub(crate) fn first_chunk(&self) -> ChunkId {
        self.first_chunk
    }

    /// Pages from this one on were stored by this writer.
    pub(crate) fn first_page(&self) -> PageId {
        self.first_page
    }

    /// Claims chunks that were found in the dedup index. Condemned ones become 0.
    pub(super) fn claim<'ids>(&self, ids: impl Iterator<Item = &'ids mut ChunkId>) {
        let mut claims = self.claims.lock();
        for id in ids.filter(|id| **id != 0 && **id < self.first_chunk) {
            if claims.condemned.iter().any(|condemned| condemned(*id)) {
                *id = 0
            } else {
                claims.chunks.insert(*id);
            }
        }
    }

    /// Condemns the chunks that `choose` selects; it receives the claimed ones. Nothing is claimed
    /// meanwhile.
    pub(crate) fn condemn<T>(&self, choose: impl FnOnce(&RoaringTreemap) -> (Condemned, T)) -> T {
        let mut claims = self.claims.lock();
        let (condemned, chosen) = choose(&claims.chunks);
        claims.condemned.push(condemned);
        chosen
    }

    /// Held by a commit, and by every change of dedup entries that depends on what was read there.
    /// So an entry that was just pointed at a new chunk is not deleted.
    pub(crate) fn changing_index(&self) -> MutexGuard<'_, ()> {
        self.index.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn condemned_chunks_cannot_be_claimed() {
        let state = StoreState { next_chunk: 100, ..StoreState::NEW };
        let referred = Referred::new(&state);
        let claim = |mut ids: Vec<ChunkId>| {
            referred.claim(ids.iter_mut());
            ids
        };
        assert_eq!(claim(vec![0, 5, 100, 200]), [0, 5, 100, 200]);
        let claimed = referred
            .condemn(|claimed| (Arc::new(|id| id < 50), claimed.iter().collect::<Vec<_>>()));
        assert_eq!(claimed, [5]);
        assert_eq!(claim(vec![7, 60, 130]), [0, 60, 130]);
        // A second gc keeps the first one's condemned chunks.
        referred.condemn(|_claimed| (Arc::new(|id| id == 70), ()));
        assert_eq!(claim(vec![7, 70, 80]), [0, 0, 80]);
    }
}
