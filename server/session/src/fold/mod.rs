//! Fold: the sealed layers of a synthetic restore point become deduplicated chunks.
//!
//! A fold changes nothing visible and is never required. It releases the layers' space. From then
//! on the captured blocks are compressed and deduplicated.
//!
//! # Order of writes, and why a crash is safe after each
//!
//! 1. The chunks under the captured blocks, and a new chunk map, are written as a backup writes
//!    them. A crash leaves chunks and pages that no document names.
//! 2. One synced batch: the point, and every point of the machine over the same layers, names its
//!    new map and no folded layers. A crash leaves a complete fold. Sessions and readers still use
//!    the layers, which still exist.
//! 3. The sessions over the layers move, each by one synced replacement of its document: an idle
//!    one under its lock, a served one by its process, which then replaces the base of its disks
//!    (see `rebase`). A crash leaves a session over the layers. They stay until a point sealed from
//!    it is folded.
//! 4. Layers that no document names are removed.
//!
//! A served session whose process does not answer keeps its layers in the same way.

mod captured;

use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Context, Disk, Error, ErrorKind, Extent, ExtentKind, Result};
use coldrise_store::{
    DiskDocument, DiskWriter, MapRoot, PointDocument, RepositoryWriter, WriteCounts, WriteOptions,
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

/// The result of folding a point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FoldReport {
    /// Bytes of the disks under captured blocks, in whole chunks.
    pub read_bytes: u64,
    /// Number of new chunks.
    pub stored_chunks: u64,
    /// Bytes that the new chunks take in the store.
    pub stored_bytes: u64,
    /// Number of other points that were over the same layers and no longer are.
    pub other_points: u64,
    /// Number of sessions that are no longer over the layers.
    pub sessions: u64,
    /// Number of sessions that still are: the processes that serve them did not move them.
    pub served_sessions: u64,
    /// Number of removed layers.
    pub removed_layers: u64,
    /// Bytes that the files of the removed layers took on the disk.
    pub removed_bytes: u64,
}

/// Folds the layers of `point`, all its disks at once. A point without layers is unchanged. Points
/// that wait in sessions are entered into the catalog first. `on_bytes` receives the disk and the
/// position reached in it, in bytes.
///
/// # Errors
/// `NotFound`; `Corrupt` if a part cannot be read: then nothing has changed; `Interrupted` once
/// `cancel` is set; `NoSpace`.
pub fn fold(
    writer: &RepositoryWriter,
    point: &PointDocument,
    options: WriteOptions,
    on_bytes: &dyn Fn(&DiskDocument, u64),
    cancel: &AtomicBool,
) -> Result<FoldReport> {
    enter_sealed_points(writer)?;
    let repository = writer.repository();
    // The fold of another point may have folded it since the caller read it.
    let point = repository.point(&point.machine, &point.point)?;
    let mut folded = FoldReport::default();
    let mut moved = FoldedDisks::default();
    for disk in point.disks.iter().filter(|disk| !disk.layers.is_empty()) {
        let what = || format!("folding {}/{}/{}", point.machine, point.point, disk.name);
        let root = fold_disk(writer, disk, options, on_bytes, cancel, &mut folded).context(what)?;
        moved.add(disk, root);
    }
    if moved.is_empty() {
        return Ok(folded);
    }
    if cancel.load(Ordering::Relaxed) {
        return Err(cancelled());
    }
    folded.other_points = moved.move_points(writer, &point)?;
    let (sessions, served_sessions) = moved.move_sessions(repository)?;
    (folded.sessions, folded.served_sessions) = (sessions, served_sessions);
    let layers = moved.layers();
    let sizes: Vec<_> =
        layers.iter().map(|id| allocated_bytes(&layer_path(repository, id))).collect();
    enter_sealed_points(writer)?;
    for (id, bytes) in layers.iter().zip(sizes) {
        if !layer_path(repository, id).exists() {
            folded.removed_layers += 1;
            folded.removed_bytes += bytes;
        }
    }
    Ok(folded)
}

/// Space that a file takes on the disk, in bytes; 0 if it does not exist.
fn allocated_bytes(path: &std::path::Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512)
}

fn cancelled() -> Error {
    let what = "cancelled: the restore point is as it was; run it again to go on";
    Error::new(ErrorKind::Interrupted, what)
}

/// Stores the content of the layers over the disk's chunks. Returns the new map.
fn fold_disk(
    writer: &RepositoryWriter,
    disk: &DiskDocument,
    options: WriteOptions,
    on_bytes: &dyn Fn(&DiskDocument, u64),
    cancel: &AtomicBool,
    folded: &mut FoldReport,
) -> Result<MapRoot> {
    let repository = writer.repository();
    let chunk_size = u64::from(repository.chunk_size_bytes());
    let layers = sealed_layers(repository, &disk.layers, disk.size_bytes)?;
    let mut captured = CapturedChunks::new(&layers, chunk_size, disk.size_bytes);
    let base = base_disk(repository, disk.root, disk.size_bytes);
    let view = LayeredDisk::new(disk.size_bytes, true, Stack { base, layers: layers.clone() });
    let mut sink = writer.disk_writer(Some(disk.root), disk.size_bytes, options)?;
    while let Some(run) = captured.next_run(RUN_BYTES) {
        let mut at = run.start;
        while at < run.end {
            if cancel.load(Ordering::Relaxed) {
                return Err(cancelled());
            }
            at = fold_piece(&view, &mut sink, at..run.end, chunk_size)?;
            on_bytes(disk, at);
        }
        folded.read_bytes += run.end - run.start;
    }
    let (root, counts) = sink.finish()?;
    let WriteCounts { stored_chunks, stored_bytes, .. } = counts;
    folded.stored_chunks += stored_chunks;
    folded.stored_bytes += stored_bytes;
    Ok(root)
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
