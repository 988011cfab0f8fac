//! Image files with a variable length: only the text of a flat VMDK, which clients rewrite
//! as a whole.

use coldrise_block::Disk;
use coldrise_formats::Layout;
use coldrise_session::Length;
use std::sync::Arc;

/// Size in bytes of the side file of an image file: the file's maximum content, plus the
/// block with the length if the length can change.
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
