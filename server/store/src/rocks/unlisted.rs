//! Files that are there and that the database's list, the manifest, does not know.
//!
//! RocksDB deletes them when the database is opened for writing. Mostly that is right: a writer
//! that was killed left them, and what they hold is in listed files or in the log, too. Files
//! that the manifest says were deleted, and those with a lower number than its own, which were
//! there when it was begun, are what was not deleted yet. But where the manifest has lost its
//! end others hold what nothing else does:
//!
//! - documents and counters that are newer than all in the listed files, and are not in the
//!   log: there they are until their file is listed;
//! - chunks and pages that were committed and are not in the database. Chunks are handed over
//!   past the log, but are committed only when their file is listed.
//!
//! What cannot be read was left half written. The index is derived.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use coldrise_block::{ErrorKind, Result};

use super::manifest::{number, told_by};
use super::rebuild::{read_logs, Table};
use super::{Database, Family, ReadMode, FAMILIES};

/// The first of these `unlisted` files that holds what the database does not. They were there
/// before the database was opened, and it was opened as it is listed; `next_chunk` and
/// `next_page` are its own.
///
/// # Errors
/// What the operating system says; `Corrupt` where the manifest cannot be read.
pub(crate) fn unlisted_that_counts(
    database: &Database,
    unlisted: &[PathBuf],
    (next_chunk, next_page): (u64, u64),
) -> Result<Option<PathBuf>> {
    for (path, table) in late_tables(database.path(), unlisted)? {
        let counts = match FAMILIES[table.family].0 {
            Family::Dedup => false,
            family @ (Family::State | Family::Catalog) => is_newer(database, family, &table)?,
            Family::Chunks => {
                is_lacking(database, Family::Chunks, &table, &next_chunk.to_be_bytes())?
            }
            Family::Maps => is_lacking(database, Family::Maps, &table, &next_page.to_be_bytes())?,
        };
        if counts {
            return Ok(Some(path.clone()));
        }
    }
    Ok(None)
}

/// Whether one of these files can be read and may have come after all that the manifest tells.
///
/// # Errors
/// As of [`unlisted_that_counts`].
pub(super) fn has_late(database: &Path, unlisted: &[PathBuf]) -> Result<bool> {
    Ok(!late_tables(database, unlisted)?.is_empty())
}

/// Those of which the manifest does not say that they are to be deleted.
fn late_tables<'a>(database: &Path, unlisted: &'a [PathBuf]) -> Result<Vec<(&'a PathBuf, Table)>> {
    let mut late = Vec::new();
    if unlisted.is_empty() {
        return Ok(late);
    }
    let told = told_by(database)?;
    for path in unlisted {
        let is_late = |number: u64| number >= told.own_number && !told.deleted.contains(&number);
        if number(path).is_some_and(is_late) {
            if let Some(table) = unless_unreadable(Table::open(path))?.flatten() {
                late.push((path, table));
            }
        }
    }
    Ok(late)
}

/// What could be read; of a file that is damaged or gone nothing.
fn unless_unreadable<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => Ok(None),
        read => read.map(Some),
    }
}

/// Whether a file holds what is newer than all in the listed files of its family, and not in
/// the log.
fn is_newer(database: &Database, family: Family, table: &Table) -> Result<bool> {
    let mut known = 0;
    for file in database.listed_files(family)? {
        if let Some(listed) = unless_unreadable(Table::open(&database.path_of(&file)))?.flatten() {
            known = sequences(&listed)?.into_iter().fold(known, u64::max);
        }
    }
    let mut newer = sequences(table)?;
    newer.retain(|sequence| *sequence > known);
    read_logs(database.path(), |change| {
        newer.remove(&change.sequence);
        Ok(())
    })?;
    Ok(!newer.is_empty())
}

/// Of what can be read.
fn sequences(table: &Table) -> Result<HashSet<u64>> {
    let mut found = HashSet::new();
    let read = table.read(
        |_, _| true,
        |entry| {
            found.insert(entry.sequence);
            Ok(())
        },
    );
    unless_unreadable(read)?;
    Ok(found)
}

/// Whether the database lacks a committed value that is at the beginning or the end of a file.
fn is_lacking(database: &Database, family: Family, table: &Table, next: &[u8]) -> Result<bool> {
    for key in table.values_at_ends().into_iter().filter(|key| *key < next) {
        match database.get(family, key, ReadMode::Payload) {
            // It has one, in a file that is damaged or missing.
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {}
            value => {
                if value?.is_none() {
                    return Ok(true);
                }
            }
        }
    }
    Ok(false)
}
