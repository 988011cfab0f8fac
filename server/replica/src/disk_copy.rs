//! One disk of a point that is about to be copied.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Disk, Result};
use coldrise_session::ByteRanges;
use coldrise_store::{DiskDocument, MapRoot, PointDocument};

use crate::changes::PointChanges;
use crate::remote::AnnouncedDisk;
use crate::source::CopySource;

/// Maximum number of ranges that are announced of a point.
const MAX_RANGES: usize = 16 << 10;

/// A point that both sides have.
pub(crate) struct Common {
    pub(crate) here: PointDocument,
    pub(crate) there: PointDocument,
}

/// The changes of a disk against its base at the remote side.
pub(crate) struct DiskCopy {
    pub(crate) source: PointChanges,
    /// The map of the base there.
    pub(crate) base: Option<MapRoot>,
    /// The size of the base, in bytes.
    pub(crate) base_end_bytes: Option<u64>,
    /// The base, read here.
    pub(crate) compared: Option<Arc<dyn Disk>>,
}

impl DiskCopy {
    /// Opens a disk of `point`. The caller holds the point and `common`.
    pub(crate) fn open(
        source: &dyn CopySource,
        point: &PointDocument,
        disk: &DiskDocument,
        common: Option<&Common>,
        cancel: &AtomicBool,
    ) -> Result<DiskCopy> {
        let name = &disk.name;
        let common = common.and_then(|common| {
            Some((&common.here, common.here.disk(name)?, common.there.disk(name)?))
        });
        // Layers there lie over the map, which alone can be a base.
        let common = common.filter(|(_, _, there)| there.layers.is_empty());
        let base = common.map(|(here, ..)| here);
        Ok(DiskCopy {
            source: PointChanges::open(source, point, base, name, cancel)?,
            base: common.map(|(_, _, there)| there.root),
            base_end_bytes: common.map(|(_, here, _)| here.size_bytes),
            compared: base.map(|base| source.disk(base, name)).transpose()?,
        })
    }

    /// For the announcement of a point with this number of disks.
    pub(crate) fn announced(&self, disks: usize) -> Result<AnnouncedDisk> {
        let content = Arc::clone(self.source.disk());
        let mut ranges: Vec<(u64, u64)> = self.source.differences()?.into();
        // No range says what lies behind the end of a smaller base.
        ranges.extend(self.base_end_bytes.map(|end| (end, content.size_bytes())));
        // Nor is behind the end of this disk what a larger base had there.
        ranges.iter_mut().for_each(|(_, end)| *end = content.size_bytes().min(*end));
        let differences = ByteRanges::union(ranges).at_most((MAX_RANGES / disks.max(1)).max(16));
        Ok(AnnouncedDisk { base: self.base, differences, content })
    }
}
