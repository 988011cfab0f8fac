//! Cuts the ranges to compare into pieces, in order and on demand.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use coldrise_block::{Disk, Extent, Result};

use super::{Target, first_extent};

/// Pieces end at multiples of this, so that no two of them share a chunk.
const PIECE_BYTES: u64 = 1 << 20;
/// Extents per request.
const EXTENT_LIMIT: usize = 256;

/// The pieces; several threads take from them.
pub(super) struct Pieces<'d> {
    wanted: &'d dyn Disk,
    target: &'d dyn Target,
    ranges: &'d [Range<u64>],
    unit_bytes: u64,
    cursor: Mutex<Cursor>,
}

#[derive(Default)]
struct Cursor {
    /// The range at hand, and where in it the next piece begins.
    range: usize,
    at: u64,
    wanted: Known,
    target: Known,
}

/// The known extents of one disk, ascending.
#[derive(Default)]
struct Known(Vec<Extent>);

impl Known {
    /// The extent at `at`, from what is known or from `ask`.
    fn at(&mut self, at: u64, ask: impl FnOnce() -> Result<Vec<Extent>>) -> Result<Extent> {
        let ended = |extent: &Extent| extent.offset_bytes + extent.length_bytes <= at;
        let known = self.0.partition_point(ended);
        self.0.drain(..known);
        if self.0.first().is_none_or(|extent| extent.offset_bytes > at) {
            self.0 = ask()?;
        }
        first_extent(&self.0, at)
    }
}

/// A step of the comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// Both disks must be read.
    Compared(Range<u64>),
    /// Both are known to read as zeroes.
    Equal(Range<u64>),
}

impl<'d> Pieces<'d> {
    /// `ranges` are ascending, disjoint and in whole units, but for the disk's end.
    pub(super) fn new(
        wanted: &'d dyn Disk,
        target: &'d dyn Target,
        ranges: &'d [Range<u64>],
        unit_bytes: u64,
    ) -> Pieces<'d> {
        let first = ranges.first().map_or(0, |range| range.start);
        let cursor = Mutex::new(Cursor { at: first, ..Cursor::default() });
        Pieces { wanted, target, ranges, unit_bytes, cursor }
    }

    /// The next piece; `None` at the end.
    pub(super) fn next(&self) -> Result<Option<Piece>> {
        let mut cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        let cursor = &mut *cursor;
        let Some(range) = self.ranges.get(cursor.range) else { return Ok(None) };
        let at = cursor.at;
        let piece = match self.zeroes_until(cursor, at, range.end)? {
            end if end > at => Piece::Equal(at..end),
            _ => Piece::Compared(at..range.end.min(at - at % PIECE_BYTES + PIECE_BYTES)),
        };
        let (Piece::Compared(taken) | Piece::Equal(taken)) = &piece;
        cursor.at = taken.end;
        if cursor.at >= range.end {
            cursor.range += 1;
            cursor.at = self.ranges.get(cursor.range).map_or(0, |range| range.start);
        }
        Ok(Some(piece))
    }

    /// The end of the whole units from `at` on that both disks know to be zero; `at` if there are none.
    fn zeroes_until(&self, cursor: &mut Cursor, at: u64, end: u64) -> Result<u64> {
        let left = end - at;
        let ask = || self.wanted.extents(at, left, EXTENT_LIMIT);
        let wanted = cursor.wanted.at(at, ask)?;
        if !wanted.kind.reads_zero() {
            return Ok(at);
        }
        let target = cursor.target.at(at, || self.target.source().extents(at, left))?;
        if !target.kind.reads_zero() {
            return Ok(at);
        }
        let zeroes = wanted.end_behind(at)?.min(target.end_behind(at)?);
        if zeroes >= end {
            return Ok(end);
        }
        Ok(zeroes - zeroes % self.unit_bytes)
    }
}
