//! Statistics of a repository.

use coldrise_block::Result;

use crate::repository::{PAGE_CACHE_BYTES, Repository};
use crate::rocks::{Family, READER_BLOCK_CACHE_BYTES, WRITER_BLOCK_CACHE_BYTES};
use crate::state::StoreState;

/// The content of a repository, in numbers.
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
    /// Their plaintext: the size after deduplication.
    pub unique_bytes: u64,
    /// Their size after compression, encryption and padding.
    pub stored_bytes: u64,
    /// Size of the database files. They also hold maps, index and catalog, and exclude
    /// the data that is still in RocksDB's log.
    pub(crate) database_bytes: u64,
}

/// Memory for the indexes of a repository, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct IndexMemory {
    /// In every reading process: indexes of the database's files, as estimated by
    /// RocksDB. Other parts of the index are read on demand.
    pub reader_bytes: u64,
    /// Maximum in every reading process: cached blocks of the database and decoded pages
    /// of chunk maps. The cache of decoded chunks comes on top; its size is an option of
    /// the front end.
    pub reader_cache_bytes: u64,
    /// In a writer, in addition to the reader's: the filter and the index that find known
    /// chunks, computed from the number of chunks.
    pub writer_bytes: u64,
    /// Maximum in a writer: cached blocks, instead of the reader's.
    pub writer_cache_bytes: u64,
}

/// Memory for a million entries of the dedup index: its filter has 10 bits per key, and
/// one of about 60 keys is in its index (measured: 1.498 bytes per key).
const DEDUP_MEMORY_PER_MILLION: u64 = 1_500_000;

/// The number of stored chunks and their size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredChunks {
    /// Chunks, including unreferenced ones.
    pub chunks: u64,
    /// Their size after compression, encryption and padding.
    pub stored_bytes: u64,
}

impl Repository {
    /// The number of stored chunks. Reads only the store's counters.
    ///
    /// # Errors
    /// `Corrupt` if the counters do not authenticate.
    pub fn stored_chunks(&self) -> Result<StoredChunks> {
        let StoreState { chunks, stored_bytes, .. } = StoreState::read(self)?;
        Ok(StoredChunks { chunks, stored_bytes })
    }

    /// The memory for the indexes.
    ///
    /// # Errors
    /// `Corrupt` if the store's counters do not authenticate.
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

    /// Counts the content of the repository. Reads the whole catalog.
    ///
    /// # Errors
    /// `Corrupt` if a document does not authenticate.
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
