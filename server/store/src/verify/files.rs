//! Files of the database that nothing else reads whole: the counters and the index.
//!
//! A damaged block of a file may hold nothing that a restore point needs, and yet stop
//! every backup: RocksDB cannot compact it. So the checksums of all files are compared, but
//! of those of chunks of which everything is read anyway. And a reader sees a database that has lost a
//! file as it was before that came.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Context, ErrorKind, Result};

use super::{check_cancel, CatalogDamage};
use crate::description::database_path;
use crate::file_list::{cut_short, FileList};
use crate::log_directory::LogDirectory;
use crate::rocks::{is_sound, Family};
use crate::Repository;

const LIST: &str = "the list of the database's files";

impl Repository {
    /// Files of the database that are missing, cannot be read or do not match their checksums;
    /// of chunks only where reading all chunks does not tell. The list of them where that cannot be read.
    ///
    /// # Errors
    /// `NoSpace` or `Io` where there is no room for RocksDB's log; `Interrupted` when it was
    /// cancelled, which is looked at after each file.
    pub fn damaged_files(&self, cancel: &AtomicBool) -> Result<Vec<CatalogDamage>> {
        let chunks = self.database().listed_files(Family::Chunks)?;
        let mut read: HashSet<_> =
            chunks.iter().map(|file| self.database().path_of(file)).collect();
        let superseded = self.database().superseded_chunk_files()?;
        read.retain(|path| !superseded.contains(path));
        let folder = database_path(self.path());
        let log = LogDirectory::create()?;
        let mut damaged = Vec::new();
        let list = match FileList::read(&folder, log.path()) {
            Ok(list) => list,
            Err(error) => return Ok(vec![damage(LIST.to_owned(), &error.full_message())]),
        };
        if let Some(file) = list.unlisted_that_counts(self)? {
            // A writer may just have listed it.
            let again = FileList::read(&folder, log.path())?.unlisted_that_counts(self)?;
            if again.is_some_and(|again| again == file) {
                let reason = format!("{}: run coldrise repair", cut_short(&file));
                return Ok(vec![CatalogDamage { what: LIST.to_owned(), reason }]);
            }
        }
        for path in list.listed() {
            check_cancel(cancel)?;
            // Of those only whether they are there.
            let found = match read.contains(path) {
                true => path.symlink_metadata().map(|_| true).context(|| "looking for a file"),
                false => is_sound(path),
            };
            match found {
                Ok(true) => {}
                Ok(false) => {
                    damaged.push((path.to_owned(), "does not match its checksums".to_owned()))
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    damaged.push((path.to_owned(), "is missing".to_owned()));
                }
                Err(error) => damaged.push((path.to_owned(), error.full_message())),
            }
        }
        if !damaged.is_empty() {
            if let Ok(list) = FileList::read(&folder, log.path()) {
                // A writer gives up files all the time.
                let live: HashSet<_> = list.listed().collect();
                damaged.retain(|(path, _)| live.contains(path.as_path()));
                // The next one strikes these off: nothing refers to them.
                for file in list.missing_uncommitted(self).unwrap_or_default() {
                    damaged.retain(|(path, _)| *path != file.path);
                }
            }
        }
        damaged.sort();
        let describe = |(path, why): (PathBuf, String)| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            damage(format!("the file db/{name} of the database"), &why)
        };
        Ok(damaged.into_iter().map(describe).collect())
    }
}

fn damage(what: String, why: &str) -> CatalogDamage {
    let reason = format!("{why}, which may stop backups: run coldrise repair");
    CatalogDamage { what, reason }
}
