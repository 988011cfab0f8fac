//! Fold: the sealed layers of a synthetic restore point become deduplicated chunks.
//!
//! Nothing that anybody sees changes, and it is never required: it gives the layers'
//! space back, and the captured blocks are compressed and shared from then on.
//!
//! # Order of writes, and why a crash is safe after each
//!
//! 1. The chunks under the captured blocks, and a new chunk map, as a backup writes
//!    them. Left: chunks and pages that no document names.
//! 2. One synced batch: the point names its new map and no layers, and so does every
//!    point of the machine that lies over the same layers. Left: the fold, whole;
//!    sessions and readers still use the layers, which are still there.
//! 3. Sessions that nobody writes, each by one synced replacement of its document.
//!    Left: a session over the layers, which therefore stay until the next fold.
//! 4. Layers that nothing names are removed.
//!
//! A session that is served keeps its layers: what its process has open must stay
//! named by its document. It is moved by the first fold after it was closed.

mod captured;
mod moved;

use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Context, Disk, Error, ErrorKind, Extent, ExtentKind, Result};
use coldrise_store::{
    DiskDocument, DiskWriter, MapRoot, PointDocument, RepositoryWriter, WriteCounts, WriteOptions,
};

use crate::catalog::enter_sealed_points;
use crate::disk::{LayeredDisk, Stack};
use crate::live::{base_disk, sealed_layers};
use crate::place::layer_path;
use captured::CapturedChunks;
use moved::Moved;

/// Largest part of a disk that is looked at, and read, at once.
const RUN_BYTES: u64 = 16 << 20;
const READ_BYTES: u64 = 1 << 20;
/// Extents that are asked for at once.
const EXTENTS: usize = 1024;

/// What folding a point has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Folded {
    /// Bytes of the disks under captured blocks, in whole chunks.
    pub read_bytes: u64,
    /// Chunks that were new and were stored.
    pub stored_chunks: u64,
    /// Bytes that those take in the store.
    pub stored_bytes: u64,
    /// Other points that lay over the same layers and no longer do.
    pub other_points: u64,
    /// Sessions that no longer lie over the layers.
    pub sessions: u64,
    /// Sessions that still do, because they are being served.
    pub served_sessions: u64,
    /// Layers that are gone.
    pub removed_layers: u64,
    /// What their files took on the disk.
    pub removed_bytes: u64,
}

/// Folds the layers of `point`, all its disks at once; a point without layers is left
/// as it is. Points that wait in sessions are entered into the catalog first.
/// `on_bytes` hears how far into which disk it is, in bytes.
///
/// # Errors
/// `NotFound`; `Corrupt` where something cannot be read: then nothing has changed;
/// `Interrupted` once `cancel` is set; `NoSpace`.
pub fn fold(
    writer: &RepositoryWriter,
    point: &PointDocument,
    options: WriteOptions,
    on_bytes: &dyn Fn(&DiskDocument, u64),
    cancel: &AtomicBool,
) -> Result<Folded> {
    enter_sealed_points(writer)?;
    let repository = writer.repository();
    // It may have been folded with another one since the caller has read it.
    let point = repository.point(&point.machine, &point.point)?;
    let mut folded = Folded::default();
    let mut moved = Moved::default();
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

/// What a file takes on the disk; 0 for one that is gone.
fn allocated_bytes(path: &std::path::Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512)
}

fn cancelled() -> Error {
    let what = "cancelled: the restore point is as it was; run it again to go on";
    Error::new(ErrorKind::Interrupted, what)
}

/// Stores what the layers hold over the disk's chunks; the new map.
fn fold_disk(
    writer: &RepositoryWriter,
    disk: &DiskDocument,
    options: WriteOptions,
    on_bytes: &dyn Fn(&DiskDocument, u64),
    cancel: &AtomicBool,
    folded: &mut Folded,
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

/// Stores the start of a range of whole chunks (the last one may end with the disk):
/// zeroes as a hole, without reading them. Returns where to go on.
fn fold_piece(
    view: &LayeredDisk,
    sink: &mut DiskWriter,
    range: std::ops::Range<u64>,
    chunk_size: u64,
) -> Result<u64> {
    let whole_chunks = |end: u64| match end >= range.end {
        true => range.end,
        false => end - end % chunk_size,
    };
    let extents = view.extents(range.start, range.end - range.start, EXTENTS)?;
    let is_zero = |extent: &&Extent| extent.kind != ExtentKind::Stored;
    let end = |extent: &Extent| extent.offset_bytes + extent.length_bytes;
    let zero_end = extents.iter().take_while(is_zero).last().map_or(range.start, end);
    let zero_end = whole_chunks(zero_end);
    if zero_end > range.start {
        sink.write_hole(range.start, zero_end - range.start)?;
        return Ok(zero_end);
    }
    // Up to the next chunk that is zeroes as a whole.
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
