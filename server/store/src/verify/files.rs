//! The files of the database: whether they are those that it lists, and read.
//!
//! A damaged block of a file may hold nothing that a restore point needs, and yet stop
//! every backup: RocksDB cannot compact it. So the checksums of all files are compared, but
//! of those of chunks of which everything is read anyway. A reader sees a database that has lost
//! a file as it was before that came, and one whose list or log has lost its end as it was
//! before: the high-water mark tells.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Context, ErrorKind, Result};

use super::{check_cancel, CatalogDamage};
use crate::description::database_path;
use crate::log_directory::LogDirectory;
use crate::rocks::{self, is_sound, listed_in, open_as_listed, Family, Listed};
use crate::Repository;

const LIST: &str = "the list of the database's files";
const DATABASE: &str = "the database";
/// Looks at a database that is being written.
const MAX_TRIES: u32 = 3;

impl Repository {
    /// Files of the database that are missing, are others than it lists, cannot be read or do not
    /// match their checksums; of chunks only where reading all chunks does not tell. The list
    /// of them where that cannot be read, and the database where it is older than its last commit.
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
        let mut damaged: Vec<_> = self.damaged_marks().into_iter().map(mark_damage).collect();
        if let Some(mark) = self.stored_mark() {
            // A writer may replace the log or the list between two looks at them.
            let look = || mark.rolled_back(&folder, log.path());
            let looks = std::iter::repeat_with(look).take(MAX_TRIES as usize);
            let mut below = looks.take_while(|found| !matches!(found, Ok(None)));
            match below.nth(MAX_TRIES as usize - 1) {
                None => {}
                Some(Ok(why)) => {
                    damaged.push(damage(DATABASE.to_owned(), &why.unwrap_or_default()));
                }
                Some(Err(error)) => damaged.push(damage(LIST.to_owned(), &error.full_message())),
            }
        }
        let mut files = self.damaged_listed_files(&read, cancel)?;
        for _ in 1..MAX_TRIES {
            // A writer gives up files all the time.
            if files.is_empty() {
                break;
            }
            let again = self.damaged_listed_files(&read, cancel)?;
            files.retain(|file| again.contains(file));
        }
        damaged.extend(files);
        Ok(damaged)
    }

    fn damaged_listed_files(
        &self,
        read: &HashSet<PathBuf>,
        cancel: &AtomicBool,
    ) -> Result<Vec<CatalogDamage>> {
        let folder = database_path(self.path());
        let log = LogDirectory::create()?;
        let opened = open_as_listed(&folder, log.path());
        let listed = match opened.and_then(|opened| listed_in(&opened)) {
            Ok(listed) => listed,
            Err(error) => return Ok(vec![damage(LIST.to_owned(), &error.full_message())]),
        };
        let mut damaged = Vec::new();
        // Of a file that no commit names the next writer says nothing: it goes on without.
        let next_chunk = self.stored_mark().map_or(u64::MAX, |mark| mark.next_chunk);
        let is_gone = |file: &Listed| file.is_uncommitted(next_chunk) && !file.path.exists();
        let is_any_gone = listed.iter().any(is_gone);
        for path in listed.into_iter().filter(|file| !is_gone(file)).map(|file| file.path) {
            check_cancel(cancel)?;
            // Of those only whether they are there.
            let found = match read.contains(&path) {
                true => path.symlink_metadata().map(|_| true).context(|| "looking for a file"),
                false => is_sound(&path),
            };
            match found {
                Ok(true) => {}
                Ok(false) => damaged.push((path, "does not match its checksums".to_owned())),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    damaged.push((path, "is missing".to_owned()));
                }
                Err(error) => damaged.push((path, error.full_message())),
            }
        }
        damaged.sort();
        let describe = |(path, why): (PathBuf, String)| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            damage(format!("the file db/{name} of the database"), &why)
        };
        let mut damaged: Vec<_> = damaged.into_iter().map(describe).collect();
        if damaged.is_empty() && !is_any_gone {
            // By its length and its unique id: RocksDB names the first that is another one.
            if let Err(error) = rocks::check_listed(&folder, log.path()) {
                let why = format!("another file is in the place of one: {}", error.full_message());
                damaged.push(damage(DATABASE.to_owned(), &why));
            }
        }
        Ok(damaged)
    }
}

fn damage(what: String, why: &str) -> CatalogDamage {
    let reason = format!("{why}, which may stop backups: run coldrise repair");
    CatalogDamage { what, reason }
}

fn mark_damage(name: &str) -> CatalogDamage {
    let reason = "it is missing or damaged; the next backup writes it anew from the other one";
    CatalogDamage { what: format!("the file {name}"), reason: reason.to_owned() }
}
