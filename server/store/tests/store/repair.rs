//! Damaged chunks heal when their content is written again.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use coldrise_block::ErrorKind;
use coldrise_store::*;

use crate::common::*;

const MIB: usize = 1 << 20;

fn largest_file(repository: &Path) -> PathBuf {
    let files = std::fs::read_dir(repository.join("db")).unwrap().map(|e| e.unwrap().path());
    let tables = files.filter(|path| path.extension().is_some_and(|end| end == "sst"));
    tables.max_by_key(|path| path.metadata().unwrap().len()).unwrap()
}

/// Flips bytes in the middle of these stored chunks.
fn damage(store: &Store, content: &[u8], chunks: &[usize]) {
    let file = largest_file(&store.path());
    let mut bytes = std::fs::read(&file).unwrap();
    for number in chunks {
        // Without encryption and compression, the content can be found in the file.
        let wanted = &content[number * CHUNK + 100..number * CHUNK + 200];
        let at = bytes.windows(wanted.len()).position(|found| found == wanted).unwrap();
        bytes[at + 50] ^= 0x10;
    }
    std::fs::write(&file, bytes).unwrap();
}

fn disks(root: MapRoot, content: &[u8]) -> Vec<VerifiedDisk> {
    let size_bytes = content.len() as u64;
    vec![VerifiedDisk { name: "web01/point/vda".to_owned(), root, size_bytes }]
}

fn find_damage(writer: &RepositoryWriter, disks: &[VerifiedDisk]) -> RepairReport {
    let cancel = AtomicBool::new(false);
    let coverage = Coverage::Everything;
    let options = VerifyOptions { coverage, threads: 2, cancel: &cancel, progress: &|_| {} };
    writer.find_damage(disks, None, &options).unwrap()
}

fn open_for_repair(store: &Store) -> (RepositoryWriter, ReopenReport) {
    let options = OpenOptions::default();
    RepositoryWriter::open_for_repair(&store.path(), &PassphraseSource::None, &options).unwrap()
}

fn store() -> (Store, Vec<u8>, MapRoot) {
    let store = Store::with(CHUNK as u32, Compression::None, false);
    let content = noise(31, 9 * MIB);
    let (root, _) = write_all(&store.writer(), None, &content);
    (store, content, root)
}

#[test]
fn a_backup_heals_damaged_chunks() {
    let (store, content, root) = store();
    damage(&store, &content, &[3, 4, 700, 2303]);
    let reader = store.reader();
    let disk = reader.disk(root, content.len() as u64);
    let mut chunk = vec![0; CHUNK];
    assert_eq!(disk.read_at(&mut chunk, 3 * CHUNK as u64).unwrap_err().kind(), ErrorKind::Corrupt);

    // Before a repair, a backup trusts the index.
    let (_, counts) = write_all(&store.writer(), None, &content);
    assert_eq!((counts.stored_chunks, counts.healed_chunks), (0, 0));

    let (writer, reopened) = open_for_repair(&store);
    let found = find_damage(&writer, &disks(root, &content));
    assert_eq!(found.healable_chunks, 4);
    assert_eq!(found.found.affected[0].ranges.len(), 3);
    assert_eq!(reopened.mended_files, 1);
    assert!((2..=4).contains(&reopened.lost_blocks), "{reopened:?}");
    drop(writer);
    // The chunks are listed now: the next writer, of a part of the content, heals that part.
    let writer = store.writer();
    assert_eq!(writer.damaged_chunks(), 4);
    let (_, counts) = write_all(&writer, None, &content[..MIB]);
    assert_eq!((counts.stored_chunks, counts.healed_chunks), (0, 2));
    assert_eq!(writer.damaged_chunks(), 2);
    // A reader that met the damage sees the healed chunks, one by one and as a stream.
    disk.read_at(&mut chunk, 3 * CHUNK as u64).unwrap();
    assert!(chunk == content[3 * CHUNK..4 * CHUNK]);
    let mut stream = vec![0; MIB];
    disk.read_at(&mut stream, 0).unwrap();
    assert!(stream == content[..MIB]);

    let (_, counts) = write_all(&writer, None, &content);
    assert_eq!((counts.healed_chunks, writer.damaged_chunks()), (2, 0));
    assert!(read_all(&store.reader().disk(root, content.len() as u64)) == content);
    assert!(find_damage(&writer, &disks(root, &content)).found.is_clean());
    drop(writer);
    assert_eq!(store.writer().damaged_chunks(), 0);
}

#[test]
fn a_chunk_heals_from_its_content_alone() {
    let (store, content, root) = store();
    damage(&store, &content, &[17]);
    let writer = store.writer();
    find_damage(&writer, &disks(root, &content));
    assert_eq!(writer.heal(&content[..CHUNK]).unwrap(), 0, "that one is not damaged");
    assert_eq!(writer.heal(&content[..100]).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(writer.heal(&content[16 * CHUNK..20 * CHUNK]).unwrap(), 1);
    assert_eq!(writer.heal(&content[16 * CHUNK..20 * CHUNK]).unwrap(), 0);
    drop(writer);
    assert!(read_all(&store.reader().disk(root, content.len() as u64)) == content);
}

/// The last chunk is at the place where a writer looks for uncommitted chunks.
#[test]
fn damage_anywhere_in_the_chunks_keeps_no_writer_out() {
    for number in [0, 1500, 2303] {
        let (store, content, root) = store();
        damage(&store, &content, &[number]);
        let writer = store.writer();
        let more = noise(32, MIB);
        let (new, _) = write_all(&writer, None, &more);
        assert!(read_all(&writer.repository().disk(new, more.len() as u64)) == more);
        let found = find_damage(&writer, &disks(root, &content));
        assert_eq!(found.found.damaged_chunk_count, 1);
        assert_eq!(writer.heal(&content[number * CHUNK..(number + 1) * CHUNK]).unwrap(), 1);
        drop(writer);
        assert!(read_all(&store.reader().disk(root, content.len() as u64)) == content);
    }
}

/// RocksDB reads whole files when it compacts them. With damage inside it would refuse writes.
#[test]
fn nothing_of_the_damage_is_left_in_the_files() {
    let (store, content, root) = store();
    damage(&store, &content, &[0, 1, 1500, 2303]);
    let (writer, reopened) = open_for_repair(&store);
    assert_eq!(reopened.mended_files, 1);
    find_damage(&writer, &disks(root, &content));
    // Undamaged chunks are readable, and damaged ones are reported missing.
    let disk = writer.repository().disk(root, content.len() as u64);
    for (number, wanted) in content.chunks(CHUNK).enumerate() {
        let mut chunk = vec![0; CHUNK];
        let read = disk.read_at(&mut chunk, (number * CHUNK) as u64);
        if [0, 1, 1500, 2303].contains(&number) {
            assert_eq!(read.unwrap_err().kind(), ErrorKind::Corrupt)
        } else {
            assert!(read.is_ok() && chunk == wanted)
        }
    }
    write_all(&writer, None, &content);
    drop(writer);
    assert!(read_all(&store.reader().disk(root, content.len() as u64)) == content);
    let bytes: Vec<Vec<u8>> = std::fs::read_dir(store.path().join("db"))
        .unwrap()
        .map(|entry| std::fs::read(entry.unwrap().path()).unwrap_or_default())
        .collect();
    for number in [0, 1, 1500, 2303] {
        let mut wrong = content[number * CHUNK + 100..number * CHUNK + 200].to_vec();
        wrong[50] ^= 0x10;
        assert!(!bytes.iter().any(|file| file.windows(100).any(|found| found == wrong)));
    }
}
