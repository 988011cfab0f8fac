//! Opening a repository that has lost files of its database.

use std::path::Path;

use coldrise_block::{Context, ErrorKind, Result};

use crate::description::database_path;
use crate::rocks::{mend_fatal, Database, Family};
use crate::writer::STAGING_NAME;
use crate::{OpenOptions, PassphraseSource, RepositoryWriter};

/// What had to be done to open a repository.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reopened {
    /// Files of the database that were missing or cut short and were given up; what
    /// they held is found missing by the repair.
    pub dropped_files: u64,
    /// The deduplication index could not be read and was made anew.
    pub is_index_rebuilt: bool,
}

impl RepositoryWriter {
    /// Opens a repository for writing, also where files of chunks or of chunk maps are
    /// missing or cut short, or the deduplication index cannot be read: those are given
    /// up, and what is readable of the index is kept.
    ///
    /// # Errors
    /// As of [`RepositoryWriter::open`]; `Corrupt` where something else is lost.
    pub fn open_for_repair(
        path: &Path,
        passphrase: &PassphraseSource,
        options: &OpenOptions,
    ) -> Result<(RepositoryWriter, Reopened)> {
        let mut reopened = Reopened::default();
        let writer = RepositoryWriter::open_with(path, passphrase, options, |log| {
            let path = database_path(path);
            mend_fatal(&path)?;
            let mut database = match Database::open_primary(&path, log, false) {
                Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {
                    tracing::debug!(error = %error.full_message(), "opening past what is lost");
                    // First with links to all files: where it does not work out nothing has
                    // changed. (What is opened so and cannot be kept would leave readers less
                    // than they have now.)
                    let trial = path.join(STAGING_NAME).join("trial");
                    link_files(&path, &trial)?;
                    drop(open_damaged(&trial, log)?);
                    std::fs::remove_dir_all(&trial).context(|| trial.display().to_string())?;
                    let (database, found) = open_damaged(&path, log)?;
                    reopened = found;
                    database
                }
                opened => opened?,
            };
            if !database.can_walk(Family::Dedup)? {
                database.rebuild_index(&path.join(STAGING_NAME).join("index.sst"))?;
                reopened.is_index_rebuilt = true;
            }
            Ok(database)
        })?;
        Ok((writer, reopened))
    }
}

fn open_damaged(path: &Path, log: &Path) -> Result<(Database, Reopened)> {
    let (database, is_index_rebuilt) = Database::open_damaged(path, log)?;
    let mut dropped_files = 0;
    for family in [Family::State, Family::Catalog, Family::Maps, Family::Chunks] {
        dropped_files += database.drop_unreadable_files(family)?;
    }
    Ok((database, Reopened { dropped_files, is_index_rebuilt }))
}

/// Makes a folder of links to the files of another one. RocksDB never changes a file
/// that is complete.
fn link_files(from: &Path, to: &Path) -> Result<()> {
    let what = || format!("making {}", to.display());
    if to.exists() {
        std::fs::remove_dir_all(to).context(what)?;
    }
    std::fs::create_dir_all(to).context(what)?;
    for entry in std::fs::read_dir(from).context(|| from.display().to_string())? {
        let entry = entry.context(|| from.display().to_string())?;
        if entry.file_type().context(what)?.is_file() && entry.file_name() != "LOCK" {
            std::fs::hard_link(entry.path(), to.join(entry.file_name())).context(what)?;
        }
    }
    Ok(())
}
