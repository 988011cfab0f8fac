//! A reader beside a writer.
//!
//! A reader is a secondary of RocksDB: it reads the manifest, and the log's changes into its memory.
//! It looks into its memory first. A writer that flushes its memory deletes the log. If it does
//! that between two catch-ups, the reader finds the flushed entries in files, but older ones of the
//! same keys, which it has read from the log before, hide them: a removed point would be there
//! still, until the writer changes the same family again. So [`Database::catch_up`] opens the
//! database again after a part of the log was deleted unread.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::Result;
use librocksdb_sys as sys;
use parking_lot::Mutex;

use super::log_check::first_change;
use super::{checked, Database, Family};

/// What a reader needs to catch up.
pub(super) struct Reader {
    /// The directory for RocksDB's log.
    directory: PathBuf,
    /// The manifest's name and length after the last catch-up. While they stay, no log is deleted.
    /// Locked during a catch-up.
    seen: Mutex<Option<(PathBuf, u64)>>,
}

impl Reader {
    pub(super) fn new(directory: &Path) -> Reader {
        Reader { directory: directory.to_owned(), seen: Mutex::new(None) }
    }
}

impl Database {
    /// Lets a reader see the commits that the writer has made since.
    pub(crate) fn catch_up(&self) -> Result<()> {
        let Some(reader) = &self.reader else { return Ok(()) };
        let mut seen = reader.seen.lock();
        let reached = self.sequence();
        let opened = self.opened();
        checked("catching up with the writer", |error| {
            // SAFETY: the database is live and was opened as a secondary.
            unsafe { sys::rocksdb_try_catch_up_with_primary(opened.db, error) }
        })?;
        let list = self.list_stamp();
        let is_same = list.is_some() && *seen == list;
        if !is_same && self.hides_changes_after(reached)? {
            let again = Database::open_secondary_as_is(&self.path, &reader.directory)?;
            *self.opened.write() = Arc::clone(&again.opened.read());
        }
        *seen = list;
        Ok(())
    }

    /// Whether entries in memory may hide newer ones in files, because changes after the one
    /// numbered `reached` were in a log that is deleted. False for changes that are still in a log:
    /// the catch-up has read them. Only for the catalog: entries of other families do not change
    /// under their keys, except for counters.
    fn hides_changes_after(&self, reached: u64) -> Result<bool> {
        if self.unflushed_entries(Family::Catalog)? == [0, 0] {
            return Ok(false);
        }
        Ok(match first_change(&self.path)? {
            // Logs are deleted in the order of their changes.
            Some(first) => first > reached + 1,
            None => self.sequence() != reached,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rocks::ReadMode;

    struct Fixture {
        folder: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Fixture {
            Fixture { folder: tempfile::tempdir().unwrap() }
        }

        fn directory(&self, name: &str) -> PathBuf {
            let path = self.folder.path().join(name);
            std::fs::create_dir_all(&path).unwrap();
            path
        }

        fn writer(&self) -> Database {
            Database::open_primary(&self.directory("db"), &self.directory("w"), true).unwrap()
        }

        fn reader(&self) -> Database {
            Database::open_secondary(&self.directory("db"), &self.directory("r")).unwrap()
        }
    }

    fn put(database: &Database, key: &[u8], value: &[u8]) {
        let mut batch = database.batch();
        batch.put(Family::Catalog, key, value).unwrap();
        database.write(batch, true).unwrap();
    }

    fn delete(database: &Database, key: &[u8]) {
        let mut batch = database.batch();
        batch.delete(Family::Catalog, key).unwrap();
        database.write(batch, true).unwrap();
    }

    fn value(database: &Database, key: &[u8]) -> Option<Vec<u8>> {
        database.get(Family::Catalog, key, ReadMode::Cached).unwrap().map(|value| value.to_vec())
    }

    #[test]
    fn a_reader_sees_a_deletion_whose_log_is_deleted_before_it_catches_up() {
        let fixture = Fixture::new();
        let writer = fixture.writer();
        put(&writer, b"point", b"document");
        let reader = fixture.reader();
        assert_eq!(value(&reader, b"point").unwrap(), b"document");
        delete(&writer, b"point");
        drop(writer);
        // Opening flushes the log and deletes it.
        let writer = fixture.writer();
        reader.catch_up().unwrap();
        assert_eq!(value(&reader, b"point"), None);
        drop(writer);
    }

    #[test]
    fn a_reader_sees_a_new_value_whose_log_is_flushed_by_the_same_writer() {
        let fixture = Fixture::new();
        let writer = fixture.writer();
        put(&writer, b"point", b"old");
        let reader = fixture.reader();
        reader.catch_up().unwrap();
        put(&writer, b"point", b"new");
        writer.flush().unwrap();
        put(&writer, b"other", b"value");
        writer.flush().unwrap();
        reader.catch_up().unwrap();
        assert_eq!(value(&reader, b"point").unwrap(), b"new");
        assert_eq!(value(&reader, b"other").unwrap(), b"value");
    }

    #[test]
    fn values_and_cursors_outlive_the_database_that_is_opened_again() {
        let fixture = Fixture::new();
        let writer = fixture.writer();
        put(&writer, b"point", b"document");
        let reader = fixture.reader();
        let before = reader.opened();
        let held = reader.get(Family::Catalog, b"point", ReadMode::Cached).unwrap().unwrap();
        let mut cursor = reader.cursor(Family::Catalog, ReadMode::Cached).unwrap();
        delete(&writer, b"point");
        drop(writer);
        let writer = fixture.writer();
        reader.catch_up().unwrap();
        assert!(!Arc::ptr_eq(&before, &reader.opened()));
        assert_eq!(&*held, b"document");
        cursor.seek(b"").unwrap();
        assert_eq!(cursor.entry().unwrap().1, b"document");
        drop(writer);
    }

    #[test]
    fn a_reader_that_has_read_the_whole_log_does_not_open_the_database_again() {
        let fixture = Fixture::new();
        let mut writer = fixture.writer();
        put(&writer, b"point", b"1");
        let reader = fixture.reader();
        let before = reader.opened();
        for round in 2..6_u8 {
            put(&writer, b"point", &[round]);
            reader.catch_up().unwrap();
            drop(writer);
            writer = fixture.writer();
            if round % 2 == 0 {
                put(&writer, b"point", &[round]);
            }
            reader.catch_up().unwrap();
            assert_eq!(value(&reader, b"point").unwrap(), [round]);
        }
        assert!(Arc::ptr_eq(&before, &reader.opened()));
    }
}
