//! Shared helpers of the store's tests.
#![allow(dead_code)]

use std::path::Path;
use std::sync::Arc;

use coldrise_store::*;
use tempfile::TempDir;

/// 4 KiB chunks give many chunks in few bytes.
pub(crate) const CHUNK: usize = 4096;

pub(crate) struct Store {
    pub directory: TempDir,
    pub source: PassphraseSource,
}

impl Store {
    pub(crate) fn new() -> Store {
        Store::with(CHUNK as u32, Compression::Zstd(1), false)
    }

    /// Each opening derives the key, which takes time.
    pub(crate) fn encrypted() -> Store {
        Store::with(CHUNK as u32, Compression::Zstd(1), true)
    }

    pub(crate) fn with(chunk_size_bytes: u32, compression: Compression, encrypted: bool) -> Store {
        let directory = TempDir::new().unwrap();
        let passphrase = encrypted.then(|| Passphrase::new(b"correct horse".to_vec()).unwrap());
        let source = if encrypted {
            PassphraseSource::Command("echo correct horse".into())
        } else {
            PassphraseSource::None
        };
        let store = Store { directory, source };
        let options =
            InitOptions { chunk_size_bytes, compression, passphrase: passphrase.as_ref() };
        Repository::init(&store.path(), &options).unwrap();
        store
    }

    pub(crate) fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("repo")
    }

    pub(crate) fn writer(&self) -> RepositoryWriter {
        RepositoryWriter::open(&self.path(), &self.source, &OpenOptions::default()).unwrap()
    }

    pub(crate) fn reader(&self) -> Arc<Repository> {
        self.reader_with(OpenOptions::default().cache_bytes)
    }

    pub(crate) fn reader_with(&self, cache_bytes: u64) -> Arc<Repository> {
        Repository::open(&self.path(), &self.source, &OpenOptions { cache_bytes }).unwrap()
    }
}

/// Bytes that look random but are the same for the same seed.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for piece in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        piece.copy_from_slice(
            &state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes()[..piece.len()],
        );
    }
    bytes
}

/// Half noise, half repetitive, per chunk.
pub(crate) fn half_compressible(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = noise(seed, length);
    for (number, piece) in bytes.chunks_mut(CHUNK).enumerate() {
        let middle = piece.len() / 2;
        for (position, byte) in piece[middle..].iter_mut().enumerate() {
            *byte = (position % 17) as u8 ^ number as u8;
        }
    }
    bytes
}

pub(crate) fn write_all(
    writer: &RepositoryWriter,
    base: Option<MapRoot>,
    content: &[u8],
) -> (MapRoot, WriteCounts) {
    let mut disk =
        writer.disk_writer(base, content.len() as u64, WriteOptions { threads: 2 }).unwrap();
    let mut offset = 0;
    for piece in content.chunks(1 << 20) {
        let mut buffer = disk.buffer();
        buffer.extend_from_slice(piece);
        disk.write(offset, buffer).unwrap();
        offset += piece.len() as u64;
    }
    disk.finish().unwrap()
}

pub(crate) fn read_all(disk: &ChunkedDisk) -> Vec<u8> {
    let mut content = vec![0xee; disk.size_bytes() as usize];
    disk.read_at(&mut content, 0).unwrap();
    content
}

pub(crate) fn point(machine: &str, name: &str, root: MapRoot, size_bytes: u64) -> PointDocument {
    PointDocument {
        machine: MachineName::parse(machine).unwrap(),
        point: PointName::parse(name).unwrap(),
        created_at_ms: 1_795_168_800_000,
        origin: PointOrigin::Backup { sources: vec!["raw:/images/disk".into()] },
        disks: vec![DiskDocument {
            name: DiskName::parse("vda").unwrap(),
            size_bytes,
            root,
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
    }
}

pub(crate) fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}
