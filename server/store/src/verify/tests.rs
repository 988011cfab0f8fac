use super::*;
use crate::map::PageSource;
use crate::rocks::{Family, ReadMode};
use crate::*;

const CHUNK: usize = 4096;
/// One inner page, three leaves; the third is half empty.
const CHUNKS: usize = 2 * 1024 + 500;

struct Fixture {
    directory: tempfile::TempDir,
    writer: RepositoryWriter,
    disks: Vec<VerifiedDisk>,
}

fn passphrase() -> PassphraseSource {
    PassphraseSource::Command("printf secret".into())
}

/// Two points of one disk: the second differs in chunks 10 and 2000.
fn fixture() -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let secret = Passphrase::new(b"secret".to_vec()).unwrap();
    let options = InitOptions {
        chunk_size_bytes: CHUNK as u32,
        compression: Compression::Lz4,
        passphrase: Some(&secret),
    };
    let path = directory.path().join("repo");
    Repository::init(&path, &options).unwrap();
    let writer =
        RepositoryWriter::open(&path, &passphrase(), &OpenOptions { cache_bytes: 0 }).unwrap();
    let mut content = vec![0; CHUNKS * CHUNK];
    for (number, chunk) in content.chunks_mut(CHUNK).enumerate() {
        chunk[..8].copy_from_slice(&(number as u64 + 1).to_le_bytes());
    }
    let mut disks = Vec::new();
    let mut root = None;
    for round in 0..2u8 {
        if round == 1 {
            content[10 * CHUNK + 9] = 0xff;
            content[2000 * CHUNK + 9] = 0xfe;
        }
        let options = WriteOptions { threads: 1 };
        let mut disk = writer.disk_writer(root, content.len() as u64, options).unwrap();
        disk.write(0, content.clone()).unwrap();
        let (written, _) = disk.finish().unwrap();
        root = Some(written);
        let name = format!("web01/{round}/vda");
        disks.push(VerifiedDisk { name, root: written, size_bytes: content.len() as u64 - 100 });
    }
    Fixture { directory, writer, disks }
}

impl Fixture {
    fn verify(&self, coverage: Coverage) -> VerifyReport {
        self.verify_of(self.writer.repository(), coverage)
    }

    fn verify_of(&self, repository: &Repository, coverage: Coverage) -> VerifyReport {
        let cancel = AtomicBool::new(false);
        let options =
            VerifyOptions { coverage, threads: 2, cancel: &cancel, progress: &|_progress| {} };
        repository.verify(&self.disks, &options).unwrap()
    }

    fn change(&self, family: Family, id: u64, change: impl FnOnce(&mut Vec<u8>)) {
        let database = self.writer.repository().database();
        let key = id.to_be_bytes();
        let mut value = database.get(family, &key, ReadMode::Cached).unwrap().unwrap().to_vec();
        change(&mut value);
        let mut batch = database.batch();
        batch.put(family, &key, &value).unwrap();
        database.write(batch, true).unwrap();
    }

    fn remove(&self, family: Family, id: u64) {
        let database = self.writer.repository().database();
        let mut batch = database.batch();
        batch.delete(family, &id.to_be_bytes()).unwrap();
        database.write(batch, true).unwrap();
    }
}

fn chunk_range(first: u64, count: u64) -> Range<u64> {
    first * CHUNK as u64..(first + count) * CHUNK as u64
}

fn affected(disk: &str, ranges: &[Range<u64>]) -> Affected {
    Affected { disk: disk.to_owned(), ranges: ranges.to_vec() }
}

#[test]
fn a_sound_repository_is_clean_and_wholly_read() {
    let fixture = fixture();
    let report = fixture.verify(Coverage::Everything);
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.chunks, CHUNKS as u64 + 2);
    // The inner page and two leaves were replaced.
    assert_eq!(report.pages, 4 + 3);
    assert!(report.read_bytes > report.chunks * 36);
    let (points, damaged) = fixture.writer.repository().verify_catalog().unwrap();
    assert!(points.is_empty() && damaged.is_empty());
}

#[test]
fn a_damaged_chunk_is_named_with_every_disk_that_needs_it() {
    for missing in [false, true] {
        let fixture = fixture();
        // Chunk 11 is in both points, chunk 10 in the first alone: ids begin at 1.
        for id in [11, 12, 13] {
            if missing {
                fixture.remove(Family::Chunks, id)
            } else {
                fixture.change(Family::Chunks, id, |value| value[30] ^= 1)
            }
        }
        let report = fixture.verify(Coverage::Everything);
        let ids: Vec<_> = report.damaged_chunks.iter().map(|damaged| damaged.id).collect();
        assert_eq!(ids, [11, 12, 13]);
        assert_eq!(report.damaged_chunk_count, 3);
        assert!(report.damaged_pages.is_empty());
        let both = [
            affected("web01/0/vda", &[chunk_range(10, 3)]),
            affected("web01/1/vda", &[chunk_range(11, 2)]),
        ];
        assert_eq!(report.affected, both);
        assert!(!report.is_clean());
    }
}

#[test]
fn chunks_that_stand_at_each_others_places_are_damage() {
    let fixture = fixture();
    let database = fixture.writer.repository().database();
    let value = |id: u64| {
        let key = id.to_be_bytes();
        database.get(Family::Chunks, &key, ReadMode::Cached).unwrap().unwrap().to_vec()
    };
    let (one, two) = (value(100), value(200));
    fixture.change(Family::Chunks, 100, |value| *value = two);
    fixture.change(Family::Chunks, 200, |value| *value = one);
    let report = fixture.verify(Coverage::Everything);
    let ids: Vec<_> = report.damaged_chunks.iter().map(|damaged| damaged.id).collect();
    assert_eq!(ids, [100, 200]);
    assert_eq!(report.affected.len(), 2);
}

#[test]
fn a_damaged_page_is_reported_with_the_affected_ranges() {
    let fixture = fixture();
    // Pages are stored from the leaves up: 1, 2, 3 and the root 4; then the second
    // map's leaves and its root.
    for (page, missing) in [(3, false), (3, true)] {
        if missing {
            fixture.remove(Family::Maps, page)
        } else {
            fixture.change(Family::Maps, page, |value| value[20] ^= 1)
        }
        // A separate reader, because pages are cached.
        let path = fixture.directory.path().join("repo");
        let reader = Repository::open(&path, &passphrase(), &OpenOptions::default()).unwrap();
        let report = fixture.verify_of(&reader, Coverage::Everything);
        assert_eq!(report.damaged_chunk_count, 0);
        assert_eq!(report.damaged_pages.len(), 1, "{report:?}");
        assert_eq!(report.damaged_pages[0].id, page);
        // The third leaf is shared; it ends at the disk's end.
        let end = fixture.disks[0].size_bytes;
        let range = chunk_range(2048, 1).start..end;
        let both =
            ["web01/0/vda", "web01/1/vda"].map(|disk| affected(disk, std::slice::from_ref(&range)));
        assert_eq!(report.affected, both);
    }
}

#[test]
fn a_verify_of_referenced_data_skips_the_rest() {
    let mut fixture = fixture();
    fixture.disks.truncate(1);
    // Needed only by the second point.
    let newest = CHUNKS as u64 + 1;
    fixture.change(Family::Chunks, newest, |value| value[30] ^= 1);
    let report = fixture.verify(Coverage::Referenced);
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.chunks, CHUNKS as u64);
    let report = fixture.verify(Coverage::Everything);
    assert_eq!(report.damaged_chunks[0].id, newest);
    assert!(report.affected.is_empty() && !report.is_clean());
}

#[test]
fn a_sample_reads_its_share_and_at_least_a_piece() {
    let fixture = fixture();
    let stored = CHUNKS as u64 + 2;
    let pieces = stored.div_ceil(32);
    // The last piece is a short one.
    let short = pieces * 32 - stored;
    for percent in [0.001, 1.0, 5.0, 50.0, 99.0] {
        let of = ((pieces as f64 * percent / 100.0).ceil() as u64) * 32;
        let read = fixture.verify(Coverage::Sample(percent)).chunks;
        assert!(read == of || read == of - short, "{percent}: {read} of {of}");
    }
    let all = fixture.verify(Coverage::Sample(100.0));
    assert_eq!((all.chunks, all.is_clean()), (CHUNKS as u64 + 2, true));
}

/// After years most ids are gone, and a repair skips many at once.
#[test]
fn deleted_ids_are_neither_sampled_nor_counted() {
    let fixture = fixture();
    let database = fixture.writer.repository().database();
    // Files that were just written cannot be dropped.
    database.compact(Family::Chunks, None).unwrap();
    let content: Vec<u8> =
        (0..40 * CHUNK as u32).map(|at| (at / 4096 * 7 + at % 251) as u8).collect();
    let mut disk = fixture
        .writer
        .disk_writer(None, content.len() as u64, WriteOptions { threads: 1 })
        .unwrap();
    disk.write(0, content.clone()).unwrap();
    let (root, _) = disk.finish().unwrap();
    let new = VerifiedDisk { name: "new".to_owned(), root, size_bytes: content.len() as u64 };
    database.flush().unwrap();
    let first_new = CHUNKS as u64 + 3;
    let stored = fixture.writer.repository().next_chunk().unwrap() - first_new;
    let last_old = (first_new - 1).to_be_bytes();
    database.delete_files_in_range(Family::Chunks, &[0; 8], &last_old).unwrap();
    let cancel = AtomicBool::new(false);
    let last = parking_lot::Mutex::new(VerifyProgress::default());
    let progress = |now| *last.lock() = now;
    let repository = fixture.writer.repository();
    for coverage in [Coverage::Sample(0.001), Coverage::Everything, Coverage::Referenced] {
        let options = VerifyOptions { coverage, threads: 1, cancel: &cancel, progress: &progress };
        let report = repository.verify(std::slice::from_ref(&new), &options).unwrap();
        let read = if coverage == Coverage::Sample(0.001) { stored.min(32) } else { stored };
        assert!(report.is_clean() && [read, stored % 32].contains(&report.chunks), "{report:?}");
        let (progress, bytes) = (*last.lock(), read * CHUNK as u64);
        assert_eq!(progress.total_bytes, bytes, "{coverage:?}");
        assert!(progress.done_bytes <= bytes, "{coverage:?}");
    }
    // Damage in the other chunks is named too.
    let report = fixture.verify(Coverage::Sample(0.001));
    let whole = 0..CHUNKS as u64 * CHUNK as u64 - 100;
    let names = fixture.disks.iter().map(|d| affected(&d.name, std::slice::from_ref(&whole)));
    assert_eq!(report.affected, names.collect::<Vec<_>>());
}

#[test]
fn a_verify_reports_progress_and_can_be_cancelled() {
    let fixture = fixture();
    let cancel = AtomicBool::new(false);
    let last = parking_lot::Mutex::new(VerifyProgress::default());
    let progress = |now: VerifyProgress| {
        let mut last = last.lock();
        if now.done_bytes > last.done_bytes {
            *last = now;
        }
    };
    let options = VerifyOptions {
        coverage: Coverage::Everything,
        threads: 1,
        cancel: &cancel,
        progress: &progress,
    };
    let report = fixture.writer.repository().verify(&fixture.disks, &options).unwrap();
    let progress = *last.lock();
    let bytes = report.chunks * CHUNK as u64;
    assert_eq!((progress.done_bytes, progress.total_bytes), (bytes, bytes));
    assert_eq!(progress.read_bytes, report.read_bytes);
    cancel.store(true, std::sync::atomic::Ordering::Relaxed);
    let cancelled = fixture.writer.repository().verify(&fixture.disks, &options).unwrap_err();
    assert_eq!(cancelled.kind(), coldrise_block::ErrorKind::Interrupted);
}

#[test]
fn a_damaged_document_is_named_by_its_key() {
    let fixture = fixture();
    for (machine, point) in [("web01", "20261120T100000Z"), ("web01", "20261120T100000Z+3")] {
        let disk = &fixture.disks[0];
        let document = PointDocument {
            machine: MachineName::parse(machine).unwrap(),
            point: PointName::parse(point).unwrap(),
            created_at_ms: 1,
            origin: PointOrigin::Backup { sources: vec!["a".into()] },
            disks: vec![DiskDocument {
                name: DiskName::parse("vda").unwrap(),
                size_bytes: disk.size_bytes,
                root: disk.root,
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
    let repository = fixture.writer.repository();
    let keys = {
        let mut cursor = repository.database().cursor(Family::Catalog, ReadMode::Cached).unwrap();
        let mut keys = Vec::new();
        cursor.seek(&[]).unwrap();
        while let Some((key, value)) = cursor.entry() {
            keys.push((key.to_vec(), value.to_vec()));
            cursor.next().unwrap();
        }
        keys
    };
    assert_eq!(keys.len(), 3);
    let put = |key: &[u8], value: &[u8]| {
        let mut batch = repository.database().batch();
        batch.put(Family::Catalog, key, value).unwrap();
        repository.database().write(batch, true).unwrap();
    };
    let mut damaged = keys[2].1.clone();
    damaged[20] ^= 1;
    put(&keys[2].0, &damaged);
    let (points, found) = repository.verify_catalog().unwrap();
    assert_eq!(points.len(), 1);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].what, "web01/20261120T100000Z+3");
    // Without the machine's own document the name is lost, but not the time.
    put(&keys[0].0, &damaged);
    let (_, found) = repository.verify_catalog().unwrap();
    assert_eq!(found.len(), 2);
    assert!(found[1].what.ends_with("/20261120T100000Z+3"), "{found:?}");
    // The counters.
    let mut batch = repository.database().batch();
    batch.put(Family::State, b"state", b"nothing of ours").unwrap();
    repository.database().write(batch, true).unwrap();
    let (_, found) = repository.verify_catalog().unwrap();
    assert_eq!(found.len(), 3);
    assert!(fixture.verify(Coverage::Everything).is_clean());
}

#[test]
fn a_verify_of_recent_points_names_every_affected_disk() {
    let fixture = fixture();
    let repository = fixture.writer.repository();
    let (old, new) = fixture.disks.split_at(1);
    let verify = |before: &[VerifiedDisk]| {
        let cancel = AtomicBool::new(false);
        let coverage = Coverage::Everything;
        let options = VerifyOptions { coverage, threads: 2, cancel: &cancel, progress: &|_| {} };
        let disks = RecentDisks { before, recent: new, all: &fixture.disks };
        repository.verify_recent(&disks, &options).unwrap()
    };
    let report = verify(old);
    assert!(report.is_clean());
    // Two new chunks are read, and one map: an inner page and three leaves.
    assert_eq!((report.chunks, report.pages), (2, 4));
    assert_eq!(verify(&[]).chunks, CHUNKS as u64 + 2);

    // An old chunk is left to the earlier verify.
    fixture.change(Family::Chunks, 20, |value| value[30] ^= 1);
    assert!(verify(old).is_clean());
    assert_eq!(verify(&[]).affected.len(), 2);
    fixture.change(Family::Chunks, 20, |value| value[30] ^= 1);
    // A new one is found in any disk, damaged or missing.
    let id = CHUNKS as u64 + 1;
    fixture.change(Family::Chunks, id, |value| value[30] ^= 1);
    let report = verify(old);
    assert_eq!(report.damaged_chunk_count, 1);
    assert_eq!(report.affected, [affected("web01/1/vda", &[chunk_range(10, 1)])]);
    fixture.remove(Family::Chunks, id);
    assert_eq!(verify(old).affected, [affected("web01/1/vda", &[chunk_range(10, 1)])]);
    // A page that the new point shares with the old one is read.
    let page = repository.page(old[0].root.page(), old[0].root.levels() - 1).unwrap()[2];
    fixture.change(Family::Maps, page, |value| value[30] ^= 1);
    let cold = Repository::open(repository.path(), &passphrase(), &OpenOptions::default()).unwrap();
    let cancel = AtomicBool::new(false);
    let coverage = Coverage::Everything;
    let options = VerifyOptions { coverage, threads: 2, cancel: &cancel, progress: &|_| {} };
    let disks = RecentDisks { before: old, recent: new, all: &fixture.disks };
    let report = cold.verify_recent(&disks, &options).unwrap();
    let ids: Vec<_> = report.damaged_pages.iter().map(|damaged| damaged.id).collect();
    assert_eq!(ids, [page]);
    let names: Vec<_> = report.affected.iter().map(|affected| &affected.disk[..]).collect();
    assert_eq!(names, ["web01/0/vda", "web01/1/vda"]);
}
