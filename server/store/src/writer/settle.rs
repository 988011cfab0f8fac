//! What a writer does before it opens a database of which the files that are there are not those
//! that are listed: RocksDB deletes files that it does not know, and opens no database for
//! writing of which one is missing. See [`FileList`].
//!
//! A file that was never committed is struck off: one edit at the end of the list, synced. A
//! crash leaves it missing, or struck off. The writer's lock is held meanwhile.

use std::path::Path;

use coldrise_block::{Error, ErrorKind, Result};

use super::lock_for_writing;
use crate::description::database_path;
use crate::file_list::{cut_short, FileList};
use crate::log_directory::LogDirectory;
use crate::passphrase::ReadOnce;
use crate::repair::refuse_unfinished;
use crate::repository::{Access, KeyCheck};
use crate::rocks::{open_as_listed, strike_off};
use crate::{OpenOptions, Repository};

/// Whether a repository has to be settled before a writer opens its database.
///
/// # Errors
/// As of [`FileList::read`].
pub(super) fn is_in_doubt(repository: &Path, log_directory: &Path) -> Result<bool> {
    Ok(FileList::read(&database_path(repository), log_directory)?.is_in_doubt())
}

/// Strikes off files that were never committed, and refuses to go on where RocksDB would
/// delete files that count. Of what else may be wrong with the database opening it tells.
///
/// # Errors
/// `Corrupt` where the list has lost its end; as of opening the repository for writing.
pub(super) fn settle(path: &Path, passphrase: &ReadOnce<'_>) -> Result<()> {
    let options = OpenOptions { cache_bytes: 0 };
    let folder = database_path(path);
    let repository = Repository::open_with(path, passphrase, &options, KeyCheck::Beside, |_| {
        let lock = lock_for_writing(path)?;
        refuse_unfinished(path)?;
        let log = LogDirectory::create()?;
        let database = open_as_listed(&folder, log.path())?;
        Ok((database, Access { writer_lock: Some(lock), _log: log }))
    })?;
    let log = LogDirectory::create()?;
    let list = FileList::read(&folder, log.path())?;
    let (file, lost) =
        (list.unlisted_that_counts(&repository)?, list.missing_uncommitted(&repository)?);
    if let Some(file) = file {
        let message = format!(
            "the list of the files of {} {}: run coldrise repair, which makes it anew",
            folder.display(),
            cut_short(&file)
        );
        return Err(Error::new(ErrorKind::Corrupt, message));
    }
    if !lost.is_empty() {
        strike_off(&folder, log.path(), lost)?;
    }
    for file in lost {
        tracing::warn!(
            file = %file.path.display(),
            "a file of chunks that was never committed is missing and was struck off"
        );
    }
    Ok(())
}
