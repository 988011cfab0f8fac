//! Giving up files of the database that nobody can read, or that are not there.
//!
//! RocksDB opens no database for writing of which a file is lost, and offers nothing to
//! strike one off: it deletes only files with nothing below them, and none of level 0,
//! where what was written last is. So the list of the files is edited, see
//! [`super::manifest`]. Of a file that has lost only its end another one is made.
//!
//! Order of writes, each durable before the next, and what a crash leaves:
//!
//! 1. A file that nobody can read gets another name, `NUMBER.remains`, so that neither RocksDB
//!    nor the next opening finds it: it may end the process. *A crash leaves* a file that is
//!    listed and missing, and what remains of it: the next repair goes on from there.
//! 2. Of what remains of a listed file a new one is made, `NEW.anew`. *A crash leaves* files
//!    that are not listed, and go.
//! 3. The edits: the file goes, the new one comes, in one record. *A crash leaves* a listed
//!    file that is missing, and the new one under its first name, which the next repair
//!    changes; or edits that are half there at the end, which do not count.
//! 4. The new file gets its name. What remained of the old one goes, which is not listed any
//!    more; where nothing of it could be read it is kept as `NUMBER.lost`, in case that
//!    somebody can. *A crash leaves* remains that are not listed, and go: also such ones.
//! 5. With all that can be read at hand the list is looked at: where it has lost its end it is
//!    made anew, see [`super::rebuild`]. If not, files that are not there are struck off.
//!
//! Before 2. files go that the list strikes off, as RocksDB would delete them.
//!
//! A listed file is missing from 1. to 4., and a writer then opens no database, unless it is one
//! of chunks that were never committed: then nothing is lost with it.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, ErrorKind, Result};

use super::manifest::{
    listed, missing, number, open_as_listed, strike_off, strike_off_with, told_by, Listed,
};
use super::mend::{files_ending, mend_end, table_files};
use super::rebuild::{file_edit, highest_number, put_numbers, rebuild, Table, TAG_NEXT_FILE};
use super::unlisted::{is_any_late, unlisted_that_counts};
use crate::description::sync_directory;

/// Of files that were given up and are kept, in case that somebody can read them.
const LOST_ENDING: &str = "lost";
/// Of files that are about to be given up.
const REMAINS_ENDING: &str = "remains";
/// Of files that come in their place.
const ANEW_ENDING: &str = "anew";
const TABLE_ENDING: &str = "sst";

/// What was done so that a database opens again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GivenUp {
    /// Files that were struck off.
    pub(crate) files: u64,
    /// Files of which the end was made anew.
    pub(crate) mended: u64,
    /// Blocks that those had and that cannot be read.
    pub(crate) lost_blocks: u64,
    /// The list of the files could not be read, or was cut short, and was made anew.
    pub(crate) is_list_new: bool,
}

/// Strikes off the files of a database that are not there, and the `unreadable` ones; of
/// those others are made that hold what can be read of them. Where the manifest cannot be
/// read, or is cut short, it is made anew: all other files have been mended. `before` is
/// called before anything is lost. Durable on return. The caller holds the writer's lock, and
/// nobody else has the database open for writing.
///
/// # Errors
/// `Corrupt` where the manifest takes no edits, or a file is none of ours; `NoSpace`; what the
/// operating system says.
pub(crate) fn give_up_lost(
    database: &Path,
    log_directory: &Path,
    unreadable: &HashSet<PathBuf>,
    before: impl Fn() -> Result<()>,
) -> Result<GivenUp> {
    // Listed they would end the process; without them nobody opens it for writing.
    for path in unreadable {
        rename(path, REMAINS_ENDING)?;
    }
    sync_directory(database)?;
    let mut given_up = GivenUp::default();
    let mut files = listed(database, log_directory);
    if let Ok(listed_now) = &files {
        finish(database, listed_now)?;
        remove_struck_off(database, listed_now)?;
        let cut = with_remains(listed_now)?;
        if !cut.is_empty() {
            before()?;
            replace(database, log_directory, listed_now, &cut, &mut given_up)?;
            files = listed(database, log_directory);
        }
    }
    let is_list_lost = match &files {
        Ok(listed) => has_lost_its_end(database, log_directory, listed)?,
        Err(error) => error.kind() == ErrorKind::Corrupt,
    };
    if is_list_lost {
        before()?;
        rebuild_without_remains(database, log_directory, &mut given_up)?;
        files = listed(database, log_directory);
    }
    let files = files?;
    let lost = missing(&files)?;
    remove_remains(database, &files, !lost.is_empty())?;
    if !lost.is_empty() {
        before()?;
        strike_off(database, log_directory, &lost)?;
        given_up.files += lost.len() as u64;
    }
    Ok(given_up)
}

/// The files that are listed and not there, and of which something remains.
fn with_remains(listed: &[Listed]) -> Result<Vec<Listed>> {
    let mut found = Vec::new();
    for file in missing(listed)? {
        let remains = file.path.with_extension(REMAINS_ENDING);
        // A drive that fails is no file that is lost.
        if remains.try_exists().context(|| format!("looking for {}", remains.display()))? {
            found.push(file);
        }
    }
    Ok(found)
}

/// Makes the list anew, from all that can be read.
fn rebuild_without_remains(
    database: &Path,
    log_directory: &Path,
    given_up: &mut GivenUp,
) -> Result<()> {
    // Each is whole, and holds what remains of another.
    for path in files_ending(database, ANEW_ENDING)? {
        rename(&path, TABLE_ENDING)?;
    }
    // Nobody knows of which family they were, or whether they were in the list.
    for path in files_ending(database, REMAINS_ENDING)? {
        set_aside(&path)?;
        given_up.files += 1;
    }
    sync_directory(database)?;
    let rebuilt = rebuild(database, log_directory)?;
    given_up.is_list_new = true;
    given_up.mended += rebuilt.mended;
    given_up.lost_blocks += rebuilt.lost_blocks;
    given_up.files += rebuilt.unreadable;
    Ok(())
}

/// Finishes what an interrupted repair began after its edits, and removes what it had made
/// before them.
fn finish(database: &Path, listed: &[Listed]) -> Result<()> {
    for path in files_ending(database, ANEW_ENDING)? {
        match is_listed(&path, listed) {
            true => rename(&path, TABLE_ENDING)?,
            false => remove(&path)?,
        }
    }
    sync_directory(database)
}

/// Removes the files that the manifest says are to be deleted, as RocksDB would: a killed
/// compaction has left them. A list that is made anew would bring back what was in there.
fn remove_struck_off(database: &Path, listed: &[Listed]) -> Result<()> {
    let told = told_by(database)?;
    for path in table_files(database)? {
        let is_told = number(&path).is_some_and(|number| !told.may_miss(number));
        if is_told && !is_listed(&path, listed) {
            remove(&path)?;
        }
    }
    sync_directory(database)
}

/// Removes what remains of files that are in no list: a killed compaction has left them, and
/// RocksDB would have deleted them. Where a file is gone they are kept: they may hold what it did.
fn remove_remains(database: &Path, listed: &[Listed], is_any_gone: bool) -> Result<()> {
    for path in files_ending(database, REMAINS_ENDING)? {
        match is_listed(&path, listed) {
            true => {}
            false if is_any_gone => set_aside(&path)?,
            false => remove(&path)?,
        }
    }
    sync_directory(database)
}

fn is_listed(path: &Path, listed: &[Listed]) -> bool {
    let path = path.with_extension(TABLE_ENDING);
    listed.iter().any(|file| file.path == path)
}

/// Steps 2 to 4, for files of which something remains.
fn replace(
    database: &Path,
    log_directory: &Path,
    listed: &[Listed],
    cut: &[Listed],
    given_up: &mut GivenUp,
) -> Result<()> {
    let told = told_by(database)?;
    let highest = listed.iter().map(|file| file.number).fold(highest_number(database)?, u64::max);
    let mut next = told.next_file.max(highest + 1);
    let (mut edits, mut made) = (Vec::new(), Vec::new());
    for file in cut {
        let remains = file.path.with_extension(REMAINS_ENDING);
        let path = database.join(format!("{next:06}.{ANEW_ENDING}"));
        let mut edit = file.deletion();
        let found = mend_end(&remains, &path, file.family, (&file.first, &file.last))?;
        if let Some((mended, sequences)) = found {
            match Table::open(&path)? {
                Some(table) => {
                    edit.extend(file_edit(&table, u64::from(file.level), sequences));
                    next += 1;
                    put_numbers(&mut edit, &[TAG_NEXT_FILE, next]);
                    made.push((file, path, mended));
                }
                None => remove(&path)?,
            }
        }
        edits.push(edit);
    }
    sync_directory(database)?;
    match strike_off_with(database, log_directory, cut, &edits) {
        // RocksDB takes one of the new files for none of its own.
        Err(error) if error.kind() == ErrorKind::Corrupt && !made.is_empty() => {
            tracing::warn!(%error, "files that were made of what remains are left out");
            for (_, path, _) in made.drain(..) {
                remove(&path)?;
            }
            strike_off(database, log_directory, cut)?;
        }
        done => done?,
    }
    for (_, path, mended) in &made {
        rename(path, TABLE_ENDING)?;
        given_up.mended += 1;
        given_up.lost_blocks += mended.lost;
    }
    sync_directory(database)?;
    for file in cut {
        let remains = file.path.with_extension(REMAINS_ENDING);
        match made.iter().any(|(of, ..)| of.path == file.path) {
            true => remove(&remains)?,
            false => {
                set_aside(&remains)?;
                given_up.files += 1;
            }
        }
    }
    sync_directory(database)
}

/// Keeps a file that nobody can read where nobody looks for it.
pub(super) fn set_aside(path: &Path) -> Result<()> {
    rename(path, LOST_ENDING)
}

fn rename(path: &Path, ending: &str) -> Result<()> {
    std::fs::rename(path, path.with_extension(ending))
        .context(|| format!("giving up {}", path.display()))
}

fn remove(path: &Path) -> Result<()> {
    std::fs::remove_file(path).context(|| format!("removing {}", path.display()))
}

/// Whether edits are missing at the manifest's end, when nothing remains of a listed file any
/// more: there is a file that it does not know, and
/// that holds what nothing else does, or may have come in place of one that it knows and that
/// is gone.
fn has_lost_its_end(database: &Path, log_directory: &Path, listed: &[Listed]) -> Result<bool> {
    let mut unlisted = table_files(database)?;
    unlisted.extend(files_ending(database, REMAINS_ENDING)?);
    unlisted.retain(|path| !is_listed(path, listed));
    if unlisted.is_empty() {
        return Ok(false);
    }
    if !missing(listed)?.is_empty() && is_any_late(database, &unlisted)? {
        return Ok(true);
    }
    // Without the keys nobody knows which ids were committed. A file of chunks that a killed
    // backup had just handed over counts here: to list it does no harm.
    let database = open_as_listed(database, log_directory)?;
    Ok(unlisted_that_counts(&database, &unlisted, (u64::MAX, u64::MAX))?.is_some())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use super::*;
    use crate::rocks::rebuild::TAG_FAMILY;
    use crate::rocks::record_log::record;
    use crate::rocks::record_log::BLOCK_BYTES;
    use crate::rocks::{Database, Family, ReadMode, FAMILIES};

    fn all_files(database: &Path, log_directory: &Path) -> Result<HashSet<PathBuf>> {
        Ok(listed(database, log_directory)?.into_iter().map(|file| file.path).collect())
    }

    fn open(folder: &Path, create: bool) -> Result<Database> {
        Database::open_primary(&folder.join("db"), folder, create)
    }

    /// One file of the newest values on level 0, over an older one.
    fn fill(folder: &Path, create: bool, round: u8) {
        let database = open(folder, create).unwrap();
        let mut batch = database.batch();
        for (family, _) in FAMILIES {
            batch.put(family, b"older", &[0]).unwrap();
            batch.put(family, b"key", &[round]).unwrap();
        }
        database.write(batch, true).unwrap();
        database.flush().unwrap();
    }

    fn manifest(folder: &Path) -> PathBuf {
        let current = std::fs::read_to_string(folder.join("db/CURRENT")).unwrap();
        folder.join("db").join(current.trim_end())
    }

    #[test]
    fn lost_files_of_any_level_are_given_up_and_what_is_older_shows() {
        let folder = tempfile::tempdir().unwrap();
        fill(folder.path(), true, 1);
        let before = all_files(&folder.path().join("db"), folder.path()).unwrap();
        fill(folder.path(), false, 2);
        let after = all_files(&folder.path().join("db"), folder.path()).unwrap();
        let new: Vec<_> = after.difference(&before).collect();
        assert_eq!((before.len(), new.len()), (FAMILIES.len(), FAMILIES.len()));
        // One is not there, the others nobody can read.
        std::fs::remove_file(new[0]).unwrap();
        assert!(open(folder.path(), false).is_err());
        let calls = std::cell::Cell::new(0);
        let give_up = |unreadable: &HashSet<PathBuf>| {
            let before = || {
                calls.set(calls.get() + 1);
                Ok(())
            };
            give_up_lost(&folder.path().join("db"), folder.path(), unreadable, before).unwrap()
        };
        let unreadable: HashSet<PathBuf> = new[1..].iter().map(|path| (*path).clone()).collect();
        for path in &unreadable {
            std::fs::write(path, vec![0x5a; 2000]).unwrap();
        }
        assert_eq!(give_up(&unreadable).files, 5);
        let calls_with_losses = calls.replace(0);
        assert_eq!(give_up(&HashSet::new()).files, 0);
        // What a killed compaction left is no loss.
        let torn = folder.path().join("db/999999.sst");
        std::fs::write(&torn, b"half").unwrap();
        assert_eq!(give_up(&HashSet::from([torn.clone()])).files, 0);
        assert!(!torn.exists() && !torn.with_extension(LOST_ENDING).exists());
        assert!(calls_with_losses > 0 && calls.get() == 0);
        let database = open(folder.path(), false).unwrap();
        for (family, _) in FAMILIES {
            let value = database.get(family, b"key", ReadMode::Cached).unwrap().unwrap();
            assert_eq!(*value, [1]);
        }
        drop(database);
        fill(folder.path(), false, 3);
        // What was given up is kept.
        let is_kept = |path: &PathBuf| path.with_extension(LOST_ENDING).exists();
        assert!(unreadable.iter().all(is_kept));
        let database = open(folder.path(), false).unwrap();
        assert_eq!(*database.get(Family::State, b"key", ReadMode::Cached).unwrap().unwrap(), [3]);
    }

    #[test]
    fn edits_are_read_wherever_a_block_ends() {
        let folder = tempfile::tempdir().unwrap();
        fill(folder.path(), true, 1);
        let path = manifest(folder.path());
        let mut file = File::options().append(true).open(&path).unwrap();
        let mut end = file.metadata().unwrap().len() as usize;
        // Edits that change nothing, of lengths that meet the end of a block everywhere.
        let mut edit = Vec::new();
        put_numbers(&mut edit, &[TAG_FAMILY, 0]);
        for blocks in 1..40 {
            while end < blocks * BLOCK_BYTES - 40 {
                let bytes = record(end, &edit.repeat(200));
                let bytes = match end + bytes.len() < blocks * BLOCK_BYTES - 40 {
                    true => bytes,
                    false => record(end, &edit),
                };
                file.write_all(&bytes).unwrap();
                end += bytes.len();
            }
            while end < blocks * BLOCK_BYTES - blocks % 20 {
                let bytes = record(end, &edit[..0]);
                file.write_all(&bytes).unwrap();
                end += bytes.len();
            }
            let bytes = record(end, &edit.repeat(4));
            file.write_all(&bytes).unwrap();
            end += bytes.len();
        }
        drop(file);
        let files = all_files(&folder.path().join("db"), folder.path()).unwrap();
        assert_eq!(files.len(), FAMILIES.len());
        std::fs::remove_file(files.iter().min().unwrap()).unwrap();
        assert_eq!(give_up(&folder), 1);
        assert_eq!(manifest(folder.path()), path, "nobody has opened it for writing");
        open(folder.path(), false).unwrap();
    }

    fn give_up(folder: &tempfile::TempDir) -> u64 {
        let none = HashSet::new();
        give_up_lost(&folder.path().join("db"), folder.path(), &none, || Ok(())).unwrap().files
    }

    #[test]
    fn what_is_half_written_at_the_end_goes_before_an_edit() {
        let folder = tempfile::tempdir().unwrap();
        for (round, half) in [&[][..], &[0x17; 9], &[0; 40]].into_iter().enumerate() {
            fill(folder.path(), round == 0, round as u8 + 1);
            let path = manifest(folder.path());
            let mut bytes = std::fs::read(&path).unwrap();
            let before = all_files(&folder.path().join("db"), folder.path()).unwrap();
            match half.is_empty() {
                // The last edit: that of a file that came last.
                true => bytes.truncate(bytes.len() - 3),
                false => bytes.extend_from_slice(half),
            }
            std::fs::write(&path, &bytes).unwrap();
            let listed = all_files(&folder.path().join("db"), folder.path()).unwrap();
            assert!(half.is_empty() || listed == before);
            std::fs::remove_file(listed.iter().min().unwrap()).unwrap();
            assert_eq!(give_up(&folder), 1);
            assert_eq!(give_up(&folder), 0);
            let left = all_files(&folder.path().join("db"), folder.path()).unwrap();
            assert_eq!(left.len(), listed.len() - 1);
            open(folder.path(), false).unwrap();
        }
    }
}
