mod fresh;
mod lists;
mod swapped;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::*;
use crate::repository_config::database_path;
use crate::rocks::{LiveFile, ReadMode, SstWriter};
use crate::state::StoreState;
use crate::verify::Coverage;
use crate::*;

const CHUNK: usize = 4096;
const NO_CACHE: OpenOptions = OpenOptions { cache_bytes: 0 };
static NO_CANCEL: AtomicBool = AtomicBool::new(false);

struct Fixture {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

/// Chunks that all differ, also between seeds.
fn content(seed: u64, chunks: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = vec![0; chunks * CHUNK];
    for piece in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        piece.copy_from_slice(&state.to_le_bytes());
    }
    bytes
}

fn write(writer: &RepositoryWriter, content: &[u8]) -> MapRoot {
    let options = WriteOptions { threads: 1 };
    let mut disk = writer.disk_writer(None, content.len() as u64, options).unwrap();
    disk.write(0, content.to_vec()).unwrap();
    disk.finish().unwrap().0
}

/// Asserts that readable chunks have their content. Returns how many cannot be read.
fn assert_never_wrong(writer: &RepositoryWriter, root: MapRoot, content: &[u8]) -> usize {
    let disk = writer.repository().disk(root, content.len() as u64);
    let mut lost = 0;
    for (number, wanted) in content.chunks(CHUNK).enumerate() {
        let mut chunk = vec![0; CHUNK];
        match disk.read_at(&mut chunk, (number * CHUNK) as u64) {
            Ok(()) => assert!(chunk == wanted, "chunk {number} holds something else"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt);
                lost += 1;
            }
        }
    }
    lost
}

fn verified(root: MapRoot, content: &[u8]) -> VerifiedDisk {
    VerifiedDisk { name: "web01/point/vda".to_owned(), root, size_bytes: content.len() as u64 }
}

fn find_damage(writer: &RepositoryWriter, disks: &[VerifiedDisk]) -> RepairReport {
    let coverage = Coverage::Everything;
    let options = VerifyOptions { coverage, threads: 1, cancel: &NO_CANCEL, progress: &|_| {} };
    writer.find_damage(disks, None, &options).unwrap()
}

/// Stores the chunks of these ids again, in a file of level 0.
fn store_again(writer: &RepositoryWriter, ids: &[ChunkId]) {
    put_again(writer, ids);
    writer.repository().database().flush().unwrap();
}

fn put_again(writer: &RepositoryWriter, ids: &[ChunkId]) {
    let database = writer.repository().database();
    let mut batch = database.batch();
    for id in ids {
        let key = id.to_be_bytes();
        let value = database.get(Family::Chunks, &key, ReadMode::Payload).unwrap().unwrap();
        batch.put(Family::Chunks, &key, &value).unwrap();
    }
    database.write(batch, true).unwrap();
}

/// Flips two bits of each of these chunks in one file; a single flip would be corrected.
fn damage(file: &Path, content: &[u8], chunks: impl Iterator<Item = usize>) {
    let mut bytes = std::fs::read(file).unwrap();
    let mut from = 0;
    for number in chunks {
        let wanted = &content[number * CHUNK + 100..number * CHUNK + 200];
        let found = bytes[from..].windows(100).position(|found| found == wanted).unwrap();
        bytes[from + found + 50] ^= 0x11;
        from += found;
    }
    std::fs::write(file, bytes).unwrap();
}

/// Makes the database ingest a file of chunks that no commit names; returns its path.
fn hand_over(writer: &RepositoryWriter, first: ChunkId) -> PathBuf {
    let database = writer.repository().database();
    let path = database.path().join("handed-over.sst");
    let mut file = SstWriter::create(database, &path).unwrap();
    (first..first + 10).for_each(|id| file.put(&id.to_be_bytes(), b"chunk").unwrap());
    database.ingest_chunks(&file.finish().unwrap()).unwrap();
    let files = database.listed_files(Family::Chunks).unwrap();
    let is_it = |file: &&LiveFile| *file.smallest == first.to_be_bytes()[..];
    database.path_of(files.iter().find(is_it).unwrap())
}

fn truncate(path: &Path, end: u64) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_len(end).unwrap();
}

fn point_name(number: u8) -> PointName {
    PointName::parse(&format!("202611{number:02}T100000Z")).unwrap()
}

fn web01() -> MachineName {
    MachineName::parse("web01").unwrap()
}

/// A point with one disk, as a backup makes it.
fn point_of(number: u8, root: MapRoot, size_bytes: u64, text: &str) -> PointDocument {
    let name = DiskName::parse("vda").unwrap();
    PointDocument {
        machine: web01(),
        point: point_name(number),
        created_at_ms: 1_795_168_800_000,
        origin: PointOrigin::Backup { sources: vec!["raw:/images/disk".into()] },
        disks: vec![DiskDocument { name, size_bytes, root, layers: Vec::new() }],
        configuration: Some(Configuration { format: "text".into(), text: text.into() }),
        parts: vec![MachinePart::new(TPM_STATE, SWTPM_PERMALL, b"keys").unwrap()],
        is_protected: false,
        files: None,
        quarantine: None,
        made_in: None,
        display_name: None,
        came_by: Vec::new(),
    }
}

/// Stores a point, or replaces its document.
fn put_document(writer: &RepositoryWriter, number: u8, text: &str) {
    let document = point_of(number, MapRoot::EMPTY, CHUNK as u64, text);
    if writer.repository().has_point(&document.machine, &document.point).unwrap() {
        writer.replace_points(&[document]).unwrap()
    } else {
        writer.put_point(&document).unwrap()
    }
}

fn document(writer: &RepositoryWriter, number: u8) -> Option<String> {
    let found = writer.repository().point(&web01(), &point_name(number)).ok()?;
    found.configuration.map(|configuration| configuration.text)
}

fn chunk_files(writer: &RepositoryWriter) -> Vec<PathBuf> {
    let database = writer.repository().database();
    let files = database.listed_files(Family::Chunks).unwrap();
    files.iter().map(|file| database.path_of(file)).collect()
}

/// Whether all of these disks and documents are readable.
fn is_whole(
    writer: &RepositoryWriter,
    disks: &[(MapRoot, Vec<u8>)],
    documents: &[(u8, &str)],
) -> bool {
    documents.iter().all(|(name, content)| document(writer, *name).as_deref() == Some(*content))
        && disks.iter().all(|(root, content)| assert_never_wrong(writer, *root, content) == 0)
}

/// Copies of files, to be restored after they were deleted.
struct Aside {
    folder: tempfile::TempDir,
    paths: Vec<PathBuf>,
}

impl Aside {
    fn keep(paths: Vec<PathBuf>) -> Aside {
        let aside = Aside { folder: tempfile::tempdir().unwrap(), paths };
        for path in &aside.paths {
            std::fs::copy(path, aside.copy_of(path)).unwrap();
        }
        aside
    }

    fn copy_of(&self, path: &Path) -> PathBuf {
        self.folder.path().join(path.file_name().unwrap())
    }

    fn put_back(&self) {
        for path in &self.paths {
            std::fs::copy(self.copy_of(path), path).unwrap();
        }
    }
}

impl Fixture {
    fn new() -> Fixture {
        Fixture::with(None)
    }

    fn with(passphrase: Option<&Passphrase>) -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("repo");
        let (chunk_size_bytes, compression) = (CHUNK as u32, Compression::None);
        let options = InitOptions { chunk_size_bytes, compression, passphrase };
        Repository::init(&path, &options).unwrap();
        Fixture { _folder: folder, path }
    }

    fn open(&self) -> Result<RepositoryWriter> {
        RepositoryWriter::open(&self.path, &PassphraseSource::None, &NO_CACHE)
    }

    fn open_for_repair(&self) -> RepositoryWriter {
        self.repair().0
    }

    fn repair(&self) -> (RepositoryWriter, ReopenReport) {
        let source = PassphraseSource::None;
        RepositoryWriter::open_for_repair(&self.path, &source, &NO_CACHE).unwrap()
    }

    fn open_to_read(&self) -> Arc<Repository> {
        Repository::open(&self.path, &PassphraseSource::None, &NO_CACHE).unwrap()
    }

    fn damaged_files(&self) -> Vec<CatalogDamage> {
        self.open_to_read().damaged_files(&NO_CANCEL).unwrap()
    }

    fn copy(&self) -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("repo");
        let copied = std::process::Command::new("cp").arg("-r").args([&self.path, &path]).status();
        assert!(copied.unwrap().success());
        Fixture { _folder: folder, path }
    }

    fn manifest(&self) -> PathBuf {
        let database = database_path(&self.path);
        let current = std::fs::read_to_string(database.join("CURRENT")).unwrap();
        database.join(current.trim_end())
    }

    fn is_flagged(&self) -> bool {
        self.path.join("repair-unfinished").symlink_metadata().is_ok()
    }

    /// Closes the writer and removes the files of these families that `is_lost` selects.
    fn lose(
        &self,
        writer: RepositoryWriter,
        families: &[Family],
        is_lost: impl Fn(&LiveFile) -> bool,
    ) {
        let database = writer.repository().database();
        database.flush().unwrap();
        let files = families.iter().flat_map(|family| database.listed_files(*family).unwrap());
        let lost: Vec<_> = files.filter(is_lost).map(|file| database.path_of(&file)).collect();
        assert!(!lost.is_empty());
        drop(writer);
        lost.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    }
}

/// Changes the ids from which a writer opened after a repair continues.
fn continue_from(fixture: &Fixture, change: impl Fn(&mut StoreState)) {
    let writer = fixture.open().unwrap();
    let repository = writer.repository();
    let mut state = StoreState::read(repository).unwrap();
    change(&mut state);
    let mut batch = repository.database().batch();
    state.put(repository, &mut batch).unwrap();
    repository.database().write(batch, true).unwrap();
    repository.database().flush().unwrap();
}

/// Missing chunks are not listed yet, so a backup would refer to them.
#[test]
fn until_the_damage_is_listed_an_interrupted_repair_keeps_other_writers_out() {
    let fixture = Fixture::new();
    let (a, b) = (content(1, 300), content(2, 40));
    let writer = fixture.open().unwrap();
    let root = write(&writer, &a);
    writer.repository().database().flush().unwrap();
    let end = writer.repository().next_chunk().unwrap().to_be_bytes();
    let other = write(&writer, &b);
    fixture.lose(writer, &[Family::State, Family::Chunks], |file| *file.smallest >= end[..]);

    for _ in 0..2 {
        drop(fixture.open_for_repair());
        let refused = fixture.open().err().expect("a repair was interrupted");
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
        assert!(refused.full_message().contains("run coldrise repair again"), "{refused:?}");
    }
    let writer = fixture.open_for_repair();
    let found = find_damage(&writer, &[verified(root, &a), verified(other, &b)]);
    assert_eq!(found.healable_chunks, 40);
    drop(writer);
    assert!(!fixture.is_flagged());
    let writer = fixture.open().unwrap();
    write(&writer, &b);
    assert_eq!(assert_never_wrong(&writer, other, &b), 0, "a backup has healed it");
    assert_eq!(assert_never_wrong(&writer, root, &a), 0);
}

/// The newest chunks and their dedup entries are lost; the map has their ids.
#[test]
fn a_chunk_id_that_a_page_names_is_not_given_again() {
    let fixture = Fixture::new();
    let (a, b, c) = (content(1, 100), content(2, 50), content(3, 60));
    let writer = fixture.open().unwrap();
    write(&writer, &a);
    let end = writer.repository().next_chunk().unwrap();
    drop(writer);
    continue_from(&fixture, |state| state.next_chunk = end - 1 + (1 << 20));
    let writer = fixture.open().unwrap();
    let root = write(&writer, &b);
    fixture.lose(writer, &[Family::State, Family::Dedup, Family::Chunks], |file| {
        *file.smallest >= end.to_be_bytes()[..]
    });
    let writer = fixture.open_for_repair();
    find_damage(&writer, &[verified(root, &b)]);
    let third = write(&writer, &c);
    assert_eq!(assert_never_wrong(&writer, third, &c), 0);
    assert_eq!(assert_never_wrong(&writer, root, &b), 50);
}

/// The newest pages are lost; documents name them.
#[test]
fn a_page_id_that_a_document_names_is_not_given_again() {
    for is_in_catalog in [true, false] {
        let fixture = Fixture::new();
        let (a, b, c) = (content(1, 100), content(2, 50), content(3, 60));
        let writer = fixture.open().unwrap();
        write(&writer, &a);
        let end = StoreState::read(writer.repository()).unwrap().next_page;
        writer.repository().database().flush().unwrap();
        drop(writer);
        continue_from(&fixture, |state| state.next_page = end - 1 + (1 << 20));
        let writer = fixture.open().unwrap();
        let root = write(&writer, &b);
        let point = point_of(20, root, b.len() as u64, "");
        if is_in_catalog {
            writer.put_point(&point).unwrap();
        }
        fixture.lose(writer, &[Family::State, Family::Maps, Family::MapsCopy], |file| {
            *file.largest >= end.to_be_bytes()[..]
        });
        let writer = fixture.open_for_repair();
        // No document of the store names a session's disk.
        let disks = [verified(root, &b)];
        find_damage(&writer, if is_in_catalog { &[] } else { &disks });
        let third = write(&writer, &c);
        assert_eq!(assert_never_wrong(&writer, third, &c), 0);
        assert_eq!(assert_never_wrong(&writer, root, &b), 50);
    }
}

fn first_file(writer: &RepositoryWriter) -> PathBuf {
    let database = writer.repository().database();
    database.path_of(&database.listed_files(Family::Chunks).unwrap().remove(0))
}

/// RocksDB would compact such files as soon as it is opened, and then refuse writes.
#[test]
fn damage_that_a_compaction_is_about_to_meet_is_mended() {
    let fixture = Fixture::new();
    let a = content(1, 600);
    let writer = fixture.open().unwrap();
    let root = write(&writer, &a);
    let path = first_file(&writer);
    for _ in 0..3 {
        store_again(&writer, &[1, 600]);
    }
    // The fourth file is written as soon as the database is opened.
    put_again(&writer, &[1, 600]);
    drop(writer);
    damage(&path, &a, [300].into_iter());
    let (writer, reopened) = fixture.repair();
    let found = find_damage(&writer, &[verified(root, &a)]);
    assert_eq!((reopened.mended_files, found.healable_chunks), (1, 1));
    assert_eq!(writer.heal(&a[300 * CHUNK..301 * CHUNK]).unwrap(), 1);
    drop(writer);
    let writer = fixture.open().unwrap();
    writer.repository().database().compact(Family::Chunks, None).unwrap();
    assert_eq!(assert_never_wrong(&writer, root, &a), 0);
}

/// A backup was killed, and then the drive failed at its chunks.
#[test]
fn damage_in_uncommitted_data_is_dropped_with_it() {
    for is_in_one_file in [false, true] {
        let fixture = Fixture::new();
        let (a, b) = (content(1, 600), content(2, 600));
        let writer = fixture.open().unwrap();
        let root = write(&writer, &a);
        let end = writer.repository().next_chunk().unwrap();
        write(&writer, &b);
        let database = writer.repository().database();
        database.flush().unwrap();
        if is_in_one_file {
            database.compact(Family::Chunks, None).unwrap();
        }
        let mut files = database.listed_files(Family::Chunks).unwrap();
        files.sort_by(|a, b| a.smallest.cmp(&b.smallest));
        assert_eq!(files.len(), if is_in_one_file { 1 } else { 2 });
        let path = database.path_of(&files[files.len() - 1]);
        drop(writer);
        continue_from(&fixture, |state| state.next_chunk = end);
        damage(&path, &b, [300].into_iter());
        let writer = fixture.open().unwrap();
        assert_eq!(assert_never_wrong(&writer, root, &a), 0);
        assert!(writer.repository().next_chunk().unwrap() >= end + 600);
        assert!(find_damage(&writer, &[verified(root, &a)]).found.is_clean());
        drop(writer);
        assert_eq!(fixture.damaged_files(), []);
        let writer = fixture.open().unwrap();
        let other = write(&writer, &content(3, 50));
        assert_eq!(assert_never_wrong(&writer, other, &content(3, 50)), 0);
    }
}

/// Nothing reads the value, but a compaction does.
#[test]
fn damage_in_a_rewritten_value_is_found_and_mended() {
    let fixture = Fixture::new();
    let a = content(1, 600);
    let writer = fixture.open().unwrap();
    let root = write(&writer, &a);
    let path = first_file(&writer);
    store_again(&writer, &[301]);
    drop(writer);
    assert_eq!(fixture.damaged_files(), []);
    damage(&path, &a, [300].into_iter());
    let damaged = fixture.damaged_files();
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(damaged.len() == 1 && damaged[0].what.contains(name), "{damaged:?}");
    let (writer, reopened) = fixture.repair();
    let found = find_damage(&writer, &[verified(root, &a)]);
    assert_eq!((reopened.mended_files, reopened.lost_blocks), (1, 1));
    assert!(found.found.is_clean());
    drop(writer);
    assert_eq!(fixture.damaged_files(), []);
    let writer = fixture.open().unwrap();
    writer.repository().database().compact(Family::Chunks, None).unwrap();
    assert_eq!(assert_never_wrong(&writer, root, &a), 0);
}

#[test]
fn the_files_of_all_damaged_chunks_are_mended_however_many_there_are() {
    let fixture = Fixture::new();
    let (a, b) = (content(1, 1100), content(2, 50));
    let writer = fixture.open().unwrap();
    let database = writer.repository().database();
    let disks = [&a, &b].map(|content| {
        let root = write(&writer, content);
        database.flush().unwrap();
        verified(root, content)
    });
    let mut files = database.listed_files(Family::Chunks).unwrap();
    files.sort_by(|a, b| a.smallest.cmp(&b.smallest));
    assert_eq!(files.len(), 2);
    let paths: Vec<_> = files.iter().map(|file| database.path_of(file)).collect();
    drop(writer);
    damage(&paths[0], &a, 0..1100);
    damage(&paths[1], &b, [7].into_iter());
    let (writer, reopened) = fixture.repair();
    let found = find_damage(&writer, &disks);
    let files = (reopened.mended_files, reopened.dropped_files);
    assert_eq!((files, found.healable_chunks), ((1, 1), 1101), "of one nothing can be read");
    drop(writer);
    assert_eq!(fixture.damaged_files(), []);
}

/// A person who mistakes one repository for another changes nothing in it.
#[test]
fn nothing_is_mended_with_a_wrong_passphrase() {
    let fixture = Fixture::with(Some(&Passphrase::new(b"secret".to_vec()).unwrap()));
    let options = OpenOptions { cache_bytes: 0 };
    let right = PassphraseSource::Command("printf secret".into());
    let writer = RepositoryWriter::open(&fixture.path, &right, &options).unwrap();
    write(&writer, &content(1, 100));
    fixture.lose(writer, &[Family::State, Family::Dedup], |_| true);
    let files = || {
        let entries = std::fs::read_dir(database_path(&fixture.path)).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        let mut files: Vec<_> =
            paths.map(|path| (path.clone(), std::fs::read(path).unwrap_or_default())).collect();
        files.sort();
        files
    };
    let before = files();
    let wrong = PassphraseSource::Command("printf wrong".into());
    let refused = RepositoryWriter::open_for_repair(&fixture.path, &wrong, &options);
    assert_eq!(refused.err().unwrap().kind(), ErrorKind::WrongPassphrase);
    assert!(files() == before && !fixture.is_flagged());
    assert!(RepositoryWriter::open_for_repair(&fixture.path, &right, &options).is_ok());
    assert!(fixture.is_flagged());
}

/// An error of the drive does not mean that there is no flag.
#[test]
fn a_flag_that_cannot_be_looked_for_is_an_error() {
    let fixture = Fixture::new();
    std::os::unix::fs::symlink("repair-unfinished", fixture.path.join("repair-unfinished"))
        .unwrap();
    let loops = "repair-unfinished";
    let error = fixture.open().err().expect("nobody knows whether there is one");
    assert!(error.full_message().contains(loops), "{error:?}");
    let options = OpenOptions { cache_bytes: 0 };
    let source = PassphraseSource::None;
    let error = RepositoryWriter::open_for_repair(&fixture.path, &source, &options).err().unwrap();
    assert!(error.full_message().contains(loops), "{error:?}");
}
