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
use super::{Database, Family, LiveFile, FAMILIES};
use crate::advice::REPAIR;

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
