//! Checks the database files: they must be the listed ones, and readable.
//!
//! A damaged block may hold nothing that a restore point needs, and still stop every backup,
//! because RocksDB cannot compact its file. So the checksums of all files are verified, except
//! files of chunks that are read completely anyway. A reader of a database that has lost a file
//! sees the state before that file. If the manifest or the log has lost its end, it sees an earlier
//! state too; the high-water mark detects this.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use coldrise_block::{Context, ErrorKind, Result};

use super::check_cancel;
use crate::CatalogDamage;
use crate::Repository;
use crate::advice::advise_repair;
use crate::high_water::refuse_rolled_back;
use crate::log_directory::LogDirectory;
use crate::repair_flag::refuse_unfinished;
use crate::repository_config::database_path;
use crate::rocks::{self, Family, Listed, is_sound, listed_in, open_as_listed};

const LIST: &str = "the list of the database's files";
const DATABASE: &str = "the database";
/// Attempts to check a database that is being written.
const MAX_TRIES: u32 = 3;

impl Repository {
    /// Damaged files of the database: missing, different from the listed ones, unreadable, or with
    /// wrong checksums. Files of chunks are checked only if reading all chunks does not cover them.
    /// Reports the manifest if it is unreadable, and the database if it is older than its last
    /// commit.
    ///
    /// # Errors
    /// `NoSpace` or `Io` if there is no room for RocksDB's log; `Interrupted` after a cancel, which
    /// is checked after each file.
    pub fn damaged_files(&self, cancel: &AtomicBool) -> Result<Vec<CatalogDamage>> {
        let chunks = self.database().listed_files(Family::Chunks)?;
        let mut read: HashSet<_> =
            chunks.iter().map(|file| self.database().path_of(file)).collect();
        let superseded = self.database().superseded_chunk_files()?;
        read.retain(|path| !superseded.contains(path));
        let folder = database_path(self.path());
        let log = LogDirectory::create()?;
        let mut damaged = self.damaged_marks();
        if self.are_files_sound(&read, log.path(), cancel)? {
            return Ok(damaged);
        }
        if let Some(mark) = self.stored_mark() {
            // A writer may replace the log or the manifest between two checks.
            let look = || mark.rolled_back(&folder, log.path());
            let looks = std::iter::repeat_with(look).take(MAX_TRIES as usize);
            let mut below = looks.take_while(|found| !matches!(found, Ok(None)));
            match below.nth(MAX_TRIES as usize - 1) {
                None => {}
                Some(Ok(why)) => {
                    damaged.push(damage(DATABASE.to_owned(), &why.unwrap_or_default()));
                }
                Some(Err(error)) => damaged.push(damage(LIST.to_owned(), &error.message())),
            }
        }
        let mut files = self.damaged_listed_files(&read, cancel)?;
        for _ in 1..MAX_TRIES {
            // A writer deletes files all the time.
            if files.is_empty() {
                break;
            }
            let again = self.damaged_listed_files(&read, cancel)?;
            files.retain(|file| again.contains(file));
        }
        damaged.extend(files);
        Ok(damaged)
    }

    /// Checks whether a writer could open the database now. Changes nothing.
    ///
    /// # Errors
    /// Those of the writer: `Corrupt` if a repair is unfinished, the database is below its
    /// high-water mark, or one of its files is missing or different.
    pub fn check_writable(&self) -> Result<()> {
        refuse_unfinished(self.path())?;
        let folder = database_path(self.path());
        let log = LogDirectory::create()?;
        let look = || {
            let mark = self.stored_mark();
            if let Some(mark) = &mark {
                refuse_rolled_back(&folder, mark, log.path())?;
            }
            match rocks::check_listed(&folder, log.path()) {
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    let listed = listed_in(&open_as_listed(&folder, log.path())?)?;
                    let next_chunk = mark.map_or(u64::MAX, |mark| mark.next_chunk);
                    let mut missing = listed.iter().filter(|file| !file.path.exists()).peekable();
                    let is_any = missing.peek().is_some();
                    // A writer continues without files that no commit names.
                    if is_any && missing.all(|file| file.is_uncommitted(next_chunk)) {
                        Ok(())
                    } else {
                        Err(error)
                    }
                }
                checked => checked,
            }
        };
        let mut checked = look();
        for _ in 1..MAX_TRIES {
            // A writer may have replaced a file meanwhile.
            if checked.is_ok() {
                break;
            }
            checked = look();
        }
        checked.map_err(advise_repair)
    }

    /// True if no check finds damage in the database's files. Opens the database once for all of
    /// them; after a failure, each check has to open it again to name the damage.
    fn are_files_sound(
        &self,
        read: &HashSet<PathBuf>,
        log_directory: &Path,
        cancel: &AtomicBool,
    ) -> Result<bool> {
        let folder = database_path(self.path());
        let mark = self.stored_mark().unwrap_or_default();
        if !rocks::sound_manifest(&folder).is_ok_and(|end| end >= mark.manifest) {
            return Ok(false);
        }
        let Ok(opened) = rocks::open_as_checked(&folder, log_directory) else { return Ok(false) };
        let Ok(listed) = listed_in(&opened) else { return Ok(false) };
        for file in listed.iter().filter(|file| !read.contains(&file.path)) {
            check_cancel(cancel)?;
            if !is_sound(&file.path).unwrap_or(false) {
                return Ok(false);
            }
        }
        // The files that other threads read only have to exist.
        Ok(opened.sequence() >= mark.sequence && listed.iter().all(|file| file.path.exists()))
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
            Err(error) => return Ok(vec![damage(LIST.to_owned(), &error.message())]),
        };
        let mut damaged = Vec::new();
        // A missing file that no commit names is not reported: the next writer continues without
        // it.
        let next_chunk = self.stored_mark().map_or(u64::MAX, |mark| mark.next_chunk);
        let is_gone = |file: &Listed| file.is_uncommitted(next_chunk) && !file.path.exists();
        let is_any_gone = listed.iter().any(is_gone);
        for path in listed.into_iter().filter(|file| !is_gone(file)).map(|file| file.path) {
            check_cancel(cancel)?;
            // Those files only have to exist.
            let found = if read.contains(&path) {
                path.symlink_metadata()
                    .map(|_| true)
                    .context(|| format!("looking for {}", path.display()))
            } else {
                is_sound(&path)
            };
            match found {
                Ok(true) => {}
                Ok(false) => damaged.push((path, "does not match its checksums".to_owned())),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    damaged.push((path, "is missing".to_owned()));
                }
                Err(error) => damaged.push((path, error.message())),
            }
        }
        damaged.sort();
        let describe = |(path, why): (PathBuf, String)| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            damage(format!("the file db/{name} of the database"), &why)
        };
        let mut damaged: Vec<_> = damaged.into_iter().map(describe).collect();
        if damaged.is_empty() && !is_any_gone {
            // By length and unique id: RocksDB names the first different file.
            if let Err(error) = rocks::check_listed(&folder, log.path()) {
                damaged.push(damage(DATABASE.to_owned(), &error.message()));
            }
        }
        Ok(damaged)
    }
}

fn damage(what: String, why: &str) -> CatalogDamage {
    let reason = format!("{why}, which may stop backups: run coldrise repair");
    CatalogDamage::new(what, reason)
}
