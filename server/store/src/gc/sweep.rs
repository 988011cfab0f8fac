//! Sweep: deletes unreachable data, in an order that a kill may interrupt anywhere.
//!
//! 1. The memtables are flushed to files; then the units are found and judged again.
//! 2. The unreachable entries are condemned. From now on, a backup in the same process does not
//!    refer to them; entries that it already referred to stay (see `writer::referred`). The dedup
//!    entries of all condemned chunks are deleted, durably. A kill leaves unreferenced chunks
//!    without dedup entries. The next gc that rewrites as many files finds them in the same files.
//! 3. Files without any used entry are dropped (their manifest entry, synced).
//! 4. Files with few used entries are rewritten without the others, some at a time. They are
//!    checked just before, so that damaged files are skipped. Each such step is one synced entry of
//!    the manifest. A kill leaves new files that RocksDB removes at the next open.
//! 5. The same is done for the maps.
//! 6. The counters of the store are made exact, synced. A kill before this step leaves counters
//!    that include deleted entries, until the next gc.
//!
//! On a full drive, steps 2 to 4 are done in rounds: see [`super::room`].
//!
//! Condemned chunks of a damaged file stay in it without dedup entries, as after a kill.
//!
//! So a dedup entry never refers to a missing chunk, and reachable data is never touched: a
//! [`Rule`] never deletes an entry in use.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::repository::Repository;
use crate::rocks::{Family, LiveFile, Rule};
use crate::writer::{Condemned, RepositoryWriter, Shared};

use super::check::{GcOptions, Work, check};
use super::room::Rounds;
use super::units::{self, Fate, Unit};
use super::{Reachable, dedup_index, id_of_key};

/// Approximate bytes that one thread copies in one step.
const STEP_LIVE_BYTES: u64 = 512 << 20;
const REWRITING_THREADS: usize = 2;
/// Approximate bytes that are copied at the same time.
pub(super) const STEPS_LIVE_BYTES: u64 = REWRITING_THREADS as u64 * STEP_LIVE_BYTES;

/// The result of a gc.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcReport {
    /// Chunks that were deleted.
    pub chunks: u64,
    /// Pages of chunk maps that were deleted.
    pub pages: u64,
    /// Their approximate size in bytes, from the average entry size of each file.
    pub bytes: u64,
    /// Files that were dropped whole.
    pub(crate) dropped_files: u64,
    /// Files that were rewritten.
    pub(crate) rewritten_files: u64,
    /// Unreferenced chunks that stay, because most of their file is in use or their file
    /// is damaged.
    pub kept_chunks: u64,
    /// Damaged files that were skipped, with the reason.
    pub damaged_files: Vec<String>,
}

impl GcReport {
    fn add(&mut self, rewritten: Checked) {
        self.rewritten_files += rewritten.sound_files;
        for (unit, error) in rewritten.damaged {
            self.bytes = self.bytes.saturating_sub(unit.dead_bytes());
            if unit.family == Family::Chunks {
                self.kept_chunks += unit.dead();
            }
            let names: Vec<_> = unit.files.iter().map(|file| format!("db{}", file.name)).collect();
            let damage = format!("{}: {}", names.join(", "), error.full_message());
            self.damaged_files.push(damage);
        }
    }
}

/// The step that a gc has just completed, durably.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Judged,
    Forgotten,
    Dropped(Family),
    /// Nothing has changed yet: the damaged files are known.
    Checked(Family),
    Rewritten(Family),
}

impl RepositoryWriter {
    /// Deletes unreachable entries and returns their space to the file system. Keeps entries that
    /// this writer has stored since it was opened, and entries referred to by a disk that another
    /// thread is writing.
    ///
    /// # Errors
    /// `Busy` beside another gc; `Interrupted` after a cancel: completed steps stay. `NoSpace`,
    /// `Corrupt` or `Io` if rewriting failed; this writer may then refuse further writes. Damage is
    /// not an error: damaged files are skipped and reported.
    pub fn collect_garbage(
        &self,
        reachable: Reachable,
        options: &GcOptions<'_>,
    ) -> Result<GcReport> {
        self.collect_until(reachable, options, &|_step| options.check_cancel())
    }

    /// Like [`RepositoryWriter::collect_garbage`]; `after` each step decides whether to continue.
    pub(super) fn collect_until(
        &self,
        reachable: Reachable,
        options: &GcOptions<'_>,
        after: &dyn Fn(Step) -> Result<()>,
    ) -> Result<GcReport> {
        let started = std::time::Instant::now();
        let after = &|step: Step| {
            tracing::debug!(?step, elapsed_ms = started.elapsed().as_millis() as u64, "gc");
            after(step)
        };
        let Some(_alone) = self.shared.gc_running.try_lock() else {
            return Err(Error::new(ErrorKind::Busy, "another gc is running"));
        };
        let mut reachable = reachable;
        reachable.add_all_of(&self.shared.referred);
        let mut sweep = Sweep {
            writer: &self.shared,
            repository: self.repository(),
            work: Work::new(options),
            after,
            done: GcReport::default(),
        };
        sweep.run(reachable)?;
        self.recount()?;
        Ok(sweep.done)
    }
}

struct Sweep<'a> {
    writer: &'a Shared,
    repository: &'a Repository,
    work: Work<'a>,
    after: &'a dyn Fn(Step) -> Result<()>,
    done: GcReport,
}

impl Sweep<'_> {
    fn run(&mut self, mut reachable: Reachable) -> Result<()> {
        self.repository.database().flush()?;
        let max_unused = self.work.max_unused();
        let mut chunks = units::of_family(self.repository, Family::Chunks, &reachable, max_unused)?;
        let maps = units::of_family(self.repository, Family::Maps, &reachable, max_unused)?;
        let copies = units::of_family(self.repository, Family::MapsCopy, &reachable, max_unused)?;
        self.work.plan(chunks.iter().chain(&maps).chain(&copies));
        (self.after)(Step::Judged)?;

        let gone = self.writer.referred.condemn(|claimed| {
            reachable.add_chunks(claimed);
            units::spare(&mut chunks, &reachable);
            let gone = Arc::new(Gone::new(&chunks, Arc::new(reachable)));
            (gone.condemned(), gone)
        });
        let kept = chunks.iter().filter(|unit| unit.fate == Fate::Kept);
        self.done.kept_chunks = kept.map(Unit::dead).sum();
        self.done.chunks = self.delete_family(chunks, &gone.reachable)?;
        self.done.pages = self.delete_family(maps, &gone.reachable)?;
        self.delete_family(copies, &gone.reachable)?;
        Ok(())
    }

    /// Deletes the unreachable entries of one family, in as many rounds as the free space of the
    /// drive requires. Returns the number of deleted entries.
    fn delete_family(&mut self, units: Vec<Unit>, reachable: &Arc<Reachable>) -> Result<u64> {
        let Some(family) = units.first().map(|unit| unit.family) else { return Ok(0) };
        let stored = units.iter().map(|unit| unit.entries).sum();
        let mut rounds = Rounds::new(self.repository, units);
        let mut deleted = 0;
        while let Some(round) = rounds.next()? {
            let going = round.units.iter().filter(|unit| unit.fate != Fate::Kept);
            let dead = going.clone().map(Unit::dead).sum();
            let gone = Arc::new(Gone::new(&round.units, Arc::clone(reachable)));
            if family == Family::Chunks {
                let is_rewritten = round.is_last && dedup_index::is_rewritten(dead, stored);
                dedup_index::forget(self.writer, &gone.condemned(), dead, is_rewritten)?;
                (self.after)(Step::Forgotten)?;
            }
            self.done.bytes += going.map(Unit::dead_bytes).sum::<u64>();
            deleted += self.delete(&round.units, &gone)?;
        }
        if family == Family::Chunks {
            self.done.kept_chunks += rounds.left().map(Unit::dead).sum::<u64>();
        }
        Ok(deleted)
    }

    /// Drops and rewrites the files of one family. Returns the number of deleted entries.
    fn delete(&mut self, units: &[Unit], gone: &Arc<Gone>) -> Result<u64> {
        let database = self.repository.database();
        let mut deleted = 0;
        for run in units.chunk_by(|a, b| a.fate == b.fate) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            if first.fate != Fate::Dropped {
                continue;
            }
            let bounds = (first.ids.start().to_be_bytes(), last.ids.end().to_be_bytes());
            database.delete_files_in_range(first.family, &bounds.0, &bounds.1)?;
            // Files on level 0 stay here, and are counted when they are rewritten.
            let dropped = run.iter().flat_map(|unit| &unit.files).filter(|file| file.level > 0);
            deleted += dropped.clone().map(LiveFile::values).sum::<u64>();
            self.done.dropped_files += dropped.count() as u64;
            (self.after)(Step::Dropped(first.family))?;
        }
        self.rewrite(&groups(units), gone)?;
        Ok(deleted + gone.deleted.load(Ordering::Relaxed))
    }

    /// Checks one group after the other. Other threads rewrite the checked groups
    /// meanwhile: checking waits for the drive, rewriting computes and writes.
    fn rewrite(&mut self, groups: &[Group<'_>], gone: &Arc<Gone>) -> Result<()> {
        let Some(family) = groups.first().map(Group::family) else { return Ok(()) };
        let _filtering = self.repository.database().filter(family, gone.rule())?;
        let (repository, work, after) = (self.repository, &self.work, self.after);
        let done = &mut self.done;
        let mut finish = |rewritten: Result<Checked>| {
            done.add(rewritten?);
            after(Step::Rewritten(family))
        };
        std::thread::scope(|scope| {
            let (checked, to_rewrite) = mpsc::sync_channel(0);
            let to_rewrite = Arc::new(Mutex::new(to_rewrite));
            let (rewritten, results) = mpsc::channel();
            let spawn = |_| {
                let (to_rewrite, rewritten) = (Arc::clone(&to_rewrite), rewritten.clone());
                let next = move || to_rewrite.lock().recv().ok();
                scope.spawn(move || {
                    while let Some(group) = next() {
                        let _ = rewritten.send(rewrite_checked(repository, group, work));
                    }
                })
            };
            let threads: Vec<_> = (0..REWRITING_THREADS).map(spawn).collect();
            // Closing the channels ends the threads.
            drop((to_rewrite, rewritten));
            let panicked = || Error::new(ErrorKind::Internal, "a rewriting thread panicked");
            let mut all = groups.iter().try_for_each(|group| {
                let group = check_group(repository, group, work)?;
                after(Step::Checked(family))?;
                checked.send(group).map_err(|_| panicked())?;
                results.try_iter().try_for_each(&mut finish)
            });
            drop(checked);
            for result in results {
                all = all.and(finish(result));
            }
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| panicked()))?;
            all
        })
    }
}

/// A group whose damaged units are known.
struct Checked {
    family: Family,
    bytes: u64,
    /// Neighbouring sound units.
    sound: Vec<RangeInclusive<u64>>,
    sound_files: u64,
    /// Damaged units that are skipped, with the reason.
    damaged: Vec<(Unit, Error)>,
}

fn check_group(repository: &Repository, group: &Group, work: &Work<'_>) -> Result<Checked> {
    let (family, bytes) = (group.family(), group.bytes);
    let (sound, damaged) = (Vec::<RangeInclusive<u64>>::new(), Vec::new());
    let mut checked = Checked { family, bytes, sound, sound_files: 0, damaged };
    let mut is_open = false;
    for unit in group.units.iter().filter(|unit| unit.is_copied()) {
        work.check_cancel()?;
        let found = check(repository, unit);
        work.advance(unit.bytes);
        if let Err(error) = found {
            checked.damaged.push((unit.clone(), error));
            is_open = false;
            continue;
        }
        checked.sound_files += unit.files.len() as u64;
        match checked.sound.last_mut() {
            Some(last) if is_open => *last = *last.start()..=*unit.ids.end(),
            _ => checked.sound.push(unit.ids.clone()),
        }
        is_open = true;
    }
    Ok(checked)
}

/// Rewrites the sound files of a group without the condemned entries.
fn rewrite_checked(repository: &Repository, group: Checked, work: &Work<'_>) -> Result<Checked> {
    work.check_cancel()?;
    for ids in &group.sound {
        let (from, to) = (ids.start().to_be_bytes(), ids.end().to_be_bytes());
        repository.database().compact(group.family, Some((&from, &to)))?;
    }
    work.advance(group.bytes);
    Ok(group)
}

/// The entries of one family to delete.
struct Gone {
    family: Family,
    /// The ids of dropped or rewritten units; ascending.
    ranges: Vec<RangeInclusive<u64>>,
    reachable: Arc<Reachable>,
    /// Entries that compactions dropped.
    deleted: AtomicU64,
}

impl Gone {
    fn new(units: &[Unit], reachable: Arc<Reachable>) -> Gone {
        let chosen = units.iter().filter(|unit| unit.fate != Fate::Kept);
        Gone {
            family: units.first().map_or(Family::Chunks, |unit| unit.family),
            ranges: chosen.map(|unit| unit.ids.clone()).collect(),
            reachable,
            deleted: AtomicU64::new(0),
        }
    }

    fn has(&self, id: u64) -> bool {
        let at = self.ranges.partition_point(|range| *range.end() < id);
        let is_chosen = self.ranges.get(at).is_some_and(|range| range.contains(&id));
        is_chosen && !self.reachable.has(self.family, id)
    }

    fn condemned(self: &Arc<Self>) -> Condemned {
        let gone = Arc::clone(self);
        Arc::new(move |id| gone.has(id))
    }

    fn rule(self: &Arc<Self>) -> Rule {
        let gone = Arc::clone(self);
        Arc::new(move |key, _value| {
            let goes = id_of_key(key).is_some_and(|id| gone.has(id));
            gone.deleted.fetch_add(u64::from(goes), Ordering::Relaxed);
            goes
        })
    }
}

/// Neighbouring units that are rewritten in one step, with dropped units between them.
struct Group<'u> {
    units: &'u [Unit],
    /// Bytes of the copied units.
    bytes: u64,
    live_bytes: u64,
}

impl Group<'_> {
    fn family(&self) -> Family {
        self.units.first().map_or(Family::Chunks, |unit| unit.family)
    }
}

/// Groups small files, so that they form larger ones if their neighbours are rewritten too.
fn groups(units: &[Unit]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    let mut start = 0;
    // A dropped unit does not separate its neighbours.
    let mut is_open = false;
    for (number, unit) in units.iter().enumerate() {
        is_open &= unit.fate != Fate::Kept;
        if !unit.is_copied() {
            continue;
        }
        match groups.last_mut() {
            Some(last) if is_open && last.live_bytes + unit.live_bytes() <= STEP_LIVE_BYTES => {
                last.units = &units[start..=number];
                last.bytes += unit.bytes;
                last.live_bytes += unit.live_bytes();
            }
            _ => {
                start = number;
                let (bytes, live_bytes) = (unit.bytes, unit.live_bytes());
                groups.push(Group { units: &units[number..=number], bytes, live_bytes });
            }
        }
        is_open = true;
    }
    groups
}
