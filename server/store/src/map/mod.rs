//! The chunk map: the chunk at each index of a disk.
//!
//! It is a persistent radix tree of immutable pages. A leaf holds
//! [`LEAF_SLOTS`] chunk ids, an inner page [`INNER_SLOTS`] ids of pages one
//! level below. 0 is a hole: of one chunk, or of the whole subtree. An update
//! writes new versions of the pages that it touches and shares all other pages
//! with its base, so the difference of two maps is found by comparing page ids.
//!
//! ```text
//! root (level 1)   [ 17 | 0 | 18 | … ]         page 19
//!                     │       └───────┐
//! leaves (level 0) [ 1 2 3 … ]     [ 0 0 900 … ]    pages 17, 18
//! ```
//!
//! A page of level n has only children of level n - 1, and the level is
//! authenticated. So a walk ends, whatever the store contains.

mod builder;
mod diff;
mod extents;
mod page;

use serde::{Deserialize, Serialize};

pub use builder::{MapBuilder, PageSink};
pub use diff::for_each_difference;
pub use extents::{Place, extents_of};
pub use page::{page_value, parse_page_value};

use coldrise_block::{Error, ErrorKind, Result};
use std::sync::Arc;

/// The number of a stored page: from 1 on, in the order of storing. 0: no page.
pub type PageId = u64;

/// Chunk ids in a leaf.
pub(crate) const LEAF_SLOTS: usize = 1024;
/// Page ids in an inner page.
pub(crate) const INNER_SLOTS: usize = 512;
/// Maximum number of pages on the path from a root to a leaf: enough for 2^37
/// chunks, eight times the number in the largest disk with the smallest chunks.
pub(crate) const MAX_LEVELS: u8 = 4;

const _: () = assert!(
    subtree_chunks(MAX_LEVELS)
        >= coldrise_block::MAX_DISK_SIZE_BYTES / crate::MIN_CHUNK_SIZE_BYTES as u64
);

/// A whole chunk map: its root page and its height. A map is immutable, so
/// copying this copies the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "RootFields", into = "RootFields")]
pub struct MapRoot {
    page: PageId,
    levels: u8,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RootFields {
    page: u64,
    levels: u8,
}

impl TryFrom<RootFields> for MapRoot {
    type Error = Error;
    fn try_from(fields: RootFields) -> Result<Self> {
        MapRoot::new(fields.page, fields.levels)
    }
}

impl From<MapRoot> for RootFields {
    fn from(root: MapRoot) -> Self {
        RootFields { page: root.page, levels: root.levels }
    }
}

impl MapRoot {
    /// A map of holes only.
    pub const EMPTY: MapRoot = MapRoot { page: 0, levels: 1 };

    pub(crate) fn new(page: PageId, levels: u8) -> Result<Self> {
        if !(1..=MAX_LEVELS).contains(&levels) {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("a chunk map of {levels} levels is not possible"),
            ));
        }
        Ok(MapRoot { page, levels })
    }

    /// The root page; 0 if there is none.
    pub fn page(self) -> PageId {
        self.page
    }

    /// The number of levels.
    pub fn levels(self) -> u8 {
        self.levels
    }

    /// Chunks that this height can hold.
    pub fn capacity(self) -> u64 {
        subtree_chunks(self.levels)
    }
}

/// Chunks below a page of level `levels - 1`; 1 for 0.
pub const fn subtree_chunks(levels: u8) -> u64 {
    let mut chunks = if levels == 0 { 1 } else { LEAF_SLOTS as u64 };
    let mut level = 1;
    while level < levels {
        chunks *= INNER_SLOTS as u64;
        level += 1;
    }
    chunks
}

/// The minimum height for a disk of `chunks` chunks.
pub(crate) fn levels_for(chunks: u64) -> u8 {
    (1..MAX_LEVELS).find(|levels| subtree_chunks(*levels) >= chunks).unwrap_or(MAX_LEVELS)
}

/// Slots of a page of this level.
pub(crate) const fn slots_of(level: u8) -> usize {
    if level == 0 { LEAF_SLOTS } else { INNER_SLOTS }
}

/// The slot in a page of `level` that leads to chunk `index`.
#[inline]
pub fn slot_of(index: u64, level: u8) -> usize {
    let slot = if level == 0 {
        index % LEAF_SLOTS as u64
    } else {
        (index / subtree_chunks(level)) % INNER_SLOTS as u64
    };
    slot as usize
}

/// A page in memory: all of its slots.
pub type Page = Arc<[u64]>;

/// Reads pages.
pub trait PageSource {
    /// The page `id`, which must be of `level`.
    fn page(&self, id: PageId, level: u8) -> Result<Page>;
}

#[cfg(test)]
#[path = "map_tests.rs"]
mod tests;
