//! What a repository holds, in numbers.

use coldrise_block::Result;

use crate::repository::Repository;
use crate::rocks::Family;
use crate::state::StoreState;

/// What a repository holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct StoreStats {
    /// Machines of the catalog.
    pub machines: u64,
    /// Points of all machines.
    pub points: u64,
    /// Sum of the sizes of all disks of all points.
    pub recoverable_bytes: u64,
    /// Stored chunks.
    pub chunks: u64,
    /// Plaintext of those: what is left after deduplication.
    pub unique_bytes: u64,
    /// What they take after compression, encryption and padding.
    pub stored_bytes: u64,
    /// Files of the database, which also hold maps, index and catalog, and
    /// which lag behind by what is still in RocksDB's log.
    pub database_bytes: u64,
}

impl Repository {
    /// Counts what the repository holds; reads the whole catalog.
    ///
    /// # Errors
    /// `Corrupt` where a document does not authenticate.
    pub fn stats(&self) -> Result<StoreStats> {
        let state = StoreState::read(self)?;
        let mut stats = StoreStats {
            chunks: state.chunks,
            unique_bytes: state.chunks.saturating_mul(u64::from(self.chunk_size_bytes())),
            stored_bytes: state.stored_bytes,
            ..StoreStats::default()
        };
        for family in [Family::State, Family::Chunks, Family::Maps, Family::Catalog] {
            stats.database_bytes += self.database().family_bytes(family)?;
        }
        for machine in self.machines()? {
            stats.machines += 1;
            for point in self.points(&machine)? {
                stats.points += 1;
                let bytes = point.disks.iter().map(|disk| disk.size_bytes);
                stats.recoverable_bytes =
                    bytes.fold(stats.recoverable_bytes, |sum, size| sum.saturating_add(size));
            }
        }
        Ok(stats)
    }
}
