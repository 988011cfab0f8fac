//! Verify: reads and authenticates what a repository holds, and names what each
//! damage affects.
//!
//! ```text
//!   chunks   in the order of storing, in parallel  ─▶ which ids are unusable
//!   maps     every page that a disk leads to, once ─▶ which subtrees hold one
//!   disks    down the affected subtrees only       ─▶ names and byte ranges
//! ```
//!
//! A chunk is authenticated and not decompressed: what authenticates is what was
//! stored. The order does not matter for correctness: what is stored after a
//! verify has begun is left to the next one.

mod chunks;
mod documents;
mod files;
mod maps;
mod recent;

pub(crate) use chunks::IdSet;
pub use documents::CatalogDamage;
pub use recent::RecentDisks;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Error, ErrorKind, Result};

use crate::chunk::ChunkId;
use crate::state::StoreState;
use crate::{MapRoot, Repository};

/// Where the store's counters are lost, keys that anybody can make up tell how many ids
/// there are: no more are believed than take half a gibibyte of memory.
const MAX_UNCOUNTED_IDS: u64 = 1 << 32;

/// Damaged chunks that are described one by one; more are only counted.
const MAX_DESCRIBED: usize = 1000;

/// A disk to be verified: every disk of every point, and of every session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedDisk {
    /// What a person calls it: `web01/20261120T100000Z/vda`.
    pub name: String,
    /// Its chunk map.
    pub root: MapRoot,
    /// Its size in bytes.
    pub size_bytes: u64,
}

/// Which chunks are read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Coverage {
    /// Every stored chunk, those that no disk refers to included: a later backup
    /// may.
    Everything,
    /// Chunks that the given disks refer to.
    Referenced,
    /// So many percent of all stored chunks, in pieces of neighbours: of as many equal
    /// parts of the ids one piece each, chosen at random. At least one.
    Sample(f64),
}

/// How to verify.
#[derive(Clone, Copy)]
pub struct VerifyOptions<'a> {
    /// Which chunks are read.
    pub coverage: Coverage,
    /// Threads that read chunks; 0: as many as there are processors.
    pub threads: usize,
    /// Set by whoever wants to end it.
    pub cancel: &'a AtomicBool,
    /// Hears how far it has come, from several threads; first that nothing is done.
    pub progress: &'a (dyn Fn(VerifyProgress) + Sync),
}

/// How far a verify has come, in bytes that disks have: a chunk counts whole, however small
/// it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyProgress {
    /// What was dealt with.
    pub done_bytes: u64,
    /// All there is to deal with.
    pub total_bytes: u64,
    /// Bytes read, as they are stored.
    pub read_bytes: u64,
}

/// One damaged value.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Damaged {
    /// Number of the chunk or the page.
    pub id: u64,
    /// What is wrong with it.
    pub reason: String,
}

/// A part of a disk that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Affected {
    /// The disk's name.
    pub disk: String,
    /// The ranges in bytes, ascending, joined where they touch.
    pub ranges: Vec<Range<u64>>,
}

/// What a verify found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Chunks that were read and authenticated, or found damaged.
    pub chunks: u64,
    /// Bytes of their values.
    pub read_bytes: u64,
    /// Pages of chunk maps that were read, each once.
    pub pages: u64,
    /// The damaged chunks, at most 1,000 of them.
    pub damaged_chunks: Vec<Damaged>,
    /// Number of all damaged chunks.
    pub damaged_chunk_count: u64,
    /// The damaged or missing pages.
    pub damaged_pages: Vec<Damaged>,
    /// The disks that refer to something damaged or missing, in the order given.
    pub affected: Vec<Affected>,
}

impl VerifyReport {
    /// True where nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.damaged_chunk_count == 0 && self.damaged_pages.is_empty() && self.affected.is_empty()
    }
}

impl Repository {
    /// Verifies chunks and the chunk maps of `disks`.
    ///
    /// # Errors
    /// `Interrupted` when it was cancelled; what the operating system says.
    /// Damage is no error: it is reported.
    pub fn verify(
        &self,
        disks: &[VerifiedDisk],
        options: &VerifyOptions<'_>,
    ) -> Result<VerifyReport> {
        self.verify_chunks(disks, options).map(|(report, _)| report)
    }

    /// The same, and which chunks are unusable: damaged, or not there.
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

    /// The id that the next chunk gets, and no chunk has yet.
    pub(crate) fn next_chunk(&self) -> Result<ChunkId> {
        // A reader may see older counters than maps, where a file is not the one that is listed.
        let marked = self.stored_mark().map_or(0, |mark| mark.next_chunk);
        match StoreState::read(self) {
            Ok(state) => Ok(state.next_chunk.max(marked)),
            // Its damage is told with the documents.
            Err(_) => Ok(chunks::last_id(self)?.saturating_add(1).min(MAX_UNCOUNTED_IDS)),
        }
    }

    /// What `disks` cannot read where these chunks are unusable.
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
    match cancel.load(Ordering::Relaxed) {
        true => Err(Error::new(ErrorKind::Interrupted, "cancelled")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests;
