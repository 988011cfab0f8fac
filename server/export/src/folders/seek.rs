//! Finds where a file stores bytes, without reading it.

use coldrise_block::{Disk, Error, ErrorKind, Result};

/// Bytes in the first step. Each further step is longer: the answer is usually near, and a
/// long hole then costs next to nothing.
const FIRST_WINDOW_BYTES: u64 = 1 << 20;
/// Extents in one request.
const EXTENTS: usize = 16;

/// The first stored byte from `offset_bytes` on; `None` if only zeroes follow. An offset
/// behind the end is `ErrorKind::OutOfRange`.
pub(super) fn next_stored(disk: &dyn Disk, offset_bytes: u64) -> Result<Option<u64>> {
    first(disk, offset_bytes, |reads_zero| !reads_zero)
}

/// The first byte from `offset_bytes` on that is known to be zero; the file's
/// end counts as one. An offset behind the end is `ErrorKind::OutOfRange`.
pub(super) fn next_hole(disk: &dyn Disk, offset_bytes: u64) -> Result<u64> {
    let found = first(disk, offset_bytes, |reads_zero| reads_zero)?;
    Ok(found.unwrap_or_else(|| disk.size_bytes()))
}

fn first(
    disk: &dyn Disk,
    offset_bytes: u64,
    is_wanted: impl Fn(bool) -> bool,
) -> Result<Option<u64>> {
    let size_bytes = disk.size_bytes();
    if offset_bytes > size_bytes {
        return Err(Error::new(
            ErrorKind::OutOfRange,
            format!("{offset_bytes} is behind the end of {size_bytes} bytes"),
        ));
    }
    let mut at = offset_bytes;
    let mut window = FIRST_WINDOW_BYTES;
    while at < size_bytes {
        let found = disk.extents(at, window.min(size_bytes - at), EXTENTS)?;
        if let Some(extent) = found.iter().find(|extent| is_wanted(extent.kind.reads_zero())) {
            return Ok(Some(extent.offset_bytes.max(offset_bytes)));
        }
        let Some(last) = found.last() else {
            return Err(Error::new(ErrorKind::Internal, "a disk reported no extents"));
        };
        at = last.end_behind(at)?;
        window = window.saturating_mul(2);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use coldrise_block::{Extent, ExtentKind, ReadContext, push_extent};

    const MIB: u64 = 1 << 20;

    /// A disk of stored ranges.
    struct Ranges {
        size_bytes: u64,
        stored: Vec<std::ops::Range<u64>>,
    }

    impl Disk for Ranges {
        fn size_bytes(&self) -> u64 {
            self.size_bytes
        }

        fn read(&self, _: &mut [u8], _: u64, _: &mut ReadContext) -> Result<()> {
            panic!("nothing has to be read")
        }

        fn extents(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
            let mut found = Vec::new();
            let mut at = offset;
            while at < offset + length && found.len() <= limit {
                let within = self.stored.iter().find(|range| range.contains(&at));
                let next = self.stored.iter().map(|range| range.start).find(|start| *start > at);
                let (end, kind) = match within {
                    Some(range) => (range.end, ExtentKind::Stored),
                    None => (next.unwrap_or(u64::MAX), ExtentKind::Hole),
                };
                let end = end.min(offset + length);
                push_extent(&mut found, Extent { offset_bytes: at, length_bytes: end - at, kind });
                at = end;
            }
            found.truncate(limit);
            Ok(found)
        }
    }

    #[test]
    fn a_seek_finds_stored_ranges_at_any_distance() {
        let size_bytes = 1 << 40;
        let far = size_bytes - 4096;
        let disk = Ranges { size_bytes, stored: vec![0..4096, 9 * MIB..10 * MIB, far..size_bytes] };
        assert_eq!(next_stored(&disk, 0).unwrap(), Some(0));
        assert_eq!(next_stored(&disk, 4095).unwrap(), Some(4095));
        assert_eq!(next_stored(&disk, 4096).unwrap(), Some(9 * MIB));
        assert_eq!(next_stored(&disk, 10 * MIB).unwrap(), Some(far));
        assert_eq!(next_hole(&disk, 0).unwrap(), 4096);
        assert_eq!(next_hole(&disk, 5000).unwrap(), 5000);
        assert_eq!(next_hole(&disk, 9 * MIB).unwrap(), 10 * MIB);
        assert_eq!(next_hole(&disk, far).unwrap(), size_bytes, "the end is a hole");
        assert_eq!(next_hole(&disk, size_bytes).unwrap(), size_bytes);
    }

    #[test]
    fn a_seek_behind_the_last_stored_range_finds_nothing() {
        let disk = Ranges { size_bytes: 100 * MIB, stored: vec![0..4096, 8192..MIB] };
        assert_eq!(next_stored(&disk, MIB).unwrap(), None);
        assert_eq!(next_stored(&disk, 100 * MIB).unwrap(), None);
        let behind = next_stored(&disk, 100 * MIB + 1).unwrap_err();
        assert_eq!(behind.kind(), ErrorKind::OutOfRange);
    }

    #[test]
    fn many_small_extents_are_stepped_over() {
        let stored = (0..4000).map(|n| n * 8192..n * 8192 + 4096).collect();
        let disk = Ranges { size_bytes: 4000 * 8192 + MIB, stored };
        let end = 3999 * 8192 + 4096;
        assert_eq!(next_stored(&disk, end - 1).unwrap(), Some(end - 1));
        assert_eq!(next_stored(&disk, end).unwrap(), None);
        assert_eq!(next_hole(&disk, 8192).unwrap(), 8192 + 4096);
    }
}
