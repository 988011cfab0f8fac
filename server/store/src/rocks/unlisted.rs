//! Files that are there and that the database's list, the manifest, does not know.
//!
//! RocksDB deletes them when the database is opened for writing. Mostly that is right: a writer
//! that was killed left them, and what they hold is in listed files or in the log, too. But
//! where the manifest has lost its end they hold what nothing else does:
//!
//! - what is newer than all that the listed files hold, and is not in the log: there it is until
//!   its file is listed;
//! - chunks and pages that were committed and are not in the database, in a file that comes
//!   after all that the manifest has given a number to. Chunks are handed over past the log,
//!   but are committed only when their file is listed. Files with lower numbers may have been
//!   given up together with what they held, by a gc.
//!
//! What cannot be read was left half written, and never listed. The index is derived.

use std::path::{Path, PathBuf};

use coldrise_block::{Context, ErrorKind, Result};

use super::manifest::number;
use super::rebuild::{read_logs, Table};
use super::record_log::{manifest, records};
use super::table::varint;
use super::{Database, Family, ReadMode, FAMILIES};

const TAG_KEY_ORDER: u64 = 1;
const TAG_LOG_NUMBER: u64 = 2;
const TAG_NEXT_FILE: u64 = 3;
const TAG_PREVIOUS_LOG: u64 = 9;
const TAG_DATABASE_ID: u64 = (1 << 13) + 1;

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
    if unlisted.is_empty() {
        return Ok(None);
    }
    let next_file = next_file(&manifest(database.path())?)?;
    for path in unlisted {
        let Some(table) = unless_unreadable(Table::open(path))?.flatten() else { continue };
        let counts = match FAMILIES[table.family].0 {
            Family::Dedup => false,
            family @ (Family::State | Family::Catalog) => is_newer(database, family, &table)?,
            family @ (Family::Chunks | Family::Maps) => {
                let next = if family == Family::Chunks { next_chunk } else { next_page };
                let is_after = number(path).is_some_and(|number| number >= next_file);
                is_after && is_lacking(database, family, &table, &next.to_be_bytes())?
            }
        };
        if counts {
            return Ok(Some(path.clone()));
        }
    }
    Ok(None)
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
    let highest = highest_sequence(table)?;
    for file in database.listed_files(family)? {
        let listed = unless_unreadable(Table::open(&database.path_of(&file)))?.flatten();
        if listed.map_or(Ok(0), |listed| highest_sequence(&listed))? >= highest {
            return Ok(false);
        }
    }
    let mut is_logged = false;
    read_logs(database.path(), |change| {
        is_logged |= change.sequence == highest;
        Ok(())
    })?;
    Ok(!is_logged)
}

/// Of what can be read.
fn highest_sequence(table: &Table) -> Result<u64> {
    let mut highest = 0;
    let read = table.read(
        |_, _| true,
        |entry| {
            highest = highest.max(entry.sequence);
            Ok(())
        },
    );
    unless_unreadable(read)?;
    Ok(highest)
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

/// The number that the next file gets, as a manifest's last edit tells that does.
fn next_file(manifest: &Path) -> Result<u64> {
    let bytes = std::fs::read(manifest).context(|| format!("reading {}", manifest.display()))?;
    let (edits, _) = records(&bytes);
    // Without one nothing is said of any file.
    Ok(edits.iter().rev().find_map(|edit| next_file_of(edit)).unwrap_or(u64::MAX))
}

/// RocksDB writes it before all that is not named here.
fn next_file_of(mut edit: &[u8]) -> Option<u64> {
    loop {
        match varint(&mut edit)? {
            TAG_NEXT_FILE => return varint(&mut edit),
            TAG_LOG_NUMBER | TAG_PREVIOUS_LOG => {
                varint(&mut edit)?;
            }
            TAG_KEY_ORDER | TAG_DATABASE_ID => {
                let length = usize::try_from(varint(&mut edit)?).ok()?;
                edit = edit.get(length..)?;
            }
            _ => return None,
        }
    }
}
