//! Writing to a repository.
//!
//! ```text
//! RepositoryWriter ── one per repository, by a lock on REPO/writer.lock
//!     └─ DiskWriter ── any number at a time, through one pipeline
//!          callers ─▶ jobs ─▶ workers: hash, look up, number, compress, encrypt
//!                                └─▶ committer: files of chunks, maps, commits
//! ```
//!
//! Locks: `Shared::running` first, while a disk begins or ends; `Numbering` (for short), inside
//! of it the claims of `Referred`; the map of a disk (by the committer alone); the dedup index
//! (for one batch); `Shared::progress` last.

mod commit;
mod disk_run;
mod disk_writer;
pub(crate) mod pipeline;
mod referred;
mod target;
mod worker;

use std::fs::File;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::fs::{flock, FlockOperation};

use crate::damaged::DamagedChunks;
use crate::description::database_path;
use crate::high_water::{self, refuse_rolled_back, HighWater, Mark};
use crate::log_directory::LogDirectory;
use crate::map::MapRoot;
use crate::markers::Flag;
use crate::passphrase::ReadOnce;
use crate::repair::{leave_out_uncommitted, refuse_unfinished, FRESH_NAME};
use crate::repository::{Access, KeyCheck, Repository};
use crate::rocks::{Database, Family, ReadMode};
use crate::state::StoreState;
use crate::{
    catalog, MachineName, OpenOptions, PassphraseSource, PointDocument, PointName, Quarantine,
};

pub use disk_run::WriteCounts;
pub use disk_writer::{DiskWriter, WriteOptions};
use pipeline::Running;
pub(crate) use referred::{Condemned, Referred};
pub use target::{BackupTarget, DiskTarget};

const LOCK_NAME: &str = "writer.lock";
/// Inside of `db`, so that files can be moved and not copied.
pub(crate) const STAGING_NAME: &str = "coldrise-staging";
/// More than this in RocksDB's log is written to files at once: whoever opens
/// the database replays what is left in the log.
const MAX_LOG_BYTES: u64 = 2 << 20;

/// The one writer of a repository.
pub struct RepositoryWriter {
    pub(crate) shared: Arc<Shared>,
}

/// What the writer and the disks that it writes share.
pub(crate) struct Shared {
    pub(crate) repository: Arc<Repository>,
    running: Mutex<Running>,
    pub(crate) progress: Mutex<Progress>,
    pub(crate) damaged: DamagedChunks,
    pub(crate) referred: Referred,
    /// Held by a gc: one at a time.
    pub(crate) reclaiming: Mutex<()>,
}

/// Where the writer is.
pub(crate) struct Progress {
    /// As committed when no disk was being written, except that ids that were handed out are
    /// gone.
    pub(crate) state: StoreState,
    /// A commit failed: what is on disk is only known again after reopening.
    pub(crate) failed: bool,
    /// Bytes in RocksDB's log since it was last written to files.
    pub(crate) log_bytes: u64,
    /// A gc ran beside a disk: its counters count what is gone.
    pub(crate) is_to_be_counted: bool,
}

impl RepositoryWriter {
    /// Opens a repository for writing and removes what an interrupted writer
    /// left.
    ///
    /// # Errors
    /// `Busy` where somebody else writes it; otherwise as
    /// [`Repository::open`].
    pub fn open(
        path: &Path,
        passphrase: &PassphraseSource,
        options: &OpenOptions,
    ) -> Result<RepositoryWriter> {
        RepositoryWriter::open_after(path, passphrase, options, || Ok(()))
            .map(|((), writer)| writer)
    }

    /// The same with something to do first, when the passphrase is known to be right and nothing
    /// has changed yet; what that gave is to be let go of after the writer, as it is where both
    /// are taken as they come.
    ///
    /// # Errors
    /// Those of `first`; as of [`RepositoryWriter::open`].
    pub fn open_after<T>(
        path: &Path,
        passphrase: &PassphraseSource,
        options: &OpenOptions,
        first: impl FnOnce() -> Result<T>,
    ) -> Result<(T, RepositoryWriter)> {
        let passphrase = ReadOnce::new(passphrase);
        let (mut first, mut done) = (Some(first), None);
        let mut begin = || {
            done = first.take().map_or(Ok(done.take()), |first| first().map(Some))?;
            Ok(())
        };
        let open = |folder: &Path, log: &Path, mark: Option<Mark>| {
            refuse_unfinished(path)?;
            // Opening deletes files that the list does not name, and drops the log.
            let opened = match mark {
                Some(mark) => refuse_rolled_back(folder, &mark, log)
                    .and_then(|()| Database::open_looked_at(folder, log)),
                None => Database::open_primary(folder, log, false),
            };
            opened.map_err(advise_repair)
        };
        let settle = |_: &Repository| Ok(());
        let mut open_with =
            || RepositoryWriter::open_with(path, &passphrase, options, &mut begin, open, settle);
        let writer = match open_with() {
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {
                match leave_out_uncommitted(path, &passphrase)? {
                    true => open_with()?,
                    false => return Err(error),
                }
            }
            opened => opened?,
        };
        let never = || Error::new(ErrorKind::Internal, "opened without its beginning");
        Ok((done.ok_or_else(never)?, writer))
    }

    /// The same with another way to open the database. Nothing changes before the passphrase is
    /// known to be right: opening it for writing does change it. `open_database` is given the
    /// database's folder, a directory for RocksDB's log, and the high-water mark. `settle` is called before anything is believed that
    /// is stored.
    pub(crate) fn open_with(
        path: &Path,
        passphrase: &ReadOnce<'_>,
        options: &OpenOptions,
        first: impl FnOnce() -> Result<()>,
        open_database: impl FnOnce(&Path, &Path, Option<Mark>) -> Result<Database>,
        settle: impl FnOnce(&Repository) -> Result<()>,
    ) -> Result<RepositoryWriter> {
        let check = KeyCheck::First;
        let repository = Repository::open_with(path, passphrase, options, check, |found, keys| {
            first()?;
            let lock = lock_for_writing(path)?;
            let log = LogDirectory::create()?;
            let folder = database_path(path);
            // Before: opening may need their space.
            remove_folder(&folder.join(STAGING_NAME))?;
            remove_folder(&path.join(FRESH_NAME))?;
            let mark = keys.and_then(|keys| high_water::read(path, &found.id, keys));
            let database = open_database(&folder, log.path(), mark)?;
            let high_water = HighWater::new(mark.unwrap_or_default());
            Ok((database, Access { writer_lock: Some(lock), _log: log, high_water }))
        })?;
        let repository = Arc::new(repository);
        settle(&repository)?;
        let state = recover(&repository)?;
        // Opening has begun another list of files.
        repository.high_water().reach(state.next_chunk, state.next_page);
        repository.raise_mark(0);
        let progress = Progress { state, failed: false, log_bytes: 0, is_to_be_counted: false };
        let damaged = DamagedChunks::read(&repository)?;
        let referred = Referred::new(&state);
        let progress = Mutex::new(progress);
        let reclaiming = Mutex::default();
        let running = Mutex::default();
        let shared = Shared { repository, running, progress, damaged, referred, reclaiming };
        Ok(RepositoryWriter { shared: Arc::new(shared) })
    }

    /// Whether a write has failed: this writer takes no more.
    pub fn has_failed(&self) -> bool {
        self.shared.progress.lock().failed
    }

    /// The repository; it reads what this writer has committed.
    pub fn repository(&self) -> &Arc<Repository> {
        &self.shared.repository
    }

    /// Adds a point to the catalog. Atomic, and durable on return.
    ///
    /// # Errors
    /// `AlreadyExists` where the name is taken, `InvalidInput` for a document
    /// out of its bounds, `NoSpace`.
    pub fn put_point(&self, document: &PointDocument) -> Result<()> {
        self.put_point_with_files(document, None)
    }

    /// The same for a point that carries files: `files` is what
    /// [`Repository::point_files`] gives back, in at most 16 MiB.
    ///
    /// # Errors
    /// As of [`RepositoryWriter::put_point`].
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
        Ok(())
    }

    /// Replaces documents of points by others that stand for the same contents.
    /// Atomic, and durable on return.
    ///
    /// # Errors
    /// `NotFound` where one of the points is not there, `InvalidInput` for a document
    /// out of its bounds, `NoSpace`.
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
        // Before anything goes that the documents of before referred to.
        documents.iter().try_for_each(|document| repository.mark_point(document).map(|_| ()))
    }

    /// Sets a flag of some points before `write`, and takes it back of others afterwards.
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

    /// Protects points, or takes that back; all or none. Durable on return.
    ///
    /// # Errors
    /// `NotFound` where one of them is not in the catalog; `NoSpace`.
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
        let (set, unset) = match is_protected {
            true => (points.to_vec(), Vec::new()),
            false => (Vec::new(), points.to_vec()),
        };
        let write = || repository.commit(batch);
        self.flagged(Flag::Protected, set, unset, write)
    }

    /// Removes points from the catalog, all of them or none, and with its last point
    /// a machine. Durable on return. What they referred to stays until a gc.
    ///
    /// # Errors
    /// `NotFound` where one of them is not there; then nothing is removed.
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

    /// Strikes off points that the catalog has lost: nothing says any more that they have
    /// to be there. Durable on return. A bitmap that may count from one of them is refused
    /// from then on.
    ///
    /// # Errors
    /// `Corrupt` where a machine's document does not authenticate; `NoSpace`.
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

    /// Makes the counters of the store exact, durably: now, or, where disks are being
    /// written, when one of them ends.
    ///
    /// Errors: as of reading and writing the database.
    pub(crate) fn count_anew(&self) -> Result<()> {
        let running = self.shared.running.lock();
        let mut progress = self.shared.progress.lock();
        match running.is_any() {
            true => progress.is_to_be_counted = true,
            false => progress.state.count_anew(self.repository())?,
        }
        Ok(())
    }

    /// Starts one disk of a backup: `base` with what will be written; a point or a
    /// session names it for as long as this writer is open. Beyond the end of `base`, and
    /// everywhere without one, the disk starts as a hole. Other disks may be written at the
    /// same time, from other threads or the same one.
    ///
    /// # Errors
    /// `Poisoned` after a failed write, `InvalidInput` for a size that is not possible.
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

/// What is lost may be given up, and the rest go on.
pub(crate) fn advise_repair(error: Error) -> Error {
    // Some damage is told with its way out already.
    let is_advised = error.full_message().contains("coldrise repair");
    match error.kind() {
        ErrorKind::Corrupt if !is_advised => {
            error.context("the database is damaged: run coldrise repair")
        }
        ErrorKind::NoSpace => error.context(
            "the drive is full, and to open the repository for writing takes up to 1 MiB: make \
             room for that; then coldrise gc gives back what nothing refers to",
        ),
        _ => error,
    }
}

/// The lock of the only writer.
pub(crate) struct WriterLock(File);

impl Drop for WriterLock {
    /// To close the file is not enough: a child that another thread starts at this moment
    /// has it, too, until it runs its own program.
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

pub(crate) fn lock_for_writing(path: &Path) -> Result<WriterLock> {
    use std::os::unix::fs::OpenOptionsExt;
    let name = path.join(LOCK_NAME);
    let what = || format!("locking {}", name.display());
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&name)
        .context(what)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(WriterLock(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::new(
            ErrorKind::Busy,
            format!(
                "another process is writing the repository {}: wait for it to end, or stop it",
                path.display()
            ),
        )),
        Err(error) => Err(std::io::Error::from(error)).context(what),
    }
}

/// Removes what an interrupted writer left, and returns where to go on.
///
/// Chunks and pages from the committed state's ids on were never named by a
/// commit: nothing refers to them. Their ids are skipped all the same, so that
/// no id that was ever in the store names two contents. It does not matter
/// where a crash interrupts this: files first go, and as long as the state is
/// not committed the next writer does it all again.
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
        tracing::info!(?family, from, to = last, "removing what was not committed");
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

/// The last id that is stored from `next` on, as the files are listed: nobody reads what a
/// killed backup has left, and what is damaged of it is to go all the same.
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

/// Deletes what is left of these ids, one by one: see the read options of `Database`.
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
        // Whether it is there or not: nothing reads it any more.
        Err(error) if error.kind() == ErrorKind::Corrupt => ids.into_iter().try_for_each(delete)?,
        done => done?,
    }
    database.write(batch, false)
}

fn id_of_key(key: &[u8]) -> Result<u64> {
    key.try_into()
        .map(u64::from_be_bytes)
        .map_err(|_| Error::new(ErrorKind::Corrupt, "the store holds a key that is no id"))
}

/// Removes a folder, which may be gone already, and what is in it.
pub(crate) fn remove_folder(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_given_back_although_a_child_has_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let lock = lock_for_writing(folder.path()).unwrap();
        let of_a_child = lock.0.try_clone().unwrap();
        assert_eq!(lock_for_writing(folder.path()).err().unwrap().kind(), ErrorKind::Busy);
        drop(lock);
        lock_for_writing(folder.path()).unwrap();
        drop(of_a_child);
    }
}
