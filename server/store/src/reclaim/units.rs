//! The files of chunks, in units of which is known how much is in use.
//!
//! A file tells its first id, its last and how many chunks it holds, and the bitmap
//! how many ids of that range are in use. Where the ranges of files overlap (a small
//! backup, a large one that became a file of its own, a small one again), only all
//! of them together tell how many of the chunks in use are theirs: they are one unit.

use std::ops::RangeInclusive;

use coldrise_block::{Error, ErrorKind, Result};

use crate::chunk::ChunkId;
use crate::repository::Repository;
use crate::rocks::{Family, LiveFile};

use super::Reachable;

/// A unit is rewritten when at least one chunk of so many is of no use.
const REWRITTEN_DEAD_CHUNKS: u64 = 2;

/// Files whose ranges of ids overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) ids: RangeInclusive<ChunkId>,
    pub(crate) files: Vec<LiveFile>,
    pub(crate) bytes: u64,
    /// Chunks in the files.
    pub(crate) chunks: u64,
    /// Chunks in use that have an id of the range.
    pub(crate) live: u64,
}

/// What becomes of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Nothing in it is in use.
    Dropped,
    /// What is in use is copied: at most as much as is given back.
    Rewritten,
    /// Most of it is in use.
    Kept,
}

impl Unit {
    /// Chunks that nothing refers to.
    pub(crate) fn dead(&self) -> u64 {
        self.chunks.saturating_sub(self.live)
    }

    pub(crate) fn fate(&self) -> Fate {
        if self.live == 0 {
            Fate::Dropped
        } else if self.dead() > 0
            && self.dead().saturating_mul(REWRITTEN_DEAD_CHUNKS) >= self.chunks
        {
            Fate::Rewritten
        } else {
            Fate::Kept
        }
    }
}

/// The units of the chunks family, in the order of their ids.
pub(crate) fn of_chunks(repository: &Repository, reachable: &Reachable) -> Result<Vec<Unit>> {
    let mut units: Vec<Unit> = Vec::new();
    for file in repository.database().live_files(Family::Chunks)? {
        let ids = id_of(&file.smallest)?..=id_of(&file.largest)?;
        let chunks = file.values();
        match units.last_mut() {
            Some(last) if ids.start() <= last.ids.end() => {
                last.ids = *last.ids.start()..=(*last.ids.end()).max(*ids.end());
                last.bytes += file.bytes;
                last.chunks += chunks;
                last.files.push(file);
            }
            _ => units.push(Unit { ids, bytes: file.bytes, chunks, live: 0, files: vec![file] }),
        }
    }
    for unit in &mut units {
        unit.live = reachable.chunks_in(unit.ids.clone());
    }
    Ok(units)
}

fn id_of(key: &[u8]) -> Result<ChunkId> {
    key.try_into().map(ChunkId::from_be_bytes).map_err(|_| {
        Error::new(
            ErrorKind::Corrupt,
            "a file of chunks holds a key that is no id; run coldrise verify",
        )
    })
}
