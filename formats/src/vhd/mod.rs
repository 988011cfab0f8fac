//! VHD, fixed and dynamic.
//!
//! Source: Microsoft, "Virtual Hard Disk Image Format Specification", October
//! 2006. All numbers are big endian; sectors are 512 bytes.
//!
//! ```text
//! fixed     disk | rest of the last sector | footer
//! dynamic   footer | header | BAT | per present block: 7 empty sectors,
//!           sector bitmap, 2 MiB of the disk | footer
//! ```

mod dynamic;
mod footer;
mod geometry;

pub(crate) use dynamic::dynamic;

use crate::layout::Builder;
use crate::{DiskShape, Layout};
use footer::{DiskType, footer};

/// Bytes in a sector.
const SECTOR_BYTES: u64 = 512;

/// A fixed VHD: the disk, then the footer. A client may change the footer.
pub(crate) fn fixed(disk: &DiskShape) -> Layout {
    let builder = Builder::writable().disk(disk.size_bytes).zeroes_to(disk.shown_bytes());
    builder.bytes(footer(disk, DiskType::Fixed).to_vec()).finish()
}

/// The checksum of a footer or header whose checksum field is zero: the one's
/// complement of the sum of its bytes.
fn checksum(bytes: &[u8]) -> [u8; 4] {
    let sum: u32 = bytes.iter().map(|byte| u32::from(*byte)).sum();
    (!sum).to_be_bytes()
}
