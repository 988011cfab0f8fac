//! Cuts a disk into pieces of work, in order and on demand.

use std::sync::{Mutex, PoisonError};

use coldrise_block::{BLOCK_SIZE_BYTES, Context, Disk, Error, ErrorKind, Extent, Result};

use crate::source::{round_down, round_up};

/// Maximum length of one read.
const STORED_BYTES: u64 = 2 << 20;
/// Maximum length of one zeroing: short enough to cancel soon.
const ZERO_BYTES: u64 = 256 << 20;
/// Extents per request.
const EXTENT_LIMIT: usize = 256;

/// A piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// Must be read and written.
    Stored { offset_bytes: u64, length_bytes: usize },
    /// Must be zeroed.
    Zeroes { offset_bytes: u64, length_bytes: u64 },
    /// Reads as zeroes in the disk and in the target: nothing to do.
    Skipped { length_bytes: u64 },
}

impl Piece {
    /// The length of the disk range that it covers.
    pub(super) fn length_bytes(&self) -> u64 {
        match *self {
            Piece::Stored { length_bytes, .. } => length_bytes as u64,
            Piece::Zeroes { length_bytes, .. } | Piece::Skipped { length_bytes } => length_bytes,
        }
    }
}

/// The pieces of one disk; several threads take from it.
pub(super) struct Pieces<'d> {
    disk: &'d dyn Disk,
    /// Stored pieces are extended to multiples of this.
    alignment_bytes: u64,
    needs_zeroes: bool,
    cursor: Mutex<Cursor>,
}

struct Cursor {
    next_offset: u64,
    /// Known extents, the next one last.
    known: Vec<Extent>,
}

impl<'d> Pieces<'d> {
    pub(super) fn new(disk: &'d dyn Disk, alignment_bytes: u64, needs_zeroes: bool) -> Self {
        Pieces {
            disk,
            alignment_bytes: alignment_bytes.max(BLOCK_SIZE_BYTES),
            needs_zeroes,
            cursor: Mutex::new(Cursor { next_offset: 0, known: Vec::new() }),
        }
    }

    /// The next piece; `None` at the end of the disk.
    pub(super) fn next(&self) -> Result<Option<Piece>> {
        let size_bytes = self.disk.size_bytes();
        let mut cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let at = cursor.next_offset;
            if at >= size_bytes {
                return Ok(None);
            }
            let Some(extent) = cursor.known.last().copied() else {
                let mut known = self
                    .disk
                    .extents(at, size_bytes - at, EXTENT_LIMIT)
                    .context(|| format!("reading the extents at offset {at}"))?;
                if known.is_empty() {
                    return Err(Error::new(
                        ErrorKind::Internal,
                        format!("the disk returned no extents at offset {at}"),
                    ));
                }
                known.reverse();
                cursor.known = known;
                continue;
            };
            let end = (extent.offset_bytes + extent.length_bytes).min(size_bytes);
            let end = if extent.kind.reads_zero() {
                // Zeroes that share a unit with stored bytes are written with them.
                if end == size_bytes { end } else { round_down(end, self.alignment_bytes) }
            } else {
                round_up(end, self.alignment_bytes).min(size_bytes)
            };
            if end <= at {
                // Completed already.
                cursor.known.pop();
                continue;
            }
            let length = end - at;
            let piece = match (extent.kind.reads_zero(), self.needs_zeroes) {
                (true, true) => {
                    Piece::Zeroes { offset_bytes: at, length_bytes: length.min(ZERO_BYTES) }
                }
                (true, false) => Piece::Skipped { length_bytes: length },
                (false, _) => {
                    // Pieces end at multiples of their size, so that no two of them
                    // share a chunk, which both would have to decode.
                    let stop = round_down(at, STORED_BYTES) + STORED_BYTES;
                    Piece::Stored { offset_bytes: at, length_bytes: (end.min(stop) - at) as usize }
                }
            };
            cursor.next_offset = at + piece.length_bytes();
            return Ok(Some(piece));
        }
    }
}
