//! Files that are there and that the database's list, the manifest, does not know.
//!
//! RocksDB deletes them when the database is opened for writing. Mostly that is right: a writer
//! that was killed left them, and what they hold is in listed files or in the log, too. Files
//! that the manifest strikes off are leftovers for sure, and so are those with a lower number
//! than its own, which were there when it was begun, if it goes beyond its beginning. But where
//! the manifest has lost its end others hold what nothing else does:
//!
//! - documents and counters that are newer than all that is known under their keys, in the
//!   listed files or in the log: there they are until their file is listed;
//! - chunks and pages that were committed and that the database does not know, nor that they
//!   were deleted. Chunks are handed over past the log, but are committed only when their file
//!   is listed.
//!
//! Of a file without its end, as a killed writer leaves it half written, its blocks tell. One
//! that has an end and cannot be read was damaged: nobody was killed while writing it. The
//! index is derived.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, ErrorKind, Result};

use super::internal_key::{split, KIND_VALUE};
use super::manifest::{number, told_by, Told};
use super::rebuild::{read_logs, rows, Table};
use super::salvage::{salvage, starts_as};
use super::table::Origin;
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
    next: (u64, u64),
) -> Result<Option<PathBuf>> {
    let told = told_by(database.path())?;
    for path in unlisted {
        let counts = match look(path, &told)? {
            Look::Leftover => false,
            Look::Table(table) => table_counts(database, &table, next)?,
            Look::Damaged => true,
            Look::Torn => torn_counts(database, path, next)?,
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
pub(super) fn is_any_late(database: &Path, unlisted: &[PathBuf]) -> Result<bool> {
    let told = told_by(database)?;
    for path in unlisted {
        if matches!(look(path, &told)?, Look::Table(_)) {
            return Ok(true);
        }
    }
    Ok(false)
}

enum Look {
    /// It is to be deleted, holds nothing, or is gone.
    Leftover,
    Table(Table),
    /// It has an end, and cannot be read.
    Damaged,
    /// It has none.
    Torn,
}

fn look(path: &Path, told: &Told) -> Result<Look> {
    if !number(path).is_some_and(|number| told.may_miss(number)) {
        return Ok(Look::Leftover);
    }
    match Table::open(path) {
        Ok(table) => Ok(table.map_or(Look::Leftover, Look::Table)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Look::Leftover),
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            Ok(if Origin::read(path).is_ok() { Look::Damaged } else { Look::Torn })
        }
        Err(error) => Err(error),
    }
}

struct Version {
    key: Vec<u8>,
    sequence: u64,
    has_value: bool,
}

fn table_counts(database: &Database, table: &Table, next: (u64, u64)) -> Result<bool> {
    match FAMILIES[table.family].0 {
        Family::Dedup => Ok(false),
        Family::State | Family::Catalog => is_newer(database, &entries_of(table)?),
        family @ (Family::Chunks | Family::Maps) => {
            for key in table.values_at_ends() {
                if is_committed(family, key, next) && !knows(database, family, key)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}

/// Of a file of which nobody knows the family.
fn torn_counts(database: &Database, path: &Path, next: (u64, u64)) -> Result<bool> {
    let content = match std::fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        content => content.context(|| format!("reading {}", path.display()))?,
    };
    let family = if starts_as(&content, Family::Maps) { Family::Maps } else { Family::Chunks };
    let Some(found) = salvage(&content, family, None) else { return Ok(false) };
    let mut versions = Vec::new();
    for (key, _) in found.data(&content).filter_map(rows).flatten() {
        if let Some((key, sequence, kind)) = split(&key) {
            let has_value = kind == KIND_VALUE;
            // Those of the index are hashes.
            if key.len() != 32 || key.is_ascii() {
                versions.push(Version { key: key.to_vec(), sequence, has_value });
            }
        }
    }
    let (ids, others): (Vec<_>, Vec<_>) =
        versions.into_iter().partition(|version| version.key.len() == 8 && version.key[0] == 0);
    for version in ids.iter().take(1).chain(ids.last()).filter(|version| version.has_value) {
        let families = [Family::Chunks, Family::Maps];
        let mut is_lacking = families.iter().any(|f| is_committed(*f, &version.key, next));
        for family in families {
            is_lacking = is_lacking && !knows(database, family, &version.key)?;
        }
        if is_lacking {
            return Ok(true);
        }
    }
    Ok(!others.is_empty() && is_newer(database, &others)?)
}

fn is_committed(family: Family, key: &[u8], (next_chunk, next_page): (u64, u64)) -> bool {
    let next = if family == Family::Chunks { next_chunk } else { next_page };
    *key < next.to_be_bytes()[..]
}

/// Whether one of these documents and counters is newer than all that is known under its key.
fn is_newer(database: &Database, versions: &[Version]) -> Result<bool> {
    let families = [Family::State, Family::Catalog];
    let mut known: HashMap<Vec<u8>, u64> = HashMap::new();
    let mut learn = |key: &[u8], sequence| {
        let newest = known.entry(key.to_vec()).or_insert(sequence);
        *newest = sequence.max(*newest);
    };
    for family in families {
        for file in database.listed_files(family)? {
            if let Some(table) = unless_unreadable(Table::open(&database.path_of(&file)))?.flatten()
            {
                entries_of(&table)?.iter().for_each(|entry| learn(&entry.key, entry.sequence));
            }
        }
    }
    read_logs(database.path(), |change| {
        if families.contains(&FAMILIES[change.family].0) {
            learn(change.key, change.sequence);
        }
        Ok(())
    })?;
    Ok(versions.iter().any(|version| match known.get(&version.key) {
        Some(newest) => version.sequence > *newest,
        None => version.has_value,
    }))
}

/// Whether the database has this chunk or page, or had it in what is lost, or knows that it was
/// deleted.
fn knows(database: &Database, family: Family, key: &[u8]) -> Result<bool> {
    let mut files = database.listed_files(family)?;
    files.retain(|file| *file.smallest <= *key && *key <= *file.largest);
    for file in &files {
        let path = database.path_of(file);
        if !path.try_exists().context(|| format!("looking for {}", path.display()))? {
            return Ok(true);
        }
    }
    match database.get(family, key, ReadMode::Payload) {
        Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(true),
        value => {
            if value?.is_some() {
                return Ok(true);
            }
        }
    }
    let mut is_known = false;
    for file in &files {
        if let Some(table) = unless_unreadable(Table::open(&database.path_of(file)))?.flatten() {
            let around = |before: &[u8], cut: &[u8]| *before <= *key && *key <= *cut;
            let read = table.read(around, |entry| {
                is_known |= entry.key == key;
                Ok(())
            });
            unless_unreadable(read)?;
        }
    }
    read_logs(database.path(), |change| {
        is_known |= FAMILIES[change.family].0 == family && change.key == key;
        Ok(())
    })?;
    Ok(is_known)
}

/// What could be read; of a file that is damaged or gone nothing.
fn unless_unreadable<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => Ok(None),
        read => read.map(Some),
    }
}

/// Of what can be read.
fn entries_of(table: &Table) -> Result<Vec<Version>> {
    let mut found = Vec::new();
    let read = table.read(
        |_, _| true,
        |entry| {
            let (key, has_value) = (entry.key.to_vec(), entry.value.is_some());
            found.push(Version { key, sequence: entry.sequence, has_value });
            Ok(())
        },
    );
    unless_unreadable(read)?;
    Ok(found)
}
