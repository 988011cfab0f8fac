//! Fold: the sealed layers of a synthetic restore point become deduplicated chunks.
//!
//! A fold changes nothing visible and is never required. It releases the layers' space. From then
//! on the captured blocks are compressed and deduplicated.
//!
//! # Order of writes, and why a crash is safe after each
//!
//! Points are folded one after the other, the oldest first. For each:
//!
//! 1. The chunks under the captured blocks, and a new chunk map, are written as a backup writes
//!    them, over the map of the point before it if that one had the lower layers. A crash leaves
//!    chunks and pages that no document names.
//! 2. One synced write: the point names its new map and no layers. A crash leaves a complete fold
//!    of this point. All others still use the layers, which still exist; the next fold reads them
//!    once more.
//!
//! After the last point, and each time that folded layers take [`RELEASED_BYTES`]: what uses them
//! moves. Doing this for each point would take time with the square of their number.
//!
//! 3. One synced batch: every other point over the layers names the new map and the layers above.
//! 4. The sessions over the layers move, each by one synced replacement of its document: an idle
//!    one under its lock, a served one by its process, which then replaces the base of its disks
//!    (see `rebase`). A crash leaves a session over the layers. They stay until a point sealed from
//!    it is folded.
//! 5. Layers that no document names are removed.
//!
//! A served session whose process does not answer keeps its layers in the same way.

mod captured;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Context, Disk, Error, ErrorKind, Extent, ExtentKind, Result};
use coldrise_store::{
    DiskDocument, DiskWriter, LayerId, MachineName, MapRoot, PointDocument, RepositoryWriter,
    WriteCounts, WriteOptions,
};

use crate::disks::layered_disk::{LayeredDisk, Stack};
use crate::disks::point_disk::{base_disk, sealed_layers};
use crate::paths::layer_path;
use crate::points::catalog::enter_sealed_points;
use crate::sessions::folded_disks::FoldedDisks;
use captured::CapturedChunks;

/// Largest part of a disk that is examined and read at once, in bytes.
const RUN_BYTES: u64 = 16 << 20;
const READ_BYTES: u64 = 1 << 20;
/// Number of extents per query.
const EXTENTS: usize = 1024;
/// Space of folded layers at which they are removed before all points are folded, in bytes.
const RELEASED_BYTES: u64 = 1 << 30;

/// What folding a point did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FoldReport {
    /// Bytes of the disks under captured blocks, in whole chunks.
    pub read_bytes: u64,
    /// Number of new chunks.
    pub stored_chunks: u64,
    /// Bytes that the new chunks take in the store.
    pub stored_bytes: u64,
    /// Number of its layers that were removed.
    pub removed_layers: u64,
    /// Bytes that the files of these layers took on the disk.
    pub removed_bytes: u64,
}

/// The result of a fold.
#[derive(Debug, Default)]
pub struct Folded {
    /// The folded points, in the order given. One that had no layers is among them.
    pub points: Vec<FoldReport>,
    /// Why the next point was not folded; `None` if all were.
    pub failed: Option<Error>,
    /// Number of other points that were over the same layers and no longer are.
    pub other_points: u64,
    /// Number of sessions that are no longer over the layers.
    pub sessions: u64,
    /// Number of sessions that still are: the processes that serve them did not move them.
    pub served_sessions: u64,
}

/// Receives the point, the disk and the position reached in it, in bytes.
pub(crate) type OnBytes<'a> = dyn Fn(&PointDocument, &DiskDocument, u64) + 'a;

/// Folds the layers of `points`, all disks of each at once. A point without layers is unchanged.
/// Points that wait in sessions are entered into the catalog first. It stops at the first point
/// that fails, or once `cancel` is set; those before it are folded. The time grows with the number
/// of points if the oldest come first.
///
/// # Errors
/// In the result: `NotFound`; `Corrupt` if a part cannot be read: then the point has not changed;
/// `Interrupted` once `cancel` is set; `NoSpace`. Returned: errors of the writes that concern all points.
pub fn fold(
    writer: &RepositoryWriter,
    points: &[PointDocument],
    options: WriteOptions,
    on_bytes: &OnBytes<'_>,
    cancel: &AtomicBool,
) -> Result<Folded> {
    enter_sealed_points(writer)?;
    let mut fold =
        Fold { writer, options, on_bytes, cancel, moved: FoldedDisks::default(), held: Vec::new() };
    let mut folded = Folded::default();
    let mut machines: BTreeSet<&MachineName> = BTreeSet::new();
    for point in points {
        match fold.fold_point(point, folded.points.len()) {
            Ok(report) => folded.points.push(report),
            Err(error) => {
                folded.failed = Some(error);
                break;
            }
        }
        machines.insert(&point.machine);
        if fold.held.iter().map(|held| held.bytes).sum::<u64>() >= RELEASED_BYTES {
            fold.release(&machines, &mut folded)?;
            machines.clear();
        }
    }
    fold.release(&machines, &mut folded)?;
    Ok(folded)
}

struct Fold<'a> {
    writer: &'a RepositoryWriter,
    options: WriteOptions,
    on_bytes: &'a OnBytes<'a>,
    cancel: &'a AtomicBool,
    moved: FoldedDisks,
    held: Vec<HeldLayer>,
}

/// A folded layer that may still be in use.
struct HeldLayer {
    id: LayerId,
    /// Space that its file takes on the disk.
    bytes: u64,
    /// The number of its point in [`Folded::points`].
    point: usize,
}

impl Fold<'_> {
    fn fold_point(&mut self, point: &PointDocument, number: usize) -> Result<FoldReport> {
        let repository = self.writer.repository();
        // The fold of another point may have folded it since the caller read it.
        let mut point = repository.point(&point.machine, &point.point)?;
        let mut report = FoldReport::default();
        let is_moved = self.moved.apply_to_point(&mut point);
        let mut steps = Vec::new();
        for disk in point.disks.iter().filter(|disk| !disk.layers.is_empty()) {
            let what = || format!("folding {}/{}/{}", point.machine, point.point, disk.name);
            let root = self.fold_disk(&point, disk, &mut report).context(what)?;
            steps.push((disk.clone(), root));
        }
        if self.cancel.load(Ordering::Relaxed) {
            return Err(cancelled());
        }
        let with_layers = point.disks.iter_mut().filter(|disk| !disk.layers.is_empty());
        for (disk, (_, root)) in with_layers.zip(&steps) {
            disk.layers.clear();
            disk.root = *root;
        }
        if is_moved || !steps.is_empty() {
            self.writer.replace_points(&[point])?;
        }
        for (disk, root) in &steps {
            self.moved.add(disk, *root);
            self.held.extend(disk.layers.iter().map(|layer| HeldLayer {
                id: layer.id,
                bytes: allocated_bytes(&layer_path(repository, &layer.id)),
                point: number,
            }));
        }
        Ok(report)
    }

    /// Moves what is over the folded layers, and removes those that nothing uses.
    fn release(&mut self, machines: &BTreeSet<&MachineName>, folded: &mut Folded) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let repository = self.writer.repository();
        for machine in machines {
            folded.other_points += self.moved.move_points(self.writer, machine)?;
        }
        let (sessions, served_sessions) = self.moved.move_sessions(repository)?;
        folded.sessions = folded.sessions.max(sessions);
        folded.served_sessions = folded.served_sessions.max(served_sessions);
        enter_sealed_points(self.writer)?;
        for held in self.held.drain(..) {
            if !layer_path(repository, &held.id).exists() {
                let report = &mut folded.points[held.point];
                report.removed_layers += 1;
                report.removed_bytes += held.bytes;
            }
        }
        Ok(())
    }

    /// Stores the content of the layers over the disk's chunks. Returns the new map.
    fn fold_disk(
        &self,
        point: &PointDocument,
        disk: &DiskDocument,
        report: &mut FoldReport,
    ) -> Result<MapRoot> {
        let repository = self.writer.repository();
        let chunk_size = u64::from(repository.chunk_size_bytes());
        let layers = sealed_layers(repository, &disk.layers, disk.size_bytes)?;
        let mut captured = CapturedChunks::new(&layers, chunk_size, disk.size_bytes);
        let base = base_disk(repository, disk.root, disk.size_bytes);
        let view = LayeredDisk::new(disk.size_bytes, true, Stack { base, layers: layers.clone() });
        let mut sink = self.writer.disk_writer(Some(disk.root), disk.size_bytes, self.options)?;
        while let Some(run) = captured.next_run(RUN_BYTES) {
            let mut at = run.start;
            while at < run.end {
                if self.cancel.load(Ordering::Relaxed) {
                    return Err(cancelled());
                }
                at = fold_piece(&view, &mut sink, at..run.end, chunk_size)?;
                (self.on_bytes)(point, disk, at);
            }
            report.read_bytes += run.end - run.start;
        }
        let (root, counts) = sink.finish()?;
        let WriteCounts { stored_chunks, stored_bytes, .. } = counts;
        report.stored_chunks += stored_chunks;
        report.stored_bytes += stored_bytes;
        Ok(root)
    }
}

/// Space that a file takes on the disk, in bytes; 0 if it does not exist.
fn allocated_bytes(path: &std::path::Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512)
}

fn cancelled() -> Error {
    let what = "cancelled: the restore point is unchanged; run it again to continue";
    Error::new(ErrorKind::Interrupted, what)
}

/// Stores the start of a range of whole chunks (the last one may end with the disk). Zeroes become
/// a hole without being read. Returns the offset at which to continue.
fn fold_piece(
    view: &LayeredDisk,
    sink: &mut DiskWriter,
    range: std::ops::Range<u64>,
    chunk_size: u64,
) -> Result<u64> {
    let whole_chunks = |end: u64| if end >= range.end { range.end } else { end - end % chunk_size };
    let extents = view.extents(range.start, range.end - range.start, EXTENTS)?;
    let is_zero = |extent: &&Extent| extent.kind != ExtentKind::Stored;
    let end = |extent: &Extent| extent.offset_bytes + extent.length_bytes;
    let zero_end = extents.iter().take_while(is_zero).last().map_or(range.start, end);
    let zero_end = whole_chunks(zero_end);
    if zero_end > range.start {
        sink.write_hole(range.start, zero_end - range.start)?;
        return Ok(zero_end);
    }
    // Read up to the next chunk that is entirely zeroes.
    let next_zero = extents.iter().filter(is_zero).find_map(|extent| {
        let start = extent.offset_bytes.next_multiple_of(chunk_size);
        (start > range.start && whole_chunks(end(extent)) > start).then_some(start)
    });
    let stop = range.end.min(range.start + READ_BYTES.max(chunk_size));
    let stop = next_zero.map_or(stop, |start| stop.min(start));
    let mut bytes = sink.buffer();
    bytes.resize((stop - range.start) as usize, 0);
    view.read_at(&mut bytes, range.start)?;
    sink.write(range.start, bytes)?;
    Ok(stop)
}
