//! Ranges of bytes of a disk.

use serde::{Deserialize, Serialize};

/// Ranges, ascending, apart and not empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<(u64, u64)>", into = "Vec<(u64, u64)>")]
pub struct ByteRanges(
    /// Start and end.
    Vec<(u64, u64)>,
);

impl ByteRanges {
    /// The union of the ranges, given as start and end, in any order.
    pub fn union(mut ranges: Vec<(u64, u64)>) -> ByteRanges {
        ranges.retain(|(start, end)| start < end);
        ranges.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
        for (start, end) in ranges {
            match joined.last_mut() {
                Some((_, last)) if *last >= start => *last = end.max(*last),
                _ => joined.push((start, end)),
            }
        }
        ByteRanges(joined)
    }

    /// At most `most` ranges that cover these: the smallest gaps are filled.
    #[must_use]
    pub fn at_most(self, most: usize) -> ByteRanges {
        let excess = self.0.len().saturating_sub(most.max(1));
        if excess == 0 {
            return self;
        }
        let mut gaps: Vec<u64> = self.0.windows(2).map(|pair| pair[1].0 - pair[0].1).collect();
        let (_, limit, _) = gaps.select_nth_unstable(excess - 1);
        let limit = *limit;
        let mut joined: Vec<(u64, u64)> = Vec::with_capacity(most);
        for (start, end) in self.0 {
            match joined.last_mut() {
                Some((_, last)) if start - *last <= limit => *last = end,
                _ => joined.push((start, end)),
            }
        }
        ByteRanges(joined)
    }

    /// Adds a range.
    pub fn add(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let first = self.0.partition_point(|(_, known)| *known < start);
        let behind = self.0.partition_point(|(known, _)| *known <= end);
        let (mut from, mut to) = (start, end);
        if let Some((known, _)) = self.0.get(first).filter(|_| first < behind) {
            from = from.min(*known);
        }
        if let Some((_, known)) = behind.checked_sub(1).and_then(|last| self.0.get(last)) {
            if first < behind {
                to = to.max(*known);
            }
        }
        self.0.splice(first..behind, [(from, to)]);
    }

    /// Whether `at` lies in a range, and where that changes; at `end` at the latest.
    pub fn at(&self, at: u64, end: u64) -> (bool, u64) {
        let next = self.0.partition_point(|(_, known)| *known <= at);
        match self.0.get(next) {
            Some((start, stop)) if *start <= at => (true, end.min(*stop)),
            Some((start, _)) => (false, end.min(*start)),
            None => (false, end),
        }
    }

    /// The number of bytes behind `at`.
    pub(crate) fn bytes_behind(&self, at: u64) -> u64 {
        self.0.iter().map(|(start, end)| end.saturating_sub(at.max(*start))).sum()
    }

    /// The end of the last range.
    pub fn end_bytes(&self) -> u64 {
        self.0.last().map_or(0, |(_, end)| *end)
    }

    /// The number of ranges.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

impl TryFrom<Vec<(u64, u64)>> for ByteRanges {
    type Error = &'static str;

    fn try_from(ranges: Vec<(u64, u64)>) -> Result<ByteRanges, &'static str> {
        let is_apart = ranges.windows(2).all(|pair| pair[0].1 < pair[1].0);
        match is_apart && ranges.iter().all(|(start, end)| start < end) {
            true => Ok(ByteRanges(ranges)),
            false => Err("ranges that overlap"),
        }
    }
}

impl From<ByteRanges> for Vec<(u64, u64)> {
    fn from(ranges: ByteRanges) -> Vec<(u64, u64)> {
        ranges.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_and_found() {
        let ranges = ByteRanges::union(vec![(20, 30), (4, 8), (8, 10), (5, 6), (7, 7)]);
        assert_eq!(ranges, ByteRanges(vec![(4, 10), (20, 30)]));
        assert_eq!(ranges.at(0, 100), (false, 4));
        assert_eq!(ranges.at(4, 100), (true, 10));
        assert_eq!(ranges.at(4, 7), (true, 7));
        assert_eq!(ranges.at(10, 15), (false, 15));
        assert_eq!(ranges.at(30, 100), (false, 100));
        assert_eq!((ranges.bytes_behind(0), ranges.bytes_behind(25)), (16, 5));
        assert_eq!((ranges.end_bytes(), ranges.count()), (30, 2));
    }

    #[test]
    fn an_added_range_is_merged_with_adjacent_ranges() {
        let base = ByteRanges::union(vec![(10, 20), (30, 40), (50, 60)]);
        for (start, end, expected) in [
            (0, 5, vec![(0, 5), (10, 20), (30, 40), (50, 60)]),
            (0, 10, vec![(0, 20), (30, 40), (50, 60)]),
            (20, 30, vec![(10, 40), (50, 60)]),
            (15, 55, vec![(10, 60)]),
            (32, 34, vec![(10, 20), (30, 40), (50, 60)]),
            (60, 70, vec![(10, 20), (30, 40), (50, 70)]),
            (70, 80, vec![(10, 20), (30, 40), (50, 60), (70, 80)]),
            (7, 7, vec![(10, 20), (30, 40), (50, 60)]),
        ] {
            let mut ranges = base.clone();
            ranges.add(start, end);
            assert_eq!(ranges, ByteRanges(expected), "{start} {end}");
        }
    }

    #[test]
    fn fewer_ranges_cover_the_same() {
        let ranges = ByteRanges::union(vec![(0, 1), (2, 3), (10, 11), (12, 13), (40, 41)]);
        assert_eq!(ranges.clone().at_most(5), ranges);
        assert_eq!(ranges.clone().at_most(3), ByteRanges(vec![(0, 3), (10, 13), (40, 41)]));
        assert_eq!(ranges.at_most(1), ByteRanges(vec![(0, 41)]));
    }

    #[test]
    fn empty_unordered_and_overlapping_ranges_are_refused() {
        for text in ["[[4,8],[8,9]]", "[[4,4]]", "[[4,8],[1,2]]"] {
            assert!(serde_json::from_str::<ByteRanges>(text).is_err(), "{text}");
        }
        let ranges: ByteRanges = serde_json::from_str("[[1,2],[4,8]]").unwrap();
        assert_eq!(serde_json::to_string(&ranges).unwrap(), "[[1,2],[4,8]]");
    }
}
