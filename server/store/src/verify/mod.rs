//! Verify: reads and authenticates the content of a repository, and names the disks that damage
//! affects.
//!
//! ```text
//!   chunks   in the order of storing, in parallel  ─▶ which ids are unusable
//!   maps     every page that a disk leads to, once ─▶ which subtrees hold one
//!   disks    down the affected subtrees only       ─▶ names and byte ranges
//! ```
//!
//! A chunk is authenticated and not decompressed: an authentic value is the stored one. The order
//! of reading does not matter for correctness. Chunks stored after a verify has begun are left to
//! the next one.

mod chunks;
mod documents;
mod files;
mod maps;
mod recent;

pub(crate) use chunks::IdSet;
pub use recent::RecentDisks;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Error, ErrorKind, Result};

use crate::chunk::ChunkId;
use crate::state::StoreState;
use crate::{MapRoot, Repository};

/// If the store's counters are lost, the number of ids comes from keys that any writer can forge. This
/// bounds it, so that it takes at most half a gibibyte of memory.
const MAX_UNCOUNTED_IDS: u64 = 1 << 32;

/// Maximum number of damaged chunks that are described; more are only counted.
const MAX_DESCRIBED: usize = 1000;

/// A disk to verify. A complete verify gets every disk of every point and session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedDisk {
    /// Its name for people: `web01/20261120T100000Z/vda`.
    pub name: String,
    /// Its chunk map.
    pub root: MapRoot,
    /// Its size in bytes.
    pub size_bytes: u64,
}

/// The chunks that are read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Coverage {
    /// Every stored chunk, including unreferenced ones, which a later backup may use again.
    Everything,
    /// Chunks that the given disks refer to.
    Referenced,
    /// This percentage of all stored chunks, in pieces of neighbouring ids: one randomly chosen
    /// piece of each of equally large parts of the ids. At least one piece.
    Sample(f64),
}

/// Options of a verify.
#[derive(Clone, Copy)]
pub struct VerifyOptions<'a> {
    /// Which chunks are read.
    pub coverage: Coverage,
    /// Threads that read chunks; 0 means one per processor.
    pub threads: usize,
    /// Set it to end the verify.
    pub cancel: &'a AtomicBool,
    /// Receives the progress, from several threads; the first call reports that nothing is done.
    pub progress: &'a (dyn Fn(VerifyProgress) + Sync),
}

/// The progress of a verify in bytes of disks: a chunk counts with its plaintext size, whatever its
/// stored size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyProgress {
    /// Bytes processed.
    pub done_bytes: u64,
    /// Bytes to process.
    pub total_bytes: u64,
    /// Stored bytes read.
    pub read_bytes: u64,
}

/// One damaged value.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Damaged {
    /// The id of the chunk or page.
    pub id: u64,
    /// The kind of damage, in words.
    pub reason: String,
}

/// The parts of a disk that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Affected {
    /// The disk's name.
    pub disk: String,
    /// The ranges in bytes, ascending; adjacent ranges are joined.
    pub ranges: Vec<Range<u64>>,
}

/// The result of a verify.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Chunks that were read and are authentic or damaged.
    pub chunks: u64,
    /// Bytes of their values.
    pub read_bytes: u64,
    /// Pages of chunk maps that were read, each once.
    pub pages: u64,
    /// The damaged chunks, and missing ones that a disk refers to: at most 1,000.
    pub damaged_chunks: Vec<Damaged>,
    /// The number of all damaged and missing chunks.
    pub damaged_chunk_count: u64,
    /// The damaged or missing pages.
    pub damaged_pages: Vec<Damaged>,
    /// The disks with damaged or missing parts, in the order given.
    pub affected: Vec<Affected>,
}

impl VerifyReport {
    fn damage(&mut self, id: ChunkId, reason: String) {
        self.damaged_chunk_count += 1;
        if self.damaged_chunks.len() < MAX_DESCRIBED {
            self.damaged_chunks.push(Damaged { id, reason });
        }
    }

    /// True if there is no damage.
    pub fn is_clean(&self) -> bool {
        self.damaged_chunk_count == 0 && self.damaged_pages.is_empty() && self.affected.is_empty()
    }
}

impl Repository {
    /// Verifies chunks and the chunk maps of `disks`.
    ///
    /// # Errors
    /// `Interrupted` after a cancel; errors of the operating system. Damage is not an error: it is
    /// reported.
    pub fn verify(
        &self,
        disks: &[VerifiedDisk],
        options: &VerifyOptions<'_>,
    ) -> Result<VerifyReport> {
        self.verify_chunks(disks, options).map(|(report, _)| report)
    }

    /// [`Repository::verify`] that also returns the unusable chunks: damaged or missing ones.
    pub(crate) fn verify_chunks(
        &self,
        disks: &[VerifiedDisk],
        options: &VerifyOptions<'_>,
    ) -> Result<(VerifyReport, IdSet)> {
        self.catch_up()?;
        let mut report = VerifyReport::default();
        let end = self.next_chunk()?;
        let wanted = match options.coverage {
            Coverage::Referenced => Some(maps::referenced(self, disks, end, options.cancel)?),
            Coverage::Everything | Coverage::Sample(_) => None,
        };
        let unusable = chunks::verify(self, 1..end, wanted.as_ref(), options, &mut report)?;
        maps::find_affected(self, disks, &unusable, options.cancel, &mut report)?;
        Ok((report, unusable))
    }

    /// The id of the next chunk; no chunk has it yet.
    pub(crate) fn next_chunk(&self) -> Result<ChunkId> {
        // If a file is not the listed one, a reader may see counters that are older than the maps.
        let marked = self.stored_mark().map_or(0, |mark| mark.next_chunk);
        match StoreState::read(self) {
            Ok(state) => Ok(state.next_chunk.max(marked)),
            // This damage is reported with the documents.
            Err(_) => Ok(chunks::last_id(self)?.saturating_add(1).min(MAX_UNCOUNTED_IDS)),
        }
    }

    /// The parts of `disks` that cannot be read if these chunks are unusable.
    pub(crate) fn affected(
        &self,
        disks: &[VerifiedDisk],
        unusable: &IdSet,
        cancel: &AtomicBool,
    ) -> Result<Vec<Affected>> {
        let mut report = VerifyReport::default();
        maps::find_affected(self, disks, unusable, cancel, &mut report)?;
        Ok(report.affected)
    }
}

fn check_cancel(cancel: &AtomicBool) -> Result<()> {
    if cancel.load(Ordering::Relaxed) {
        Err(Error::new(ErrorKind::Interrupted, "cancelled"))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
