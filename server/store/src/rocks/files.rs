//! Lists the files of a family.

use std::ffi::CStr;
use std::path::{Path, PathBuf};

use coldrise_block::{Error, ErrorKind, Result};
use librocksdb_sys as sys;

use super::manifest::manifest;
use super::table::TableProperties;
use super::{Database, FAMILIES, Family};

/// How often a list begins again.
const LIST_ATTEMPTS: u32 = 20;

/// One file of a family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LiveFile {
    /// Its name in the directory of the database, with a leading slash.
    pub(crate) name: String,
    /// 0 for a file written from a memtable.
    pub(crate) level: u32,
    pub(crate) bytes: u64,
    /// The first key, of an entry or of a deletion.
    pub(crate) smallest: Vec<u8>,
    /// The last key, of an entry or of a deletion.
    pub(crate) largest: Vec<u8>,
    pub(crate) properties: TableProperties,
}

impl LiveFile {
    /// Number of entries that are not deletions.
    pub(crate) fn values(&self) -> u64 {
        self.properties.entries.saturating_sub(self.properties.deletions)
    }
}

impl Database {
    /// The path of a file of the database.
    pub(crate) fn path_of(&self, file: &LiveFile) -> PathBuf {
        self.path.join(file.name.trim_start_matches('/'))
    }

    /// The manifest's name and length. They change with every file that is added or removed. `None`
    /// while the manifest is being replaced.
    pub(crate) fn list_stamp(&self) -> Option<(PathBuf, u64)> {
        list_stamp(&self.path)
    }

    /// The files of a family, sorted by first key. Entries that are only in a memtable are in none
    /// of them.
    ///
    /// # Errors
    /// `NotFound`, to a reader, if the writer has just deleted one; `Corrupt` if the end of one is damaged.
    pub(crate) fn live_files(&self, family: Family) -> Result<Vec<LiveFile>> {
        // A writer's own compactions delete files that it has just listed.
        let attempts = if self.reader.is_some() { 1 } else { LIST_ATTEMPTS };
        listed_again(attempts, || {
            let mut files = self.listed_files(family)?;
            for file in &mut files {
                file.properties = TableProperties::read(&self.path_of(file))?;
            }
            files.sort_by(|a, b| a.smallest.cmp(&b.smallest));
            Ok(files)
        })
    }

    /// The last key of a family according to the list of its files; reads no file. The key may have
    /// been deleted.
    pub(crate) fn last_key(&self, family: Family) -> Result<Option<Vec<u8>>> {
        self.flush_family(family)?;
        Ok(self.listed_files(family)?.into_iter().map(|file| file.largest).max())
    }

    /// The files of a family as the database lists them, unsorted and without their properties;
    /// reads no file.
    pub(crate) fn listed_files(&self, family: Family) -> Result<Vec<LiveFile>> {
        let Some((_, wanted)) = FAMILIES.iter().find(|(candidate, _)| *candidate == family) else {
            return Err(Error::new(ErrorKind::Internal, "an unknown family"));
        };
        let mut files = Vec::new();
        let opened = self.opened();
        // SAFETY: the database is live; the list is read before it is destroyed, once; its strings
        // are NUL-terminated and live as long as the list.
        unsafe {
            let list = sys::rocksdb_livefiles(opened.db);
            for index in 0..sys::rocksdb_livefiles_count(list) {
                let name = sys::rocksdb_livefiles_column_family_name(list, index);
                if CStr::from_ptr(name) != *wanted {
                    continue;
                }
                let (mut smallest_bytes, mut largest_bytes) = (0, 0);
                let smallest = sys::rocksdb_livefiles_smallestkey(list, index, &mut smallest_bytes);
                let largest = sys::rocksdb_livefiles_largestkey(list, index, &mut largest_bytes);
                let name = CStr::from_ptr(sys::rocksdb_livefiles_name(list, index));
                files.push(LiveFile {
                    name: name.to_string_lossy().into_owned(),
                    level: u32::try_from(sys::rocksdb_livefiles_level(list, index)).unwrap_or(0),
                    bytes: sys::rocksdb_livefiles_size(list, index) as u64,
                    smallest: super::lent_bytes(smallest, smallest_bytes).to_vec(),
                    largest: super::lent_bytes(largest, largest_bytes).to_vec(),
                    properties: TableProperties::default(),
                });
            }
            sys::rocksdb_livefiles_destroy(list);
        }
        Ok(files)
    }
}

/// See [`Database::list_stamp`].
pub(super) fn list_stamp(database: &Path) -> Option<(PathBuf, u64)> {
    let (path, _) = manifest(database).ok()?;
    let length = path.metadata().ok()?.len();
    Some((path, length))
}

/// Lists again, while a listed file is not there any more.
fn listed_again<T>(attempts: u32, list: impl Fn() -> Result<T>) -> Result<T> {
    for _ in 1..attempts {
        match list() {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            listed => return listed,
        }
    }
    list()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_file_that_vanishes_is_listed_again() {
        let calls = Cell::new(0);
        let list = |vanishing: u32, kind| {
            calls.set(0);
            listed_again(LIST_ATTEMPTS, || {
                calls.set(calls.get() + 1);
                match calls.get() <= vanishing {
                    true => Err(Error::new(kind, "the file")),
                    false => Ok(calls.get()),
                }
            })
        };
        assert_eq!(list(3, ErrorKind::NotFound).unwrap(), 4);
        assert_eq!(list(99, ErrorKind::NotFound).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(calls.get(), LIST_ATTEMPTS);
        assert_eq!(list(1, ErrorKind::Corrupt).unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(calls.get(), 1);
    }
}
