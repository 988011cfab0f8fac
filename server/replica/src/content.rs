//! The bytes of a disk that a copy has to read: ranges that may differ from its base, and are not holes.

/// The ranges that may be content, ascending.
#[derive(Debug, Default)]
pub(crate) struct Content {
    ranges: Vec<ContentRange>,
    bytes: u64,
}

#[derive(Debug)]
struct ContentRange {
    start: u64,
    end: u64,
    /// Content before it, in bytes.
    before_bytes: u64,
}

impl Content {
    /// Adds a range that lies behind all others.
    pub(crate) fn add(&mut self, start: u64, end: u64) {
        match self.ranges.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => self.ranges.push(ContentRange { start, end, before_bytes: self.bytes }),
        }
        self.bytes += end.saturating_sub(start);
    }

    /// All of it, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The bytes before an offset of the disk.
    pub(crate) fn bytes_before(&self, offset_bytes: u64) -> u64 {
        let count = self.ranges.partition_point(|range| range.start < offset_bytes);
        self.ranges[..count]
            .last()
            .map_or(0, |last| last.before_bytes + (offset_bytes.min(last.end) - last.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_before_an_offset_exclude_holes() {
        let mut content = Content::default();
        [(4, 8), (8, 10), (20, 30)].into_iter().for_each(|(start, end)| content.add(start, end));
        assert_eq!((content.bytes(), content.ranges.len()), (16, 2));
        let before = [0, 4, 5, 10, 15, 20, 21, 30, 99].map(|offset| content.bytes_before(offset));
        assert_eq!(before, [0, 0, 1, 6, 6, 6, 7, 16, 16]);
        assert_eq!(Content::default().bytes_before(7), 0);
    }
}
