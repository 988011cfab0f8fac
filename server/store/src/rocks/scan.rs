//! Reads all chunks in order, bypassing RocksDB for ranges that a single file holds.
//!
//! RocksDB reads one block at a time and copies each; verify then runs at half the speed at which
//! the files can be read and authenticated. If files overlap or contain deletions, and for entries
//! that are only in memory, only RocksDB knows which entries count, so those ranges are read
//! through RocksDB.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::OnceLock;

use coldrise_block::{ErrorKind, Result};

use super::sst_reader::{BlockBuffers, BlockFile};
use super::table::{IndexKind, TableProperties};
use super::{Database, Family, LiveFile, ReadMode};

/// The files of chunks at the time of its creation. Reading a file that was deleted since is an
/// error.
pub(crate) struct ChunkFiles {
    /// Sorted by first key; no two overlap.
    files: Vec<ChunkFile>,
    /// First and last keys of the ranges to read through RocksDB, unsorted.
    asked: Vec<(Vec<u8>, Vec<u8>)>,
}

struct ChunkFile {
    smallest: Vec<u8>,
    largest: Vec<u8>,
    path: PathBuf,
    opened: OnceLock<Option<BlockFile>>,
}

impl Database {
    /// The files that can be read bypassing RocksDB.
    ///
    /// # Errors
    /// Those of [`Database::live_files`]; then no file can be read this way.
    pub(crate) fn chunk_files(&self) -> Result<ChunkFiles> {
        let mut asked = Vec::new();
        let deleted = self.property(Family::Chunks, c"rocksdb.num-deletes-active-mem-table")?
            + self.property(Family::Chunks, c"rocksdb.num-deletes-imm-mem-tables")?;
        let mut files: Vec<ChunkFile> = Vec::new();
        for file in self.live_files(Family::Chunks)? {
            let is_plain = deleted == 0
                && file.properties.deletions == 0
                && file.properties.index == IndexKind::TwoLevel;
            if !is_plain {
                asked.push((file.smallest.clone(), file.largest.clone()));
            }
            let path = self.path_of(&file);
            match files.last_mut() {
                Some(last) if last.largest >= file.smallest => {
                    asked.push((last.smallest.clone(), file.largest.clone()));
                    last.largest = file.largest.max(std::mem::take(&mut last.largest));
                }
                _ => files.push(ChunkFile {
                    smallest: file.smallest,
                    largest: file.largest,
                    path,
                    opened: OnceLock::new(),
                }),
            }
        }
        let mut cursor = self.cursor(Family::Chunks, ReadMode::Memory)?;
        cursor.seek(&[])?;
        while let Some((key, _)) = cursor.entry() {
            asked.push((key.to_vec(), key.to_vec()));
            cursor.next()?;
        }
        drop(cursor);
        Ok(ChunkFiles { files, asked: joined(asked) })
    }
}

impl Database {
    /// The files of chunks in which some values may not count, because they overlap another file or
    /// hold deletions; also files whose properties cannot be read. A reader of all chunks does not
    /// read all of these files; a compaction does.
    pub(crate) fn superseded_chunk_files(&self) -> Result<HashSet<PathBuf>> {
        let mut files = self.listed_files(Family::Chunks)?;
        files.sort_by(|a, b| a.smallest.cmp(&b.smallest));
        let mut superseded = HashSet::new();
        // The file that reaches furthest so far.
        let mut furthest: Option<&LiveFile> = None;
        for file in &files {
            if let Some(before) = furthest.filter(|before| before.largest >= file.smallest) {
                superseded.insert(self.path_of(before));
                superseded.insert(self.path_of(file));
            }
            if furthest.is_none_or(|before| before.largest < file.largest) {
                furthest = Some(file);
            }
        }
        for path in files.iter().map(|file| self.path_of(file)) {
            match TableProperties::read(&path) {
                Ok(properties) if properties.deletions == 0 => {}
                // A writer has just deleted it, or it is lost; other checks find that.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Ok(_) | Err(_) => {
                    superseded.insert(path);
                }
            }
        }
        Ok(superseded)
    }

    /// Whether all blocks of a file of chunks are readable and undamaged. Also false if only
    /// RocksDB can tell.
    pub(crate) fn has_sound_blocks(&self, file: &LiveFile, buffers: &mut BlockBuffers) -> bool {
        let read = BlockFile::open(&self.path_of(file)).and_then(|opened| {
            // From before the first key to after the last one.
            let end = [&file.largest, &[0][..]].concat();
            opened.read((&file.smallest, &end), buffers, |_, _| true, |_, _| Ok(()))
        });
        read.is_ok()
    }
}

impl ChunkFiles {
    /// First and last keys of the ranges that may hold chunks, ascending; outside them there is
    /// none.
    pub(crate) fn ranges(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let files = self.files.iter().map(|file| (file.smallest.clone(), file.largest.clone()));
        joined(files.chain(self.asked.iter().cloned()).collect())
    }

    /// Whether this can read all keys from `from` up to, but not including, `end`.
    pub(crate) fn cover(&self, from: &[u8], end: &[u8]) -> bool {
        let at = self.asked.partition_point(|(_, last)| last.as_slice() < from);
        self.asked.get(at).is_none_or(|(first, _)| first.as_slice() >= end)
    }

    /// Calls `entry` with the keys from `from` up to, but not including, `end`, ascending, and
    /// their values. May skip blocks for which `is_wanted` returns false. Its arguments are a key
    /// that is not after the block's first key, and one that is not before its last key.
    ///
    /// # Errors
    /// Fails at the first entry that cannot be read; RocksDB then names the fault. Errors of
    /// `entry`.
    pub(crate) fn read(
        &self,
        (from, end): (&[u8], &[u8]),
        buffers: &mut BlockBuffers,
        is_wanted: impl Fn(&[u8], &[u8]) -> bool,
        mut entry: impl FnMut(&[u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        let first = self.files.partition_point(|file| file.largest.as_slice() < from);
        for file in self.files.get(first..).unwrap_or_default() {
            if file.smallest.as_slice() >= end {
                break;
            }
            let opened = file.opened.get_or_init(|| BlockFile::open(&file.path).ok());
            let Some(opened) = opened else { return Err(super::table::damaged(&file.path)) };
            opened.read((from, end), buffers, &is_wanted, &mut entry)?;
        }
        Ok(())
    }
}

/// The ranges, ascending; overlapping ones are joined.
fn joined(mut ranges: Vec<(Vec<u8>, Vec<u8>)>) -> Vec<(Vec<u8>, Vec<u8>)> {
    ranges.sort();
    let mut joined: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    for (first, last) in ranges {
        match joined.last_mut() {
            Some(before) if first <= before.1 => before.1 = last.max(std::mem::take(&mut before.1)),
            _ => joined.push((first, last)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rocks::SstWriter;

    type Entries = Vec<(Vec<u8>, Vec<u8>)>;

    fn key(number: u64) -> [u8; 8] {
        number.to_be_bytes()
    }

    /// Values of many lengths, including an empty one and one that spans several blocks.
    fn value(number: u64, round: u8) -> Vec<u8> {
        let length = match number % 97 {
            0 => 0,
            1 => 70_000,
            other => other * 40,
        };
        (0..length).map(|at| (at * 7 + number) as u8 ^ round).collect()
    }

    struct Fixture {
        folder: tempfile::TempDir,
        database: Option<Database>,
    }

    impl Fixture {
        fn new() -> Fixture {
            let folder = tempfile::tempdir().unwrap();
            let mut fixture = Fixture { folder, database: None };
            fixture.reopen(true);
            fixture
        }

        fn reopen(&mut self, create: bool) {
            self.database = None;
            let path = self.folder.path().join("db");
            let opened = Database::open_primary(&path, self.folder.path(), create);
            self.database = Some(opened.unwrap());
        }

        fn database(&self) -> &Database {
            self.database.as_ref().unwrap()
        }

        fn ingest(&self, numbers: impl Iterator<Item = u64>) {
            let path = self.folder.path().join("staging.sst");
            let mut file = SstWriter::create(self.database(), &path).unwrap();
            for number in numbers {
                file.put(&key(number), &value(number, 0)).unwrap();
            }
            self.database().ingest_chunks(&file.finish().unwrap()).unwrap();
        }

        fn put(&self, numbers: &[u64], round: u8) {
            let mut batch = self.database().batch();
            for &number in numbers {
                batch.put(Family::Chunks, &key(number), &value(number, round)).unwrap();
            }
            self.database().write(batch, true).unwrap();
        }

        /// The entries that RocksDB finds.
        fn walked(&self, from: u64, end: u64) -> Result<Entries> {
            let mut cursor = self.database().cursor(Family::Chunks, ReadMode::Scan)?;
            let mut walked = Vec::new();
            cursor.seek(&key(from))?;
            while let Some((found, value)) =
                cursor.entry().filter(|(found, _)| **found < key(end)[..])
            {
                walked.push((found.to_vec(), value.to_vec()));
                cursor.next()?;
            }
            Ok(walked)
        }

        fn read(&self, files: &ChunkFiles, from: u64, end: u64) -> Result<Entries> {
            let mut read = Vec::new();
            let mut buffers = BlockBuffers::default();
            files.read(
                (&key(from), &key(end)),
                &mut buffers,
                |_, _| true,
                |found, value| {
                    read.push((found.to_vec(), value.to_vec()));
                    Ok(())
                },
            )?;
            Ok(read)
        }
    }

    #[test]
    fn every_range_reads_as_rocksdb_reads_it() {
        let fixture = Fixture::new();
        fixture.ingest((1..2000).filter(|number| number % 3 != 0));
        fixture.ingest(2500..2600);
        let files = fixture.database().chunk_files().unwrap();
        for (from, end) in [
            (0, 5000),
            (1, 2),
            (2, 2),
            (3, 4),
            (500, 1500),
            (1999, 2501),
            (2599, 2600),
            (2600, 9000),
        ] {
            assert!(files.cover(&key(from), &key(end)));
            assert!(fixture.read(&files, from, end).unwrap() == fixture.walked(from, end).unwrap());
        }
        for from in (0..2700).step_by(13) {
            assert!(
                fixture.read(&files, from, from + 40).unwrap()
                    == fixture.walked(from, from + 40).unwrap()
            );
        }
    }

    #[test]
    fn unwanted_data_is_not_read() {
        let fixture = Fixture::new();
        fixture.ingest(1..2000);
        let files = fixture.database().chunk_files().unwrap();
        let mut read = 0;
        let is_wanted =
            |before: &[u8], last: &[u8]| *before <= key(700)[..] && *last >= key(600)[..];
        let mut buffers = BlockBuffers::default();
        let mut has = Vec::new();
        files
            .read((&key(1), &key(2000)), &mut buffers, is_wanted, |found, _| {
                read += 1;
                has.push(found.to_vec());
                Ok(())
            })
            .unwrap();
        assert!((600..=700).all(|number| has.contains(&key(number).to_vec())));
        assert!(read < 300, "{read}");
    }

    #[test]
    fn overlapping_and_deleted_ranges_are_read_by_rocksdb() {
        let mut fixture = Fixture::new();
        fixture.ingest(1..1000);
        fixture.ingest(2000..3000);
        // First in memory, then in a file over the first one.
        fixture.put(&[100, 900], 1);
        for _ in 0..2 {
            let files = fixture.database().chunk_files().unwrap();
            assert!(!files.cover(&key(50), &key(101)));
            assert!(files.cover(&key(2000), &key(4000)));
            for from in (0..6000).step_by(50) {
                if files.cover(&key(from), &key(from + 50)) {
                    assert!(
                        fixture.read(&files, from, from + 50).unwrap()
                            == fixture.walked(from, from + 50).unwrap()
                    );
                }
            }
            fixture.database().flush().unwrap();
        }
        let mut batch = fixture.database().batch();
        batch.delete(Family::Chunks, &key(2500)).unwrap();
        fixture.database().write(batch, true).unwrap();
        assert!(!fixture.database().chunk_files().unwrap().cover(&key(2500), &key(2501)));
        fixture.reopen(false);
        assert!(!fixture.database().chunk_files().unwrap().cover(&key(2500), &key(2501)));
    }

    /// Also in a file that was deleted meanwhile.
    #[test]
    fn a_flipped_byte_is_an_error_or_changes_nothing() {
        let mut fixture = Fixture::new();
        fixture.ingest((2..90).chain(200..260));
        let sound = fixture.walked(0, 1000).unwrap();
        let name = fixture.database().live_files(Family::Chunks).unwrap()[0].name.clone();
        let path = fixture.folder.path().join("db").join(name.trim_start_matches('/'));
        let bytes = std::fs::read(&path).unwrap();
        let (mut errors, mut trials) = (0, 0);
        for at in (0..bytes.len()).step_by(211) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            std::fs::write(&path, &flipped).unwrap();
            let Ok(files) = fixture.database().chunk_files() else {
                errors += 1;
                continue;
            };
            match fixture.read(&files, 0, 1000) {
                Ok(read) => assert!(read == sound, "a flipped bit in byte {at} of {}", bytes.len()),
                Err(_) => errors += 1,
            }
            trials += 1;
        }
        // All except flips in bytes that only describe the file.
        assert!(trials > 1000 && errors > trials * 95 / 100, "{errors} of {trials}");
        std::fs::write(&path, &bytes).unwrap();
        let files = fixture.database().chunk_files().unwrap();
        std::fs::rename(&path, path.with_extension("away")).unwrap();
        assert!(fixture.read(&files, 0, 1000).is_err());
        std::fs::rename(path.with_extension("away"), &path).unwrap();
        fixture.reopen(false);
        assert!(fixture.walked(0, 1000).unwrap() == sound);
    }
}
