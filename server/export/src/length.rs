//! Which image files clients make longer or shorter: only the text of a flat VMDK,
//! which they write anew as a whole.

use coldrise_block::Disk;
use coldrise_formats::Layout;
use coldrise_session::Length;
use std::sync::Arc;

/// Bytes of the side file of an image file: what the file may hold, and the block
/// with the length where that can change.
pub(crate) fn side_file_bytes(layout: &Layout) -> u64 {
    if layout.growth_limit_bytes() == layout.size_bytes() {
        return layout.size_bytes();
    }
    Length::disk_bytes(layout.growth_limit_bytes())
}

/// The length of a file of that layout; `None` where it never changes.
pub(crate) fn length_of(layout: &Layout, side: &Arc<dyn Disk>) -> Option<Length> {
    let (limit_bytes, first_bytes) = (layout.growth_limit_bytes(), layout.size_bytes());
    (limit_bytes != first_bytes).then(|| Length::new(side, limit_bytes, first_bytes))
}
