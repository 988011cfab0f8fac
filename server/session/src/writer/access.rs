//! How a command opens its repository.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{ErrorKind, Result};
use coldrise_store::{OpenOptions, PassphraseSource, ReopenReport, Repository, RepositoryWriter};

use crate::points::catalog::{EnteredPoints, enter_sealed_points, open_for_repair};
use crate::writer::background_lock::write_before_background;

const NO_CACHE: OpenOptions = OpenOptions { cache_bytes: 0 };
/// A backup that has begun listens after this long, and the next one of several opens the
/// repository after this long.
const BACKUP_PATIENCE: Duration = Duration::from_secs(2);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// A repository that is not open: its directory and its passphrase.
#[derive(Clone, Debug)]
pub struct RepositoryAccess {
    path: PathBuf,
    passphrase: PassphraseSource,
}

impl RepositoryAccess {
    /// The repository in the directory `path`.
    pub fn new(path: impl Into<PathBuf>, passphrase: PassphraseSource) -> RepositoryAccess {
        RepositoryAccess { path: path.into(), passphrase }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the passphrase comes from.
    pub fn passphrase(&self) -> &PassphraseSource {
        &self.passphrase
    }

    /// Opens it for reading, with `cache_bytes` of memory for decoded chunks: 0 is enough for documents.
    ///
    /// # Errors
    /// The errors of [`Repository::open`].
    pub fn open(&self, cache_bytes: u64) -> Result<Arc<Repository>> {
        Repository::open(&self.path, &self.passphrase, &OpenOptions { cache_bytes })
    }

    /// Opens it for writing: background work yields, and sealed points enter the catalog. From then on files
    /// that this process makes are readable for its user only.
    ///
    /// # Errors
    /// `Busy` if another process is writing; the errors of [`Repository::open`].
    pub fn open_for_writing(&self) -> Result<RepositoryWriter> {
        let ((), writer) =
            write_before_background(&self.path, || self.open_in_background(|| Ok(())))?;
        let entered = enter_sealed_points(&writer)?;
        tracing::debug!(entered = entered.points, "sealed points were entered into the catalog");
        Ok(writer)
    }

    /// Opens it for writing, and asks no other process to yield. It is for a caller that holds the
    /// background lock or takes it in `first`, whose result is returned.
    ///
    /// # Errors
    /// The errors of `first` and of [`RepositoryAccess::open_for_writing`].
    pub fn open_in_background<T>(
        &self,
        first: impl FnOnce() -> Result<T>,
    ) -> Result<(T, RepositoryWriter)> {
        keep_files_private();
        RepositoryWriter::open_after(&self.path, &self.passphrase, &NO_CACHE, first)
    }

    /// Opens it for writing even if parts of its database are lost. Reports them, and what was entered
    /// into the catalog.
    ///
    /// # Errors
    /// The errors of [`open_for_repair`].
    pub fn open_for_repair(&self) -> Result<(RepositoryWriter, ReopenReport, EnteredPoints)> {
        keep_files_private();
        write_before_background(&self.path, || {
            open_for_repair(&self.path, &self.passphrase, &NO_CACHE)
        })
    }

    /// Does something with the writer: in this process, or, if a backup holds it, through that one.
    /// `through` returns `None` if no backup took the request.
    ///
    /// # Errors
    /// `Busy` if another command than a backup holds the writer; the errors of both closures.
    pub fn write_beside_backups<T>(
        &self,
        alone: impl FnOnce(RepositoryWriter) -> Result<T>,
        through: impl Fn(&Arc<Repository>) -> Result<Option<T>>,
    ) -> Result<T> {
        let started = Instant::now();
        loop {
            let busy = match self.open_for_writing() {
                Err(error) if error.kind() == ErrorKind::Busy => error,
                opened => return alone(opened?),
            };
            if let Some(done) = through(&self.open(0)?)? {
                return Ok(done);
            }
            if started.elapsed() >= BACKUP_PATIENCE {
                return Err(busy);
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

/// Lets only this user read the files that this process makes from now on. RocksDB makes its
/// files with the mode that the umask leaves.
pub fn keep_files_private() {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
}
