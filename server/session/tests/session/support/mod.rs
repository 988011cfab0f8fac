//! A repository with one point, for tests of sessions.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::Disk;
use coldrise_session::open_point_disk;
use coldrise_store::{
    Compression, DiskDocument, DiskName, InitOptions, MachineName, OpenOptions, PassphraseSource,
    PointDocument, PointName, PointOrigin, Repository, RepositoryWriter, SessionName, WriteOptions,
};
use tempfile::TempDir;

pub(crate) const CHUNK: u64 = 16 << 10;
pub(crate) const DISK_BYTES: u64 = 4 << 20;
/// How long a seal waits for the server.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct TestRepository {
    _folder: TempDir,
    pub path: PathBuf,
    pub point: PointDocument,
}

pub(crate) fn name(text: &str) -> SessionName {
    SessionName::parse(text).unwrap()
}

pub(crate) fn disk_name(text: &str) -> DiskName {
    DiskName::parse(text).unwrap()
}

/// Every fourth chunk is a hole. No two of the others are the same, also of two seeds.
pub(crate) fn content(seed: u8) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..DISK_BYTES).map(|i| seed ^ (i / 512) as u8 ^ i as u8).collect();
    for (number, chunk) in bytes.chunks_mut(CHUNK as usize).enumerate() {
        match number % 4 {
            3 => chunk.fill(0),
            _ => chunk[..2].copy_from_slice(&[number as u8, seed]),
        }
    }
    bytes
}

/// A repository holding one point of two disks.
pub(crate) fn place() -> TestRepository {
    place_in(tempfile::tempdir().unwrap())
}

/// Each opening derives the key, which takes time.
pub(crate) fn encrypted_place() -> TestRepository {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("passphrase"), "correct horse").unwrap();
    place_in(folder)
}

fn place_in(folder: TempDir) -> TestRepository {
    let path = folder.path().join("repo");
    let passphrase = passphrase(&path).read().unwrap();
    let options = InitOptions {
        chunk_size_bytes: CHUNK as u32,
        compression: Compression::Zstd(1),
        passphrase: passphrase.as_ref(),
    };
    Repository::init(&path, &options).unwrap();
    let writer = writer(&path);
    let mut disks = Vec::new();
    for (disk, seed) in [("vda", 1), ("vdb", 2)] {
        let options = WriteOptions { threads: 2 };
        let mut sink = writer.disk_writer(None, DISK_BYTES, options).unwrap();
        sink.write(0, content(seed)).unwrap();
        let (root, _) = sink.finish().unwrap();
        disks.push(DiskDocument {
            name: disk_name(disk),
            size_bytes: DISK_BYTES,
            root,
            layers: Vec::new(),
        });
    }
    let point = PointDocument {
        machine: MachineName::parse("web01").unwrap(),
        point: PointName::parse("20261120T100000Z").unwrap(),
        created_at_ms: 1,
        origin: PointOrigin::Backup { sources: vec!["a".into(), "b".into()] },
        disks,
        configuration: None,
        parts: Vec::new(),
        is_protected: false,
        files: None,
        quarantine: None,
        made_in: None,
        display_name: None,
        came_by: Vec::new(),
    };
    writer.put_point(&point).unwrap();
    TestRepository { _folder: folder, path, point }
}

pub(crate) fn passphrase(repository: &Path) -> PassphraseSource {
    let file = repository.with_file_name("passphrase");
    if file.exists() { PassphraseSource::File(file) } else { PassphraseSource::None }
}

pub(crate) fn writer(path: &Path) -> RepositoryWriter {
    RepositoryWriter::open(path, &passphrase(path), &OpenOptions::default()).unwrap()
}

impl TestRepository {
    pub(crate) fn open(&self) -> Arc<Repository> {
        self.open_with(&OpenOptions::default())
    }

    pub(crate) fn open_with(&self, options: &OpenOptions) -> Arc<Repository> {
        Repository::open(&self.path, &passphrase(&self.path), options).unwrap()
    }
}

pub(crate) fn read_all(disk: &dyn Disk) -> Vec<u8> {
    let mut bytes = vec![0; disk.size_bytes() as usize];
    disk.read_at(&mut bytes, 0).unwrap();
    bytes
}

pub(crate) fn point_bytes(
    repository: &Arc<Repository>,
    point: &PointDocument,
    disk: &str,
) -> Vec<u8> {
    read_all(&*open_point_disk(repository, point, &disk_name(disk)).unwrap())
}
