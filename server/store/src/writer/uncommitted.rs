//! Files of chunks that no commit names, and that are in the database's list though they are
//! not there.
//!
//! Where the drive fails when the list (RocksDB's manifest) is synced, while the database
//! takes a file of chunks over, RocksDB says so and deletes the file. The list may name it
//! all the same, and then nobody opens the database for writing any more.
//!
//! The commit failed with it (step 2 in [`super::commit`]), so its chunks have ids from the
//! committed `next_chunk` on, and nothing refers to them: `recover` would remove them if they
//! were there. So the file is struck off, if
//! - the state is what a writer would see. A reader sees a database without a file as it was
//!   before that came, with a state that may be older than the file;
//! - no other file is missing: then a repair has more to look at;
//! - the list is not cut short, and the state with it: no file is there that the list does not
//!   know and that holds what the state does not. Files that a killed compaction left have
//!   nothing new, and those that were left half written are in no list.
//!
//! One edit at the end of the list does it, synced: a crash leaves the file missing, or struck
//! off. The writer's lock is held meanwhile.

use std::collections::HashSet;
use std::path::Path;

use coldrise_block::{ErrorKind, Result};

use super::lock_for_writing;
use crate::description::database_path;
use crate::log_directory::LogDirectory;
use crate::repair::refuse_unfinished;
use crate::repository::{Access, KeyCheck};
use crate::rocks::{
    family_and_last_key, listed_in, missing, open_as_listed, strike_off, table_files, Database,
    Family, Listed,
};
use crate::state::StoreState;
use crate::{OpenOptions, PassphraseSource, Repository};

/// Strikes off such files, if that is all that keeps the database from being opened. Whether
/// there were any.
///
/// # Errors
/// As of opening the repository for writing.
pub(super) fn strike_off_uncommitted(path: &Path, passphrase: &PassphraseSource) -> Result<bool> {
    let options = OpenOptions { cache_bytes: 0 };
    let folder = database_path(path);
    let repository = Repository::open_with(path, passphrase, &options, KeyCheck::Beside, |_| {
        let lock = lock_for_writing(path)?;
        refuse_unfinished(path)?;
        let log = LogDirectory::create()?;
        let database = open_as_listed(&folder, log.path())?;
        Ok((database, Access { writer_lock: Some(lock), _log: log }))
    })?;
    let lost = missing_uncommitted(&repository, repository.database())?;
    if lost.is_empty() {
        return Ok(false);
    }
    let log = LogDirectory::create()?;
    strike_off(&folder, log.path(), &lost)?;
    for file in lost {
        tracing::warn!(
            file = %file.path.display(),
            "a file of chunks that was never committed is missing and was struck off"
        );
    }
    Ok(true)
}

/// The files of chunks that are missing and that no commit names; none where anything else is
/// missing, too. `database` is that of the repository, opened as it is listed.
///
/// # Errors
/// `Corrupt` where the state cannot be read; what the operating system says.
pub(crate) fn missing_uncommitted(
    repository: &Repository,
    database: &Database,
) -> Result<Vec<Listed>> {
    let state = StoreState::read_in(repository, database)?;
    let listed = listed_in(database)?;
    let known: HashSet<_> = listed.iter().map(|file| file.path.clone()).collect();
    let lost = missing(listed)?;
    let (next_chunk, next_page) = (state.next_chunk.to_be_bytes(), state.next_page.to_be_bytes());
    if lost.iter().any(|file| file.family != Family::Chunks || file.first[..] < next_chunk[..]) {
        return Ok(Vec::new());
    }
    for path in table_files(database.path())?.iter().filter(|path| !known.contains(*path)) {
        let holds_nothing_new = match family_and_last_key(path) {
            Err(error) if error.kind() == ErrorKind::Corrupt => true,
            found => match found? {
                None | Some((Family::Dedup, _)) => true,
                Some((Family::Chunks, last)) => last[..] < next_chunk[..],
                Some((Family::Maps, last)) => last[..] < next_page[..],
                Some((Family::State | Family::Catalog, _)) => false,
            },
        };
        if !holds_nothing_new {
            return Ok(Vec::new());
        }
    }
    Ok(lost)
}
