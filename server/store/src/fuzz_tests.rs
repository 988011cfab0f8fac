//! Every kind of value in the database except chunks and pages, which have their own tests, as an
//! attacker may forge it: random bytes, authentic bytes without meaning, and changed ones.

use std::sync::LazyLock;

use coldrise_block::{ErrorKind, Result};
use proptest::prelude::*;

use crate::damage_list::DamagedChunks;
use crate::rocks::{Family, ReadMode};
use crate::state::StoreState;
use crate::*;

struct Fixture {
    directory: tempfile::TempDir,
    writer: RepositoryWriter,
    point: PointDocument,
}

/// Made once, because making a repository is slow.
static FIXTURE: LazyLock<parking_lot::Mutex<Fixture>> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    let options =
        InitOptions { chunk_size_bytes: 4096, compression: Compression::None, passphrase: None };
    Repository::init(directory.path(), &options).unwrap();
    let options = OpenOptions { cache_bytes: 0 };
    let writer =
        RepositoryWriter::open(directory.path(), &PassphraseSource::None, &options).unwrap();
    let mut disk = writer.disk_writer(None, 8 * 4096, WriteOptions { threads: 1 }).unwrap();
    disk.write(0, vec![7; 8 * 4096]).unwrap();
    let (root, _) = disk.finish().unwrap();
    let point = PointDocument {
        machine: MachineName::parse("web01").unwrap(),
        point: PointName::parse("20261120T100000Z").unwrap(),
        created_at_ms: 1,
        origin: PointOrigin::Backup { sources: Vec::new() },
        disks: vec![DiskDocument {
            name: DiskName::parse("vda").unwrap(),
            size_bytes: 8 * 4096,
            root,
            layers: Vec::new(),
        }],
        configuration: None,
        parts: Vec::new(),
        is_protected: false,
        quarantine: None,
        made_in: None,
        display_name: None,
        came_by: Vec::new(),
        files: None,
    };
    writer.put_point(&point).unwrap();
    parking_lot::Mutex::new(Fixture { directory, writer, point })
});

impl Fixture {
    fn repository(&self) -> &Repository {
        self.writer.repository()
    }

    fn put(&self, family: Family, key: &[u8], value: &[u8]) {
        let mut batch = self.repository().database().batch();
        batch.put(family, key, value).unwrap();
        self.repository().database().write(batch, false).unwrap();
    }

    /// Runs `look` with another value under a key, then restores the old one.
    fn with<T>(&self, family: Family, key: &[u8], value: &[u8], look: impl FnOnce() -> T) -> T {
        let database = self.repository().database();
        let before = database.get(family, key, ReadMode::Cached).unwrap().map(|v| v.to_vec());
        self.put(family, key, value);
        let seen = look();
        let mut batch = database.batch();
        match before {
            Some(before) => batch.put(family, key, &before).unwrap(),
            None => batch.delete(family, key).unwrap(),
        }
        database.write(batch, false).unwrap();
        seen
    }

    fn catalog_keys(&self) -> Vec<Vec<u8>> {
        let mut cursor =
            self.repository().database().cursor(Family::Catalog, ReadMode::Cached).unwrap();
        cursor.seek(&[]).unwrap();
        let mut keys = Vec::new();
        while let Some((key, _)) = cursor.entry() {
            keys.push(key.to_vec());
            cursor.next().unwrap();
        }
        keys
    }
}

fn is_damage<T>(result: Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::Corrupt)
}

/// JSON of documents, valid and invalid.
fn garbage() -> impl Strategy<Value = Vec<u8>> {
    let text = prop_oneof![
        Just(r#"{"machine":5,"point":"20261120T100000Z"}"#.to_owned()),
        Just("[".repeat(5000)),
        Just(r#"{"machine":"../../x"}"#.to_owned()),
        r#"\{"(machine|point|disks)":[0-9\[\]{}",a-z]{0,40}\}"#,
    ];
    let any = prop::collection::vec(any::<u8>(), 0..300);
    prop_oneof![any, text.prop_map(String::into_bytes)]
        .prop_filter("a machine's document", |value| !is_machine(value))
}

/// Whether it is a whole document of a machine: its name alone makes one.
fn is_machine(value: &[u8]) -> bool {
    let parsed: Option<serde_json::Value> = serde_json::from_slice(value).ok();
    parsed.is_some_and(|value| {
        value["machine"].as_str().is_some_and(|name| MachineName::parse(name).is_ok())
    })
}

proptest! {
    #[test]
    fn made_up_documents_of_the_catalog_are_damage(
        which: prop::sample::Index, value in garbage(), is_sealed: bool,
    ) {
        let fixture = FIXTURE.lock();
        let keys = fixture.catalog_keys();
        let key = which.get(&keys);
        let repository = fixture.repository();
        let value = if is_sealed {
                let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
                repository.encrypt_document(&format!("catalog {hex}"), &value).unwrap()
            } else { value };
        let (point, machine) = (&fixture.point, &fixture.point.machine);
        let (walked, found, all) = fixture.with(Family::Catalog, key, &value, || {
            (repository.verify_catalog(), repository.point(machine, &point.point), repository.machines())
        });
        let (_, damaged) = walked.unwrap();
        prop_assert_eq!(damaged.len(), 1, "{:?}", damaged);
        prop_assert!(is_damage(found) || is_damage(all));
    }

    #[test]
    fn made_up_keys_of_the_catalog_are_damage(
        key in prop::collection::vec(any::<u8>(), 1..60), value in garbage(),
    ) {
        let fixture = FIXTURE.lock();
        prop_assume!(!fixture.catalog_keys().contains(&key));
        let repository = fixture.repository();
        let walked = fixture.with(Family::Catalog, &key, &value, || repository.verify_catalog());
        let (points, damaged) = walked.unwrap();
        prop_assert_eq!(points.len(), 1);
        prop_assert_eq!(damaged.len(), 1);
    }

    #[test]
    fn made_up_counters_and_lists_are_damage(value in garbage(), is_sealed: bool) {
        let fixture = FIXTURE.lock();
        let repository = fixture.repository();
        let sealed = |purpose: &str| if is_sealed { repository.encrypt_document(purpose, &value).unwrap() } else { value.clone() };
        let state = sealed("store state");
        let read = fixture.with(Family::State, b"state", &state, || StoreState::read(repository));
        prop_assert!(is_damage(read));
        let list = sealed("damaged chunks");
        let read =
            fixture.with(Family::State, b"damaged chunks", &list, || DamagedChunks::read(repository));
        prop_assert!(is_damage(read.map(drop)));
    }

    #[test]
    fn made_up_entries_of_the_index_are_damage(
        hash in any::<[u8; 32]>(), value in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let fixture = FIXTURE.lock();
        let repository = fixture.repository();
        let found = fixture
            .with(Family::Dedup, &hash, &value, || crate::dedup::find(repository, &hash));
        prop_assert!(is_damage(found));
    }

    #[test]
    fn made_up_markers_are_ignored(value in garbage(), name in "[0-9a-f]{32}") {
        let fixture = FIXTURE.lock();
        let path = fixture.directory.path().join("markers").join(&name);
        std::fs::write(&path, &value).unwrap();
        let marked = fixture.repository().marked().unwrap();
        let sealed = fixture.repository().encrypt_document(&format!("marker {name}"), &value).unwrap();
        std::fs::write(&path, sealed).unwrap();
        let again = fixture.repository().marked().unwrap();
        std::fs::remove_file(&path).unwrap();
        prop_assert_eq!(&marked, &["web01/20261120T100000Z".to_owned()]);
        prop_assert_eq!(again, marked);
    }

    #[test]
    fn a_damaged_end_of_a_file_is_reported(
        changes in prop::collection::vec((0usize..2000, any::<u8>()), 1..6),
    ) {
        let fixture = FIXTURE.lock();
        fixture.repository().database().flush().unwrap();
        // A listed file: the folder may also hold one that is just being written. A compaction may remove one that
        // was listed.
        let listed = crate::rocks::listed_in(fixture.repository().database()).unwrap();
        let mut content = listed.iter().find_map(|file| std::fs::read(&file.path).ok()).unwrap();
        for (back, byte) in changes {
            let at = content.len().saturating_sub(1 + back);
            content[at] = byte;
        }
        let copy = fixture.directory.path().join("copy.sst");
        std::fs::write(&copy, content).unwrap();
        // These numbers only decide which files are worth rewriting: they may be anything, or
        // damage.
        let read = crate::rocks::table::TableProperties::read(&copy);
        prop_assert!(read.is_ok() || is_damage(read));
    }
}
