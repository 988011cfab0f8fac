use std::collections::BTreeMap;
use std::path::PathBuf;

use proptest::prelude::*;

use super::super::record_log::record;
use super::super::{ReadMode, SstWriter};
use super::*;

type Content = BTreeMap<Vec<u8>, Vec<u8>>;

/// Of a chunk or a page.
fn content(key: &[u8]) -> Vec<u8> {
    key.repeat(30 + usize::from(key[1]))
}

/// A database and what it holds, by family.
struct Fixture {
    folder: tempfile::TempDir,
    database: Option<Database>,
    content: Vec<Content>,
    round: u8,
}

impl Fixture {
    fn new() -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let content = vec![Content::new(); FAMILIES.len()];
        let mut fixture = Fixture { folder, database: None, content, round: 0 };
        fixture.open(true);
        fixture
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("db")
    }

    fn open(&mut self, create: bool) {
        self.database = None;
        let opened = Database::open_primary(&self.path(), self.folder.path(), create);
        self.database = Some(opened.unwrap());
    }

    fn database(&self) -> &Database {
        self.database.as_ref().unwrap()
    }

    /// Puts these keys of every family, or deletes them.
    fn change(&mut self, keys: impl Iterator<Item = u16>, is_put: bool) {
        self.round += 1;
        let database = self.database.take().unwrap();
        let mut batch = database.batch();
        for key in keys {
            for (at, (family, _)) in FAMILIES.into_iter().enumerate() {
                let key = key.to_be_bytes();
                let value = match is_for_ever(at) {
                    true => content(&key),
                    false => vec![self.round; usize::from(key[1]) * 5 + at],
                };
                if is_put {
                    batch.put(family, &key, &value).unwrap();
                    self.content[at].insert(key.to_vec(), value);
                } else {
                    batch.delete(family, &key).unwrap();
                    self.content[at].remove(&key[..]);
                }
            }
        }
        database.write(batch, true).unwrap();
        self.database = Some(database);
    }

    /// Hands a file of chunks over.
    fn ingest(&mut self, keys: impl Iterator<Item = u16>) {
        let path = self.folder.path().join("staging.sst");
        let database = self.database.as_ref().unwrap();
        let mut file = SstWriter::create(database, &path).unwrap();
        let chunks = 1;
        assert_eq!(FAMILIES[chunks].0, Family::Chunks);
        for key in keys {
            let key = key.to_be_bytes();
            file.put(&key, &content(&key)).unwrap();
            self.content[chunks].insert(key.to_vec(), content(&key));
        }
        database.ingest_chunks(&file.finish().unwrap()).unwrap();
    }

    /// Closes it, which leaves what is in the log there.
    fn lose_list(&mut self) {
        self.database = None;
        self.remove_list();
    }

    fn remove_list(&self) {
        for entry in std::fs::read_dir(self.path()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if name.starts_with("MANIFEST") || name == "CURRENT" {
                std::fs::remove_file(path).unwrap();
            }
        }
    }

    fn rebuild(&mut self) {
        rebuild(&self.path(), self.folder.path()).unwrap();
        self.open(false);
    }

    fn check(&self) {
        for (at, (family, _)) in FAMILIES.into_iter().enumerate() {
            let mut found = Content::new();
            let mut cursor = self.database().cursor(family, ReadMode::Cached).unwrap();
            cursor.seek(&[]).unwrap();
            while let Some((key, value)) = cursor.entry() {
                found.insert(key.to_vec(), value.to_vec());
                cursor.next().unwrap();
            }
            for key in (0..=u16::MAX).step_by(7).map(u16::to_be_bytes) {
                let got = self.database().get(family, &key, ReadMode::Cached).unwrap();
                let got = got.as_ref().map(|value| &value[..]);
                assert_eq!(got, found.get(&key[..]).map(Vec::as_slice), "{family:?}");
            }
            if family == Family::Dedup {
                // It may lack some, and know older ones.
                continue;
            }
            let wanted = &self.content[at];
            let differing = wanted.iter().find(|(key, value)| found.get(*key) != Some(value));
            assert_eq!(differing, None, "{family:?}: lost or old");
            match is_for_ever(at) {
                true => assert!(found.iter().all(|(key, value)| *value == content(key))),
                false => assert_eq!(found.len(), wanted.len(), "{family:?}: something came back"),
            }
        }
    }
}

#[test]
fn what_is_in_files_and_the_log_is_all_there() {
    let mut fixture = Fixture::new();
    fixture.ingest(1000..3000);
    fixture.change(0..200, true);
    fixture.database().flush().unwrap();
    fixture.change(100..300, true);
    fixture.change(50..60, false);
    fixture.database().flush().unwrap();
    fixture.change(55..58, true);
    fixture.change(250..280, false);
    fixture.lose_list();
    fixture.rebuild();
    fixture.check();
    fixture.change(0..400, true);
    fixture.database().flush().unwrap();
    fixture.change(20..30, false);
    fixture.check();
    fixture.lose_list();
    fixture.rebuild();
    fixture.check();
}

#[test]
fn nothing_but_a_log_is_enough_and_nothing_at_all_is_an_empty_database() {
    let mut fixture = Fixture::new();
    fixture.lose_list();
    fixture.rebuild();
    fixture.check();
    fixture.change(0..50, true);
    fixture.lose_list();
    assert_eq!(table_files(&fixture.path()).unwrap(), Vec::<PathBuf>::new());
    fixture.rebuild();
    fixture.check();
}

/// A log may be older than a file that was handed over.
#[test]
fn a_chunk_does_not_go_with_a_deletion_that_was_before_it() {
    let mut fixture = Fixture::new();
    fixture.change(1000..1100, true);
    fixture.change(1000..1500, false);
    fixture.ingest(1010..1300);
    fixture.database().compact(Family::Chunks, None).unwrap();
    fixture.lose_list();
    fixture.rebuild();
    fixture.check();
}

#[test]
fn a_crash_before_the_end_changes_nothing() {
    let mut fixture = Fixture::new();
    fixture.change(0..300, true);
    fixture.database().flush().unwrap();
    fixture.change(100..200, false);
    fixture.database().flush().unwrap();
    fixture.change(150..400, true);
    fixture.lose_list();
    for _ in 0..3 {
        rebuild(&fixture.path(), fixture.folder.path()).unwrap();
        // The files it made are there, and in no list.
        fixture.remove_list();
        std::fs::create_dir(fixture.path().join(FOLDER)).unwrap();
        std::fs::write(fixture.path().join(FOLDER).join("half"), b"half").unwrap();
    }
    fixture.rebuild();
    fixture.check();
    assert!(!fixture.path().join(FOLDER).exists());
}

/// As RocksDB does: a log that a crash left without its end is followed by one that goes on
/// where it ends, or by one that does not count.
#[test]
fn behind_a_torn_log_counts_what_goes_on_where_it_ends() {
    let batch = |sequence: u64, key: &[u8]| {
        let mut batch = sequence.to_le_bytes().to_vec();
        batch.extend(1_u32.to_le_bytes());
        batch.extend([1, key.len() as u8]);
        batch.extend(key);
        batch.extend([1, b'v']);
        record(0, &batch)
    };
    let read = |logs: &[(u64, &[u8], bool)]| {
        let folder = tempfile::tempdir().unwrap();
        for (number, (sequence, key, is_torn)) in logs.iter().enumerate() {
            let mut bytes = batch(*sequence, key);
            bytes.extend(if *is_torn { &[0x17; 9][..] } else { &[] });
            std::fs::write(folder.path().join(format!("{number:06}.log")), bytes).unwrap();
        }
        let mut keys = Vec::new();
        logs::read(folder.path(), |change| {
            keys.extend_from_slice(change.key);
            Ok(())
        })
        .unwrap();
        String::from_utf8(keys).unwrap()
    };
    assert_eq!(read(&[(5, b"a", true), (6, b"b", false), (9, b"c", false)]), "abc");
    assert_eq!(read(&[(5, b"a", true), (7, b"b", false), (8, b"c", false)]), "a");
    assert_eq!(
        read(&[(5, b"a", false), (7, b"b", true), (8, b"c", true), (8, b"d", false)]),
        "abc"
    );
}

#[derive(Clone, Debug)]
enum Step {
    Change(u16, u16, bool),
    Ingest(u16, u16),
    Flush,
    Compact,
    Reopen,
    LoseList,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = || (0_u16..600, 1_u16..200);
    let step = prop_oneof![
        4 => (range(), any::<bool>()).prop_map(|((from, count), is_put)| Step::Change(from, count, is_put)),
        2 => range().prop_map(|(from, count)| Step::Ingest(from, count)),
        3 => Just(Step::Flush),
        1 => Just(Step::Compact),
        1 => Just(Step::Reopen),
        2 => Just(Step::LoseList),
    ];
    prop::collection::vec(step, 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn whatever_was_done_is_there(steps in steps()) {
        let mut fixture = Fixture::new();
        for step in steps {
            match step {
                Step::Change(from, count, is_put) => fixture.change(from..from + count, is_put),
                Step::Ingest(from, count) => fixture.ingest(from..from + count),
                Step::Flush => fixture.database().flush().unwrap(),
                Step::Compact => {
                    for (family, _) in FAMILIES {
                        fixture.database().compact(family, None).unwrap();
                    }
                }
                Step::Reopen => fixture.open(false),
                Step::LoseList => {
                    fixture.lose_list();
                    fixture.rebuild();
                    fixture.check();
                }
            }
        }
        fixture.lose_list();
        fixture.rebuild();
        fixture.check();
    }
}

/// Bytes as they may stand where numbers, kinds and lengths are looked for.
fn made_up() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop_oneof![0_u8..8, any::<u8>()], 0..200)
}

proptest! {
    #[test]
    fn fuzz_of_batches_and_blocks(mut bytes in made_up(), restarts in 0_u32..4) {
        let mut changes = 0;
        let _ = logs::read_batch(&bytes, &mut |change| {
            changes += 1;
            assert!(change.family < FAMILIES.len() && change.key.len() < bytes.len());
            Ok(())
        });
        assert!(changes <= bytes.len());
        bytes.extend_from_slice(&restarts.to_le_bytes());
        for (key, (offset, length)) in tables::rows(&bytes).unwrap_or_default() {
            assert!(key.len() <= bytes.len() && offset + length <= bytes.len() as u64);
        }
    }
}
