//! Builds a layout from its first byte to its last.

use super::{Blocks, Content, Layout, Region, Table, Writes};

/// Collects regions; each begins at the end of the previous one.
pub(crate) struct Builder {
    regions: Vec<Region>,
    at: u64,
    read_only: bool,
}

impl Builder {
    /// For a file that clients can write.
    pub(crate) fn writable() -> Self {
        Builder { regions: Vec::new(), at: 0, read_only: false }
    }

    /// For a file that refuses every write.
    pub(crate) fn read_only() -> Self {
        Builder { read_only: true, ..Builder::writable() }
    }

    /// Bytes that a client may change.
    pub(crate) fn bytes(self, bytes: Vec<u8>) -> Self {
        let length = bytes.len() as u64;
        self.push(length, Content::Bytes(bytes), Writes::Kept)
    }

    /// A table of `length_bytes`.
    pub(crate) fn table(self, length_bytes: u64, table: Table, writes: Writes) -> Self {
        self.push(length_bytes, Content::Table(table), writes)
    }

    /// Zeroes up to `offset_bytes` of the file, which must not lie before
    /// [`Builder::at`].
    pub(crate) fn zeroes_to(self, offset_bytes: u64) -> Self {
        let length = offset_bytes - self.at;
        self.push(length, Content::Zero, Writes::Kept)
    }

    /// The whole disk.
    pub(crate) fn disk(self, size_bytes: u64) -> Self {
        self.push(size_bytes, Content::Disk, Writes::ToDisk)
    }

    /// The present blocks of the disk.
    pub(crate) fn blocks(self, blocks: Blocks) -> Self {
        let length = blocks.length_bytes();
        self.push(length, Content::Blocks(blocks), Writes::Refused)
    }

    /// The current end, in bytes.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// The layout.
    pub(crate) fn finish(self) -> Layout {
        Layout { regions: self.regions, size_bytes: self.at, growth_limit_bytes: self.at }
    }

    /// The layout of a small file that clients can extend up to the limit.
    pub(crate) fn finish_growable(self, limit_bytes: u64) -> Layout {
        Layout { growth_limit_bytes: limit_bytes.max(self.at), ..self.finish() }
    }

    fn push(mut self, length_bytes: u64, content: Content, writes: Writes) -> Self {
        if length_bytes > 0 {
            let writes = if self.read_only { Writes::Refused } else { writes };
            self.regions.push(Region { start_bytes: self.at, length_bytes, content, writes });
            self.at += length_bytes;
        }
        self
    }
}
