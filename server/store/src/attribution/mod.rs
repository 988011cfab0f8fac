//! Attribution: what of the stored chunks belongs to one point alone, or to one
//! machine alone, and would go with it.
//!
//! Every page and every chunk gets an [`owner::Owner`], which only ever grows: nobody,
//! one point, one machine, several machines. A map is walked from its root down, and a
//! page whose owner does not grow by the visit is passed by with all that is below it:
//! its owner is at most that of everything below.
//!
//! ```text
//! nobody ─▶ one point ─▶ one machine ─▶ several
//! ```
//!
//! So a page is read three times at most, however many points share it, and the work
//! is proportional to the number of different pages, not to points times size. Memory:
//! 14 bytes per page, and 4 per chunk of a window of chunk numbers, which is as large as
//! the free memory allows (`window`). A repository of more is walked once per window, each
//! time only down the pages that lead to chunks of it.
//!
//! What a chunk takes is not stored with the maps, and reading them for it would
//! read the repository: it is the average of the file that the chunk lies in.

mod owner;
mod sizes;
mod walk;
mod window;

use coldrise_block::{ErrorKind, Result};

use crate::state::StoreState;
use crate::{DiskDocument, LayerId, Repository};

use sizes::ChunkSizes;
use walk::Walk;

/// What one machine holds on to.
#[derive(Clone, Debug, Default)]
pub struct Holdings {
    /// The disks of each of its points.
    pub points: Vec<Vec<DiskDocument>>,
    /// The disks of its sessions, as they were last sealed.
    pub sessions: Vec<DiskDocument>,
}

/// What belongs to one owner alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Chunks that nobody else refers to.
    pub chunks: u64,
    /// About what they take, compressed, encrypted and padded.
    pub stored_bytes: u64,
    /// Layers that nobody else refers to, sorted.
    pub layers: Vec<LayerId>,
}

/// What belongs to a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineAttribution {
    /// What no other machine refers to: it goes with all of the machine's points.
    pub alone: Share,
    /// Its points, in the order given.
    pub points: Vec<PointAttribution>,
}

/// What belongs to a point.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PointAttribution {
    /// What no other point and no session refers to: it goes with the point.
    pub alone: Share,
    /// What its chunk maps refer to: bytes that a restore reads, holes left out,
    /// captured writes not counted.
    pub recoverable_bytes: u64,
}

impl Repository {
    /// Says what belongs to each of `machines`, and to each of their points, alone.
    /// For a true answer they are all that the repository holds.
    ///
    /// # Errors
    /// `Corrupt` for a page that is damaged or missing.
    pub fn attribute(&self, machines: &[Holdings]) -> Result<Vec<MachineAttribution>> {
        // Read after the points were: it counts at least what they refer to.
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

/// How often the files are listed anew beside a writer that deletes some.
const LISTING_ATTEMPTS: u32 = 5;

impl Repository {
    fn chunk_sizes(&self, state: &StoreState) -> Result<ChunkSizes> {
        for _ in 1..LISTING_ATTEMPTS {
            match ChunkSizes::read(self, state) {
                // The writer deleted a file between its listing and its reading.
                Err(error) if error.kind() == ErrorKind::NotFound => self.catch_up()?,
                told => return told,
            }
        }
        ChunkSizes::read(self, state)
    }
}

#[cfg(test)]
mod tests;
