//! VHDX with all blocks present, or with only the stored blocks.
//!
//! Source: [MS-VHDX], "Virtual Hard Disk v2 (VHDX) File Format". All numbers are
//! little endian; every part after the front begins at a whole MiB.
//!
//! ```text
//! 0        file identifier, two headers, two region tables    (front)
//! 1 MiB    log, empty
//! 2 MiB    metadata: block size, disk size, sector sizes, id  (metadata)
//! 3 MiB    BAT
//! then     payload blocks, in the order of the disk
//! ```
//!
//! With every block present, the payload is the disk in one piece.

mod front;
mod metadata;

use std::ops::Range;
use std::sync::Arc;

use crate::layout::{Blocks, Builder, Present, Table, Width, Writes};
use crate::{DiskShape, Layout, Result};

const MIB: u64 = 1 << 20;
const LOG_OFFSET_BYTES: u64 = MIB;
const LOG_BYTES: u64 = MIB;
const METADATA_OFFSET_BYTES: u64 = 2 * MIB;
const METADATA_BYTES: u64 = MIB;
const BAT_OFFSET_BYTES: u64 = 3 * MIB;

/// 2.5.1.1: PAYLOAD_BLOCK_FULLY_PRESENT. An entry combines it with the block's
/// offset in the file, whose low 20 bits are 0.
const FULLY_PRESENT: u64 = 6;
/// PAYLOAD_BLOCK_NOT_PRESENT and SB_BLOCK_NOT_PRESENT.
const NOT_PRESENT: u64 = 0;

/// Maximum number of blocks. Larger disks get larger blocks, because readers
/// hold the whole BAT in memory (8 MiB at this limit).
const MAX_BLOCKS: u64 = 1 << 20;
/// 2.6.2.1: from 1 MiB to 256 MiB, a power of two. VHD uses this size, too.
const LEAST_BLOCK_BYTES: u64 = 2 * MIB;

const _: () = assert!(crate::MAX_DISK_SIZE_BYTES / MAX_BLOCKS <= 256 * MIB);

/// The values that follow from a disk's size.
struct Shape {
    block_bytes: u64,
    /// Payload blocks per sector bitmap block (2.5): after this many entries the
    /// BAT has one for a bitmap, which only differencing disks use.
    chunk_ratio: u64,
    bat_bytes: u64,
}

impl Shape {
    fn of(disk: &DiskShape) -> Self {
        let size_bytes = disk.shown_bytes();
        let block_bytes =
            size_bytes.div_ceil(MAX_BLOCKS).next_power_of_two().max(LEAST_BLOCK_BYTES);
        let chunk_ratio = (disk.sector_size.bytes() << 23) / block_bytes;
        let blocks = size_bytes.div_ceil(block_bytes);
        let entries = blocks + (blocks - 1) / chunk_ratio;
        let bat_bytes = (entries * Width::U64Le.bytes() as u64).next_multiple_of(MIB);
        Shape { block_bytes, chunk_ratio, bat_bytes }
    }

    fn payload_offset_bytes(&self) -> u64 {
        BAT_OFFSET_BYTES + self.bat_bytes
    }

    fn bat(&self, present: Arc<Present>) -> Table {
        Table {
            width: Width::U64Le,
            present,
            first: self.payload_offset_bytes() | FULLY_PRESENT,
            step: self.block_bytes,
            absent: NOT_PRESENT,
            spacer_after: Some(self.chunk_ratio),
        }
    }
}

/// A VHDX in which every block is present. Clients may change headers, log and
/// metadata; a changed BAT would move the disk's data.
pub(crate) fn fixed(disk: &DiskShape) -> Layout {
    let shape = Shape::of(disk);
    let blocks = disk.shown_bytes().div_ceil(shape.block_bytes);
    let end = shape.payload_offset_bytes() + blocks * shape.block_bytes;
    let bat = shape.bat(Arc::new(Present::All(blocks)));
    head(Builder::writable(), disk, &shape, bat, metadata::Allocation::Fixed)
        .disk(disk.size_bytes)
        .zeroes_to(end)
        .finish()
}

/// A VHDX with the blocks that `stored` touches.
pub(crate) fn dynamic(
    disk: &DiskShape,
    stored: impl IntoIterator<Item = Range<u64>>,
) -> Result<Layout> {
    let shape = Shape::of(disk);
    let present = Arc::new(Present::from_stored(disk.size_bytes, shape.block_bytes, stored)?);
    let blocks = Blocks {
        present: present.clone(),
        block_bytes: shape.block_bytes,
        lead: Vec::new(),
        disk_bytes: disk.size_bytes,
    };
    let bat = shape.bat(present);
    let builder = head(Builder::read_only(), disk, &shape, bat, metadata::Allocation::Dynamic);
    Ok(builder.blocks(blocks).finish())
}

/// Everything before the payload.
fn head(
    builder: Builder,
    disk: &DiskShape,
    shape: &Shape,
    bat: Table,
    allocation: metadata::Allocation,
) -> Builder {
    let builder = front::front(builder, disk, shape.bat_bytes).zeroes_to(METADATA_OFFSET_BYTES);
    let builder = metadata::metadata(builder, disk, shape.block_bytes, allocation);
    builder.zeroes_to(BAT_OFFSET_BYTES).table(shape.bat_bytes, bat, Writes::Refused)
}
