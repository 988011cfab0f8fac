//! Finds the differences of two disks.
//!
//! Only ranges that can differ are examined: those that the two chunk maps do not
//! share, and those captured in layers that only one of the disks has. Chunks are
//! compared by id; where layers lie over them, bytes are compared.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{BLOCK_SIZE_BYTES, Disk, Error, ErrorKind, Extent, ExtentKind, Result};
use coldrise_session::{open_live_disk, open_point_disk};
use coldrise_store::{
    DiskName, LayerReference, MapRoot, PointDocument, Repository, SessionName, diff,
};

/// Bytes per comparison.
const STEP_BYTES: u64 = 1 << 20;
/// Extents per request.
const EXTENTS: usize = 4096;

/// A range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Where it begins.
    pub offset_bytes: u64,
    /// Its length.
    pub length_bytes: u64,
}

impl Range {
    /// The first byte behind it.
    pub fn end(self) -> u64 {
        self.offset_bytes.saturating_add(self.length_bytes)
    }
}

/// One of the two disks.
pub(crate) struct Side {
    repository: Arc<Repository>,
    size_bytes: u64,
    /// The parts of a point's disk; `None` for a session, which may change.
    point: Option<(PointDocument, MapRoot, Vec<LayerReference>)>,
    name: DiskName,
    disk: Arc<dyn Disk>,
}

impl Side {
    /// A disk of a point.
    ///
    /// # Errors
    /// The errors of `open_point_disk`.
    pub(crate) fn of_point(
        repository: &Arc<Repository>,
        point: &PointDocument,
        name: &DiskName,
    ) -> Result<Side> {
        let disk = open_point_disk(repository, point, name)?;
        let parts = point.disk(name).map(|d| (point.clone(), d.root, d.layers.clone()));
        Ok(Side {
            repository: Arc::clone(repository),
            size_bytes: disk.size_bytes(),
            point: parts,
            name: name.clone(),
            disk,
        })
    }

    /// A disk of a session.
    ///
    /// # Errors
    /// The errors of `open_live_disk`.
    pub(crate) fn of_session(
        repository: &Arc<Repository>,
        session: &SessionName,
        name: &DiskName,
    ) -> Result<Side> {
        let disk = open_live_disk(repository, session, name)?;
        Ok(Side {
            repository: Arc::clone(repository),
            size_bytes: disk.size_bytes(),
            point: None,
            name: name.clone(),
            disk,
        })
    }

    /// Whether it is a point's disk without layers.
    fn is_chunks(&self) -> bool {
        self.point.as_ref().is_some_and(|(_, _, layers)| layers.is_empty())
    }

    /// Size of the disk.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The ranges that the layers above the lowest `shared` captured, zeroes included.
    fn captured(&self, shared: usize, ranges: &mut Vec<Range>) -> Result<()> {
        let Some((point, _, layers)) = &self.point else { return Ok(()) };
        let Some(own) = layers.get(shared..).filter(|own| !own.is_empty()) else { return Ok(()) };
        // The same disk with only these layers, without a base: a hole is an uncaptured
        // range.
        let mut bare = point.clone();
        for disk in bare.disks.iter_mut().filter(|disk| disk.name == self.name) {
            disk.root = MapRoot::EMPTY;
            disk.layers = own.to_vec();
        }
        let bare = open_point_disk(&self.repository, &bare, &self.name)?;
        for_each_extent(bare.as_ref(), 0, self.size_bytes, |extent| {
            if extent.kind != ExtentKind::Hole {
                ranges.push(Range {
                    offset_bytes: extent.offset_bytes,
                    length_bytes: extent.length_bytes,
                });
            }
        })
    }

    /// Whether the whole range is known to be zero. Bytes beyond the end count as zero.
    fn reads_zero(&self, range: Range) -> Result<bool> {
        let end = range.end().min(self.size_bytes);
        let mut is_zero = true;
        for_each_extent(self.disk.as_ref(), range.offset_bytes, end, |extent| {
            is_zero &= extent.kind.reads_zero();
        })?;
        Ok(is_zero)
    }

    /// Reads a range; bytes beyond the end are zero.
    fn read(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        let inside = self.size_bytes.saturating_sub(offset_bytes).min(buffer.len() as u64);
        // At most the buffer's length.
        let (inside, beyond) = buffer.split_at_mut(inside as usize);
        beyond.fill(0);
        if inside.is_empty() {
            return Ok(());
        }
        self.disk.read_at(inside, offset_bytes)
    }
}

/// Calls `look` for the extents from `from` to `end`.
fn for_each_extent(
    disk: &dyn Disk,
    from: u64,
    end: u64,
    mut look: impl FnMut(Extent),
) -> Result<()> {
    let mut at = from;
    while at < end {
        let extents = disk.extents(at, end - at, EXTENTS)?;
        let reached = extents.last().map_or(at, |e| e.offset_bytes.saturating_add(e.length_bytes));
        if reached <= at {
            return Err(Error::new(ErrorKind::Internal, "extents without progress"));
        }
        extents.into_iter().for_each(&mut look);
        at = reached;
    }
    Ok(())
}

/// The ranges in which a disk of two points can differ, ascending and apart; empty for disks that share
/// everything. Of a larger disk, its excess counts.
///
/// # Errors
/// `NotFound` if one of them does not have the disk; `Corrupt` for damage, `Interrupted` when `cancel` is set.
pub fn changed_ranges(
    repository: &Arc<Repository>,
    from: &PointDocument,
    to: &PointDocument,
    disk: &DiskName,
    cancel: &AtomicBool,
) -> Result<Vec<Range>> {
    let (from, to) =
        (Side::of_point(repository, from, disk)?, Side::of_point(repository, to, disk)?);
    candidates(&from, &to, cancel)
}

/// The ranges to compare: all if one side is a session, which may change at any moment.
fn candidates(from: &Side, to: &Side, cancel: &AtomicBool) -> Result<Vec<Range>> {
    let end = from.size_bytes.max(to.size_bytes);
    let (Some((_, from_root, from_layers)), Some((_, to_root, to_layers))) =
        (&from.point, &to.point)
    else {
        return Ok(vec![Range { offset_bytes: 0, length_bytes: end }]);
    };
    let mut found = Vec::new();
    diff(
        &from.repository.disk(*from_root, from.size_bytes),
        &to.repository.disk(*to_root, to.size_bytes),
        |extent| {
            found.push(Range {
                offset_bytes: extent.offset_bytes,
                length_bytes: extent.length_bytes,
            });
            check(cancel)
        },
    )?;
    let shared = from_layers.iter().zip(to_layers).take_while(|(a, b)| a == b).count();
    from.captured(shared, &mut found)?;
    to.captured(shared, &mut found)?;
    Ok(union(found))
}

/// Reports the ranges in which the disks differ, ascending and joined. If one disk is
/// larger, its excess is compared with zeroes.
///
/// # Errors
/// `Corrupt` for damage, `Interrupted` when `cancel` is set.
pub(crate) fn differences(
    from: &Side,
    to: &Side,
    cancel: &AtomicBool,
    report: &mut dyn FnMut(Range),
) -> Result<()> {
    let mut joined = Joined { pending: None, report };
    // Chunks of backups are compared by their ids alone.
    let is_exact = from.is_chunks() && to.is_chunks();
    for range in candidates(from, to, cancel)? {
        if is_exact {
            joined.add(range);
        } else {
            compare(from, to, range, cancel, &mut joined)?;
        }
    }
    joined.end();
    Ok(())
}

fn check(cancel: &AtomicBool) -> Result<()> {
    if cancel.load(Ordering::Relaxed) {
        return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
    }
    Ok(())
}

/// Sorts the ranges and joins those that touch or overlap.
fn union(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable_by_key(|range| range.offset_bytes);
    let mut united: Vec<Range> = Vec::new();
    for range in ranges {
        match united.last_mut() {
            Some(last) if range.offset_bytes <= last.end() => {
                last.length_bytes = last.end().max(range.end()) - last.offset_bytes;
            }
            _ => united.push(range),
        }
    }
    united
}

/// Compares a range, block by block.
fn compare(
    from: &Side,
    to: &Side,
    range: Range,
    cancel: &AtomicBool,
    joined: &mut Joined<'_>,
) -> Result<()> {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let mut at = range.offset_bytes;
    while at < range.end() {
        check(cancel)?;
        let length = (range.end() - at).min(STEP_BYTES - at % STEP_BYTES);
        let step = Range { offset_bytes: at, length_bytes: length };
        at += length;
        if from.reads_zero(step)? && to.reads_zero(step)? {
            continue;
        }
        // At most STEP_BYTES.
        left.resize(length as usize, 0);
        right.resize(length as usize, 0);
        from.read(&mut left, step.offset_bytes)?;
        to.read(&mut right, step.offset_bytes)?;
        if left == right {
            continue;
        }
        let block = BLOCK_SIZE_BYTES as usize;
        for (i, (a, b)) in left.chunks(block).zip(right.chunks(block)).enumerate() {
            if a != b {
                joined.add(Range {
                    offset_bytes: step.offset_bytes + i as u64 * BLOCK_SIZE_BYTES,
                    length_bytes: a.len() as u64,
                });
            }
        }
    }
    Ok(())
}

/// Joins adjacent ranges before they are reported.
struct Joined<'a> {
    pending: Option<Range>,
    report: &'a mut dyn FnMut(Range),
}

impl Joined<'_> {
    fn add(&mut self, range: Range) {
        match &mut self.pending {
            Some(last) if last.end() == range.offset_bytes => {
                last.length_bytes += range.length_bytes;
            }
            pending => {
                if let Some(done) = pending.replace(range) {
                    (self.report)(done);
                }
            }
        }
    }

    fn end(&mut self) {
        if let Some(done) = self.pending.take() {
            (self.report)(done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(offset_bytes: u64, length_bytes: u64) -> Range {
        Range { offset_bytes, length_bytes }
    }

    #[test]
    fn ranges_are_united() {
        let ranges = vec![range(8, 4), range(0, 2), range(9, 1), range(2, 3), range(11, 5)];
        assert_eq!(union(ranges), [range(0, 5), range(8, 8)]);
        assert_eq!(union(Vec::new()), []);
    }

    #[test]
    fn touching_differences_are_joined() {
        let mut seen = Vec::new();
        let mut report = |range| seen.push(range);
        let mut joined = Joined { pending: None, report: &mut report };
        for part in [range(0, 4), range(4, 4), range(12, 4)] {
            joined.add(part);
        }
        joined.end();
        assert_eq!(seen, [range(0, 8), range(12, 4)]);
    }
}
