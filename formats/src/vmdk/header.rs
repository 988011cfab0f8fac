//! The header of a hosted sparse extent ("Hosted Sparse Extent Header").

use super::{GRAIN_SECTORS, SECTOR_BYTES, TABLE_ENTRIES};
use crate::fields::put;

/// Bytes in a header.
pub(super) const HEADER_BYTES: usize = SECTOR_BYTES as usize;

/// The embedded descriptor follows the header's sector; products reserve 20
/// sectors for it.
pub(super) const DESCRIPTOR_OFFSET_SECTORS: u64 = 1;
pub(super) const DESCRIPTOR_SECTORS: u64 = 20;

/// Bits of "flags".
pub(super) mod flags {
    /// The line break test is valid.
    pub(in super::super) const LINE_BREAKS: u32 = 1;
    /// There is a second directory with tables of its own.
    pub(in super::super) const REDUNDANT: u32 = 1 << 1;
    /// Grains are compressed.
    pub(in super::super) const COMPRESSED: u32 = 1 << 16;
    /// Markers announce the parts of the file.
    pub(in super::super) const MARKERS: u32 = 1 << 17;
}

/// "compressAlgorithm": deflate, in zlib's framing.
pub(super) const DEFLATE: u16 = 1;

/// The fields that differ between sparse extents, in sectors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) flags: u32,
    pub(super) capacity: u64,
    pub(super) redundant_directory: u64,
    pub(super) directory: u64,
    pub(super) overhead: u64,
    pub(super) compression: u16,
}

impl Header {
    pub(super) fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        put(&mut header, 0, b"KDMV");
        put(&mut header, 4, self.version.to_le_bytes());
        put(&mut header, 8, self.flags.to_le_bytes());
        put(&mut header, 12, self.capacity.to_le_bytes());
        put(&mut header, 20, GRAIN_SECTORS.to_le_bytes());
        put(&mut header, 28, DESCRIPTOR_OFFSET_SECTORS.to_le_bytes());
        put(&mut header, 36, DESCRIPTOR_SECTORS.to_le_bytes());
        put(&mut header, 44, (TABLE_ENTRIES as u32).to_le_bytes());
        put(&mut header, 48, self.redundant_directory.to_le_bytes());
        put(&mut header, 56, self.directory.to_le_bytes());
        put(&mut header, 64, self.overhead.to_le_bytes());
        // Byte 72: not closed uncleanly. The next bytes are those that a
        // transfer as text would have changed.
        put(&mut header, 73, b"\n \r\n");
        put(&mut header, 77, self.compression.to_le_bytes());
        header
    }

    /// Header and descriptor: the extent up to its first directory or grain.
    pub(super) fn with_descriptor(&self, text: &str) -> Vec<u8> {
        let mut front = self.bytes().to_vec();
        front.extend_from_slice(text.as_bytes());
        front.resize(((DESCRIPTOR_OFFSET_SECTORS + DESCRIPTOR_SECTORS) * SECTOR_BYTES) as usize, 0);
        front
    }
}
