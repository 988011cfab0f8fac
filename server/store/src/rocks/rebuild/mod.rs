//! The list of the database's files is made anew from the files, where it is lost.
//!
//! RocksDB's list, the manifest, is one small file. It tells which files count, on which
//! level each is, and how far the log has been taken over; without it no file is found,
//! though all are there. Of two entries of one key the one with the higher sequence number
//! counts, or, where a compaction has left one without, that in the file with the higher number:
//! so the files tell that themselves.
//!
//! - Files that overlap no other one of their family stay as they are, on the lowest level.
//!   Of those that overlap the largest stay.
//! - Of the entries of all others, and of the logs, the newest of each key is kept, if the
//!   file that stays has none that is newer. They become files of the level above. RocksDB
//!   writes these, in a database of its own beside, of which the sequence numbers begin
//!   behind all others, so that they count.
//! - The logs are in that, all of them: what had been taken over already is not newer than
//!   what is in the files. A log holds all changes from its beginning on, so the newest of
//!   a key that is in one is the newest there is.
//! - A chunk or a page has one content for ever, and an id is never given out again. They
//!   get into the database past the log, too, so that a deletion in a log tells nothing:
//!   deletions do not count, and what comes back is of no use to anybody until a gc.
//! - The index is derived: of the files that overlap the others are left out, and a
//!   repair adds what is missing.
//!
//! Files that were replaced, and that a crash has kept from being deleted, are gone as far as the
//! list that was there tells them. Where nothing can be read of it they count like the others: a
//! document may come back that was deleted.
//!
//! Damaged chunks in the first or the last block of a file, and in files that are read whole,
//! leave the index of their file here, as in every repair.
//!
//! Order: 1. the files of the level above are written, and get numbers that nobody has;
//! 2. the manifest is written; 3. `CURRENT` names it. All durable. A crash before the end
//! leaves files with entries that others have as well: the next time they are read as any.
//!
//! Of the manifest (RocksDB's `version_edit.cc`) an edit is a list of varints and texts
//! behind their lengths: 1, the name of the order of keys; 2, the first log that counts; 3,
//! the next number of a file; 4, the last sequence number; 9, 0; 10, the first log that is
//! kept; 100, a file: level,
//! number, bytes, first and last key, lowest and highest sequence number; 200, the family
//! that is meant; 201, its name, where it begins; 203, the highest family.

mod logs;
mod tables;
#[cfg(test)]
mod tests;

use std::collections::btree_map::{BTreeMap, Entry as Slot};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::give_up::set_aside;
use super::mend::{mend, table_files, Extent};
use super::record_log::put_manifest;
use super::table::{put_varint, Handle};
use super::{internal_key, Database, Family, FAMILIES};
pub(super) use logs::read as read_logs;
pub(super) use tables::{rows, Table};

/// In the database's folder, for the database beside.
const FOLDER: &str = "rebuild";
const LOWEST_LEVEL: u64 = 6;
/// Entries that are written together.
const MAX_BATCH_BYTES: usize = 4 << 20;
/// Sequence numbers from which the new ones begin are a multiple of it. So many changes
/// nobody makes between two times, and there are 2^56 sequence numbers.
const SEQUENCE_STEP: u64 = 1 << 40;

pub(super) const TAG_KEY_ORDER: u64 = 1;
pub(super) const TAG_LOG_NUMBER: u64 = 2;
pub(super) const TAG_NEXT_FILE: u64 = 3;
pub(super) const TAG_LAST_SEQUENCE: u64 = 4;
pub(super) const TAG_PREVIOUS_LOG: u64 = 9;
pub(super) const TAG_FIRST_KEPT_LOG: u64 = 10;
const TAG_FILE: u64 = 100;
pub(super) const TAG_FAMILY: u64 = 200;
const TAG_FAMILY_NAME: u64 = 201;
pub(super) const TAG_HIGHEST_FAMILY: u64 = 203;

/// What became of files that were found damaged on the way.
#[derive(Default)]
pub(super) struct Rebuilt {
    pub(super) mended: u64,
    pub(super) lost_blocks: u64,
    /// Nothing of them can be read.
    pub(super) unreadable: u64,
}

/// Makes the list of the files anew. What leads to the data has been mended in all of them. The
/// caller holds the writer's lock, nobody else has the
/// database open for writing, and whoever opens it next takes nothing for granted that the
/// index or the counters say.
///
/// # Errors
/// `Corrupt` where a file changes meanwhile; `NoSpace`; what the operating system says. Then
/// the list is as it was.
pub(super) fn rebuild(database: &Path, log_directory: &Path) -> Result<Rebuilt> {
    let folder = database.join(FOLDER);
    remove_beside(database)?;
    let mut rebuilt = Rebuilt::default();
    let mut tables = Vec::new();
    for path in table_files(database)? {
        match Table::open(&path) {
            Err(error) if error.kind() == ErrorKind::Corrupt => tables.extend(rebuilt.mend(&path)?),
            opened => tables.extend(opened?),
        }
    }
    let (kept, others) = divide(tables);
    let others = rebuilt.mend_chunks(others, |_| true)?;
    let mut newest = Newest::gather(database, &others)?;
    let kept = rebuilt.mend_chunks(kept, |table| newest.is_in_range_of(table))?;
    newest.drop_older_than(&kept)?;
    let highest = kept.iter().map(Table::sequence_at_ends).fold(newest.highest, u64::max);
    let base = (highest / SEQUENCE_STEP + 2) * SEQUENCE_STEP;
    let last = base + newest.len() as u64;

    std::fs::create_dir(&folder).context(|| format!("making {}", folder.display()))?;
    let mut added = newest.write(&folder, log_directory, &others, base)?;
    let mut next_number = highest_number(database)? + 1;
    for table in &mut added {
        let path = database.join(format!("{next_number:06}.sst"));
        std::fs::rename(&table.path, &path).context(|| format!("making {}", path.display()))?;
        (table.path, table.number) = (path, next_number);
        next_number += 1;
    }
    let of_level = |level, lowest, highest| {
        move |table: &Table| {
            let sequence = table.sequence.map(|sequence| (sequence, sequence));
            (table.family, file_edit(table, level, sequence.unwrap_or((lowest, highest))))
        }
    };
    // As if they had been there from the beginning: RocksDB rewrites files of the lowest
    // level to make it so.
    let files = kept.iter().map(of_level(LOWEST_LEVEL, 0, 0));
    let files = files.chain(added.iter().map(of_level(LOWEST_LEVEL - 1, base, last)));
    put_list(database, next_number, &files.collect::<Vec<_>>(), last)?;
    // What is left there is of no use to anybody: otherwise the next writer removes it.
    let _ = remove_beside(database);
    tracing::warn!(
        kept = kept.len(),
        others = others.len(),
        entries = newest.len(),
        "the list of the database's files was made anew"
    );
    Ok(rebuilt)
}

impl Rebuilt {
    /// Leaves out of a file what cannot be read, and opens it. Where nothing is left it is set
    /// aside.
    fn mend(&mut self, path: &Path) -> Result<Option<Table>> {
        match self.try_mend(path) {
            Err(error) if error.kind() != ErrorKind::Corrupt => Err(error),
            Ok(Some(table)) => Ok(Some(table)),
            _ => {
                set_aside(path)?;
                self.unreadable += 1;
                Ok(None)
            }
        }
    }

    fn try_mend(&mut self, path: &Path) -> Result<Option<Table>> {
        let done = mend(path, Extent::Everything, || Ok(()))?;
        self.mended += u64::from(!done.is_sound());
        self.lost_blocks += done.lost;
        Table::open(path)
    }

    /// The same for files of chunks that are about to be read.
    fn mend_chunks(
        &mut self,
        tables: Vec<Table>,
        is_read: impl Fn(&Table) -> bool,
    ) -> Result<Vec<Table>> {
        let mut sound = Vec::new();
        for table in tables {
            if FAMILIES[table.family].0 != Family::Chunks || !is_read(&table) {
                sound.push(table);
                continue;
            }
            match self.try_mend(&table.path) {
                // Its blocks may be sound: reading it tells.
                Err(error) if error.kind() == ErrorKind::Corrupt => sound.push(table),
                Ok(None) => {
                    set_aside(&table.path)?;
                    self.unreadable += 1;
                }
                mended => sound.extend(mended?),
            }
        }
        Ok(sound)
    }
}

/// Removes the database beside, if a crash has left it.
///
/// # Errors
/// What the operating system says.
pub(super) fn remove_beside(database: &Path) -> Result<()> {
    let folder = database.join(FOLDER);
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(|| format!("removing {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Whether what has a key once has it for ever.
fn is_for_ever(family: usize) -> bool {
    matches!(FAMILIES[family].0, Family::Chunks | Family::Maps)
}

fn unknown_family(path: &Path) -> Error {
    let message = format!("{} is no file of this database", path.display());
    Error::new(ErrorKind::Corrupt, message)
}

/// The files that stay, and those that overlap one of them.
fn divide(mut tables: Vec<Table>) -> (Vec<Table>, Vec<Table>) {
    tables.sort_by_key(|table| std::cmp::Reverse((table.bytes, table.number)));
    // By their first keys.
    let mut kept: Vec<BTreeMap<Vec<u8>, Table>> =
        FAMILIES.iter().map(|_| BTreeMap::new()).collect();
    let mut others = Vec::new();
    for table in tables {
        let of_family = &mut kept[table.family];
        let before = of_family.range(..=table.last_key().to_vec()).next_back();
        match before.is_some_and(|(_, before)| before.overlaps(&table)) {
            true => others.push(table),
            false => {
                of_family.insert(table.first_key().to_vec(), table);
            }
        }
    }
    (kept.into_iter().flat_map(BTreeMap::into_values).collect(), others)
}

/// The newest versions of keys, by family.
struct Newest {
    families: Vec<BTreeMap<Vec<u8>, Version>>,
    /// Highest sequence number that was seen.
    highest: u64,
}

struct Version {
    age: Age,
    value: Value,
}

/// When an entry was written.
#[derive(Clone, Copy)]
struct Age {
    /// 0 where a compaction has put it on the lowest level: nobody tells any more.
    sequence: u64,
    /// Of the file that it is in; of a log more than any. What a compaction writes has a higher
    /// one than what it has read, which a crash may have left.
    number: u64,
}

impl Age {
    fn is_newer_than(self, other: Age) -> bool {
        match self.sequence == 0 || other.sequence == 0 {
            true => self.number > other.number,
            false => self.sequence > other.sequence,
        }
    }
}

enum Value {
    Deleted,
    /// In one of the files that do not stay.
    InTable(usize, Handle),
    InLog(Vec<u8>),
}

impl Newest {
    /// Of the files that do not stay, and the logs.
    fn gather(database: &Path, others: &[Table]) -> Result<Newest> {
        let families = FAMILIES.iter().map(|_| BTreeMap::new()).collect();
        let mut newest = Newest { families, highest: 0 };
        let is_derived = |table: &Table| FAMILIES[table.family].0 == Family::Dedup;
        for (at, table) in others.iter().enumerate().filter(|(_, table)| !is_derived(table)) {
            table.read(
                |_, _| true,
                |entry| {
                    let value =
                        entry.value.map_or(Value::Deleted, |place| Value::InTable(at, place));
                    let age = Age { sequence: entry.sequence, number: table.number };
                    newest.add(table.family, entry.key, age, value);
                    Ok(())
                },
            )?;
        }
        logs::read(database, |change| {
            let value = change.value.map_or(Value::Deleted, |value| Value::InLog(value.to_vec()));
            let age = Age { sequence: change.sequence, number: u64::MAX };
            newest.add(change.family, change.key, age, value);
            Ok(())
        })?;
        Ok(newest)
    }

    fn add(&mut self, family: usize, key: &[u8], age: Age, value: Value) {
        self.highest = self.highest.max(age.sequence);
        if is_for_ever(family) && matches!(value, Value::Deleted) {
            return;
        }
        let version = Version { age, value };
        match self.families[family].entry(key.to_vec()) {
            Slot::Occupied(mut known) if age.is_newer_than(known.get().age) => {
                known.insert(version);
            }
            Slot::Occupied(_) => {}
            Slot::Vacant(slot) => {
                slot.insert(version);
            }
        }
    }

    /// Whether a file may hold a version of a key that is here.
    fn is_in_range_of(&self, table: &Table) -> bool {
        let range = table.first_key().to_vec()..=table.last_key().to_vec();
        self.families[table.family].range(range).next().is_some()
    }

    /// Leaves out what is not newer than what the files that stay hold.
    fn drop_older_than(&mut self, kept: &[Table]) -> Result<()> {
        for table in kept {
            if !self.is_in_range_of(table) {
                continue;
            }
            let versions = &mut self.families[table.family];
            let mut older = Vec::new();
            let is_wanted = |before: &[u8], cut: &[u8]| {
                before > cut || versions.range(before.to_vec()..=cut.to_vec()).next().is_some()
            };
            table.read(is_wanted, |entry| {
                self.highest = self.highest.max(entry.sequence);
                let counts = entry.value.is_some() || !is_for_ever(table.family);
                if let Some(version) = versions.get(entry.key).filter(|_| counts) {
                    let age = Age { sequence: entry.sequence, number: table.number };
                    if !version.age.is_newer_than(age) {
                        older.push(entry.key.to_vec());
                    }
                }
                Ok(())
            })?;
            for key in older {
                versions.remove(&key);
            }
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.families.iter().map(BTreeMap::len).sum()
    }

    /// Writes them with sequence numbers behind `base`; the files.
    fn write(
        &self,
        folder: &Path,
        log_directory: &Path,
        others: &[Table],
        base: u64,
    ) -> Result<Vec<Table>> {
        put_list(folder, 1, &[], base)?;
        let database = Database::open_for_rebuild(folder, log_directory)?;
        let mut batch = database.batch();
        for (versions, (family, _)) in self.families.iter().zip(FAMILIES) {
            for (key, version) in versions {
                match &version.value {
                    Value::Deleted => batch.delete(family, key)?,
                    Value::InLog(value) => batch.put(family, key, value)?,
                    Value::InTable(at, place) => {
                        batch.put(family, key, &read_value(&others[*at].path, *place)?)?;
                    }
                }
                if batch.bytes() > MAX_BATCH_BYTES {
                    database.write(std::mem::replace(&mut batch, database.batch()), false)?;
                }
            }
        }
        database.write(batch, false)?;
        database.flush()?;
        let mut written = Vec::new();
        for (family, _) in FAMILIES {
            for file in database.listed_files(family)? {
                written.extend(Table::open(&database.path_of(&file))?);
            }
        }
        Ok(written)
    }
}

fn read_value(path: &Path, (offset, bytes): Handle) -> Result<Vec<u8>> {
    let mut value = vec![0; bytes as usize];
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut value, offset));
    read.context(|| format!("reading {}", path.display()))?;
    Ok(value)
}

/// The highest number that a file of the database has in its name.
pub(super) fn highest_number(database: &Path) -> Result<u64> {
    let what = || format!("reading {}", database.display());
    let mut highest = 0;
    for entry in std::fs::read_dir(database).context(what)? {
        let name = entry.context(what)?.file_name().into_string().unwrap_or_default();
        let digits = name.split(|c: char| !c.is_ascii_digit());
        highest = digits.filter_map(|digits| digits.parse().ok()).fold(highest, u64::max);
    }
    Ok(highest)
}

/// Makes the list of a database that has these files, each an edit of its family.
/// `number` and what comes behind is free.
fn put_list(database: &Path, number: u64, files: &[(usize, Vec<u8>)], last: u64) -> Result<()> {
    let families = (0..).zip(FAMILIES).map(|(id, (_, name))| {
        let mut edit = Vec::new();
        if id > 0 {
            put_numbers(&mut edit, &[TAG_FAMILY, id, TAG_FAMILY_NAME]);
            put_text(&mut edit, name.to_bytes());
        }
        put_numbers(&mut edit, &[TAG_KEY_ORDER]);
        put_text(&mut edit, internal_key::ORDER);
        // All logs there are count no more.
        put_numbers(&mut edit, &[TAG_LOG_NUMBER, number]);
        edit
    });
    let files = files.iter().map(|(family, file)| {
        let mut edit = Vec::new();
        put_numbers(&mut edit, &[TAG_FAMILY, *family as u64]);
        edit.extend_from_slice(file);
        edit
    });
    let highest_family = FAMILIES.len() as u64 - 1;
    let mut end = Vec::new();
    put_numbers(&mut end, &[TAG_LOG_NUMBER, number, TAG_PREVIOUS_LOG, 0]);
    put_numbers(&mut end, &[TAG_NEXT_FILE, number + 1, TAG_LAST_SEQUENCE, last]);
    put_numbers(&mut end, &[TAG_FIRST_KEPT_LOG, number, TAG_HIGHEST_FAMILY, highest_family]);
    put_manifest(database, number, families.chain(files).chain([end]))
}

pub(super) fn file_edit(table: &Table, level: u64, (lowest, highest): (u64, u64)) -> Vec<u8> {
    let mut edit = Vec::new();
    put_numbers(&mut edit, &[TAG_FILE, level, table.number, table.bytes]);
    put_text(&mut edit, &table.smallest);
    put_text(&mut edit, &table.largest);
    put_numbers(&mut edit, &[lowest, highest]);
    edit
}

pub(super) fn put_numbers(edit: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|number| put_varint(edit, *number));
}

fn put_text(edit: &mut Vec<u8>, text: &[u8]) {
    put_varint(edit, text.len() as u64);
    edit.extend_from_slice(text);
}
