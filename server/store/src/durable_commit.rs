//! Commits that raise the high-water mark.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Result, sync_directory};

use crate::documents::CatalogDamage;
use crate::high_water::{self, Mark, NAMES, PURPOSE, mark_paths};
use crate::repository::Repository;
use crate::rocks::{self, Batch, Family};

/// A file of the mark that is damaged for longer is not just being written.
const COMMIT_PATIENCE: Duration = Duration::from_secs(2);
const COMMIT_INTERVAL: Duration = Duration::from_millis(50);

impl Repository {
    /// Applies a batch atomically and durably, and raises the mark. A failure to write the mark is
    /// only logged: the stored mark is then too low.
    ///
    /// # Errors
    /// Those of writing the database: then nothing is applied.
    pub(crate) fn commit(&self, batch: Batch<'_>) -> Result<()> {
        // Others may write at the same time without a sync. Their earlier writes are before this
        // one in the log, and become durable with it. An empty batch is not in the log, and neither
        // are the copies of pages.
        let sequence = match batch.count() {
            0 => 0,
            count => self.database().sequence() + count,
        };
        self.database().write(batch, true)?;
        self.raise_mark(sequence);
        Ok(())
    }

    /// Raises the mark to the present state of the database, which must be durable up to
    /// `sequence`.
    pub(crate) fn raise_mark(&self, sequence: u64) {
        if let Err(error) = self.try_raise_mark(sequence) {
            tracing::warn!(error = %error.full_message(), "the high-water mark stays behind");
        }
    }

    fn try_raise_mark(&self, sequence: u64) -> Result<()> {
        let mut mark = self.high_water().0.lock();
        let manifest = rocks::synced_manifest(self.database().path(), mark.manifest)?;
        let now = Mark { sequence, manifest, ..Mark::default() };
        *mark = mark.or_higher(now);
        self.write_mark(&mark)
    }

    fn write_mark(&self, mark: &Mark) -> Result<()> {
        let plaintext: Vec<u8> = mark.fields().iter().flat_map(|word| word.to_le_bytes()).collect();
        let stored = self.encrypt_document(PURPOSE, &plaintext)?;
        let mut opened = Ok(());
        for path in mark_paths(self.path()) {
            let what = || format!("writing {}", path.display());
            let is_new = !path.try_exists().context(what)?;
            let mut options = File::options();
            let options = options.write(true).create(true).truncate(false).mode(0o600);
            let file = match high_water::open(&path, options).context(what) {
                Ok(file) => file,
                // The other one is written: of two copies one must be current.
                Err(error) => {
                    opened = Err(error);
                    continue;
                }
            };
            file.write_all_at(&stored, 0).context(what)?;
            if is_new || file.metadata().context(what)?.len() != stored.len() as u64 {
                file.set_len(stored.len() as u64).and_then(|()| file.sync_all()).context(what)?;
                sync_directory(self.path())?;
            } else {
                file.sync_data().context(what)?;
            }
        }
        opened
    }

    /// The stored mark; `None` if neither file can be read.
    pub(crate) fn stored_mark(&self) -> Option<Mark> {
        high_water::read(self.path(), self.id(), self.keys())
    }

    /// The mark's files that are missing or unreadable, in a repository that was ever written. If there are
    /// any, looks again for [`COMMIT_PATIENCE`]: a commit of another process writes one after the
    /// other, and makes both when it is the first.
    pub fn damaged_marks(&self) -> Vec<CatalogDamage> {
        let is_damaged = |path: &Path| high_water::read_one(path, self.id(), self.keys()).is_none();
        let look = || -> Vec<_> {
            let paths = NAMES.iter().zip(mark_paths(self.path()));
            paths.filter(|(_, path)| is_damaged(path)).collect()
        };
        let started = Instant::now();
        let mut damaged = look();
        while !damaged.is_empty() && started.elapsed() < COMMIT_PATIENCE {
            if damaged.len() == NAMES.len() && self.database().sequence() == 0 {
                break;
            }
            std::thread::sleep(COMMIT_INTERVAL);
            damaged = look();
        }
        let are_both = damaged.len() == NAMES.len();
        if are_both && self.database().sequence() == 0 {
            return Vec::new();
        }
        let describe = |(name, path): (&&str, PathBuf)| {
            let reason = if path.is_symlink() || path.is_dir() {
                "it is not a file: remove it; the next backup makes it"
            } else if are_both {
                "it is missing or damaged, and so is the other one: until the next backup makes \
                 both, an older database that was put back would not be noticed"
            } else {
                "it is missing or damaged; the next backup restores it from the other one"
            };
            CatalogDamage::new(format!("the file {name}"), reason.to_owned())
        };
        damaged.into_iter().map(describe).collect()
    }

    /// Flushes data that must be in its own file before a point names it: the copies of pages,
    /// which are not in the log, and small chunks, which would be lost with the log.
    pub(crate) fn flush_redundant(&self) -> Result<()> {
        self.database().flush_family(Family::MapsCopy)?;
        self.database().flush_family(Family::Chunks)
    }
}
