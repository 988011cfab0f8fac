//! Giving up files that nobody can read: with an edit at the end of the manifest.
//!
//! RocksDB opens no database for writing of which a file is lost, and offers nothing to
//! strike one off: it deletes only files with nothing below them, and none of level 0,
//! where what was written last is. Its own tool for this (`ldb unsafe_remove_sst_file`)
//! appends an edit to the manifest, and so does this.
//!
//! A manifest is a file of records, see [`super::record_log`]; each is an edit (RocksDB's
//! wiki: *MANIFEST*), here of varints as LEB128 has them: 200, family; 6, level, number of
//! the file that is deleted.
//!
//! Order: a file that is there and that nobody can read gets another name, so that neither
//! RocksDB, which deletes files that are struck off, nor the next opening finds it. Then what
//! a crash left half written at the manifest's end goes, because nothing behind it counts and
//! RocksDB ends its silence about it once something follows. Then the edits are appended. A crash
//! leaves files that are missing, which the next repair strikes off, and edits that are there,
//! or half there at the end.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use librocksdb_sys as sys;

use super::mend::table_files;
use super::rebuild::rebuild;
use super::record_log::{manifest, record, sound_end};
use super::table::put_varint;
use super::unlisted::unlisted_that_counts;
use super::{Database, Family, FAMILIES};
use crate::description::sync_directory;

const TAG_FAMILY: u64 = 200;
const TAG_DELETED_FILE: u64 = 6;
/// Openings of a database that is being written.
const MAX_TRIES: u32 = 5;
/// Of files that were given up and are kept, in case that somebody can read them.
const GIVEN_UP_ENDING: &str = "lost";

/// A file as the manifest knows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Listed {
    pub(crate) family: Family,
    family_id: u32,
    level: u32,
    number: u64,
    pub(crate) path: PathBuf,
    /// Its first key.
    pub(crate) first: Vec<u8>,
}

/// What was done so that a database opens again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GivenUp {
    /// Files that were struck off.
    pub(crate) files: u64,
    /// The list of the files could not be read, or was cut short, and was made anew.
    pub(crate) is_list_new: bool,
}

/// Strikes off the files of a database that are not there, and `unreadable` ones, which are
/// kept under another name. Where the manifest cannot be read, or is cut short, it is made
/// anew: all others have been mended. `before` is called before any of it. Durable on return. The caller
/// holds the writer's lock, and nobody else has the database open for writing.
///
/// # Errors
/// `Corrupt` where the manifest takes no edits, or a file is none of ours.
pub(crate) fn give_up_lost(
    database: &Path,
    log_directory: &Path,
    unreadable: &HashSet<PathBuf>,
    before: impl Fn() -> Result<()>,
) -> Result<GivenUp> {
    // Listed they would end the process; without them nobody opens it for writing.
    for path in unreadable {
        std::fs::rename(path, path.with_extension(GIVEN_UP_ENDING))
            .context(|| format!("giving up {}", path.display()))?;
    }
    if !unreadable.is_empty() {
        sync_directory(database)?;
    }
    let mut given_up = GivenUp::default();
    let mut listed_files = listed(database, log_directory);
    let is_lost = match &listed_files {
        Ok(listed) => is_cut_short(database, log_directory, listed)?,
        Err(error) => error.kind() == ErrorKind::Corrupt,
    };
    if is_lost {
        before()?;
        rebuild(database, log_directory)?;
        given_up.is_list_new = true;
        // Nobody knows whether they were in it.
        given_up.files = unreadable.len() as u64;
        listed_files = listed(database, log_directory);
    }
    let listed_files = listed_files?;
    // What a killed compaction left is in no list. RocksDB would have deleted it.
    for path in unreadable.iter().filter(|_| !given_up.is_list_new) {
        if !listed_files.iter().any(|file| file.path == *path) {
            std::fs::remove_file(path.with_extension(GIVEN_UP_ENDING))
                .context(|| format!("removing {}", path.display()))?;
        }
    }
    let lost = missing(&listed_files)?;
    if lost.is_empty() {
        return Ok(given_up);
    }
    before()?;
    strike_off(database, log_directory, &lost)?;
    given_up.files += lost.len() as u64;
    Ok(given_up)
}

/// Those of these files that are not there.
///
/// # Errors
/// What the operating system says: a drive that fails is no file that is lost.
pub(crate) fn missing(listed: &[Listed]) -> Result<Vec<Listed>> {
    let mut missing = Vec::new();
    for file in listed {
        let what = || format!("looking for {}", file.path.display());
        if !file.path.try_exists().context(what)? {
            missing.push(file.clone());
        }
    }
    Ok(missing)
}

/// Strikes off files that are not there. Durable on return. The caller holds the writer's
/// lock, and nobody else has the database open for writing.
///
/// # Errors
/// `Corrupt` where the manifest takes no edits. Then it is as it was.
pub(crate) fn strike_off(database: &Path, log_directory: &Path, lost: &[Listed]) -> Result<()> {
    append(database, lost, || {
        let left: HashSet<_> = listed(database, log_directory)?.into_iter().collect();
        match lost.iter().find(|file| left.contains(*file)) {
            None => Ok(()),
            Some(file) => Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "{} is missing, cut short or unreadable, and the database cannot go on \
                     without it: put a copy of it in its place, or restore what can be read and \
                     begin a new repository",
                    file.path.display()
                ),
            )),
        }
    })
}

/// Whether a manifest looks as if edits were missing at its end: there is a file that came
/// after all it knows, or one in place of others that it knows and that are gone, or one that
/// holds what is newer. What a killed compaction has left may look the same, and is no reason
/// to trust the manifest.
fn is_cut_short(database: &Path, log_directory: &Path, listed: &[Listed]) -> Result<bool> {
    let known: HashSet<&Path> = listed.iter().map(|file| file.path.as_path()).collect();
    let mut unlisted = table_files(database)?;
    unlisted.retain(|path| !known.contains(path.as_path()));
    if unlisted.is_empty() {
        return Ok(false);
    }
    let last = listed.iter().map(|file| file.number).max();
    if unlisted.iter().any(|path| number(path) > last) || !missing(listed)?.is_empty() {
        return Ok(true);
    }
    // Without the keys nobody knows which ids were committed: such files come after all others.
    let database = open_as_listed(database, log_directory)?;
    Ok(unlisted_that_counts(&database, &unlisted, (0, 0))?.is_some())
}

pub(super) fn number(path: &Path) -> Option<u64> {
    path.file_stem().and_then(|stem| stem.to_str()?.parse().ok())
}

fn listed(path: &Path, log_directory: &Path) -> Result<Vec<Listed>> {
    listed_in(&open_as_listed(path, log_directory)?)
}

/// Opens the database for nothing but to read it, beside whoever writes it, with all that its
/// manifest lists and its log holds: also where files are missing, of which nothing reads.
///
/// # Errors
/// `Corrupt` where the manifest itself cannot be read.
pub(crate) fn open_as_listed(path: &Path, log_directory: &Path) -> Result<Database> {
    // To RocksDB one that is not there is a drive that fails.
    manifest(path)?;
    // A writer may replace its log and its manifest just then.
    let mut tries = 0;
    loop {
        match Database::open_listing(path, log_directory) {
            Err(_) if tries < MAX_TRIES => tries += 1,
            opened => return opened,
        }
    }
}

/// The files of all families of an open database.
pub(crate) fn listed_in(database: &Database) -> Result<Vec<Listed>> {
    let mut found = Vec::new();
    for (family, _) in FAMILIES {
        let handle = database.family(family)?;
        // SAFETY: the handle is live.
        let family_id = unsafe { sys::rocksdb_column_family_handle_get_id(handle) };
        for file in database.listed_files(family)? {
            let path = database.path_of(&file);
            let Some(number) = number(&path) else { continue };
            let (level, first) = (file.level, file.smallest);
            found.push(Listed { family, family_id, level, number, path, first });
        }
    }
    Ok(found)
}

/// Appends edits, which stay where `check` is content with them.
fn append(database: &Path, lost: &[Listed], check: impl FnOnce() -> Result<()>) -> Result<()> {
    let path = manifest(database)?;
    let what = || format!("giving up files in {}", path.display());
    let end = sound_end(&std::fs::read(&path).context(what)?);
    let manifest = File::options().write(true).open(&path).context(what)?;
    let mut edits = Vec::new();
    for file in lost {
        let mut edit = Vec::new();
        put_varint(&mut edit, TAG_FAMILY);
        put_varint(&mut edit, u64::from(file.family_id));
        put_varint(&mut edit, TAG_DELETED_FILE);
        put_varint(&mut edit, u64::from(file.level));
        put_varint(&mut edit, file.number);
        edits.extend(record(end + edits.len(), &edit));
    }
    let cut = || manifest.set_len(end as u64).and_then(|()| manifest.sync_all());
    let done = cut()
        .and_then(|()| manifest.write_all_at(&edits, end as u64))
        .and_then(|()| manifest.sync_all())
        .context(what)
        .and_then(|()| check());
    if done.is_err() {
        // As it was; where that fails, too, the next repair finds it half written.
        let _ = cut();
    }
    done
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::rocks::record_log::BLOCK_BYTES;
    use crate::rocks::{Family, ReadMode};

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
        assert_eq!(give_up(&unreadable).files, 5);
        assert_eq!(give_up(&HashSet::new()).files, 0);
        // What a killed compaction left is no loss.
        let torn = folder.path().join("db/999999.sst");
        std::fs::write(&torn, b"half").unwrap();
        assert_eq!(give_up(&HashSet::from([torn.clone()])).files, 0);
        assert!(!torn.exists() && !torn.with_extension(GIVEN_UP_ENDING).exists());
        assert_eq!(calls.get(), 1);
        let database = open(folder.path(), false).unwrap();
        for (family, _) in FAMILIES {
            let value = database.get(family, b"key", ReadMode::Cached).unwrap().unwrap();
            assert_eq!(*value, [1]);
        }
        drop(database);
        fill(folder.path(), false, 3);
        // What was given up is kept.
        let is_kept = |path: &PathBuf| path.with_extension(GIVEN_UP_ENDING).exists();
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
        put_varint(&mut edit, TAG_FAMILY);
        put_varint(&mut edit, 0);
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
