//! VMDK: flat for ESXi and for other products, sparse, and the compressed
//! stream of an OVA.
//!
//! Source: VMware, "Virtual Disk Format 5.0" (technical note). Binary numbers are
//! little endian; offsets and lengths count sectors of 512 bytes.
//!
//! ```text
//! flat      NAME.vmdk: a text    NAME-flat.vmdk: the disk, in whole sectors
//! sparse    header | text | directory, tables | directory, tables | grains
//! stream    header | text | compressed grains, a table after each 512 of them |
//!           directory | footer | end
//! ```

mod descriptor;
mod header;
mod sparse;
mod stream;

pub(crate) use sparse::sparse;
pub use stream::{CompressedGrain, GrainCompressor, StreamVmdk};

use crate::layout::Builder;
use crate::{DiskShape, Format, Layout, Names};
use descriptor::Extent;

/// Bytes in a sector.
const SECTOR_BYTES: u64 = 512;

/// Bytes in a grain, the block of sparse and stream: 128 sectors, as every VMware
/// product writes.
pub const GRAIN_SIZE_BYTES: u64 = 64 << 10;
const GRAIN_SECTORS: u64 = GRAIN_SIZE_BYTES / SECTOR_BYTES;

/// Entries of a grain table (numGTEsPerGT), and the table's length in sectors.
const TABLE_ENTRIES: u64 = 512;
const TABLE_SECTORS: u64 = TABLE_ENTRIES * 4 / SECTOR_BYTES;

/// Sector numbers in directories and tables have 32 bits.
const MAX_IMAGE_SECTORS: u64 = 1 << 32;

/// Space for a client that rewrites a descriptor: VMware's are below 10 KiB, and
/// QEMU rewrites it as a whole.
const DESCRIPTOR_LIMIT_BYTES: u64 = 64 << 10;

/// The text of a flat VMDK; it names the companion, which holds the disk.
pub(crate) fn flat_descriptor(names: &Names, disk: &DiskShape) -> Layout {
    let extent = if names.format() == Format::Vmdk { Extent::Vmfs } else { Extent::MonolithicFlat };
    let text = descriptor::text(extent, names.companion(), disk);
    Builder::writable().bytes(text.into_bytes()).finish_growable(DESCRIPTOR_LIMIT_BYTES)
}

fn sectors(bytes: u64) -> u64 {
    bytes.div_ceil(SECTOR_BYTES)
}
