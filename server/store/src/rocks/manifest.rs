//! The list of the database's files, RocksDB's manifest: read through RocksDB, and changed with
//! edits at its end, which RocksDB's own tool (`ldb unsafe_remove_sst_file`) does as well.
//!
//! A manifest is a file of records, see [`super::record_log`]; each is an edit (RocksDB's
//! wiki: *MANIFEST*), here of varints as LEB128 has them: 200, family; 6, level, number of
//! the file that is deleted. What a crash left half written at its end goes before anything
//! follows: nothing behind it would count, and RocksDB ends its silence about it then.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use librocksdb_sys as sys;

use super::files::LiveFile;
use super::rebuild::{
    put_numbers, TAG_FAMILY, TAG_FIRST_KEPT_LOG, TAG_HIGHEST_FAMILY, TAG_KEY_ORDER,
    TAG_LAST_SEQUENCE, TAG_LOG_NUMBER, TAG_NEXT_FILE, TAG_PREVIOUS_LOG,
};
use super::record_log::{manifest, record, records, sound_end};
use super::table::varint;
use super::{Database, Family, FAMILIES};

const TAG_COMPACT_POINTER: u64 = 5;
const TAG_DELETED_FILE: u64 = 6;
const TAG_DATABASE_ID: u64 = (1 << 13) + 1;
/// Openings of a database that is being written.
const MAX_TRIES: u32 = 5;

/// A file as the manifest knows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Listed {
    pub(crate) family: Family,
    family_id: u32,
    pub(super) level: u32,
    pub(super) number: u64,
    pub(crate) path: PathBuf,
    /// Its first key, and its last one.
    pub(crate) first: Vec<u8>,
    pub(super) last: Vec<u8>,
}

impl Listed {
    /// An edit that strikes it off.
    pub(super) fn deletion(&self) -> Vec<u8> {
        let mut edit = Vec::new();
        put_numbers(&mut edit, &[TAG_FAMILY, u64::from(self.family_id)]);
        put_numbers(&mut edit, &[TAG_DELETED_FILE, u64::from(self.level), self.number]);
        edit
    }
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
    let edits: Vec<_> = lost.iter().map(Listed::deletion).collect();
    strike_off_with(database, log_directory, lost, &edits)
}

/// The same with other edits that do so.
pub(super) fn strike_off_with(
    database: &Path,
    log_directory: &Path,
    lost: &[Listed],
    edits: &[Vec<u8>],
) -> Result<()> {
    append(database, edits, || {
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

pub(super) fn number(path: &Path) -> Option<u64> {
    path.file_stem().and_then(|stem| stem.to_str()?.parse().ok())
}

/// The files of all families.
///
/// # Errors
/// As of [`open_as_listed`].
pub(super) fn listed(path: &Path, log_directory: &Path) -> Result<Vec<Listed>> {
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
            let LiveFile { level, smallest: first, largest: last, .. } = file;
            found.push(Listed { family, family_id, level, number, path, first, last });
        }
    }
    Ok(found)
}

/// What a manifest tells beside the files that it lists.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// The manifest's own: what has a lower one was there when it was begun.
    own_number: u64,
    /// Files that it has struck off.
    deleted: HashSet<u64>,
    /// The number that the next file gets.
    pub(super) next_file: u64,
    /// How often it tells up to where a family needs the logs no more: of each family where
    /// it begins, and once more when the logs that were there then had been read.
    log_numbers: usize,
}

/// Reads it, as far as the manifest goes.
///
/// # Errors
/// `Corrupt` where there is none; what the operating system says.
pub(super) fn told_by(database: &Path) -> Result<Told> {
    let path = manifest(database)?;
    let bytes = std::fs::read(&path).context(|| format!("reading {}", path.display()))?;
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let own_number = name.rsplit('-').next().and_then(|number| number.parse().ok()).unwrap_or(0);
    let mut told = Told { own_number, ..Told::default() };
    for edit in records(&bytes).0 {
        told.hear(&edit);
    }
    Ok(told)
}

impl Told {
    /// Whether a file with this number may have come after all that is told: not those that were
    /// struck off, nor those that were there when the manifest was begun. What the logs held
    /// then was written to files before, which are listed next.
    pub(super) fn may_miss(&self, number: u64) -> bool {
        let is_begun = self.log_numbers >= 2 * FAMILIES.len();
        !self.deleted.contains(&number) && (number >= self.own_number || !is_begun)
    }

    /// RocksDB writes the deleted files of an edit before those that come, and before them
    /// nothing but what is named here.
    fn hear(&mut self, mut edit: &[u8]) -> Option<()> {
        loop {
            match varint(&mut edit)? {
                TAG_DELETED_FILE => {
                    varint(&mut edit)?;
                    self.deleted.insert(varint(&mut edit)?);
                }
                TAG_NEXT_FILE => self.next_file = self.next_file.max(varint(&mut edit)?),
                TAG_LOG_NUMBER => {
                    varint(&mut edit)?;
                    self.log_numbers += 1;
                }
                tag => {
                    let (numbers, texts) = match tag {
                        TAG_KEY_ORDER | TAG_DATABASE_ID => (0, 1),
                        TAG_COMPACT_POINTER => (1, 1),
                        TAG_LAST_SEQUENCE | TAG_PREVIOUS_LOG | TAG_FIRST_KEPT_LOG | TAG_FAMILY
                        | TAG_HIGHEST_FAMILY => (1, 0),
                        _ => return None,
                    };
                    for _ in 0..numbers {
                        varint(&mut edit)?;
                    }
                    for _ in 0..texts {
                        let length = usize::try_from(varint(&mut edit)?).ok()?;
                        edit = edit.get(length..)?;
                    }
                }
            }
        }
    }
}

/// Appends edits, which stay where `check` is content with them.
fn append(database: &Path, edits: &[Vec<u8>], check: impl FnOnce() -> Result<()>) -> Result<()> {
    let path = manifest(database)?;
    let what = || format!("giving up files in {}", path.display());
    let end = sound_end(&std::fs::read(&path).context(what)?);
    let manifest = File::options().write(true).open(&path).context(what)?;
    let mut bytes = Vec::new();
    for edit in edits {
        bytes.extend(record(end + bytes.len(), edit));
    }
    let cut = || manifest.set_len(end as u64).and_then(|()| manifest.sync_all());
    let done = cut()
        .and_then(|()| manifest.write_all_at(&bytes, end as u64))
        .and_then(|()| manifest.sync_all())
        .context(what)
        .and_then(|()| check());
    if done.is_err() {
        // As it was; where that fails, too, the next repair finds it half written.
        let _ = cut();
    }
    done
}
