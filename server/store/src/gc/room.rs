//! The order in which a gc deletes on a drive without much room.
//!
//! Deleting needs space: for the deletions in the dedup index, and for the used part of a file that
//! is rewritten. With enough room all units are done in one round. Otherwise each round takes the
//! units that fit into half of the free space: first units that are dropped whole, then those with
//! the smallest used part. The next round can use the space that a round frees. Units that never
//! fit stay.

use std::time::{Duration, Instant};

use coldrise_block::Result;

use crate::repository::Repository;
use crate::rocks::Family;

use super::dedup_index;
use super::sweep::STEPS_LIVE_BYTES;
use super::units::{Fate, Unit};

/// Servers close deleted files within a second or two, and the space is free only then.
const CLOSING_PATIENCE: Duration = Duration::from_secs(3);
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The units of one family, in rounds.
pub(super) struct Rounds<'a> {
    repository: &'a Repository,
    /// Done units have the fate `Kept`.
    units: Vec<Unit>,
    is_first: bool,
}

/// All units of the family; those of other rounds are kept in this one.
pub(super) struct Round {
    pub(super) units: Vec<Unit>,
    pub(super) is_last: bool,
}

impl<'a> Rounds<'a> {
    pub(super) fn new(repository: &'a Repository, units: Vec<Unit>) -> Rounds<'a> {
        Rounds { repository, units, is_first: true }
    }

    /// The units that did not fit.
    pub(super) fn left(&self) -> impl Iterator<Item = &Unit> {
        self.units.iter().filter(|unit| unit.fate != Fate::Kept)
    }

    /// The next round; `None` when nothing is left or fits.
    ///
    /// # Errors
    /// Errors of the operating system on the free space.
    pub(super) fn next(&mut self) -> Result<Option<Round>> {
        let started = Instant::now();
        while self.left().next().is_some() {
            let room = self.repository.free_bytes()? / 2;
            if self.needed_bytes() <= room {
                let units = self.units.clone();
                self.units.clear();
                return Ok(Some(Round { units, is_last: true }));
            }
            let round = self.take(room);
            if round.iter().any(|unit| unit.fate != Fate::Kept) {
                self.is_first = false;
                return Ok(Some(Round { units: round, is_last: false }));
            }
            if self.is_first || started.elapsed() >= CLOSING_PATIENCE {
                tracing::warn!(
                    files = self.left().count(),
                    free_mib = room >> 19,
                    "the drive has no room to rewrite some files, which stay as they are: make \
                     room and run coldrise gc again"
                );
                return Ok(None);
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        Ok(None)
    }

    /// Bytes that one round with all units needs, at most.
    fn needed_bytes(&self) -> u64 {
        let dead = self.left().map(Unit::dead).sum();
        let stored = self.units.iter().map(|unit| unit.entries).sum();
        let copied: u64 = self.left().map(copied_bytes).sum();
        let is_rewritten = dedup_index::is_rewritten(dead, stored);
        let index = match self.units.first().map(|unit| unit.family) {
            Some(Family::Chunks) => dedup_index::written_bytes(dead, stored, is_rewritten),
            _ => 0,
        };
        copied.min(STEPS_LIVE_BYTES) + index
    }

    /// Takes the units that fit together.
    fn take(&mut self, room: u64) -> Vec<Unit> {
        let mut order: Vec<usize> = (0..self.units.len()).collect();
        order.sort_by_key(|number| copied_bytes(&self.units[*number]));
        let mut round = self.units.clone();
        let mut left = room;
        for number in order {
            let needed = needed_alone(&self.units[number]);
            if needed <= left {
                left -= needed;
                self.units[number].fate = Fate::Kept;
            } else {
                round[number].fate = Fate::Kept;
            }
        }
        round
    }
}

fn copied_bytes(unit: &Unit) -> u64 {
    if unit.is_copied() { unit.live_bytes() } else { 0 }
}

/// Bytes that one unit needs: its deletions and its copy. Nothing if it is kept.
fn needed_alone(unit: &Unit) -> u64 {
    match (unit.fate, unit.family) {
        (Fate::Kept, _) => 0,
        (_, Family::Chunks) => {
            copied_bytes(unit) + dedup_index::written_bytes(unit.dead(), 0, false)
        }
        _ => copied_bytes(unit),
    }
}
