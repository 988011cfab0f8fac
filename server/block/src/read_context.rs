//! One read on its way through a disk: whether it may wait, and where its bytes came from.

use std::time::{Duration, Instant};

use crate::{Error, ErrorKind, Result};

/// Whether a read may wait for a drive or a lock, or decode chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// The read may wait.
    Allowed,
    /// The read fails with `ErrorKind::WouldWait` instead.
    Refused,
}

/// The error of a read that would have to wait and must not.
#[cold]
pub fn would_wait() -> Error {
    Error::new(ErrorKind::WouldWait, "the bytes are not in memory")
}

/// The source of a part of a read.
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

/// The parameters of a read, and the sources that the disk reports for it.
///
/// An observed read collects its parts, in the order in which they were read. Neighbours with one
/// source are joined, so the usual read allocates nothing. After an error it has the parts before it.
#[derive(Debug)]
pub struct ReadContext {
    waiting: Waiting,
    is_observed: bool,
    last: Option<ReadPiece>,
    earlier: Vec<ReadPiece>,
    waits_since: Option<Instant>,
}

impl ReadContext {
    /// For a read without an observer: it does not read the clock.
    #[inline]
    pub fn new(waiting: Waiting) -> ReadContext {
        let is_observed = false;
        ReadContext { waiting, is_observed, last: None, earlier: Vec::new(), waits_since: None }
    }

    /// For a read with an observer.
    #[inline]
    pub fn observed(waiting: Waiting) -> ReadContext {
        ReadContext { is_observed: true, ..ReadContext::new(waiting) }
    }

    /// Whether the read may wait.
    #[inline]
    pub fn waiting(&self) -> Waiting {
        self.waiting
    }

    /// To be called before the read waits for a lock or a drive, or decodes.
    ///
    /// # Errors
    /// `WouldWait` if it must not.
    #[inline]
    pub fn begin_wait(&mut self) -> Result<()> {
        if self.waiting == Waiting::Refused {
            return Err(would_wait());
        }
        self.start_clock();
        Ok(())
    }

    /// To be called before what can take long although it does not wait.
    #[inline]
    pub fn start_clock(&mut self) {
        if self.is_observed && self.waits_since.is_none() {
            self.waits_since = Some(Instant::now());
        }
    }

    /// The time since the clock was started; `None` if the read came from memory. Such a read takes
    /// less than the two looks at the clock would cost it.
    #[inline]
    pub fn waited(&self) -> Option<Duration> {
        self.waits_since.map(|since| since.elapsed())
    }

    /// Adds a part.
    #[inline]
    pub fn add(&mut self, source: ReadSource, offset_bytes: u64, length_bytes: u64) {
        if !self.is_observed || length_bytes == 0 {
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

    /// The parts.
    pub fn pieces(&self) -> impl Iterator<Item = &ReadPiece> {
        self.earlier.iter().chain(&self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_source_are_joined() {
        let mut context = ReadContext::observed(Waiting::Allowed);
        assert_eq!((context.pieces().count(), context.waited()), (0, None));
        context.add(ReadSource::Backup, 0, 10);
        context.add(ReadSource::Backup, 10, 5);
        context.add(ReadSource::Captured, 15, 0);
        context.add(ReadSource::Zero, 15, 1);
        context.add(ReadSource::Zero, 17, 1);
        let piece =
            |source, offset_bytes, length_bytes| ReadPiece { source, offset_bytes, length_bytes };
        let expected = [
            piece(ReadSource::Backup, 0, 15),
            piece(ReadSource::Zero, 15, 1),
            piece(ReadSource::Zero, 17, 1),
        ];
        assert!(context.pieces().eq(&expected));
    }

    #[test]
    fn a_read_waits_only_if_it_may_and_is_timed_only_if_it_is_observed() {
        let mut refused = ReadContext::observed(Waiting::Refused);
        assert_eq!(refused.begin_wait().unwrap_err().kind(), ErrorKind::WouldWait);
        assert_eq!(refused.waited(), None);
        let mut observed = ReadContext::observed(Waiting::Allowed);
        observed.begin_wait().unwrap();
        assert!(observed.waited().is_some());
        let mut alone = ReadContext::new(Waiting::Allowed);
        alone.begin_wait().unwrap();
        alone.add(ReadSource::Backup, 0, 10);
        assert_eq!((alone.waited(), alone.pieces().count()), (None, 0));
    }
}
