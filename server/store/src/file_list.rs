//! Whether the files of the database that are there are those that its list (RocksDB's
//! manifest) names.
//!
//! A writer that was killed leaves files that are not listed. Where one holds what nothing else
//! does, the list has lost its end: see [`crate::rocks`]'s `unlisted`.
//!
//! A file may be listed and not there. RocksDB does not open such a database for writing, and
//! mostly something is lost. But where the drive fails when the list is synced, while the
//! database takes a file of chunks over, RocksDB says so and deletes the file, though the list
//! may name it already. The commit failed with it (step 2 in `writer/commit.rs`), so its chunks
//! have ids from the committed `next_chunk` on and nothing refers to them: a writer would
//! remove them if they were there. A missing file is taken for such a one, if
//! - the state is what a writer would see. A reader sees a database without a file as it was
//!   before that came, with a state that may be older than the file;
//! - the list has not lost its end, and the state with it;
//! - no other file is missing: then a repair has more to look at.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use coldrise_block::{ErrorKind, Result};

use crate::rocks::{
    listed_in, missing, open_as_listed, table_files, unlisted_that_counts, Database, Family, Listed,
};
use crate::state::StoreState;
use crate::Repository;

/// The files of a database, and those of its list.
pub(crate) struct FileList {
    /// As it is listed, for nothing but to read it.
    database: Database,
    listed: Vec<Listed>,
    unlisted: Vec<PathBuf>,
    missing: Vec<Listed>,
}

impl FileList {
    /// Reads it, beside whoever writes the database.
    ///
    /// # Errors
    /// `Corrupt` where the list cannot be read; what the operating system says.
    pub(crate) fn read(database: &Path, log_directory: &Path) -> Result<FileList> {
        // First: what comes after this is not unlisted, but new.
        let there = table_files(database)?;
        let database = open_as_listed(database, log_directory)?;
        let listed = listed_in(&database)?;
        let missing = missing(&listed)?;
        let known: HashSet<&Path> = listed.iter().map(|file| file.path.as_path()).collect();
        let unlisted = there.into_iter().filter(|path| !known.contains(path.as_path())).collect();
        Ok(FileList { database, listed, unlisted, missing })
    }

    /// Whether a file is there that is not listed, or the other way round.
    pub(crate) fn is_in_doubt(&self) -> bool {
        !self.unlisted.is_empty() || !self.missing.is_empty()
    }

    /// The files that are listed.
    pub(crate) fn listed(&self) -> impl Iterator<Item = &Path> {
        self.listed.iter().map(|file| file.path.as_path())
    }

    /// Whether the list has lost its end: then a file that it does not know holds what
    /// nothing else does.
    ///
    /// # Errors
    /// What the operating system says; `Corrupt` where the list cannot be read any more.
    pub(crate) fn unlisted_that_counts(&self, repository: &Repository) -> Result<Option<PathBuf>> {
        if self.unlisted.is_empty() {
            return Ok(None);
        }
        // Where nobody knows what was committed only a repair goes on anyway.
        let state = self.state(repository)?;
        let next = state.map_or((u64::MAX, u64::MAX), |state| (state.next_chunk, state.next_page));
        unlisted_that_counts(&self.database, &self.unlisted, next)
    }

    /// None where it is damaged, or in a file that is missing.
    fn state(&self, repository: &Repository) -> Result<Option<StoreState>> {
        match StoreState::read_in(repository, &self.database) {
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(None),
            Err(error) if error.kind() == ErrorKind::Io && !self.missing.is_empty() => Ok(None),
            state => state.map(Some),
        }
    }

    /// The files of chunks that are missing and that no commit names, of a list that has not
    /// lost its end; none where another file is missing, too.
    ///
    /// # Errors
    /// As of [`FileList::unlisted_that_counts`].
    pub(crate) fn missing_uncommitted(&self, repository: &Repository) -> Result<&[Listed]> {
        let Some(state) = self.state(repository)? else { return Ok(&[]) };
        let next = state.next_chunk.to_be_bytes();
        let is_uncommitted =
            |file: &Listed| file.family == Family::Chunks && file.first[..] >= next[..];
        Ok(if self.missing.iter().all(is_uncommitted) { &self.missing } else { &[] })
    }
}

/// What [`FileList::unlisted_that_counts`] is to be called.
pub(crate) fn cut_short(file: &Path) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    format!("has lost its end: it does not name db/{name}, and nothing else holds what is in there")
}
