//! The stored ranges of a disk, found once for all callers.

use coldrise_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, ReadContext, Result, StoredRanges, check_range,
    push_extent,
};
use std::ops::Range;

/// Maximum number of ranges to keep, 16 bytes each. A disk with more is walked at every
/// request.
const MOST_RANGES: usize = 1 << 16;

/// A disk that answers only which ranges are stored; it cannot be read.
pub(super) struct StoredMap {
    size_bytes: u64,
    /// Sorted; no two touch.
    stored: Vec<Range<u64>>,
}

impl StoredMap {
    /// The map of a disk, by walking its extents; `None` if it has too many.
    pub(super) fn of(disk: &dyn Disk) -> Result<Option<StoredMap>> {
        let mut stored: Vec<Range<u64>> = Vec::new();
        let mut ranges = StoredRanges::of(disk);
        for range in &mut ranges {
            let is_full = stored.len() == MOST_RANGES;
            match stored.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ if is_full => return Ok(None),
                _ => stored.push(range),
            }
        }
        ranges.end()?;
        Ok(Some(StoredMap { size_bytes: disk.size_bytes(), stored }))
    }
}

impl Disk for StoredMap {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, _: &mut [u8], _: u64, _: &mut ReadContext) -> Result<()> {
        Err(Error::new(ErrorKind::Internal, "a map of a disk was asked for the disk's content"))
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        check_range(self.size_bytes, offset_bytes, length_bytes)?;
        let end = offset_bytes + length_bytes;
        let limit = limit.max(1);
        let (mut at, mut found) = (offset_bytes, Vec::new());
        let mut push = |found: &mut Vec<Extent>, until: u64, kind| {
            let extent = Extent { offset_bytes: at, length_bytes: until - at, kind };
            push_extent(found, extent);
            at = until;
        };
        let first = self.stored.partition_point(|range| range.end <= offset_bytes);
        for range in &self.stored[first..] {
            if range.start >= end || found.len() >= limit {
                break;
            }
            push(&mut found, range.start.max(offset_bytes), ExtentKind::Hole);
            push(&mut found, range.end.min(end), ExtentKind::Stored);
        }
        // At the limit the answer ends early.
        if found.len() < limit {
            push(&mut found, end, ExtentKind::Hole);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk that stores its odd blocks of 512 bytes, except the first `holes`.
    struct Striped {
        blocks: u64,
        holes: u64,
    }

    impl Disk for Striped {
        fn size_bytes(&self) -> u64 {
            self.blocks * 512 + 100
        }
        fn read(&self, _: &mut [u8], _: u64, _: &mut ReadContext) -> Result<()> {
            Err(Error::new(ErrorKind::Io, "not to be read"))
        }
        fn extents(
            &self,
            offset_bytes: u64,
            length_bytes: u64,
            limit: usize,
        ) -> Result<Vec<Extent>> {
            let (mut at, end, mut found) = (offset_bytes, offset_bytes + length_bytes, Vec::new());
            while at < end && found.len() < limit {
                let block = at / 512;
                let until = ((block + 1) * 512).min(end);
                let is_stored = block >= self.holes && block % 2 == 1;
                let kind = if is_stored { ExtentKind::Stored } else { ExtentKind::Zero };
                push_extent(
                    &mut found,
                    Extent { offset_bytes: at, length_bytes: until - at, kind },
                );
                at = until;
            }
            Ok(found)
        }
    }

    fn walked(disk: &dyn Disk) -> Vec<Range<u64>> {
        StoredRanges::of(disk).collect()
    }

    #[test]
    fn a_stored_map_returns_the_extents_of_its_disk() {
        for (blocks, holes) in [(0, 0), (1, 0), (2, 0), (5000, 0), (5000, 4000), (40, 40)] {
            let disk = Striped { blocks, holes };
            let map = StoredMap::of(&disk).unwrap().unwrap();
            assert_eq!(walked(&map), walked(&disk), "{blocks} blocks");
            let end = map.size_bytes();
            let places = [(0, 1), (700, 2), (600, 3), (end / 2, 1), (end - 1, 9)];
            for (from, limit) in places.into_iter().filter(|(from, _)| *from < end) {
                let found = map.extents(from, end - from, limit).unwrap();
                assert!(found.len() <= limit + 1);
                assert_eq!(found[0].offset_bytes, from);
                assert!(found.windows(2).all(|two| {
                    two[0].offset_bytes + two[0].length_bytes == two[1].offset_bytes
                        && two[0].kind != two[1].kind
                }));
            }
        }
        assert!(StoredMap::of(&Striped { blocks: 2 << 16, holes: 0 }).unwrap().is_some());
        assert!(StoredMap::of(&Striped { blocks: (2 << 16) + 2, holes: 0 }).unwrap().is_none());
    }
}
