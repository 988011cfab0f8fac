//! The high-water mark: how far the database has come, kept outside of it.
//!
//! RocksDB opens a database whose log or list of files (manifest) has lost its end as if the
//! end had never been written, and deletes every file that the list does not name. So each
//! commit raises a mark: the next ids, the sequence number of the last change, and how long the
//! manifest was. A database below its mark was rolled back: a writer refuses it before RocksDB
//! changes anything, and a repair gives out ids from the mark on, so that none is given twice.
//!
//! `high-water.1` and `high-water.2` are sealed documents with the purpose `high-water mark`:
//! a version and five numbers of 8 bytes, little endian. Each is one sector, written in place
//! and synced, one after the other: a crash leaves at least one of them whole, and damage to
//! one is healed by the next commit. Every number only grows, so the higher of the two counts.
//!
//! The mark is written after what it speaks of is durable: a crash between leaves a mark that
//! says less. A manifest grows from other threads, too: it is synced before its length is taken.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::description::sync_directory;
use crate::keys::Keys;
use crate::repository::Repository;
use crate::rocks::{self, Batch, Family};
use crate::seal::document;
use crate::RepositoryId;

const NAMES: [&str; 2] = ["high-water.1", "high-water.2"];
const PURPOSE: &str = "high-water mark";
const VERSION: u64 = 1;
const FIELDS: usize = 6;
/// A file of this length is read.
const MAX_STORED_BYTES: u64 = 512;

/// How far a database has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    /// No chunk id below was never given out.
    pub(crate) next_chunk: u64,
    /// No page id below was never given out.
    pub(crate) next_page: u64,
    /// The database holds the change with this number.
    pub(crate) sequence: u64,
    /// The number in the manifest's name.
    pub(crate) manifest: u64,
    /// Bytes of the manifest that are durable.
    pub(crate) manifest_bytes: u64,
}

impl Mark {
    fn fields(&self) -> [u64; FIELDS] {
        let (chunk, page) = (self.next_chunk, self.next_page);
        [VERSION, chunk, page, self.sequence, self.manifest, self.manifest_bytes]
    }

    fn parse(plaintext: &[u8]) -> Option<Mark> {
        let words = plaintext.chunks(8).map(|word| word.try_into().map(u64::from_le_bytes));
        let words: Vec<u64> = words.collect::<std::result::Result<_, _>>().ok()?;
        let &[VERSION, next_chunk, next_page, sequence, manifest, manifest_bytes] = &words[..]
        else {
            return None;
        };
        Some(Mark { next_chunk, next_page, sequence, manifest, manifest_bytes })
    }

    /// Each number the higher of both; the length is that of the newer manifest.
    fn or_higher(self, other: Mark) -> Mark {
        let newer =
            (self.manifest, self.manifest_bytes).max((other.manifest, other.manifest_bytes));
        Mark {
            next_chunk: self.next_chunk.max(other.next_chunk),
            next_page: self.next_page.max(other.next_page),
            sequence: self.sequence.max(other.sequence),
            manifest: newer.0,
            manifest_bytes: newer.1,
        }
    }

    /// Whether the manifest with this number, so much of which is sound, has lost its end.
    pub(crate) fn is_beyond(&self, number: u64, sound_bytes: u64) -> bool {
        (number, sound_bytes) < (self.manifest, self.manifest_bytes)
    }

    /// Why a database is below this mark, as its folder is now; `None` where it is not.
    ///
    /// # Errors
    /// `Corrupt` where the list of its files cannot be read; what the operating system says.
    pub(crate) fn rolled_back(
        &self,
        folder: &Path,
        log_directory: &Path,
    ) -> Result<Option<String>> {
        let (number, sound_bytes) = rocks::sound_manifest(folder)?;
        if self.is_beyond(number, sound_bytes) {
            return Ok(Some("the list of its files has lost its end".to_owned()));
        }
        let sequence = rocks::open_as_listed(folder, log_directory)?.sequence();
        Ok((sequence < self.sequence).then(|| {
            format!("its log has lost its end: change {sequence} is the last of {}", self.sequence)
        }))
    }
}

/// The mark of an open repository.
#[derive(Default)]
pub(crate) struct HighWater(Mutex<Mark>);

impl HighWater {
    pub(crate) fn new(mark: Mark) -> HighWater {
        HighWater(Mutex::new(mark))
    }

    /// These are the next ids once what is about to be committed is.
    pub(crate) fn reach(&self, next_chunk: u64, next_page: u64) {
        let mut mark = self.0.lock();
        mark.next_chunk = mark.next_chunk.max(next_chunk);
        mark.next_page = mark.next_page.max(next_page);
    }

    pub(crate) fn get(&self) -> Mark {
        *self.0.lock()
    }
}

impl Repository {
    /// Applies a batch whole and durably, and raises the mark. A mark that cannot be written is
    /// only told: it says less than there is.
    ///
    /// # Errors
    /// As of writing the database: then nothing is applied.
    pub(crate) fn commit(&self, batch: Batch<'_>) -> Result<()> {
        // Others may write at the same time, without a sync: what came before is in the log
        // before this, and durable with it.
        // An empty batch is not in the log, and neither are the copies of pages.
        let sequence = match batch.count() {
            0 => 0,
            count => self.database().sequence() + count,
        };
        self.database().write(batch, true)?;
        self.raise_mark(sequence);
        Ok(())
    }

    /// Raises the mark to the database as it is, which must be durable up to `sequence`.
    pub(crate) fn raise_mark(&self, sequence: u64) {
        if let Err(error) = self.try_raise_mark(sequence) {
            tracing::warn!(error = %error.full_message(), "the high-water mark stays behind");
        }
    }

    fn try_raise_mark(&self, sequence: u64) -> Result<()> {
        let mut mark = self.high_water().0.lock();
        let is_synced = (mark.manifest, mark.manifest_bytes);
        let (manifest, manifest_bytes) = rocks::synced_manifest(self.database().path(), is_synced)?;
        let now = Mark { sequence, manifest, manifest_bytes, ..Mark::default() };
        *mark = mark.or_higher(now);
        self.write_mark(&mark)
    }

    fn write_mark(&self, mark: &Mark) -> Result<()> {
        let plaintext: Vec<u8> = mark.fields().iter().flat_map(|word| word.to_le_bytes()).collect();
        let stored = self.seal_document(PURPOSE, &plaintext)?;
        for path in mark_paths(self.path()) {
            let what = || format!("writing {}", path.display());
            let is_new = !path.try_exists().context(what)?;
            let mut options = File::options();
            let options = options.write(true).create(true).truncate(false).mode(0o600);
            let file = options.open(&path).context(what)?;
            file.write_all_at(&stored, 0).context(what)?;
            if is_new || file.metadata().context(what)?.len() != stored.len() as u64 {
                file.set_len(stored.len() as u64).and_then(|()| file.sync_all()).context(what)?;
                sync_directory(self.path())?;
            } else {
                file.sync_data().context(what)?;
            }
        }
        Ok(())
    }

    /// The mark as it is stored now; none where neither file can be read.
    pub(crate) fn stored_mark(&self) -> Option<Mark> {
        read(self.path(), self.id(), self.keys())
    }

    /// The names of the mark's files that are missing or cannot be read, in a repository to
    /// which anything was ever written.
    pub(crate) fn damaged_marks(&self) -> Vec<&'static str> {
        let is_damaged = |path: &Path| read_one(path, self.id(), self.keys()).is_none();
        let paths = NAMES.iter().zip(mark_paths(self.path()));
        let damaged: Vec<_> =
            paths.filter(|(_, path)| is_damaged(path)).map(|(name, _)| *name).collect();
        match damaged.len() == NAMES.len() && self.database().sequence() == 0 {
            true => Vec::new(),
            false => damaged,
        }
    }

    /// Writes what has to be in a file of its own before a point names it: the copies of its
    /// pages, which the log does not hold, and small chunks, which would be lost with the log.
    pub(crate) fn flush_redundant(&self) -> Result<()> {
        self.database().flush_family(Family::MapsCopy)?;
        self.database().flush_family(Family::Chunks)
    }
}

/// The mark of a repository; none where neither file can be read.
pub(crate) fn read(repository: &Path, id: &RepositoryId, keys: &Keys) -> Option<Mark> {
    let paths = mark_paths(repository).into_iter();
    paths.filter_map(|path| read_one(&path, id, keys)).reduce(Mark::or_higher)
}

fn read_one(path: &Path, id: &RepositoryId, keys: &Keys) -> Option<Mark> {
    let is_small = path.metadata().is_ok_and(|found| found.len() <= MAX_STORED_BYTES);
    let stored = is_small.then(|| std::fs::read(path).ok())??;
    Mark::parse(&document::open(&keys.documents, id.as_bytes(), PURPOSE, &stored).ok()?)
}

/// Refuses a database that is below the mark.
///
/// # Errors
/// `Corrupt`; as of [`Mark::rolled_back`].
pub(crate) fn refuse_rolled_back(folder: &Path, mark: &Mark, log_directory: &Path) -> Result<()> {
    match mark.rolled_back(folder, log_directory)? {
        None => Ok(()),
        Some(why) => Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "{} is older than its last commit: {why}. Nothing was changed: run coldrise repair",
                folder.display()
            ),
        )),
    }
}

fn mark_paths(repository: &Path) -> [PathBuf; 2] {
    NAMES.map(|name| repository.join(name))
}
