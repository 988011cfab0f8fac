//! Estimates the stored size of chunks without reading them.

use std::ops::RangeInclusive;

use coldrise_block::Result;

use crate::Repository;
use crate::chunk::ChunkId;
use crate::rocks::{Family, LiveFile};
use crate::state::StoreState;

/// The average chunk size of each file: a file holds one backup, or a part of one.
pub(super) struct ChunkSizes {
    /// Ascending.
    ranges: Vec<(RangeInclusive<ChunkId>, u64)>,
    /// The size for a chunk that is in no file yet.
    elsewhere_bytes: u64,
}

impl ChunkSizes {
    /// # Errors
    /// The errors of listing the database files.
    pub(super) fn read(repository: &Repository, state: &StoreState) -> Result<ChunkSizes> {
        let average = |bytes: u64, chunks: u64| bytes.checked_div(chunks).unwrap_or(0);
        // Files with overlapping id ranges are combined.
        let mut files: Vec<(RangeInclusive<ChunkId>, u64, u64)> = Vec::new();
        for file in repository.database().live_files(Family::Chunks)? {
            let Some(ids) = ids_of(&file) else { continue };
            let (bytes, chunks) = (file.bytes, file.values());
            match files.last_mut() {
                Some((last, all_bytes, all_chunks)) if ids.start() <= last.end() => {
                    *last = *last.start()..=*last.end().max(ids.end());
                    *all_bytes += bytes;
                    *all_chunks += chunks;
                }
                _ => files.push((ids, bytes, chunks)),
            }
        }
        let ranges = files.into_iter().map(|(ids, bytes, chunks)| (ids, average(bytes, chunks)));
        Ok(ChunkSizes {
            ranges: ranges.collect(),
            elsewhere_bytes: average(state.stored_bytes, state.chunks),
        })
    }

    /// Gives every chunk the same size.
    #[cfg(test)]
    pub(super) fn all(bytes: u64) -> ChunkSizes {
        ChunkSizes { ranges: Vec::new(), elsewhere_bytes: bytes }
    }

    /// The sizes of the chunks from `first` on, in sequence.
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

fn ids_of(file: &LiveFile) -> Option<RangeInclusive<ChunkId>> {
    let id = |key: &[u8]| key.try_into().ok().map(ChunkId::from_be_bytes);
    Some(id(&file.smallest)?..=id(&file.largest)?)
}
