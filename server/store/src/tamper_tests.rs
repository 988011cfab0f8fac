//! Values of a store that an attacker has written: swapped, copied, removed, forged. Entries are
//! changed through the database itself, so that all of RocksDB's checksums are right.

use coldrise_block::{ErrorKind, Result};

use crate::dedup;
use crate::map::PageSource;
use crate::rocks::{Family, ReadMode};
use crate::*;

const CHUNK: usize = 4096;

struct Fixture {
    _directory: tempfile::TempDir,
    writer: RepositoryWriter,
    root: MapRoot,
    content: Vec<u8>,
}

/// A disk of eight pages of chunks, with one inner page.
fn fixture(encrypted: bool) -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let passphrase = encrypted.then(|| Passphrase::new(b"secret".to_vec()).unwrap());
    let source = if encrypted {
        PassphraseSource::Command("printf secret".into())
    } else {
        PassphraseSource::None
    };
    let options = InitOptions {
        chunk_size_bytes: CHUNK as u32,
        compression: Compression::Lz4,
        passphrase: passphrase.as_ref(),
    };
    Repository::init(directory.path(), &options).unwrap();
    let options = OpenOptions { cache_bytes: 0 };
    let writer = RepositoryWriter::open(directory.path(), &source, &options).unwrap();
    let mut content = vec![0; 2 * 1024 * CHUNK];
    for (number, chunk) in content.chunks_mut(CHUNK).enumerate() {
        chunk[..8].copy_from_slice(&(number as u64 + 1).to_le_bytes());
    }
    let mut disk =
        writer.disk_writer(None, content.len() as u64, WriteOptions { threads: 1 }).unwrap();
    disk.write(0, content.clone()).unwrap();
    let (root, _) = disk.finish().unwrap();
    Fixture { _directory: directory, writer, root, content }
}

impl Fixture {
    fn value(&self, family: Family, key: &[u8]) -> Vec<u8> {
        let database = self.writer.repository().database();
        database.get(family, key, ReadMode::Cached).unwrap().unwrap().to_vec()
    }

    fn put(&self, family: Family, key: &[u8], value: &[u8]) {
        let database = self.writer.repository().database();
        let mut batch = database.batch();
        batch.put(family, key, value).unwrap();
        database.write(batch, true).unwrap();
    }

    fn remove(&self, family: Family, id: u64) {
        let database = self.writer.repository().database();
        let mut batch = database.batch();
        batch.delete(family, &id.to_be_bytes()).unwrap();
        database.write(batch, true).unwrap();
    }

    fn swap(&self, family: Family, one: u64, two: u64) {
        let (one, two) = (one.to_be_bytes(), two.to_be_bytes());
        let values = (self.value(family, &one), self.value(family, &two));
        self.put(family, &one, &values.1);
        self.put(family, &two, &values.0);
    }

    /// Reads 4 KiB at chunk `index`, and its surroundings as a stream.
    fn read(&self, index: usize) -> [Result<()>; 2] {
        let repository = self.writer.repository();
        let disk = repository.disk(self.root, self.content.len() as u64);
        [CHUNK, 256 << 10].map(|length| {
            let offset = index * CHUNK / length * length;
            let mut bytes = vec![0; length];
            disk.read_at(&mut bytes, offset as u64)?;
            assert!(bytes == self.content[offset..offset + length], "wrong bytes were returned");
            Ok(())
        })
    }

    fn assert_right(&self, index: usize) {
        for result in self.read(index) {
            result.unwrap();
        }
    }

    fn assert_corrupt(&self, index: usize, names: &str) {
        for result in self.read(index) {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(error.to_string().contains(names), "{error}");
        }
    }
}

#[test]
fn swapped_replaced_and_missing_chunks_are_noticed_and_named() {
    for encrypted in [true, false] {
        let fixture = fixture(encrypted);
        fixture.assert_right(10);
        fixture.swap(Family::Chunks, 11, 12);
        fixture.assert_corrupt(10, "chunk 11 ");
        fixture.swap(Family::Chunks, 11, 12);
        fixture.assert_right(10);
        fixture.remove(Family::Chunks, 11);
        fixture.assert_corrupt(10, "chunk 11 ");
        fixture.put(Family::Chunks, &11u64.to_be_bytes(), b"");
        fixture.assert_corrupt(10, "chunk 11 ");
        fixture.assert_right(200);
    }
}

#[test]
fn swapped_and_missing_pages_are_noticed_and_named() {
    for encrypted in [true, false] {
        // Leaves 1 and 2; the root is 3.
        let swapped = fixture(encrypted);
        assert_eq!((swapped.root.page(), swapped.root.levels()), (3, 2));
        let [right, copied] = [fixture(encrypted), fixture(encrypted)];
        right.swap(Family::Maps, 1, 2);
        right.assert_right(10);
        copied.swap(Family::MapsCopy, 1, 2);
        copied.assert_right(10);
        swapped.swap(Family::Maps, 1, 2);
        swapped.swap(Family::MapsCopy, 1, 2);
        swapped.assert_corrupt(10, "page 1 ");
        swapped.assert_corrupt(1500, "page 2 ");
        let looped = fixture(encrypted);
        let root = looped.value(Family::Maps, &3u64.to_be_bytes());
        looped.put(Family::Maps, &1u64.to_be_bytes(), &root);
        looped.put(Family::MapsCopy, &1u64.to_be_bytes(), &root);
        looped.assert_corrupt(10, "page 1 ");
        let missing = fixture(encrypted);
        missing.remove(Family::Maps, 3);
        missing.remove(Family::MapsCopy, 3);
        // A page cached from when it was built may still be readable; a page that must be read is
        // not.
        assert!(missing.writer.repository().page(99, 0).is_err());
        let error = missing.writer.repository().page(3, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn an_index_entry_that_points_elsewhere_stops_the_backup() {
    let fixture = fixture(true);
    let repository = fixture.writer.repository();
    let hash = |index: usize| {
        dedup::hash_chunk(repository, &fixture.content[index * CHUNK..(index + 1) * CHUNK])
    };
    let value = fixture.value(Family::Dedup, &hash(5));
    fixture.put(Family::Dedup, &hash(4), &value);
    let mut disk =
        fixture.writer.disk_writer(None, CHUNK as u64, WriteOptions { threads: 1 }).unwrap();
    disk.write(0, fixture.content[4 * CHUNK..5 * CHUNK].to_vec()).unwrap();
    assert_eq!(disk.finish().unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn a_document_under_another_key_is_noticed() {
    let fixture = fixture(true);
    let repository = fixture.writer.repository();
    for name in ["20261120T100000Z", "20261121T100000Z"] {
        let document = PointDocument {
            machine: MachineName::parse("web01").unwrap(),
            point: PointName::parse(name).unwrap(),
            created_at_ms: 0,
            origin: PointOrigin::Backup { sources: Vec::new() },
            disks: vec![DiskDocument {
                name: DiskName::parse("vda").unwrap(),
                size_bytes: fixture.content.len() as u64,
                root: fixture.root,
                layers: Vec::new(),
            }],
            configuration: None,
            parts: Vec::new(),
            is_protected: false,
            files: None,
            quarantine: None,
            made_in: None,
            display_name: None,
            came_by: Vec::new(),
        };
        fixture.writer.put_point(&document).unwrap();
    }
    let mut entries = Vec::new();
    let mut cursor = repository.database().cursor(Family::Catalog, ReadMode::Cached).unwrap();
    cursor.seek(b"p").unwrap();
    while let Some((key, value)) = cursor.entry() {
        entries.push((key.to_vec(), value.to_vec()));
        cursor.next().unwrap();
    }
    assert_eq!(entries.len(), 2);
    drop(cursor);
    fixture.put(Family::Catalog, &entries[0].0, &entries[1].1);
    let machine = MachineName::parse("web01").unwrap();
    assert_eq!(repository.points(&machine).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn uncommitted_data_is_dropped_and_its_ids_are_skipped() {
    let Fixture { _directory: directory, writer, root, content } = fixture(false);
    let chunk = Fixture {
        _directory: tempfile::tempdir().unwrap(),
        writer,
        root,
        content: content.clone(),
    };
    // As after a crash between ingesting a file and the commit.
    let orphan = chunk.value(Family::Chunks, &7u64.to_be_bytes());
    for id in 3000..3010u64 {
        chunk.put(Family::Chunks, &id.to_be_bytes(), &orphan);
        chunk.put(Family::Maps, &(id - 2000).to_be_bytes(), b"half a page");
    }
    drop(chunk);
    let options = OpenOptions { cache_bytes: 0 };
    let open =
        || RepositoryWriter::open(directory.path(), &PassphraseSource::None, &options).unwrap();
    let writer = open();
    let repository = writer.repository().clone();
    for id in 3000..3010u64 {
        let found = |family, id: u64| {
            repository
                .database()
                .get(family, &id.to_be_bytes(), ReadMode::Cached)
                .unwrap()
                .is_some()
        };
        assert!(!found(Family::Chunks, id) && !found(Family::Maps, id - 2000));
    }
    let mut disk =
        writer.disk_writer(Some(root), content.len() as u64, WriteOptions { threads: 1 }).unwrap();
    disk.write(0, vec![0xab; CHUNK]).unwrap();
    let (new_root, counts) = disk.finish().unwrap();
    assert_eq!(counts.stored_chunks, 1);
    assert!(new_root.page() >= 1010);
    let mut bytes = vec![0; CHUNK];
    repository.read_chunk(3010, &mut bytes).unwrap();
    assert_eq!(bytes, [0xab; CHUNK]);
    let disk = repository.disk(root, content.len() as u64);
    let mut all = vec![0; content.len()];
    disk.read_at(&mut all, 0).unwrap();
    assert!(all == content);
}
