//! Raw: exactly the disk's bytes.

use crate::layout::Builder;
use crate::{DiskShape, Layout};

/// A file with exactly the disk's bytes.
pub(crate) fn layout(disk: &DiskShape) -> Layout {
    Builder::writable().disk(disk.size_bytes).finish()
}

/// The data file of a format that counts in sectors: zeroes fill the last
/// sector.
pub(crate) fn whole_sectors(disk: &DiskShape) -> Layout {
    Builder::writable().disk(disk.size_bytes).zeroes_to(disk.shown_bytes()).finish()
}
