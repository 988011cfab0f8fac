//! Commits that raise the high-water mark.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use coldrise_block::{sync_directory, Context, Result};

use crate::high_water::{self, mark_paths, Mark, NAMES, PURPOSE};
use crate::repository::Repository;
use crate::rocks::{self, Batch, Family};

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

    /// The stored mark; `None` if neither file can be read.
    pub(crate) fn stored_mark(&self) -> Option<Mark> {
        high_water::read(self.path(), self.id(), self.keys())
    }

    /// The names of the mark's files that are missing or unreadable, in a repository that was ever
    /// written.
    pub(crate) fn damaged_marks(&self) -> Vec<&'static str> {
        let is_damaged = |path: &Path| high_water::read_one(path, self.id(), self.keys()).is_none();
        let paths = NAMES.iter().zip(mark_paths(self.path()));
        let damaged: Vec<_> =
            paths.filter(|(_, path)| is_damaged(path)).map(|(name, _)| *name).collect();
        if damaged.len() == NAMES.len() && self.database().sequence() == 0 {
            Vec::new()
        } else {
            damaged
        }
    }

    /// Flushes data that must be in its own file before a point names it: the copies of pages,
    /// which are not in the log, and small chunks, which would be lost with the log.
    pub(crate) fn flush_redundant(&self) -> Result<()> {
        self.database().flush_family(Family::MapsCopy)?;
        self.database().flush_family(Family::Chunks)
    }
}
