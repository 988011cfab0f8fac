//! What a repository holds, in numbers.

use coldrise_block::Result;

use crate::repository::{Repository, PAGE_CACHE_BYTES};
use crate::rocks::{Family, READER_BLOCK_CACHE_BYTES, WRITER_BLOCK_CACHE_BYTES};
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

/// Memory that the indexes of a repository take, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct IndexMemory {
    /// In every process that reads: indexes of the database's files, as RocksDB
    /// estimates them. The rest of the index is read where it is needed.
    pub reader_bytes: u64,
    /// At most, in every process that reads: blocks of the database and decoded pages
    /// of chunk maps that are kept. The cache of decoded chunks comes on top, as large as
    /// a front end was told.
    pub reader_cache_bytes: u64,
    /// In a writer, beside the reader's: the filter and the index that find known
    /// chunks, from the number of chunks.
    pub writer_bytes: u64,
    /// At most, in a writer: blocks that are kept, in place of the reader's.
    pub writer_cache_bytes: u64,
}

/// What a million entries of the dedup index take in memory: its filter has 10 bits
/// per key, and one of about 60 keys is in its index (measured: 1.498 bytes a key).
const DEDUP_MEMORY_PER_MILLION: u64 = 1_500_000;

/// How many chunks a repository has stored, and what they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredChunks {
    /// Chunks, those included that nothing refers to any more.
    pub chunks: u64,
    /// What they take after compression, encryption and padding.
    pub stored_bytes: u64,
}

impl Repository {
    /// How many chunks are stored; reads nothing but the store's counters.
    ///
    /// # Errors
    /// `Corrupt` where those do not authenticate.
    pub fn stored_chunks(&self) -> Result<StoredChunks> {
        let StoreState { chunks, stored_bytes, .. } = StoreState::read(self)?;
        Ok(StoredChunks { chunks, stored_bytes })
    }

    /// What the indexes take in memory.
    ///
    /// # Errors
    /// `Corrupt` where the store's counters do not authenticate.
    pub fn index_memory(&self) -> Result<IndexMemory> {
        let state = StoreState::read(self)?;
        let mut memory = IndexMemory {
            reader_cache_bytes: READER_BLOCK_CACHE_BYTES as u64 + PAGE_CACHE_BYTES,
            writer_bytes: state.chunks.saturating_mul(DEDUP_MEMORY_PER_MILLION) / 1_000_000,
            writer_cache_bytes: WRITER_BLOCK_CACHE_BYTES as u64 + PAGE_CACHE_BYTES,
            ..IndexMemory::default()
        };
        for family in
            [Family::State, Family::Chunks, Family::Maps, Family::MapsCopy, Family::Catalog]
        {
            memory.reader_bytes += self.database().family_index_memory_bytes(family)?;
        }
        Ok(memory)
    }

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
        for family in
            [Family::State, Family::Chunks, Family::Maps, Family::MapsCopy, Family::Catalog]
        {
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
