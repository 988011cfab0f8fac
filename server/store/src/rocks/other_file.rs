//! Finds the file of the database that is missing or differs from the listed one.
//!
//! RocksDB compares lengths and unique ids when it opens a database, and then often blames the
//! manifest. This module compares the files themselves with the manifest: length, column family
//! and, for files of the same length, the first key.

use std::collections::HashMap;
use std::path::Path;

use coldrise_block::{Error, ErrorKind, Result};

use super::salvage::read_what_is_left;
use super::table::family_of;
use super::{Database, FAMILIES, Family, LiveFile, ReadMode};
use crate::advice::REPAIR;
use crate::descriptors::open_tables;

/// The error of opening the database. It names the missing or different file, if that is the
/// reason.
pub(super) fn name_other_file(database: &Path, log_directory: &Path, error: Error) -> Error {
    if error.kind() != ErrorKind::Corrupt {
        return error;
    }
    match find(database, log_directory) {
        Ok(Some(found)) => Error::new(ErrorKind::Corrupt, found).advise(REPAIR),
        _ => match number_in(&error.message()) {
            Some(number) => {
                let path = database.join(format!("{number:06}.sst"));
                let message = other_file(&path, "its unique id is another one");
                Error::new(ErrorKind::Corrupt, message).advise(REPAIR)
            }
            None => error,
        },
    }
}

fn other_file(path: &Path, why: &str) -> String {
    format!("{} is not the file that the database lists: {why}", path.display())
}

/// The file number in RocksDB's text, for a file of which only the unique id differs: RocksDB's C
/// interface does not return the ids in the manifest.
fn number_in(text: &str) -> Option<u64> {
    let (_, rest) = text.split_once("Mismatch in unique ID on table file ")?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Looks for a listed file with another unique id. With a limit of open files RocksDB opens only
/// 16 files with the database, and compares a further one when it first reads it.
///
/// # Errors
/// That of RocksDB, if there is one. Other damage is not an error here.
pub(super) fn refuse_other_files(database: &Database) -> Result<()> {
    if open_tables().is_none() {
        return Ok(());
    }
    for (family, _) in FAMILIES {
        for file in database.listed_files(family)? {
            let mut cursor = database.cursor(family, ReadMode::Payload)?;
            match cursor.seek(&file.smallest) {
                Err(error) if number_in(&error.message()).is_some() => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

/// The fault of the first file that is missing or differs.
fn find(database: &Path, log_directory: &Path) -> Result<Option<String>> {
    let opened = Database::open_listing(database, log_directory)?;
    let mut files: Vec<(Family, LiveFile)> = Vec::new();
    for (family, _) in FAMILIES {
        let listed = opened.listed_files(family)?;
        files.extend(listed.into_iter().map(|file| (family, file)));
    }
    let mut lengths: HashMap<u64, u32> = HashMap::new();
    files.iter().for_each(|(_, file)| *lengths.entry(file.bytes).or_default() += 1);
    for (family, file) in &files {
        let path = opened.path_of(file);
        let Ok(found) = path.metadata() else {
            return Ok(Some(format!("{} is missing", path.display())));
        };
        let is_twin = lengths.get(&file.bytes).is_some_and(|count| *count > 1);
        let why = if found.len() != file.bytes {
            format!("it has {} bytes, and the list says {}", found.len(), file.bytes)
        } else if family_of(&path).is_ok_and(|(found, _)| found != *family) {
            "it holds keys of another column family".to_owned()
        } else if is_twin && first_key(&path).is_some_and(|key| key != file.smallest) {
            "it begins with another key than the list says".to_owned()
        } else {
            continue;
        };
        return Ok(Some(other_file(&path, &why)));
    }
    Ok(None)
}

fn first_key(path: &Path) -> Option<Vec<u8>> {
    let mut key = None;
    let _ = read_what_is_left(path, |entry| {
        key = Some(entry.key.to_vec());
        Err(Error::new(ErrorKind::Interrupted, "one key is enough"))
    });
    key
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rocks::{SstWriter, check_listed};
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    /// More files than RocksDB opens at once with a limit.
    const FILES: u64 = 40;

    #[test]
    fn each_of_many_exchanged_files_is_found_with_a_low_limit() {
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(4096), ..limit }).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("db");
        let database = Database::open_primary(&path, folder.path(), true).unwrap();
        let staging = folder.path().join("staging.sst");
        for number in 0..FILES {
            let mut file = SstWriter::create(&database, &staging).unwrap();
            file.put(&number.to_be_bytes(), b"the same length in each file").unwrap();
            database.ingest_chunks(&file.finish().unwrap()).unwrap();
        }
        let files = database.listed_files(Family::Chunks).unwrap();
        assert_eq!(files.len() as u64, FILES);
        let paths: Vec<_> = files.iter().map(|file| database.path_of(file)).collect();
        drop(database);
        check_listed(&path, folder.path()).unwrap();
        let exchange = |a: &Path, b: &Path| {
            let aside = folder.path().join("aside");
            std::fs::rename(a, &aside).unwrap();
            std::fs::rename(b, a).unwrap();
            std::fs::rename(&aside, b).unwrap();
        };
        for pair in paths.chunks_exact(2) {
            exchange(&pair[0], &pair[1]);
            let error = check_listed(&path, folder.path()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            exchange(&pair[0], &pair[1]);
        }
        check_listed(&path, folder.path()).unwrap();
    }
}
