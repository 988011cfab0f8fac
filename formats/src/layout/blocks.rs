//! The content of a compact image: its present blocks, one after the other.

use std::sync::Arc;

use super::{Place, Present, Source};

/// Approximate maximum of neighbouring blocks in one segment. It bounds the cost
/// of finding a segment.
const MAX_JOINED_BLOCKS: u64 = 16 << 10;

/// Present blocks in the order of the disk, each after the same `lead` bytes
/// (VHD's sector bitmap).
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) present: Arc<Present>,
    pub(crate) block_bytes: u64,
    pub(crate) lead: Vec<u8>,
    /// The disk may end within its last block; zeroes follow.
    pub(crate) disk_bytes: u64,
}

impl Blocks {
    /// Bytes from one present block to the next.
    pub(crate) fn stride_bytes(&self) -> u64 {
        self.lead.len() as u64 + self.block_bytes
    }

    /// Length of all present blocks with their leads.
    pub(crate) fn length_bytes(&self) -> u64 {
        self.present.present_count() * self.stride_bytes()
    }

    /// The source of the byte at `within` from the region's start, and how many
    /// bytes share it.
    pub(super) fn source_at(&self, within: u64) -> (Source, u64) {
        let (stride, lead) = (self.stride_bytes(), self.lead.len() as u64);
        let in_stride = within % stride;
        if in_stride < lead {
            return (Source::Metadata, lead - in_stride);
        }
        let block = self.present.select(within / stride);
        let run = if lead == 0 { self.present.run(block, MAX_JOINED_BLOCKS) } else { 1 };
        let offset_bytes = block * self.block_bytes + in_stride - lead;
        let end = (block + run) * self.block_bytes;
        if offset_bytes < self.disk_bytes {
            (Source::Disk { offset_bytes }, end.min(self.disk_bytes) - offset_bytes)
        } else {
            (Source::Zero, end - offset_bytes)
        }
    }

    /// Where the disk's bytes from `disk_offset_bytes` on lie in a file whose
    /// blocks begin at `start_bytes`.
    pub(super) fn place_of(&self, disk_offset_bytes: u64, start_bytes: u64) -> Option<Place> {
        if disk_offset_bytes >= self.disk_bytes {
            return None;
        }
        let block = disk_offset_bytes / self.block_bytes;
        let within = disk_offset_bytes % self.block_bytes;
        let (offset_bytes, run) = match self.present.rank(block) {
            Some(rank) => {
                let lead = self.lead.len() as u64;
                let run = if lead == 0 { self.present.run(block, MAX_JOINED_BLOCKS) } else { 1 };
                (Some(start_bytes + rank * self.stride_bytes() + lead + within), run)
            }
            None => (None, 1),
        };
        let end = ((block + run) * self.block_bytes).min(self.disk_bytes);
        Some(Place { offset_bytes, length_bytes: end - disk_offset_bytes })
    }

    /// Copies the lead bytes into `buffer` and leaves its other bytes unchanged.
    pub(super) fn read_leads(&self, within: u64, buffer: &mut [u8]) {
        let (stride, lead) = (self.stride_bytes(), self.lead.len() as u64);
        if lead == 0 {
            return;
        }
        let mut at = 0;
        while at < buffer.len() as u64 {
            let in_stride = (within + at) % stride;
            if in_stride < lead {
                let length = (lead - in_stride).min(buffer.len() as u64 - at);
                buffer[at as usize..][..length as usize]
                    .copy_from_slice(&self.lead[in_stride as usize..][..length as usize]);
            }
            at += stride - in_stride;
        }
    }
}
