//! Groups the files of a family into units with a known number of used entries.
//!
//! A file reports its first id, its last id and its number of entries; the bitmap
//! gives the number of used ids in that range. If the ranges of files overlap, only
//! their sum can be compared with the bitmap, and RocksDB rewrites them together: they
//! form one unit. Ids are assigned in order, so most units are one file.

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
    /// The ids of the range that are in use.
    pub(crate) live: u64,
    pub(crate) fate: Fate,
}

/// The decision about a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It has no used entry and is dropped.
    Dropped,
    /// Its used entries are copied.
    Rewritten,
    /// Its unreferenced share is too small.
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

    /// Unreferenced entries.
    pub(crate) fn dead(&self) -> u64 {
        self.entries.saturating_sub(self.live)
    }

    /// The size of the unreferenced entries in bytes, at the average entry size.
    pub(crate) fn dead_bytes(&self) -> u64 {
        let (dead, entries) = (u128::from(self.dead()), u128::from(self.entries.max(1)));
        (u128::from(self.bytes) * dead / entries) as u64
    }

    /// The size of the used entries in bytes.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.bytes - self.dead_bytes()
    }

    /// True if its files are read and rewritten. Files on level 0 cannot be dropped:
    /// if all entries are unreferenced, the file is rewritten to nothing.
    pub(crate) fn is_copied(&self) -> bool {
        match self.fate {
            Fate::Kept => false,
            Fate::Rewritten => true,
            Fate::Dropped => self.files.iter().any(|file| file.level == 0),
        }
    }
}

/// Keeps the units that were unused when they were judged and have a used entry now.
/// They were not checked for damage.
pub(super) fn spare(units: &mut [Unit], reachable: &Reachable) {
    for unit in units {
        unit.live = reachable.count_in(unit.family, unit.ids.clone());
        if unit.fate == Fate::Dropped && unit.live > 0 {
            unit.fate = Fate::Kept;
        }
    }
}

/// The limit for pages: they are small, and every reader reads them.
const MAX_UNUSED_PAGES_PERCENT: u64 = 25;

/// A unit is rewritten if at least this percentage of its entries is unreferenced.
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
        let message = "a file of the database holds a key that is not an id; run coldrise verify";
        Error::new(ErrorKind::Corrupt, message)
    })
}
