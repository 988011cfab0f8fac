//! Where the bytes of a read came from.

use std::time::{Duration, Instant};

/// What a part of a read was answered from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadSource {
    /// Stored chunks, decoded for this read.
    Backup,
    /// Chunks that were in memory.
    Cache,
    /// Blocks that a session or a sealed layer captured.
    Captured,
    /// Parts that hold no content.
    Zero,
}

/// A part of a read with one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadPiece {
    /// Its source.
    pub source: ReadSource,
    /// Its begin on the disk.
    pub offset_bytes: u64,
    /// Its length.
    pub length_bytes: u64,
}

/// The parts of one read, in the order in which they were read. Neighbours with one source are
/// joined, so the usual read allocates nothing. After an error it names the parts before it.
#[derive(Debug, Default)]
pub struct ReadTally {
    last: Option<ReadPiece>,
    earlier: Vec<ReadPiece>,
    waits_since: Option<Instant>,
}

impl ReadTally {
    /// Adds a part.
    #[inline]
    pub fn add(&mut self, source: ReadSource, offset_bytes: u64, length_bytes: u64) {
        if length_bytes == 0 {
            return;
        }
        match &mut self.last {
            Some(last)
                if last.source == source
                    && last.offset_bytes.wrapping_add(last.length_bytes) == offset_bytes =>
            {
                last.length_bytes += length_bytes;
            }
            last => {
                self.earlier.extend(last.take());
                *last = Some(ReadPiece { source, offset_bytes, length_bytes });
            }
        }
    }

    /// To be called before a read does what can take long: waits for a lock or a drive, or decodes.
    /// A read from memory takes less than the two looks at the clock would cost it.
    #[inline]
    pub fn begin_wait(&mut self) {
        if self.waits_since.is_none() {
            self.waits_since = Some(Instant::now());
        }
    }

    /// The time since the first [`ReadTally::begin_wait`]; `None` if the read came from memory.
    #[inline]
    pub fn waited(&self) -> Option<Duration> {
        self.waits_since.map(|since| since.elapsed())
    }

    /// The parts.
    pub fn pieces(&self) -> impl Iterator<Item = &ReadPiece> {
        self.earlier.iter().chain(&self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::{ReadPiece, ReadSource, ReadTally};

    #[test]
    fn neighbours_of_one_source_are_joined() {
        let mut tally = ReadTally::default();
        assert_eq!((tally.pieces().count(), tally.waited()), (0, None));
        tally.add(ReadSource::Backup, 0, 10);
        tally.add(ReadSource::Backup, 10, 5);
        tally.add(ReadSource::Captured, 15, 0);
        tally.add(ReadSource::Zero, 15, 1);
        tally.add(ReadSource::Zero, 17, 1);
        let piece =
            |source, offset_bytes, length_bytes| ReadPiece { source, offset_bytes, length_bytes };
        let expected = [
            piece(ReadSource::Backup, 0, 15),
            piece(ReadSource::Zero, 15, 1),
            piece(ReadSource::Zero, 17, 1),
        ];
        assert!(tally.pieces().eq(&expected));
    }
}
