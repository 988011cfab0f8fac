//! Makes an existing disk equal to a disk of the repository, and writes only where they differ.
//!
//! ```text
//!   Disk (wanted) ──┐
//!                   ├─▶ pieces ─▶ workers: read both, compare ─▶ runs that differ ─▶ target
//!   target ─────────┘    (ranges that both know to be zero are skipped)
//! ```
//!
//! Invariant: a range of the target either keeps its bytes or gets the wanted ones. So an interrupted
//! run leaves a mixture of both states, and any later run over the same ranges ends with the wanted
//! state, whatever it finds: nothing is remembered between runs.

mod compare;
mod local;
mod nbd;
mod pieces;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{BLOCK_SIZE_BYTES, Disk, Error, ErrorKind, Extent, Progress, Result};

use crate::restore::RestoreTarget;
use crate::source::{DirtyRun, Source};
use compare::Comparison;
pub(crate) use compare::{differing_runs, parts};
use local::LocalTarget;
use nbd::NbdTarget;

/// The purpose of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Count the differences; write nothing.
    Count,
    /// Write where the disks differ.
    Write,
    /// As `Count`, after a write: shown as verification.
    Verify,
}

/// The result of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// Bytes of the disk whose content was read on both sides.
    pub compared_bytes: u64,
    /// Bytes in blocks that differed. All of them were written if the purpose was that.
    pub differing_bytes: u64,
    /// Of these, bytes that were sent as zero requests instead.
    pub zeroed_bytes: u64,
    /// Number of separate ranges that differed.
    pub range_count: u64,
    /// The pieces of up to 1 MiB with differences, ascending and joined: what to verify.
    pub touched: Vec<Range<u64>>,
}

/// A disk that exists, held for this process alone where the system can do that.
pub struct ExistingDisk<'c> {
    target: Box<dyn Target + 'c>,
    name: String,
    cancel: &'c AtomicBool,
}

impl<'c> ExistingDisk<'c> {
    /// Opens `target` for reading and, if `writes`, for writing. It must have the size of the disk: a
    /// file or device exactly, an NBD export up to the next multiple of its block size. `bitmap` names a
    /// dirty bitmap that the export must have.
    ///
    /// # Errors
    /// `InvalidInput` for another size or no raw disk, `Busy` if it is mounted or open in QEMU,
    /// `ReadOnly`, `NotFound` for a missing file or bitmap, and errors of the system or server.
    pub fn open(
        target: &RestoreTarget,
        size_bytes: u64,
        bitmap: Option<&str>,
        writes: bool,
        cancel: &'c AtomicBool,
    ) -> Result<ExistingDisk<'c>> {
        let name = target.to_string();
        let opened: Box<dyn Target + 'c> = match target {
            RestoreTarget::Nbd(uri) => Box::new(NbdTarget::open(uri, bitmap, writes, cancel)?),
            RestoreTarget::Path(path) if bitmap.is_none() => Box::new(LocalTarget::open(path)?),
            RestoreTarget::Path(_) => {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!("{name}: files and devices keep no dirty bitmap"),
                )
                .advise("name the NBD export that has it, or leave out --since"));
            }
        };
        let target_bytes = opened.source().size_bytes();
        let unit = opened.source().alignment_bytes();
        if target_bytes != size_bytes && target_bytes != size_bytes.next_multiple_of(unit) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{name} has {target_bytes} bytes, and the disk {size_bytes}"),
            )
            .advise("a rollback needs the same disk; for a new disk use coldrise restore"));
        }
        Ok(ExistingDisk { target: opened, name, cancel })
    }

    /// The ranges that the bitmap marks as written, ascending and joined.
    ///
    /// # Errors
    /// Errors of the server; `Internal` if it was opened without a bitmap.
    pub fn dirty_ranges(&self) -> Result<Vec<Range<u64>>> {
        let source = self.target.source();
        let (mut ranges, mut at) = (Vec::new(), 0);
        while at < source.size_bytes() {
            check(self.cancel)?;
            let runs = source.dirty_runs(at, source.size_bytes() - at)?;
            let reached = runs.last().map_or(at, |run| run.offset_bytes + run.length_bytes);
            if reached <= at {
                return Err(Error::new(ErrorKind::Io, format!("{}: no dirty bitmap", self.name)));
            }
            at = reached;
            let dirty = |run: &DirtyRun| run.offset_bytes..run.offset_bytes + run.length_bytes;
            ranges.extend(runs.iter().filter(|run| run.is_dirty).map(dirty));
        }
        Ok(united(ranges))
    }

    /// Compares `wanted` with this disk in `ranges`, and writes the differences if that is the purpose.
    /// Call [`ExistingDisk::finish`] after a write.
    ///
    /// # Errors
    /// Errors of both disks, with the offset; `Interrupted` once cancelled. After an error any part of
    /// the differences may be written.
    pub fn compare(
        &self,
        wanted: &dyn Disk,
        ranges: &[Range<u64>],
        purpose: Purpose,
        progress: &dyn Progress,
    ) -> Result<Differences> {
        let unit_bytes = self.target.source().alignment_bytes().max(BLOCK_SIZE_BYTES);
        let size_bytes = wanted.size_bytes();
        let whole = |range: &Range<u64>| {
            let end = range.end.min(size_bytes).next_multiple_of(unit_bytes).min(size_bytes);
            range.start - range.start % unit_bytes..end
        };
        let ranges = united(ranges.iter().map(whole).collect());
        let name = self.name.as_str();
        let comparison =
            Comparison { wanted, target: self.target.as_ref(), name, unit_bytes, purpose };
        comparison.run(&ranges, progress, self.cancel)
    }

    /// Makes everything written durable, and forgets what the system's cache holds of it, so that a
    /// verification reads the disk.
    ///
    /// # Errors
    /// Errors of the system or server.
    pub fn finish(&self) -> Result<()> {
        self.target.finish()
    }
}

/// A disk that is read and written in place.
trait Target: Sync {
    /// Its properties, extents and dirty runs.
    fn source(&self) -> &dyn Source;
    /// Reads and writes for one thread.
    fn port(&self) -> Result<Box<dyn Port + '_>>;
    /// Makes everything durable. All ports must be dropped.
    fn finish(&self) -> Result<()>;
}

/// One thread's access to a target. Ranges begin at multiples of the target's unit, and end at one or at
/// the disk's end. Errors name the target and the offset.
trait Port {
    fn read_at(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()>;
    fn write_at(&mut self, bytes: &[u8], offset_bytes: u64) -> Result<()>;
    fn write_zeroes(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()>;
}

/// Sorts the ranges, drops empty ones and joins those that touch or overlap.
pub fn united(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// The first extent at `at`, which a disk must report.
fn first_extent(extents: &[Extent], at: u64) -> Result<Extent> {
    let extent = extents.first().copied();
    extent
        .filter(|extent| extent.end_behind(at).is_ok())
        .ok_or_else(|| Error::new(ErrorKind::Internal, format!("no extents at offset {at}")))
}

fn check(cancel: &AtomicBool) -> Result<()> {
    if cancel.load(Ordering::Relaxed) {
        return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::united;

    #[test]
    fn ranges_are_joined_and_empty_ones_dropped() {
        assert_eq!(united(vec![8..12, 0..2, 9..10, 2..5, 11..16, 20..20]), [0..5, 8..16]);
    }
}
