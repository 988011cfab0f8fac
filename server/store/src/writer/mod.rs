//! Writing to a repository.
//!
//! ```text
//! RepositoryWriter ── one per repository, by a lock on REPO/writer.lock
//!     └─ DiskWriter ── any number at a time, through one pipeline
//!          callers ─▶ jobs ─▶ workers: hash, look up, number, compress, encrypt
//!                                └─▶ committer: files of chunks, maps, commits
//! ```
//!
//! Lock order: `Shared::running` first, while a disk begins or ends; `Numbering` (held briefly),
//! and inside it the claims of `Referred`; the map of a disk (only by the committer); the dedup
//! index (for one batch); `Shared::progress` last.

mod commit;
mod disk_run;
mod disk_writer;
pub(crate) mod heal;
pub(crate) mod pipeline;
mod referred;
mod reserve;
mod small_files;
mod target;
mod worker;

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::damage_list::DamagedChunks;
use crate::documents::Flag;
use crate::high_water::{self, HighWater, Mark};
use crate::log_directory::LogDirectory;
use crate::map::MapRoot;
use crate::passphrase::ReadOnce;
use crate::repair_flag::FRESH_NAME;
use crate::repository::{Access, KeyCheck, Repository};
use crate::repository_config::database_path;
use crate::rocks::{Database, Family, ReadMode};
use crate::state::StoreState;
use crate::writer_lock::lock_for_writing;
use crate::{MachineName, OpenOptions, PointDocument, PointName, Quarantine, catalog};

pub use disk_run::WriteCounts;
pub use disk_writer::{DiskWriter, WriteOptions};
pub use disk_writer::{check_size, end_of_write};
use pipeline::Running;
pub(crate) use referred::{Condemned, Referred};
pub use target::{BackupTarget, DiskTarget};

/// Inside `db`, so that files can be moved instead of copied.
pub(crate) const STAGING_NAME: &str = "coldrise-staging";
/// If RocksDB's log holds more than this, it is flushed to files at once: every open of the
/// database replays the log.
const MAX_LOG_BYTES: u64 = 2 << 20;

/// The one writer of a repository.
pub struct RepositoryWriter {
    pub(crate) shared: Arc<Shared>,
}

/// State shared by the writer and the disks that it writes.
pub(crate) struct Shared {
    pub(crate) repository: Arc<Repository>,
    running: Mutex<Running>,
    pub(crate) progress: Mutex<Progress>,
    pub(crate) damaged: DamagedChunks,
    pub(crate) referred: Referred,
    /// Held by a gc, so that only one runs.
    pub(crate) gc_running: Mutex<()>,
    /// Held while small files are merged.
    merging: Mutex<()>,
}

/// The progress of the writer.
pub(crate) struct Progress {
    /// As committed when no disk was being written, but with all assigned ids counted as used.
    pub(crate) state: StoreState,
    /// Why a commit failed. The state on disk is then unknown until the repository is reopened.
    pub(crate) failure: Option<(ErrorKind, String)>,
    /// Bytes in RocksDB's log since the last flush.
    pub(crate) log_bytes: u64,
    /// A gc ran while a disk was written, so the disk's counters include removed chunks.
    pub(crate) is_to_be_counted: bool,
}

impl RepositoryWriter {
    /// [`RepositoryWriter::open`] with another way to open the database. Opening for writing
    /// changes the database, so the passphrase is checked first. `open_database` receives the
    /// database's folder, a directory for RocksDB's log, and the high-water mark. `prepare`
    /// is called before any stored state is trusted.
    pub(crate) fn open_with(
        path: &Path,
        passphrase: &ReadOnce<'_>,
        options: &OpenOptions,
        first: impl FnOnce() -> Result<()>,
        open_database: impl FnOnce(&Path, &Path, Option<Mark>) -> Result<Database>,
        prepare: impl FnOnce(&Repository) -> Result<()>,
    ) -> Result<RepositoryWriter> {
        let check = KeyCheck::First;
        let repository = Repository::open_with(path, passphrase, options, check, |found, keys| {
            first()?;
            let lock = lock_for_writing(path)?;
            let log = LogDirectory::create()?;
            let folder = database_path(path);
            // First, because opening may need their space.
            remove_folder(&folder.join(STAGING_NAME))?;
            remove_folder(&path.join(FRESH_NAME))?;
            let mark = keys.and_then(|keys| high_water::read(path, &found.id, keys));
            let database = open_database(&folder, log.path(), mark)?;
            let high_water = HighWater::new(mark.unwrap_or_default());
            Ok((database, Access { writer_lock: Some(lock), _log: log, high_water }))
        })?;
        let repository = Arc::new(repository);
        prepare(&repository)?;
        let state = recover(&repository)?;
        // Opening has started a new manifest.
        repository.high_water().reach(state.next_chunk, state.next_page);
        repository.raise_mark(0);
        let progress = Progress { state, failure: None, log_bytes: 0, is_to_be_counted: false };
        let damaged = DamagedChunks::read(&repository)?;
        let referred = Referred::new(&state);
        let progress = Mutex::new(progress);
        let (gc_running, merging, running) = Default::default();
        let shared =
            Shared { repository, running, progress, damaged, referred, gc_running, merging };
        Ok(RepositoryWriter { shared: Arc::new(shared) })
    }

    /// Whether a write has failed. This writer then refuses all writes.
    pub fn has_failed(&self) -> bool {
        self.shared.progress.lock().failure.is_some()
    }

    /// The repository; it sees everything that this writer has committed.
    pub fn repository(&self) -> &Arc<Repository> {
        &self.shared.repository
    }

    /// Adds a point to the catalog. Atomic, and durable on return.
    ///
    /// # Errors
    /// `AlreadyExists` if the name is taken; `InvalidInput` if the document is out of its bounds;
    /// `NoSpace`.
    pub fn put_point(&self, document: &PointDocument) -> Result<()> {
        self.put_point_with_files(document, None)
    }

    /// [`RepositoryWriter::put_point`] for a point that carries files: [`Repository::point_files`]
    /// returns `files`, at most 16 MiB.
    ///
    /// # Errors
    /// As [`RepositoryWriter::put_point`].
    pub fn put_point_with_files(
        &self,
        document: &PointDocument,
        files: Option<&[u8]>,
    ) -> Result<()> {
        let repository = self.repository();
        let mut progress = self.shared.progress.lock();
        let mut batch = repository.database().batch();
        catalog::add_point(repository, &mut batch, document, files)?;
        progress.log_bytes += batch.bytes() as u64;
        repository.flush_redundant()?;
        let marker = repository.prepare_point_marker(document, files)?;
        repository.commit(batch)?;
        marker.commit();
        drop(progress);
        self.merge_small_files();
        Ok(())
    }

    /// Replaces documents of points with documents of the same content. Atomic, and durable on
    /// return.
    ///
    /// # Errors
    /// `NotFound` if one of the points does not exist; `InvalidInput` if a document is out of its
    /// bounds; `NoSpace`.
    pub fn replace_points(&self, documents: &[PointDocument]) -> Result<()> {
        let repository = self.repository();
        let mut progress = self.shared.progress.lock();
        let mut batch = repository.database().batch();
        for document in documents {
            catalog::replace_point(repository, &mut batch, document)?;
        }
        progress.log_bytes += batch.bytes() as u64;
        let is_chosen = |document: &PointDocument| document.quarantine == Some(Quarantine::Chosen);
        let names = |is_set: bool| {
            let of = documents.iter().filter(move |document| is_chosen(document) == is_set);
            of.map(|document| (document.machine.clone(), document.point.clone()))
        };
        repository.flush_redundant()?;
        self.flagged(Flag::Quarantined, names(true).collect(), names(false).collect(), || {
            repository.commit(batch)
        })?;
        // Before anything is removed that the old documents named.
        documents
            .iter()
            .try_for_each(|document| repository.mark_point(document, None).map(|_| ()))?;
        drop(progress);
        self.merge_small_files();
        Ok(())
    }

    /// Sets a flag of some points before `write`, and removes it from others afterwards.
    fn flagged(
        &self,
        flag: Flag,
        set: Vec<(MachineName, PointName)>,
        unset: Vec<(MachineName, PointName)>,
        write: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let repository = self.repository();
        let mut new = Vec::new();
        let mut done = set.iter().try_for_each(|(machine, point)| {
            if repository.set_flag((machine, point), flag, true)? {
                new.push((machine, point));
            }
            Ok(())
        });
        done = done.and_then(|()| write());
        if done.is_err() {
            for name in new {
                let _ = repository.set_flag(name, flag, false);
            }
        }
        done?;
        unset.iter().try_for_each(|(machine, point)| {
            repository.set_flag((machine, point), flag, false).map(|_| ())
        })
    }

    /// Protects points or removes their protection, all or none. Durable on return.
    ///
    /// # Errors
    /// `NotFound` if one of them is not in the catalog; `NoSpace`.
    pub fn set_protected(
        &self,
        points: &[(MachineName, PointName)],
        is_protected: bool,
    ) -> Result<()> {
        let repository = self.repository();
        let mut progress = self.shared.progress.lock();
        let mut batch = repository.database().batch();
        for (machine, point) in points {
            catalog::set_protected(repository, &mut batch, machine, point, is_protected)?;
        }
        progress.log_bytes += batch.bytes() as u64;
        let (set, unset) = if is_protected {
            (points.to_vec(), Vec::new())
        } else {
            (Vec::new(), points.to_vec())
        };
        let write = || repository.commit(batch);
        self.flagged(Flag::Protected, set, unset, write)
    }

    /// Removes points from the catalog, all or none. A machine is removed with its last point.
    /// Durable on return. Their chunks stay until a gc.
    ///
    /// # Errors
    /// `NotFound` if one of them does not exist; then nothing is removed.
    pub fn remove_points(&self, points: &[(MachineName, PointName)]) -> Result<()> {
        let repository = self.repository();
        let mut progress = self.shared.progress.lock();
        let mut batch = repository.database().batch();
        catalog::remove_points(repository, &mut batch, points)?;
        progress.log_bytes += batch.bytes() as u64;
        let name = |(machine, point): &(MachineName, PointName)| format!("{machine}/{point}");
        let names: Vec<_> = points.iter().map(name).collect();
        repository.suspend_markers(&names)?;
        repository.commit(batch)?;
        repository.forget_markers(&names);
        Ok(())
    }

    /// Removes the markers of points that the catalog has lost. Durable on return. Afterwards, a
    /// bitmap that may count from one of them is refused.
    ///
    /// # Errors
    /// `Corrupt` if a machine's document does not authenticate; `NoSpace`.
    pub fn forget_lost(&self, points: &[(MachineName, PointName)]) -> Result<()> {
        let repository = self.repository();
        let mut progress = self.shared.progress.lock();
        for (machine, point) in points {
            let mut batch = repository.database().batch();
            catalog::retire_lost(repository, &mut batch, machine, point)?;
            progress.log_bytes += batch.bytes() as u64;
            repository.commit(batch)?;
            let name = format!("{machine}/{point}");
            repository.unmark(&name)?;
            repository.forget_markers(&[name]);
        }
        Ok(())
    }

    /// Makes the counters of the store exact, durably: now, or when a disk ends if disks are being
    /// written.
    ///
    /// Errors: those of reading and writing the database.
    pub(crate) fn recount(&self) -> Result<()> {
        let running = self.shared.running.lock();
        let mut progress = self.shared.progress.lock();
        if running.is_any() {
            progress.is_to_be_counted = true
        } else {
            progress.state.recount(self.repository())?
        }
        Ok(())
    }

    /// Starts one disk of a backup, as `base` plus the writes. A point or session must name `base`
    /// as long as this writer is open. Beyond the end of `base`, and without a base, the disk
    /// starts as a hole. Other disks may be written at the same time, from the same or other
    /// threads.
    ///
    /// # Errors
    /// The failure of an earlier write of any disk; `InvalidInput` for an impossible size.
    pub fn disk_writer(
        &self,
        base: Option<MapRoot>,
        size_bytes: u64,
        options: WriteOptions,
    ) -> Result<DiskWriter> {
        DiskWriter::start(self.shared.clone(), base.unwrap_or(MapRoot::EMPTY), size_bytes, options)
    }
}

impl Shared {
    pub(crate) fn staging(&self) -> PathBuf {
        database_path(self.repository.path()).join(STAGING_NAME)
    }
}

/// Removes the remains of an interrupted writer and returns the state to continue from.
///
/// No commit names chunks and pages at or above the committed state's next ids, so nothing refers
/// to them. Their ids are skipped all the same, so that no id ever stands for two contents. A crash
/// may interrupt this anywhere: the files are deleted first, and until the state is committed the
/// next writer repeats everything.
fn recover(repository: &Repository) -> Result<StoreState> {
    let mut state = StoreState::read(repository)?;
    let database = repository.database();
    let mut found = false;
    let committed = state;
    for family in [Family::Chunks, Family::Maps, Family::MapsCopy] {
        let (from, next) = match family {
            Family::Chunks => (committed.next_chunk, &mut state.next_chunk),
            _ => (committed.next_page, &mut state.next_page),
        };
        let Some(last) = last_from(database, family, from)? else { continue };
        let after = last
            .checked_add(1)
            .ok_or_else(|| Error::new(ErrorKind::Corrupt, "the ids of the store are used up"))?;
        tracing::info!(family = family.name(), from, to = last, "removing what was not committed");
        database.delete_files_in_range(family, &from.to_be_bytes(), &last.to_be_bytes())?;
        delete_from(database, family, from..=last)?;
        *next = after.max(*next);
        found = true;
    }
    if found {
        let mut batch = database.batch();
        state.put(repository, &mut batch)?;
        repository.commit(batch)?;
    }
    Ok(state)
}

/// The last stored id from `next` on, according to the manifest. The remains of a killed
/// backup are not read, and damaged ones must be deleted too.
fn last_from(database: &Database, family: Family, next: u64) -> Result<Option<u64>> {
    let mut cursor = database.cursor(family, ReadMode::Payload)?;
    // Not from the end: the last committed value may be damaged.
    let is_any = match cursor.seek(&next.to_be_bytes()) {
        Err(error) if error.kind() == ErrorKind::Corrupt => true,
        sought => sought.map(|()| cursor.entry().is_some())?,
    };
    drop(cursor);
    if !is_any {
        return Ok(None);
    }
    let last = database.last_key(family)?.map(|key| id_of_key(&key)).transpose()?;
    Ok(last.filter(|last| *last >= next))
}

/// Deletes the remaining ids one by one: see the read options of `Database`.
fn delete_from(database: &Database, family: Family, ids: RangeInclusive<u64>) -> Result<()> {
    const IDS_PER_BATCH: usize = 100_000;
    let mut batch = database.batch();
    let mut waiting = 0;
    let mut delete = |id: u64| {
        batch.delete(family, &id.to_be_bytes())?;
        waiting += 1;
        if waiting == IDS_PER_BATCH {
            let full = std::mem::replace(&mut batch, database.batch());
            database.write(full, false)?;
            waiting = 0;
        }
        Ok(())
    };
    let mut delete_stored = || -> Result<()> {
        let mut cursor = database.cursor(family, ReadMode::Payload)?;
        cursor.seek(&ids.start().to_be_bytes())?;
        while let Some((key, _)) = cursor.entry() {
            delete(id_of_key(key)?)?;
            cursor.next()?;
        }
        Ok(())
    };
    match delete_stored() {
        // Delete it whether it exists or not: nothing reads it any more.
        Err(error) if error.kind() == ErrorKind::Corrupt => ids.into_iter().try_for_each(delete)?,
        done => done?,
    }
    database.write(batch, false)
}

fn id_of_key(key: &[u8]) -> Result<u64> {
    key.try_into()
        .map(u64::from_be_bytes)
        .map_err(|_| Error::new(ErrorKind::Corrupt, "the store holds a key that is not an id"))
}

/// Removes a folder and its content. The folder may be missing.
pub(crate) fn remove_folder(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}
