//! Caches of decoded map pages and chunks. Both are bounded in bytes and split into
//! shards, so that readers on different threads rarely contend.

use std::sync::Arc;

use quick_cache::Weighter;
use quick_cache::sync::Cache;

use crate::chunk::ChunkId;
use crate::map::{LEAF_SLOTS, Page, PageId};

/// A decoded chunk.
pub(crate) type DecodedChunk = Arc<[u8]>;

const MOST_CHUNKS_AT_ONCE: u64 = 64 << 10;

#[derive(Clone)]
struct Bytes;

impl Weighter<ChunkId, DecodedChunk> for Bytes {
    fn weight(&self, _: &ChunkId, chunk: &DecodedChunk) -> u64 {
        chunk.len() as u64
    }
}

impl Weighter<(PageId, u8), Page> for Bytes {
    fn weight(&self, _: &(PageId, u8), page: &Page) -> u64 {
        page.len() as u64 * 8
    }
}

/// Decoded chunks by id. The content of an id never changes, so no entry is ever
/// invalidated.
pub(crate) struct ChunkCache(Cache<ChunkId, DecodedChunk, Bytes>);

impl ChunkCache {
    /// A cache of `bytes`; `None` if that is less than one chunk.
    pub(crate) fn new(bytes: u64, chunk_size: u32) -> Option<Self> {
        let chunks = bytes / u64::from(chunk_size);
        (chunks > 0).then(|| {
            // The table has space for this many at first, and grows on demand.
            let chunks = chunks.min(MOST_CHUNKS_AT_ONCE) as usize;
            ChunkCache(Cache::with_weighter(chunks, bytes, Bytes))
        })
    }

    #[inline]
    pub(crate) fn get(&self, id: ChunkId) -> Option<DecodedChunk> {
        self.0.get(&id)
    }

    /// Changes the capacity in bytes. Evicts the excess at once.
    pub(crate) fn resize(&self, bytes: u64) {
        self.0.set_capacity(bytes);
    }

    /// The size of the content in bytes.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.0.weight()
    }

    /// The capacity in bytes.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.0.capacity()
    }

    pub(crate) fn insert(&self, id: ChunkId, chunk: DecodedChunk) {
        self.0.insert(id, chunk);
    }
}

/// Decoded pages by id and level.
pub struct PageCache(Cache<(PageId, u8), Page, Bytes>);

impl PageCache {
    /// A cache of this size.
    pub fn new(bytes: u64) -> Self {
        let pages = (bytes / (LEAF_SLOTS as u64 * 8)) as usize;
        PageCache(Cache::with_weighter(pages, bytes, Bytes))
    }

    #[inline]
    /// The page, if it is here.
    pub fn get(&self, id: PageId, level: u8) -> Option<Page> {
        self.0.get(&(id, level))
    }

    /// Keeps a page.
    pub fn insert(&self, id: PageId, level: u8, page: Page) {
        self.0.insert((id, level), page);
    }
}
