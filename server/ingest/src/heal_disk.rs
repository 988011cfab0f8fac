//! Healing damaged chunks from ranges of a disk of another repository.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Disk, Error, ErrorKind, ExtentKind, Result};
use coldrise_store::RepositoryWriter;

use crate::heal::HealSummary;
use crate::source::{round_down, round_up};

/// Minimum length of one read, in bytes.
const READ_BYTES: u64 = 1 << 20;
/// Extents per request.
const EXTENTS: usize = 1024;

/// Reads ranges of a disk, in bytes, and stores again the chunks in them that are known to
/// be damaged. Skips what the disk cannot read: it may be damaged itself. Ends as soon as
/// no damage is left. `progress` gets the offset up to which the work is done.
///
/// # Errors
/// Errors of writing; `Interrupted` once `cancel` is set: chunks healed before stay healed.
pub fn heal_from_disk(
    writer: &RepositoryWriter,
    disk: &dyn Disk,
    ranges: &[Range<u64>],
    progress: &dyn Fn(u64),
    cancel: &AtomicBool,
) -> Result<HealSummary> {
    let chunk_size = u64::from(writer.repository().chunk_size_bytes());
    let step = round_up(READ_BYTES, chunk_size);
    let size_bytes = disk.size_bytes();
    let mut summary = HealSummary::default();
    let mut buffer = Vec::new();
    for range in ranges {
        let end = round_up(range.end, chunk_size).min(size_bytes);
        let mut at = round_down(range.start, chunk_size);
        while at < end {
            if cancel.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
            }
            if writer.damaged_chunks() == 0 {
                return Ok(summary);
            }
            let stop = end.min(at + step);
            let extents = disk.extents(at, stop - at, EXTENTS);
            let is_hole = extents.as_ref().is_ok_and(|extents| {
                let covered =
                    extents.last().is_some_and(|e| e.offset_bytes + e.length_bytes >= stop);
                covered && extents.iter().all(|extent| extent.kind != ExtentKind::Stored)
            });
            if !is_hole {
                heal_piece(writer, disk, at..stop, &mut buffer, &mut summary)?;
            }
            at = stop;
            progress(at);
        }
    }
    Ok(summary)
}

/// One read for all; if it fails, one per chunk.
fn heal_piece(
    writer: &RepositoryWriter,
    disk: &dyn Disk,
    piece: Range<u64>,
    buffer: &mut Vec<u8>,
    summary: &mut HealSummary,
) -> Result<()> {
    let chunk_size = u64::from(writer.repository().chunk_size_bytes());
    let mut heal = |part: Range<u64>| -> Result<bool> {
        let length = part.end - part.start;
        buffer.clear();
        buffer.resize(length as usize, 0);
        if disk.read_at(buffer, part.start).is_err() {
            return Ok(false);
        }
        summary.read_bytes += length;
        // At the end of the disk: the rest of the last chunk is zeroes.
        buffer.resize(round_up(length, chunk_size) as usize, 0);
        summary.healed_chunks += writer.heal(buffer)?;
        Ok(true)
    };
    if heal(piece.clone())? {
        return Ok(());
    }
    let mut at = piece.start;
    while at < piece.end {
        let end = piece.end.min(at + chunk_size);
        heal(at..end)?;
        at = end;
    }
    Ok(())
}
