//! What is known about a range of a disk without reading it.

/// What a range of a disk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Stored bytes: they have to be read.
    Stored,
    /// Reads as zeroes because something wrote zeroes there.
    Zero,
    /// Reads as zeroes because nothing was ever stored there.
    Hole,
}

impl ExtentKind {
    /// True where a read is known to return zeroes.
    pub fn reads_zero(self) -> bool {
        self != ExtentKind::Stored
    }
}

/// A range of a disk of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte of the range.
    pub offset_bytes: u64,
    /// Length of the range; never 0.
    pub length_bytes: u64,
    /// What the range holds.
    pub kind: ExtentKind,
}

/// Appends `next` to `extents`, joining it with the last one where they touch
/// and are of one kind. An empty `next` is dropped.
pub fn push_extent(extents: &mut Vec<Extent>, next: Extent) {
    if next.length_bytes == 0 {
        return;
    }
    if let Some(last) = extents.last_mut() {
        if last.kind == next.kind && last.offset_bytes + last.length_bytes == next.offset_bytes {
            last.length_bytes += next.length_bytes;
            return;
        }
    }
    extents.push(next);
}
