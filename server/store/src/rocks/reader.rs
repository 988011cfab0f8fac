//! A reader beside a writer.
//!
//! A reader is a secondary of RocksDB: it reads the manifest, and the log's changes into its memory.
//! It looks into its memory first. When a writer has flushed a family to a file, the reader reads no
//! more changes of this family from older logs, which may also be deleted: what it had not read yet
//! is in the file, but older entries of the same keys in its memory hide it. A removed point would
//! still be there, until the writer changes the same family again. So [`Database::catch_up`] opens
//! the database again if the files of the catalog have changed and its entries in memory may be
//! older.
//!
//! It also does so if there is another manifest, as each process that writes begins one: RocksDB 7.8
//! may end the process when a secondary changes to another manifest soon after it was opened
//! (an assertion in version_builder.cc). No writer begins one between the look and the call, because
//! both hold a lock (`opening_lock.rs`). Opening takes as long as for the writer. See
//! docs/decisions/0081.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::Result;
use librocksdb_sys as sys;
use parking_lot::Mutex;

use super::files::list_stamp;
use super::opening_lock::lock_for_catch_up;
use super::{Database, Family, checked};

/// How often the database is opened while a writer changes the list of its files meanwhile.
const OPEN_ATTEMPTS: usize = 5;

/// What a reader needs to catch up.
pub(super) struct Reader {
    /// The directory for RocksDB's log.
    directory: PathBuf,
    /// The manifest's name and length when it was read last. Locked during a catch-up.
    seen: Mutex<Option<(PathBuf, u64)>>,
}

impl Database {
    /// Opens the database beside a writer. `own_directory` is a directory for this reader alone;
    /// RocksDB puts its log there.
    pub(crate) fn open_secondary(path: &Path, own_directory: &Path) -> Result<Database> {
        let (mut database, seen) = open_unchanged(path, own_directory)?;
        let directory = own_directory.to_owned();
        database.reader = Some(Reader { directory, seen: Mutex::new(seen) });
        Ok(database)
    }

    /// Lets a reader see the commits that the writer has made since.
    pub(crate) fn catch_up(&self) -> Result<()> {
        let Some(reader) = &self.reader else { return Ok(()) };
        let mut seen = reader.seen.lock();
        let lock = lock_for_catch_up(&self.path);
        let list = self.list_stamp();
        match (&*seen, &list) {
            (Some((before, _)), Some((now, _))) if before == now && lock.is_some() => {}
            _ => return self.open_again(reader, &mut seen),
        }
        let files = if *seen == list { None } else { Some(self.catalog_files()?) };
        let [active, _] = self.unflushed_entries(Family::Catalog)?;
        let opened = self.opened();
        checked("catching up with the writer", |error| {
            // SAFETY: the database is live and was opened as a secondary.
            unsafe { sys::rocksdb_try_catch_up_with_primary(opened.db, error) }
        })?;
        drop(lock);
        let now = self.list_stamp();
        let is_same = files.is_none() && now == list;
        let [still_active, older] = self.unflushed_entries(Family::Catalog)?;
        // New entries are read into new memory, and RocksDB drops the older one if it may.
        let is_hiding = older > 0 || still_active > 0 && still_active == active;
        if !is_same && is_hiding && files != Some(self.catalog_files()?) {
            return self.open_again(reader, &mut seen);
        }
        *seen = now;
        Ok(())
    }

    fn open_again(&self, reader: &Reader, seen: &mut Option<(PathBuf, u64)>) -> Result<()> {
        let (again, list) = open_unchanged(&self.path, &reader.directory)?;
        *self.opened.write() = Arc::clone(&again.opened.read());
        *seen = list;
        Ok(())
    }

    fn catalog_files(&self) -> Result<BTreeSet<String>> {
        Ok(self.listed_files(Family::Catalog)?.into_iter().map(|file| file.name).collect())
    }
}

/// The database, and its manifest's name and length if they did not change meanwhile: else a log
/// whose entries had moved to a file was not found, and the file not yet.
fn open_unchanged(path: &Path, own_directory: &Path) -> Result<(Database, Option<(PathBuf, u64)>)> {
    let mut before = list_stamp(path);
    for _ in 1..OPEN_ATTEMPTS {
        let opened = Database::open_secondary_once(path, own_directory);
        let now = list_stamp(path);
        if now.is_some() && now == before {
            return opened.map(|database| (database, now));
        }
        before = now;
    }
    Database::open_secondary_once(path, own_directory).map(|database| (database, None))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::rocks::ReadMode;
    use crate::rocks::opening_lock::{PATIENCE, lock_for_opening};

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
    fn a_reader_sees_a_value_that_is_flushed_while_another_family_keeps_the_log() {
        let fixture = Fixture::new();
        let writer = fixture.writer();
        put(&writer, b"point", b"old");
        let reader = fixture.reader();
        let mut batch = writer.batch();
        batch.put(Family::State, b"counter", b"1").unwrap();
        batch.put(Family::Catalog, b"point", b"new").unwrap();
        writer.write(batch, true).unwrap();
        writer.flush_family(Family::Catalog).unwrap();
        reader.catch_up().unwrap();
        assert_eq!(value(&reader, b"point").unwrap(), b"new");
        // With memory from a later log than the one after the flush.
        put(&writer, b"point", b"newer");
        reader.catch_up().unwrap();
        assert_eq!(value(&reader, b"point").unwrap(), b"newer");
        put(&writer, b"point", b"newest");
        writer.flush_family(Family::Catalog).unwrap();
        writer.flush_family(Family::State).unwrap();
        put(&writer, b"other", b"value");
        reader.catch_up().unwrap();
        assert_eq!(value(&reader, b"point").unwrap(), b"newest");
        assert_eq!(value(&reader, b"other").unwrap(), b"value");
    }

    #[test]
    fn a_catch_up_beside_a_writer_that_opens_the_database_opens_it_again() {
        let fixture = Fixture::new();
        let writer = fixture.writer();
        put(&writer, b"point", b"document");
        let reader = fixture.reader();
        let before = reader.opened();
        let lock = lock_for_opening(&fixture.directory("db")).unwrap();
        reader.catch_up().unwrap();
        assert!(!Arc::ptr_eq(&before, &reader.opened()));
        drop(lock);
        let before = reader.opened();
        reader.catch_up().unwrap();
        assert!(Arc::ptr_eq(&before, &reader.opened()));
    }

    #[test]
    fn a_writer_waits_a_bounded_time_for_a_reader_that_catches_up() {
        let fixture = Fixture::new();
        let lock = lock_for_catch_up(&fixture.directory("db")).unwrap();
        let begin = Instant::now();
        drop(fixture.writer());
        assert!(begin.elapsed() >= PATIENCE);
        drop(lock);
    }

    #[test]
    fn random_writers_never_show_a_reader_an_older_value() {
        for seed in 0..40_u64 {
            let fixture = Fixture::new();
            let mut writer = fixture.writer();
            put(&writer, &[0], &[0]);
            let reader = fixture.reader();
            let mut expected = std::collections::BTreeMap::from([(0_u8, Some(0_u8))]);
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            for step in 1..60_u8 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let key = (state >> 8) as u8 % 4;
                match state % 12 {
                    0..=3 => {
                        put(&writer, &[key], &[step]);
                        expected.insert(key, Some(step));
                    }
                    4 => {
                        delete(&writer, &[key]);
                        expected.insert(key, None);
                    }
                    5 => {
                        let mut batch = writer.batch();
                        batch.put(Family::State, b"counter", &[step]).unwrap();
                        writer.write(batch, false).unwrap();
                    }
                    6 => writer.flush_family(Family::Catalog).unwrap(),
                    7 => writer.flush_family(Family::State).unwrap(),
                    8 => writer.flush().unwrap(),
                    9 => {
                        drop(writer);
                        writer = fixture.writer();
                    }
                    _ => {
                        reader.catch_up().unwrap();
                        for (key, expected) in &expected {
                            let found = value(&reader, &[*key]).map(|value| value[0]);
                            assert_eq!(found, *expected, "seed {seed}, step {step}, key {key}");
                        }
                    }
                }
            }
        }
    }
}
