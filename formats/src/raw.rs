//! Raw: the disk's bytes and nothing else, exact to the byte.

use crate::layout::Builder;
use crate::{DiskShape, Layout};

/// A file that is the disk.
pub(crate) fn layout(disk: &DiskShape) -> Layout {
    Builder::writable().disk(disk.size_bytes).finish()
}

/// The data file of a format that counts in sectors: zeroes fill the last one.
pub(crate) fn whole_sectors(disk: &DiskShape) -> Layout {
    Builder::writable().disk(disk.size_bytes).zeroes_to(disk.shown_bytes()).finish()
}
