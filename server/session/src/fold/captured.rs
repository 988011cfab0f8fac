//! The chunks of a disk that its layers touch.

use std::ops::Range;
use std::sync::Arc;

use coldrise_block::BLOCK_SIZE_BYTES;

use crate::layer::Layer;

/// Iterates in order over the chunks of which at least one layer captured a block.
pub(super) struct CapturedChunks<'a> {
    layers: &'a [Arc<Layer>],
    /// Per layer, the next captured block; `None` if there are no more.
    next: Vec<Option<u64>>,
    chunk_size: u64,
    size_bytes: u64,
}

impl<'a> CapturedChunks<'a> {
    pub(super) fn new(layers: &'a [Arc<Layer>], chunk_size: u64, size_bytes: u64) -> Self {
        let next = layers.iter().map(|layer| layer.next_captured(0)).collect();
        CapturedChunks { layers, next, chunk_size, size_bytes }
    }

    /// The next run of neighbouring chunks, in bytes of the disk. It is at most about `most_bytes`
    /// long.
    pub(super) fn next_run(&mut self, most_bytes: u64) -> Option<Range<u64>> {
        let first = self.next_chunk()?;
        let mut end = first;
        while end - first < most_bytes.max(self.chunk_size) && self.next_chunk() == Some(end) {
            end += self.chunk_size;
            self.pass(end);
        }
        Some(first..end.min(self.size_bytes))
    }

    /// Start of the next chunk with a captured block, in bytes of the disk.
    fn next_chunk(&self) -> Option<u64> {
        let block = self.next.iter().flatten().min()?;
        Some(block * BLOCK_SIZE_BYTES / self.chunk_size * self.chunk_size)
    }

    fn pass(&mut self, end_bytes: u64) {
        let block = end_bytes / BLOCK_SIZE_BYTES;
        for (layer, next) in self.layers.iter().zip(&mut self.next) {
            if next.is_some_and(|next| next < block) {
                *next = layer.next_captured(block);
            }
        }
    }
}
