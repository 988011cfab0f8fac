//! Verify: reads stored data, authenticates it, and names what is damaged and which disks
//! that affects.
//!
//! ```text
//! Inventory      documents of the catalog and the sessions, clients' files, markers
//!    │  disks, layers
//!    ├──▶ store: chunks, pages of maps, database files
//!    └──▶ layers: captured blocks
//! ```
//!
//! A lease holds everything for as long as it is read.

mod layers;
mod recent;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    Address, Affected, CatalogDamage, Coverage, Damaged, DiskName, Repository, VerifyOptions,
    VerifyProgress,
};
use serde::Serialize;

use crate::points::catalog::Catalog;
use crate::points::inventory::Inventory;
use crate::points::read_lease::ReadLease;
use crate::sessions::listed::session;
use crate::sessions::point_of_mark::PointOfMark;
use recent::RecentInventory;

/// The objects to verify.
#[derive(Clone, Debug)]
pub enum VerifyScope {
    /// Everything, the database's files included.
    Everything,
    /// About this percentage of the chunks, and everything else but the database's files.
    Sample(f64),
    /// What was stored or sealed since this time, in milliseconds since 1970-01-01T00:00:00Z.
    Since(u64),
    /// A point or a session, or one disk of it.
    Only(Address),
}

/// The part of a verify that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifyPart {
    /// Chunks, and the pages of maps.
    Chunks,
    /// Captured blocks.
    CapturedBlocks,
}

/// How to verify.
pub struct VerifyRequest<'a> {
    /// The objects to read.
    pub scope: VerifyScope,
    /// The program's name in leases, for people.
    pub program: &'a str,
    /// Ends the verify early.
    pub cancel: &'a AtomicBool,
    /// Receives the progress of the whole, from any thread.
    pub progress: &'a (dyn Fn(VerifyPart, VerifyProgress) + Sync),
}

/// The result of a verify.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VerifyOutcome {
    /// Restore points whose documents are readable.
    pub points: u64,
    /// Sessions whose documents are readable.
    pub sessions: u64,
    /// Chunks that were read.
    pub chunks: u64,
    /// Pages of maps that were read.
    pub pages: u64,
    /// Layers that were read.
    pub layers: u64,
    /// Bytes of chunks and captured blocks that were read.
    pub read_bytes: u64,
    /// All damaged chunks.
    pub damaged_chunks: u64,
    /// The first of them.
    pub chunks_described: Vec<Damaged>,
    /// Damaged pages of maps.
    pub damaged_pages: Vec<Damaged>,
    /// Damaged documents, and clients' files.
    pub damaged_documents: Vec<CatalogDamage>,
    /// Damaged layers, and damaged blocks in layers.
    pub damaged_layers: Vec<CatalogDamage>,
    /// Damaged markers and other guards: nothing is lost with them.
    pub damaged_markers: Vec<CatalogDamage>,
    /// Damaged database files, except those of skipped chunks.
    pub damaged_files: Vec<CatalogDamage>,
    /// Disks that lack data, each with its ranges sorted and joined, in bytes.
    pub affected: Vec<Affected>,
    /// What only the process that serves a session can read: its block map is not in shared
    /// memory.
    pub unread: Vec<CatalogDamage>,
    /// Whether nothing is damaged.
    pub is_clean: bool,
}

/// Reads and authenticates what `request` names.
///
/// # Errors
/// `NotFound` if the address names nothing; `Interrupted` once it was cancelled; errors of the
/// operating system. Damage is not an error: the outcome names it.
pub fn verify(repository: &Arc<Repository>, request: &VerifyRequest<'_>) -> Result<VerifyOutcome> {
    let (inventory, _lease) = match &request.scope {
        VerifyScope::Only(address) => only(repository, address, request.program)?,
        _ => ReadLease::everything(repository, request.program, request.cancel)?,
    };
    let is_whole = matches!(request.scope, VerifyScope::Everything);
    let cancel = request.cancel;
    // Joins the thread after every outcome: a process crashes if it exits while a thread is
    // in the database.
    std::thread::scope(|scope| {
        // At the same time as the chunks: opening the list of the files takes as long as
        // opening a hundred files.
        let files = is_whole.then(|| scope.spawn(|| repository.damaged_files(cancel)));
        let mut outcome = read(repository, inventory, request)
            .inspect_err(|_| cancel.store(true, Ordering::Relaxed))?;
        if let Some(files) = files {
            let panicked =
                |_| Error::new(ErrorKind::Internal, "the thread that checks files panicked");
            outcome.damaged_files = files.join().map_err(panicked)??;
            outcome.is_clean &= outcome.damaged_files.is_empty();
        }
        Ok(outcome)
    })
}

fn read(
    repository: &Arc<Repository>,
    mut inventory: Inventory,
    request: &VerifyRequest<'_>,
) -> Result<VerifyOutcome> {
    let (recent, coverage) = match request.scope {
        VerifyScope::Everything => (None, Coverage::Everything),
        VerifyScope::Sample(percent) => (None, Coverage::Sample(percent)),
        VerifyScope::Only(_) => (None, Coverage::Referenced),
        VerifyScope::Since(since_ms) => {
            let whole = std::mem::take(&mut inventory);
            (Some(RecentInventory::new(whole, since_ms)), Coverage::Everything)
        }
    };
    let wanted = recent.as_ref().map_or(&inventory, |recent| &recent.inventory);
    let sum = ProgressSum::new(wanted.captured_bytes(repository), request.progress);
    let progress = |now| sum.chunks(now);
    let options =
        VerifyOptions { coverage, threads: 0, cancel: request.cancel, progress: &progress };
    let chunks = match &recent {
        Some(recent) => repository.verify_recent(&recent.disks(), &options)?,
        None => repository.verify(&inventory.disks(), &options)?,
    };
    let progress = |now| sum.captured_blocks(now);
    let options = VerifyOptions { progress: &progress, ..options };
    let layers = wanted.verify_layers(repository, &options)?;
    let inventory = recent.map_or(inventory, |recent| recent.inventory);

    let are_chunks_clean = chunks.is_clean();
    let affected = joined([chunks.affected, layers.affected].concat());
    let is_clean = are_chunks_clean
        && affected.is_empty()
        && inventory.damaged.is_empty()
        && inventory.damaged_markers.is_empty()
        && layers.damaged.is_empty();
    Ok(VerifyOutcome {
        points: inventory.points.len() as u64,
        sessions: inventory.sessions.len() as u64,
        chunks: chunks.chunks,
        pages: chunks.pages,
        layers: layers.layers,
        read_bytes: chunks.read_bytes + layers.read_bytes,
        damaged_chunks: chunks.damaged_chunk_count,
        chunks_described: chunks.damaged_chunks,
        damaged_pages: chunks.damaged_pages,
        damaged_documents: inventory.damaged,
        damaged_layers: layers.damaged,
        damaged_markers: inventory.damaged_markers,
        damaged_files: Vec::new(),
        affected,
        unread: [inventory.unread, layers.unread].concat(),
        is_clean,
    })
}

/// The part of the repository behind one address, and the lease that holds it.
fn only(
    repository: &Arc<Repository>,
    address: &Address,
    program: &str,
) -> Result<(Inventory, ReadLease)> {
    let mut inventory = Inventory::default();
    let lease;
    let missing = |disk: &DiskName| {
        Error::new(ErrorKind::NotFound, format!("{address}: there is no disk {disk}"))
    };
    match address {
        Address::Point { machine, selector, disk } => {
            let mut point = Catalog::new(repository).point(machine, selector)?;
            lease = ReadLease::point(repository, program, &mut point)?;
            if let Some(disk) = disk {
                point.disks.retain(|there| there.name == *disk);
                if point.disks.is_empty() {
                    return Err(missing(disk));
                }
            }
            inventory.points.push(point);
        }
        Address::Marked { .. } => {
            let point = PointOfMark::of(repository, address)?;
            let found = only(repository, &point.address, program)?;
            point.keep();
            return Ok(found);
        }
        Address::Live { session: name, disk } => {
            let mut document = session(repository, name)?.document;
            lease = ReadLease::session(repository, program, &document)?;
            if let Some(disk) = disk {
                document.disks.retain(|there| there.name == *disk);
                if document.disks.is_empty() {
                    return Err(missing(disk));
                }
            }
            inventory.sessions.push(document);
        }
    }
    Ok((inventory, lease))
}

/// Joins the progress of both parts: the chunks come first, then the captured blocks.
pub struct ProgressSum<'a> {
    progress: &'a (dyn Fn(VerifyPart, VerifyProgress) + Sync),
    captured_bytes: u64,
    chunk_bytes: AtomicU64,
    read_bytes: AtomicU64,
}

impl<'a> ProgressSum<'a> {
    /// For `captured_bytes` of captured blocks after the chunks.
    pub fn new(
        captured_bytes: u64,
        progress: &'a (dyn Fn(VerifyPart, VerifyProgress) + Sync),
    ) -> ProgressSum<'a> {
        let (chunk_bytes, read_bytes) = Default::default();
        ProgressSum { progress, captured_bytes, chunk_bytes, read_bytes }
    }

    /// Reports the progress in the chunks.
    pub fn chunks(&self, now: VerifyProgress) {
        self.chunk_bytes.store(now.total_bytes, Ordering::Relaxed);
        self.read_bytes.fetch_max(now.read_bytes, Ordering::Relaxed);
        let total_bytes = now.total_bytes + self.captured_bytes;
        (self.progress)(VerifyPart::Chunks, VerifyProgress { total_bytes, ..now });
    }

    /// Reports the progress in the captured blocks.
    pub fn captured_blocks(&self, now: VerifyProgress) {
        // There are none, so there is nothing more to report.
        if now.total_bytes == 0 {
            return;
        }
        let before = self.chunk_bytes.load(Ordering::Relaxed);
        let now = VerifyProgress {
            done_bytes: before + now.done_bytes,
            total_bytes: before + now.total_bytes,
            read_bytes: self.read_bytes.load(Ordering::Relaxed) + now.read_bytes,
        };
        (self.progress)(VerifyPart::CapturedBlocks, now);
    }
}

/// One entry per disk, with its ranges sorted and joined: a disk may lack both chunks and
/// captured blocks, or blocks of several layers.
pub fn joined(affected: Vec<Affected>) -> Vec<Affected> {
    let mut whole: Vec<Affected> = Vec::new();
    for one in affected {
        match whole.iter_mut().find(|there| there.disk == one.disk) {
            Some(there) => there.ranges.extend(one.ranges),
            None => whole.push(one),
        }
    }
    for one in &mut whole {
        one.ranges.sort_by_key(|range| range.start);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for range in one.ranges.drain(..) {
            match ranges.last_mut() {
                Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
                _ => ranges.push(range),
            }
        }
        one.ranges = ranges;
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_a_disk_are_joined() {
        let of = |disk: &str, ranges: Vec<Range<u64>>| Affected { disk: disk.to_owned(), ranges };
        let found = joined(vec![
            of("a", vec![10..20, 50..60]),
            of("b", vec![0..1, 3..4]),
            of("a", vec![0..5, 20..30, 55..58]),
        ]);
        assert_eq!(found, [of("a", vec![0..5, 10..30, 50..60]), of("b", vec![0..1, 3..4])]);
    }
}
