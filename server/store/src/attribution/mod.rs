//! Attribution: the stored chunks that belong to one point or one machine alone. Deleting
//! that point or machine frees them.
//!
//! Every page and every chunk has an [`owner::Owner`], which only grows: none, one point,
//! one machine, several machines. A map is walked from its root down. If a visit does not
//! enlarge a page's owner, the walk skips the page and its subtree: every owner in the
//! subtree is at least as large.
//!
//! ```text
//! none ─▶ one point ─▶ one machine ─▶ several
//! ```
//!
//! So each page is read three times at most, however many points share it, and the work is
//! proportional to the number of distinct pages, not to points times size. Memory: 14
//! bytes per page, and 4 per chunk of a window of chunk numbers. The window is as large as
//! the free memory allows (`window`). A larger repository is walked once per window, each
//! time only through the pages that lead to chunks of the window.
//!
//! The stored size of a chunk is not in the maps, and reading it would mean reading the
//! repository. Instead the average of the file with the chunk is used.

mod owner;
mod sizes;
mod walk;
mod window;

use coldrise_block::{ErrorKind, Result};

use crate::state::StoreState;
use crate::{DiskDocument, LayerId, Repository};

use sizes::ChunkSizes;
use walk::Walk;

/// The disks that one machine refers to.
#[derive(Clone, Debug, Default)]
pub struct Holdings {
    /// The disks of each of its points.
    pub points: Vec<Vec<DiskDocument>>,
    /// The disks of its sessions, as of their last seal.
    pub sessions: Vec<DiskDocument>,
}

/// The storage that belongs to one owner alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldAmount {
    /// Chunks with no other reference.
    pub chunks: u64,
    /// Their approximate size, compressed, encrypted and padded.
    pub stored_bytes: u64,
    /// Layers with no other reference, sorted.
    pub layers: Vec<LayerId>,
}

/// The storage of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineAttribution {
    /// Storage without references from other machines: deleting all points of the machine
    /// frees it.
    pub alone: HeldAmount,
    /// Its points, in the order given.
    pub points: Vec<PointAttribution>,
}

/// The storage of a point.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PointAttribution {
    /// Storage without references from other points or sessions: deleting the point frees
    /// it.
    pub alone: HeldAmount,
    /// The bytes that its chunk maps refer to: a restore reads them. Holes and captured
    /// writes are not counted.
    pub recoverable_bytes: u64,
}

impl Repository {
    /// The storage that each of `machines`, and each of their points, holds alone. The result is
    /// correct only if `machines` covers the whole repository.
    ///
    /// # Errors
    /// `Corrupt` for a page that is damaged or missing.
    pub fn attribute(&self, machines: &[Holdings]) -> Result<Vec<MachineAttribution>> {
        // Read after the points, so that it includes all their references.
        let state = StoreState::read(self)?;
        let sizes = self.chunk_sizes(&state)?;
        let chunk_size = u64::from(self.chunk_size_bytes());
        let window_chunks = window::chunks();
        let mut walk = Walk::new(self, machines, state.next_page, chunk_size, window_chunks);
        walk.count_recoverable()?;
        let mut start = 0;
        while start < state.next_chunk {
            let end = state.next_chunk.min(start + window_chunks);
            walk.own_chunks(start..end, &sizes)?;
            start = end;
        }
        Ok(walk.finish())
    }
}

/// How often the files are listed again if a writer deletes some meanwhile.
const LISTING_ATTEMPTS: u32 = 5;

impl Repository {
    fn chunk_sizes(&self, state: &StoreState) -> Result<ChunkSizes> {
        for _ in 1..LISTING_ATTEMPTS {
            match ChunkSizes::read(self, state) {
                // The writer deleted a file between its listing and its reading.
                Err(error) if error.kind() == ErrorKind::NotFound => self.catch_up()?,
                other => return other,
            }
        }
        ChunkSizes::read(self, state)
    }
}

#[cfg(test)]
mod tests;
