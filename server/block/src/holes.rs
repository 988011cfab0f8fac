//! A disk that is one hole.

use crate::{Disk, Extent, ExtentKind, ReadContext, ReadSource, Result, check_range};

/// A disk of zeroes, for a layer without a base or in place of a disk that is not
/// opened. The field is its size in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Holes(pub u64);

impl Disk for Holes {
    fn size_bytes(&self) -> u64 {
        self.0
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()> {
        let length_bytes = buffer.len() as u64;
        check_range(self.0, offset_bytes, length_bytes)?;
        buffer.fill(0);
        context.add(ReadSource::Zero, offset_bytes, length_bytes);
        Ok(())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, _limit: usize) -> Result<Vec<Extent>> {
        check_range(self.0, offset_bytes, length_bytes)?;
        Ok(vec![Extent { offset_bytes, length_bytes, kind: ExtentKind::Hole }])
    }
}
