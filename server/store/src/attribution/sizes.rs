//! About what chunks take, told without reading them.

use std::ops::RangeInclusive;

use crate::chunk::ChunkId;
use crate::reclaim::of_family;
use crate::rocks::Family;
use crate::state::StoreState;
use crate::{Reachable, Repository};

/// The average of the files that a chunk lies in: a file holds what one backup, or a
/// part of it, stored.
pub(super) struct ChunkSizes {
    /// Ascending.
    ranges: Vec<(RangeInclusive<ChunkId>, u64)>,
    /// Where a chunk is in no file yet.
    elsewhere_bytes: u64,
}

impl ChunkSizes {
    pub(super) fn read(repository: &Repository, state: &StoreState) -> ChunkSizes {
        let average = |bytes: u64, chunks: u64| bytes.checked_div(chunks).unwrap_or(0);
        // A file that the writer deletes just now is no reason to tell nothing.
        let units =
            of_family(repository, Family::Chunks, &Reachable::default()).unwrap_or_default();
        ChunkSizes {
            ranges: units.into_iter().map(|u| (u.ids, average(u.bytes, u.entries))).collect(),
            elsewhere_bytes: average(state.stored_bytes, state.chunks),
        }
    }

    /// Every chunk takes as much.
    #[cfg(test)]
    pub(super) fn all(bytes: u64) -> ChunkSizes {
        ChunkSizes { ranges: Vec::new(), elsewhere_bytes: bytes }
    }

    /// What the chunks from `first` on take, one after the other.
    pub(super) fn from(&self, first: ChunkId) -> impl Iterator<Item = u64> + '_ {
        let mut ranges = self.ranges.iter().peekable();
        (first..).map(move |id| {
            while ranges.next_if(|(range, _)| *range.end() < id).is_some() {}
            match ranges.peek() {
                Some((range, bytes)) if range.contains(&id) => *bytes,
                _ => self.elsewhere_bytes,
            }
        })
    }
}
