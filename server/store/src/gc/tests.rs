use std::cell::Cell;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind, Result};

use super::sweep::Step;
use super::*;
use crate::rocks::{Family, ReadMode};
use crate::state::StoreState;
use crate::*;

pub(super) const CHUNK: usize = 4096;
pub(super) static NEVER: AtomicBool = AtomicBool::new(false);

pub(super) struct Fixture {
    directory: tempfile::TempDir,
    /// Unreferenced as a whole after its points are deleted.
    pub(super) first: Vec<u8>,
    /// Disks that are still in use.
    pub(super) live: Vec<(MapRoot, Vec<u8>)>,
}

pub(super) fn noise(seed: u64, chunks: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..chunks * CHUNK / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

pub(super) fn write(writer: &RepositoryWriter, base: Option<MapRoot>, content: &[u8]) -> MapRoot {
    let options = WriteOptions { threads: 1 };
    let mut disk = writer.disk_writer(base, content.len() as u64, options).unwrap();
    disk.write(0, content.to_vec()).unwrap();
    disk.finish().unwrap().0
}

fn empty() -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let options = InitOptions {
        chunk_size_bytes: CHUNK as u32,
        compression: Compression::None,
        passphrase: None,
    };
    Repository::init(&directory.path().join("repo"), &options).unwrap();
    Fixture { directory, first: noise(1, 600), live: Vec::new() }
}

/// Chunks in storage order, and how many of them stay in use:
///
/// ```text
///  600, a file      nothing
///  100, from a log  nothing
/// 1100, a file      400 of them: it is rewritten
///  100, from a log  all
///  600, a file      580 of them: it is kept
///   20, from a log  all
///  700, a file      all
/// ```
pub(super) fn fixture() -> Fixture {
    let fixture = empty();
    let writer = fixture.writer();
    write(&writer, None, &fixture.first);
    write(&writer, None, &noise(2, 100));
    let mut half = noise(3, 1100);
    let half_root = write(&writer, None, &half);
    let small = noise(4, 100);
    let small_root = write(&writer, None, &small);
    let mut most = noise(5, 600);
    let most_root = write(&writer, None, &most);
    most[..20 * CHUNK].copy_from_slice(&noise(6, 20));
    half[..700 * CHUNK].copy_from_slice(&noise(7, 700));
    let live = vec![
        (write(&writer, Some(most_root), &most), most),
        (write(&writer, Some(half_root), &half), half),
        (small_root, small),
    ];
    Fixture { live, ..fixture }
}

impl Fixture {
    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("repo")
    }

    pub(super) fn writer(&self) -> RepositoryWriter {
        let options = OpenOptions { cache_bytes: 0 };
        RepositoryWriter::open(&self.path(), &PassphraseSource::None, &options).unwrap()
    }

    pub(super) fn reader(&self) -> std::sync::Arc<Repository> {
        let options = OpenOptions { cache_bytes: 0 };
        Repository::open(&self.path(), &PassphraseSource::None, &options).unwrap()
    }

    pub(super) fn reachable(&self, repository: &Repository) -> Reachable {
        repository.reachable(self.live.iter().map(|(root, _)| *root), &NEVER).unwrap()
    }

    fn collect_until(&self, after: &dyn Fn(Step) -> Result<()>) -> Result<GcReport> {
        let writer = self.writer();
        let reachable = self.reachable(writer.repository());
        let options = GcOptions {
            max_unused: MaxUnused::default(),
            cancel: &NEVER,
            progress: &|_progress| {},
        };
        writer.collect_until(reachable, &options, after)
    }

    pub(super) fn collect(&self) -> GcReport {
        self.collect_until(&|_step| Ok(())).unwrap()
    }

    /// Everything in use is readable, and the index refers to no missing chunk.
    pub(super) fn assert_sound(&self) {
        let writer = self.writer();
        for repository in [writer.repository(), &self.reader()] {
            for (root, content) in &self.live {
                let disk = repository.disk(*root, content.len() as u64);
                let mut read = vec![0; content.len()];
                disk.read_at(&mut read, 0).unwrap();
                assert!(read == *content);
            }
        }
        let repository = writer.repository();
        let mut chunk = vec![0; CHUNK];
        for_each(repository, Family::Dedup, |hash, value| {
            let id = u64::from_be_bytes(*value.first_chunk::<8>().unwrap());
            repository.read_chunk(id, &mut chunk).unwrap();
            assert_eq!(crate::dedup::hash_chunk(repository, &chunk), hash);
        });
    }
}

impl Fixture {
    /// The counters of the store match its content.
    pub(super) fn assert_counted(&self) {
        let reader = self.reader();
        let state = StoreState::read(&reader).unwrap();
        let mut value_bytes = 0;
        for_each(&reader, Family::Chunks, |_, value| value_bytes += value.len() as u64);
        assert_eq!(state.chunks, count(&reader, Family::Chunks));
        assert_eq!(state.stored_bytes, value_bytes);
    }
}

fn for_each(repository: &Repository, family: Family, mut each: impl FnMut(&[u8], &[u8])) {
    let mut cursor = repository.database().cursor(family, ReadMode::Scan).unwrap();
    cursor.seek(&[]).unwrap();
    while let Some((key, value)) = cursor.entry() {
        each(key, value);
        cursor.next().unwrap();
    }
}

fn count(repository: &Repository, family: Family) -> u64 {
    let mut entries = 0;
    for_each(repository, family, |_, _| entries += 1);
    entries
}

#[test]
fn gc_removes_only_unreferenced_data() {
    let fixture = fixture();
    let reader = fixture.reader();
    let estimate = reader.estimate_gc(&fixture.reachable(&reader), MaxUnused::default()).unwrap();
    let before = std::fs::read_dir(fixture.path().join("db")).unwrap().count();
    let done = fixture.collect();
    assert_eq!((done.chunks, done.kept_chunks), (600 + 100 + 700, 20));
    assert_eq!((estimate.chunks, estimate.kept_chunks), (done.chunks, done.kept_chunks));
    // Every page of the first disks, and the pages that the changes replaced.
    assert_eq!((done.pages, done.damaged_files.len()), (1 + 1 + (1 + 1) + 1, 0));
    assert!(done.dropped_files >= 1 && done.rewritten_files >= 2, "{done:?}");
    fixture.assert_sound();
    assert!(std::fs::read_dir(fixture.path().join("db")).unwrap().count() < before + 5);

    let writer = fixture.writer();
    let repository = writer.repository();
    fixture.assert_counted();
    let chunks = count(repository, Family::Chunks);
    assert_eq!(chunks, 400 + 100 + 600 + 720);
    assert_eq!(count(repository, Family::Dedup), chunks);
    assert_eq!(count(repository, Family::Maps), fixture.reachable(repository).pages());
    drop(writer);
    // A second run finds nothing to do.
    let again = fixture.collect();
    assert_eq!(again, GcReport { kept_chunks: 20, ..GcReport::default() });
}

#[test]
fn a_gc_that_ends_after_any_step_loses_nothing_and_the_next_one_does_the_rest() {
    let steps = Cell::new(0);
    let expected = {
        let fixture = fixture();
        let counted = fixture.collect_until(&|_step| {
            steps.set(steps.get() + 1);
            Ok(())
        });
        counted.unwrap();
        let writer = fixture.writer();
        (count(writer.repository(), Family::Chunks), count(writer.repository(), Family::Maps))
    };
    assert!(steps.get() >= 5, "{}", steps.get());
    for end in 0..steps.get() {
        let mut fixture = fixture();
        let done = Cell::new(0);
        let last = Cell::new(Step::Judged);
        let ended = fixture.collect_until(&|step| {
            last.set(step);
            done.set(done.get() + 1);
            if done.get() > end {
                Err(Error::new(ErrorKind::Interrupted, "ended by the test"))
            } else {
                Ok(())
            }
        });
        assert_eq!(ended.unwrap_err().kind(), ErrorKind::Interrupted);
        fixture.assert_sound();

        // The same content, partly deleted, is stored again like any other.
        let content = fixture.first.clone();
        let root = write(&fixture.writer(), None, &content);
        fixture.live.push((root, content));
        fixture.assert_sound();
        let _ = fixture.live.pop();
        let mut left = fixture.collect();
        left.kept_chunks -= 20;
        fixture.assert_sound();
        let writer = fixture.writer();
        let found =
            (count(writer.repository(), Family::Chunks), count(writer.repository(), Family::Maps));
        assert_eq!(found, expected, "after {:?}", last.get());
        assert_eq!(left.kept_chunks, 0);
    }
}

#[test]
fn a_writer_continues_after_a_gc_and_a_reader_beside_it() {
    let fixture = fixture();
    let reader = fixture.reader();
    let writer = fixture.writer();
    let options =
        GcOptions { max_unused: MaxUnused::default(), cancel: &NEVER, progress: &|_progress| {} };
    writer.collect_garbage(fixture.reachable(writer.repository()), &options).unwrap();
    let root = write(&writer, None, &fixture.first);
    for (root, content) in fixture.live.iter().chain([&(root, fixture.first.clone())]) {
        let mut read = vec![0; content.len()];
        reader.disk(*root, content.len() as u64).read_at(&mut read, 0).unwrap();
        assert!(read == *content);
    }
}

impl Fixture {
    /// Flips a bit in an unreferenced entry of the largest file with that fate.
    /// Writes in place, so that processes with the open file see it.
    fn damage(&self, fate: Fate) -> String {
        let reader = self.reader();
        let units = units::of_family(
            &reader,
            Family::Chunks,
            &self.reachable(&reader),
            MaxUnused::default(),
        )
        .unwrap();
        let files = units.iter().filter(|unit| unit.fate == fate).flat_map(|unit| &unit.files);
        let file = files.max_by_key(|file| file.bytes).unwrap();
        let path = self.path().join("db").join(file.name.trim_start_matches('/'));
        let mut bytes = std::fs::read(&path).unwrap();
        let place = bytes.len() / 3;
        bytes[place] ^= 0x10;
        std::fs::write(&path, bytes).unwrap();
        file.name.clone()
    }

    /// Everything in use is readable, and a backup succeeds.
    fn assert_continues(&mut self) {
        let root = write(&self.writer(), None, &self.first);
        self.live.push((root, self.first.clone()));
        for (root, content) in &self.live {
            let mut read = vec![0; content.len()];
            self.reader().disk(*root, content.len() as u64).read_at(&mut read, 0).unwrap();
            assert!(read == *content);
        }
        let _ = self.live.pop();
    }
}

#[test]
fn a_damaged_file_is_left_alone_and_named() {
    let mut fixture = fixture();
    let name = fixture.damage(Fate::Rewritten);
    let done = fixture.collect();
    assert_eq!((done.chunks, done.kept_chunks), (600 + 100, 20 + 700));
    assert_eq!(done.damaged_files.len(), 1);
    assert!(done.damaged_files[0].contains(&name), "{done:?}");
    fixture.assert_continues();
}

/// All are rewritten in one step, except the damaged one in the middle.
#[test]
fn the_neighbours_of_a_damaged_file_are_rewritten() {
    let mut fixture = empty();
    let writer = fixture.writer();
    for (seed, chunks) in [(1, 600), (2, 640), (3, 600)] {
        let mut content = noise(seed, chunks);
        let root = write(&writer, None, &content);
        content[..400 * CHUNK].fill(0);
        fixture.live.push((write(&writer, Some(root), &content), content));
    }
    drop(writer);
    let name = fixture.damage(Fate::Rewritten);
    let done = fixture.collect();
    assert_eq!((done.chunks, done.kept_chunks), (400 + 400, 400));
    // Two of chunks and the one of the maps. Copies of pages wait for a point.
    assert_eq!((done.rewritten_files, done.damaged_files.len()), (2 + 1, 1));
    assert!(done.damaged_files[0].contains(&name), "{done:?}");
    fixture.assert_continues();
}

#[test]
fn unreferenced_damaged_files_are_dropped() {
    let mut fixture = fixture();
    fixture.damage(Fate::Dropped);
    let done = fixture.collect();
    assert_eq!((done.chunks, done.damaged_files), (600 + 100 + 700, Vec::new()));
    fixture.assert_continues();
}

#[test]
fn a_file_that_is_damaged_meanwhile_ends_the_gc_and_nothing_else() {
    let mut fixture = fixture();
    let name = std::cell::RefCell::new(String::new());
    let ended = fixture.collect_until(&|step| {
        if step == Step::Checked(Family::Chunks) {
            name.replace(fixture.damage(Fate::Rewritten));
        }
        Ok(())
    });
    let error = ended.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.full_message().contains("coldrise verify"), "{error:?}");
    fixture.assert_continues();
    let next = fixture.collect();
    assert_eq!(next.damaged_files.len(), 1);
    assert!(next.damaged_files[0].contains(&*name.borrow()), "{next:?}");
    fixture.assert_continues();
}

#[test]
fn files_whose_ids_overlap_are_one_unit() {
    let directory = tempfile::tempdir().unwrap();
    let fixture = Fixture { directory, first: Vec::new(), live: Vec::new() };
    let options = InitOptions {
        chunk_size_bytes: CHUNK as u32,
        compression: Compression::None,
        passphrase: None,
    };
    Repository::init(&fixture.path(), &options).unwrap();
    let writer = fixture.writer();
    let database = writer.repository().database();
    for ids in [&[1u64, 9][..], &[3, 4, 5], &[12, 13]] {
        let mut batch = database.batch();
        for id in ids {
            batch.put(Family::Chunks, &id.to_be_bytes(), &[0; 100]).unwrap();
        }
        database.write(batch, false).unwrap();
        database.flush_family(Family::Chunks).unwrap();
    }
    let units = units::of_family(
        writer.repository(),
        Family::Chunks,
        &Reachable::default(),
        MaxUnused::default(),
    )
    .unwrap();
    let found: Vec<_> =
        units.iter().map(|unit| (unit.ids.clone(), unit.entries, unit.files.len())).collect();
    assert_eq!(found, [(1..=9, 5, 2), (12..=13, 2, 1)]);
}
