//! Giving up files that nobody can read: with an edit at the end of the manifest.
//!
//! RocksDB opens no database for writing of which a file is lost, and offers nothing to
//! strike one off: it deletes only files with nothing below them, and none of level 0,
//! where what was written last is. Its own tool for this (`ldb unsafe_remove_sst_file`)
//! appends an edit to the manifest, and so does this.
//!
//! Of the format (RocksDB's wiki: *Write Ahead Log File Format*, *MANIFEST*; numbers are
//! little endian, varints are LEB128):
//!
//! ```text
//! CURRENT:   the manifest's name, a line break
//! manifest:  blocks of 32 KiB; records do not begin in the last 6 bytes of one
//! record:    CRC-32C of what follows the length, masked (4), length (2), kind (1: 1 for a
//!            whole edit, 2 for its beginning, 3 for a piece of it, 4 for its end), bytes
//! edit:      200, family; 6, level, number of the file that is deleted: all varints
//! ```
//!
//! A crash leaves edits that are there or not; each is whole by its checksum.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use librocksdb_sys as sys;

use super::table::put_varint;
use super::{Database, FAMILIES};

const BLOCK_BYTES: u64 = 32 << 10;
const HEADER_BYTES: u64 = 7;
const WHOLE: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;
const TAG_FAMILY: u64 = 200;
const TAG_DELETED_FILE: u64 = 6;
/// Openings of a database that is being written.
const MAX_TRIES: u32 = 5;
const MASK_DELTA: u32 = 0xa282_ead8;

/// A file as the manifest knows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Listed {
    family: u32,
    level: u32,
    number: u64,
    path: PathBuf,
}

/// The files of all families, beside whoever writes the database.
///
/// # Errors
/// `Corrupt` where the manifest itself cannot be read.
pub(crate) fn all_files(database: &Path, log_directory: &Path) -> Result<HashSet<PathBuf>> {
    Ok(listed(database, log_directory)?.into_iter().map(|file| file.path).collect())
}

/// Strikes off the files of a database that are not there, and those of which
/// `is_unreadable` says so. `before` is called before anything changes. Durable on return;
/// how many there were. The caller holds the writer's lock, and nobody else has the
/// database open for writing.
///
/// # Errors
/// `Corrupt` where the manifest cannot be read, or takes no edits.
pub(crate) fn give_up_lost(
    database: &Path,
    log_directory: &Path,
    is_unreadable: impl Fn(&Path) -> bool,
    before: impl FnOnce() -> Result<()>,
) -> Result<u64> {
    let is_lost = |file: &Listed| !file.path.exists() || is_unreadable(&file.path);
    let lost: Vec<_> =
        listed(database, log_directory)?.into_iter().filter(|file| is_lost(file)).collect();
    if lost.is_empty() {
        return Ok(0);
    }
    before()?;
    append(database, &lost).context(|| format!("giving up files of {}", database.display()))?;
    let left: HashSet<_> = listed(database, log_directory)?.into_iter().collect();
    match lost.iter().find(|file| left.contains(*file)) {
        None => Ok(lost.len() as u64),
        Some(file) => Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "{} is missing, cut short or unreadable, and the database cannot go on without \
                 it: put a copy of it in its place, or restore what can be read and begin a new \
                 repository",
                file.path.display()
            ),
        )),
    }
}

fn listed(path: &Path, log_directory: &Path) -> Result<Vec<Listed>> {
    // A writer may replace its log and its manifest just then.
    let mut tries = 0;
    let database = loop {
        match Database::open_listing(path, log_directory) {
            Err(_) if tries < MAX_TRIES => tries += 1,
            opened => break opened?,
        }
    };
    let mut found = Vec::new();
    for (family, _) in FAMILIES {
        // SAFETY: the handle is live.
        let id = unsafe { sys::rocksdb_column_family_handle_get_id(database.family(family)?) };
        for file in database.listed_files(family)? {
            let path = database.path_of(&file);
            let number = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok());
            let Some(number) = number else { continue };
            found.push(Listed { family: id, level: file.level, number, path });
        }
    }
    Ok(found)
}

fn append(database: &Path, lost: &[Listed]) -> std::io::Result<()> {
    let current = std::fs::read_to_string(database.join("CURRENT"))?;
    let mut manifest =
        File::options().write(true).open(database.join(current.trim_end_matches('\n')))?;
    let mut end = manifest.seek(SeekFrom::End(0))?;
    for file in lost {
        let mut edit = Vec::new();
        put_varint(&mut edit, TAG_FAMILY);
        put_varint(&mut edit, u64::from(file.family));
        put_varint(&mut edit, TAG_DELETED_FILE);
        put_varint(&mut edit, u64::from(file.level));
        put_varint(&mut edit, file.number);
        let bytes = record(end, &edit);
        manifest.write_all(&bytes)?;
        end += bytes.len() as u64;
    }
    manifest.sync_all()
}

/// An edit as it is written at `offset`: in two pieces where a block ends within it.
fn record(offset: u64, edit: &[u8]) -> Vec<u8> {
    let (mut bytes, mut rest, mut is_first) = (Vec::new(), edit, true);
    loop {
        let left = BLOCK_BYTES - (offset + bytes.len() as u64) % BLOCK_BYTES;
        if left < HEADER_BYTES {
            bytes.resize(bytes.len() + left as usize, 0);
            continue;
        }
        let (piece, after) = rest.split_at(rest.len().min((left - HEADER_BYTES) as usize));
        let kind = match (is_first, after.is_empty()) {
            (true, true) => WHOLE,
            (true, false) => FIRST,
            (false, true) => LAST,
            (false, false) => MIDDLE,
        };
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&[kind]), piece);
        let masked = checksum.rotate_right(15).wrapping_add(MASK_DELTA);
        bytes.extend_from_slice(&masked.to_le_bytes());
        bytes.extend_from_slice(&(piece.len() as u16).to_le_bytes());
        bytes.push(kind);
        bytes.extend_from_slice(piece);
        (rest, is_first) = (after, false);
        if rest.is_empty() {
            return bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rocks::{Family, ReadMode};

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
        let give_up = |is_unreadable: &dyn Fn(&Path) -> bool| {
            let before = || {
                calls.set(calls.get() + 1);
                Ok(())
            };
            give_up_lost(&folder.path().join("db"), folder.path(), is_unreadable, before).unwrap()
        };
        assert_eq!(give_up(&|path| new.iter().any(|lost| *lost == path)), 5);
        assert_eq!(give_up(&|_| false), 0);
        assert_eq!(calls.get(), 1);
        let database = open(folder.path(), false).unwrap();
        for (family, _) in FAMILIES {
            let value = database.get(family, b"key", ReadMode::Cached).unwrap().unwrap();
            assert_eq!(*value, [1]);
        }
        drop(database);
        fill(folder.path(), false, 3);
        let database = open(folder.path(), false).unwrap();
        assert_eq!(*database.get(Family::State, b"key", ReadMode::Cached).unwrap().unwrap(), [3]);
    }

    #[test]
    fn edits_are_read_wherever_a_block_ends() {
        let folder = tempfile::tempdir().unwrap();
        fill(folder.path(), true, 1);
        let path = manifest(folder.path());
        let mut file = File::options().append(true).open(&path).unwrap();
        let mut end = file.metadata().unwrap().len();
        // Edits that change nothing, of lengths that meet the end of a block everywhere.
        let mut edit = Vec::new();
        put_varint(&mut edit, TAG_FAMILY);
        put_varint(&mut edit, 0);
        for blocks in 1..40 {
            while end < blocks * BLOCK_BYTES - 40 {
                let bytes = record(end, &edit.repeat(200));
                let bytes = match end + (bytes.len() as u64) < blocks * BLOCK_BYTES - 40 {
                    true => bytes,
                    false => record(end, &edit),
                };
                file.write_all(&bytes).unwrap();
                end += bytes.len() as u64;
            }
            while end < blocks * BLOCK_BYTES - blocks % 20 {
                let bytes = record(end, &edit[..0]);
                file.write_all(&bytes).unwrap();
                end += bytes.len() as u64;
            }
            let bytes = record(end, &edit.repeat(4));
            file.write_all(&bytes).unwrap();
            end += bytes.len() as u64;
        }
        drop(file);
        let files = all_files(&folder.path().join("db"), folder.path()).unwrap();
        assert_eq!(files.len(), FAMILIES.len());
        let lost = files.iter().min().unwrap();
        let is_lost = |path: &Path| path == lost;
        let give_up = || give_up_lost(&folder.path().join("db"), folder.path(), is_lost, || Ok(()));
        assert_eq!(give_up().unwrap(), 1);
        assert_eq!(manifest(folder.path()), path, "nobody has opened it for writing");
        open(folder.path(), false).unwrap();
        // Behind what is torn no edit counts.
        fill(folder.path(), false, 2);
        let path = manifest(folder.path());
        let mut bytes = std::fs::read(&path).unwrap();
        let torn = bytes.len() - 3;
        bytes.truncate(torn);
        std::fs::write(&path, &bytes).unwrap();
        let lost = all_files(&folder.path().join("db"), folder.path()).unwrap();
        let lost = lost.iter().max().unwrap();
        let done =
            give_up_lost(&folder.path().join("db"), folder.path(), |path| path == lost, || Ok(()));
        assert_eq!(done.unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
