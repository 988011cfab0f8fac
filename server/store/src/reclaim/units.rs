//! The files of a family, in units of which is known how much is in use.
//!
//! A file tells its first id, its last and how many entries it holds, and the bitmap
//! how many ids of that range are in use. Where the ranges of files overlap, only all
//! of them together tell how many of the entries in use are theirs, and RocksDB
//! rewrites them together: they are one unit. As ids are handed out in order, most
//! units are one file.

use std::ops::RangeInclusive;

use coldrise_block::{Error, ErrorKind, Result};

use crate::repository::Repository;
use crate::rocks::{Family, LiveFile};

use super::{MaxUnused, Reachable};

/// Files whose ranges of ids overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) family: Family,
    pub(crate) ids: RangeInclusive<u64>,
    pub(crate) files: Vec<LiveFile>,
    pub(crate) bytes: u64,
    /// Chunks or pages in the files.
    pub(crate) entries: u64,
    /// Those in use that have an id of the range.
    pub(crate) live: u64,
    pub(crate) fate: Fate,
}

/// What becomes of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Nothing in it is in use.
    Dropped,
    /// What is in use is copied.
    Rewritten,
    /// Too little of it is of no use.
    Kept,
}

impl Unit {
    fn new(family: Family, ids: RangeInclusive<u64>, file: LiveFile) -> Unit {
        let (bytes, entries) = (file.bytes, file.values());
        Unit { family, ids, files: vec![file], bytes, entries, live: 0, fate: Fate::Kept }
    }

    fn add(&mut self, ids: RangeInclusive<u64>, file: LiveFile) {
        self.ids = *self.ids.start()..=(*self.ids.end()).max(*ids.end());
        self.bytes += file.bytes;
        self.entries += file.values();
        self.files.push(file);
    }

    /// Entries that nothing refers to.
    pub(crate) fn dead(&self) -> u64 {
        self.entries.saturating_sub(self.live)
    }

    /// What the dead entries take, in bytes, if they are as long as the others.
    pub(crate) fn dead_bytes(&self) -> u64 {
        let (dead, entries) = (u128::from(self.dead()), u128::from(self.entries.max(1)));
        (u128::from(self.bytes) * dead / entries) as u64
    }

    /// What the others take.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.bytes - self.dead_bytes()
    }

    /// True where files are read and written anew. Of level 0 no file can be dropped:
    /// one that is of no use is rewritten to nothing.
    pub(crate) fn is_copied(&self) -> bool {
        match self.fate {
            Fate::Kept => false,
            Fate::Rewritten => true,
            Fate::Dropped => self.files.iter().any(|file| file.level == 0),
        }
    }
}

/// Keeps the units of which nothing was in use when they were judged, and now
/// something is. Nobody has looked whether they read.
pub(super) fn spare(units: &mut [Unit], reachable: &Reachable) {
    for unit in units {
        unit.live = reachable.count_in(unit.family, unit.ids.clone());
        if unit.fate == Fate::Dropped && unit.live > 0 {
            unit.fate = Fate::Kept;
        }
    }
}

/// Of pages: they are small, and every reader goes through them.
const MAX_UNUSED_PAGES_PERCENT: u64 = 25;

/// A unit of these is rewritten when at least so many percent of its entries are dead.
fn rewritten_percent(family: Family, max_unused: MaxUnused) -> u64 {
    match family {
        Family::Chunks => max_unused.percent(),
        _ => max_unused.percent().min(MAX_UNUSED_PAGES_PERCENT),
    }
}

/// The units of the chunks or of the maps, in the order of their ids.
pub(crate) fn of_family(
    repository: &Repository,
    family: Family,
    reachable: &Reachable,
    max_unused: MaxUnused,
) -> Result<Vec<Unit>> {
    let mut units: Vec<Unit> = Vec::new();
    for file in repository.database().live_files(family)? {
        let ids = id_of(&file.smallest)?..=id_of(&file.largest)?;
        match units.last_mut() {
            Some(last) if ids.start() <= last.ids.end() => last.add(ids, file),
            _ => units.push(Unit::new(family, ids, file)),
        }
    }
    for unit in &mut units {
        unit.live = reachable.count_in(family, unit.ids.clone());
        let wanted = unit.entries.saturating_mul(rewritten_percent(family, max_unused));
        let is_worth_it = unit.dead() > 0 && unit.dead().saturating_mul(100) >= wanted;
        unit.fate = match (unit.live, is_worth_it) {
            (0, _) => Fate::Dropped,
            (_, true) => Fate::Rewritten,
            (_, false) => Fate::Kept,
        };
    }
    Ok(units)
}

fn id_of(key: &[u8]) -> Result<u64> {
    super::id_of_key(key).ok_or_else(|| {
        let message = "a file of the database holds a key that is no id; run coldrise verify";
        Error::new(ErrorKind::Corrupt, message)
    })
}
