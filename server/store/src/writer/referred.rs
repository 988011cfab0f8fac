//! What this writer refers to and no restore point names yet, against a gc beside it.
//!
//! A gc knows what points, sessions and leases name. What a backup has stored so far,
//! and which of the chunks that were there before it found to be its own content, only
//! the writer knows. Three rules, so that nothing goes that a backup needs:
//!
//! 1. Whatever this writer has stored itself stays: ids ascend, and all from the first
//!    on that was free when it was opened are its own.
//! 2. A chunk that was there before is *claimed* before its id gets into a map.
//! 3. A gc *condemns* what goes in one step, before it deletes the first dedup entry:
//!    what was claimed until then stays, and what it condemned is claimed by nobody
//!    afterwards. Whoever had just found it in the dedup index stores it anew.
//!
//! What was condemned once stays so for as long as the writer is open, even where the
//! gc was interrupted: no look-up is so slow that it misses the rule.

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

    /// Claims chunks that were found in the dedup index. Those that are not to be had
    /// any more become 0.
    pub(super) fn claim<'ids>(&self, ids: impl Iterator<Item = &'ids mut ChunkId>) {
        let mut claims = self.claims.lock();
        for id in ids.filter(|id| **id != 0 && **id < self.first_chunk) {
            match claims.condemned.iter().any(|condemned| condemned(*id)) {
                true => *id = 0,
                false => {
                    claims.chunks.insert(*id);
                }
            }
        }
    }

    /// Condemns what `choose` says, which hears what is claimed. Nothing is claimed
    /// meanwhile.
    pub(crate) fn condemn<T>(&self, choose: impl FnOnce(&RoaringTreemap) -> (Condemned, T)) -> T {
        let mut claims = self.claims.lock();
        let (condemned, chosen) = choose(&claims.chunks);
        claims.condemned.push(condemned);
        chosen
    }

    /// Whoever replaces or deletes entries of the dedup index by what it read there
    /// holds this meanwhile, and so does a commit: no entry is deleted that was just
    /// made to name a new chunk.
    pub(crate) fn changing_index(&self) -> MutexGuard<'_, ()> {
        self.index.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_condemned_is_not_claimed_and_what_is_claimed_is_heard_of() {
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
        // A second gc does not make it forget the first one.
        referred.condemn(|_claimed| (Arc::new(|id| id == 70), ()));
        assert_eq!(claim(vec![7, 70, 80]), [0, 0, 80]);
    }
}
