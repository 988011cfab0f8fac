//! What a large file shows where nothing was written, and behind its end.

use coldrise_block::{check_range, Disk, Extent, ExtentKind, Result};

/// The part of `buffer` that a file of that length fills from an offset on; the rest
/// is zeroed, for who asked for more has seen a longer file.
pub(super) fn inside(buffer: &mut [u8], offset_bytes: u64, length_bytes: u64) -> &mut [u8] {
    let left = length_bytes.saturating_sub(offset_bytes);
    let filled = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
    let (part, rest) = buffer.split_at_mut(filled);
    rest.fill(0);
    part
}

/// A disk that holds nothing.
pub(super) struct Nothing(pub(super) u64);

impl Disk for Nothing {
    fn size_bytes(&self) -> u64 {
        self.0
    }

    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        check_range(self.0, offset_bytes, buffer.len() as u64)?;
        buffer.fill(0);
        Ok(())
    }

    fn read_in_memory(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.read_at(buffer, offset_bytes)
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, _limit: usize) -> Result<Vec<Extent>> {
        check_range(self.0, offset_bytes, length_bytes)?;
        Ok(vec![Extent { offset_bytes, length_bytes, kind: ExtentKind::Hole }])
    }
}
