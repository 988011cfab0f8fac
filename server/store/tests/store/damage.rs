//! Damaged store files: reads fail with a clear error, and never return wrong bytes or crash.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use coldrise_block::ErrorKind;
use coldrise_store::*;

use crate::common::*;

/// The store files that hold chunks and pages, largest first.
fn table_files(repository: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(repository.join("db"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "sst"))
        .collect();
    files.sort_by_key(|path| std::cmp::Reverse(path.metadata().unwrap().len()));
    files
}

/// Reads the whole disk, in pieces by both kinds of reading, and asserts that only the content is
/// returned. Returns the number of failed reads.
fn read_and_compare(
    repository: &std::sync::Arc<Repository>,
    root: MapRoot,
    content: &[u8],
) -> usize {
    let disk = repository.disk(root, content.len() as u64);
    let mut failed = 0;
    for piece_size in [CHUNK, 256 << 10] {
        for (number, piece) in content.chunks(piece_size).enumerate() {
            let mut buffer = vec![0; piece.len()];
            match disk.read_at(&mut buffer, (number * piece_size) as u64) {
                Ok(()) => assert!(buffer == piece, "wrong bytes were returned"),
                Err(error) => {
                    assert!(
                        matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io),
                        "{error:?}"
                    );
                    failed += 1;
                    // If a whole file is unreadable, further reads show nothing new.
                    if failed % 10 == 0 {
                        break;
                    }
                }
            }
        }
    }
    failed
}

/// A point, with which its chunks leave the log.
fn write_point(writer: &RepositoryWriter, content: &[u8]) -> MapRoot {
    let (root, _) = write_all(writer, None, content);
    let size_bytes = content.len() as u64;
    writer.put_point(&point("web01", "20261120T100000Z", root, size_bytes)).unwrap();
    root
}

#[test]
fn flipped_bytes_in_store_files_never_give_wrong_bytes() {
    for encrypted in [true, false] {
        let store = Store::with(CHUNK as u32, Compression::Lz4, encrypted);
        let content = half_compressible(11, 3 << 20);
        let writer = store.writer();
        let root = write_point(&writer, &content);
        drop(writer);
        let mut found = 0;
        for file in table_files(&store.path()) {
            let original = std::fs::read(&file).unwrap();
            let length = original.len();
            // Spread over the payload, and dense at the index.
            let spots = (0..3).map(|i| length / 4 * (i + 1));
            let end = (0..7).map(|i| length - 1 - (i * i * 499).min(length - 1));
            for spot in spots.chain(end) {
                let mut damaged = original.clone();
                let until = (spot + 8).min(length);
                damaged[spot..until].iter_mut().for_each(|byte| *byte ^= 0xff);
                std::fs::write(&file, &damaged).unwrap();
                let opened =
                    Repository::open(&store.path(), &store.source, &OpenOptions { cache_bytes: 0 });
                match opened {
                    Ok(repository) => found += read_and_compare(&repository, root, &content),
                    Err(error) => {
                        assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io));
                        found += 1;
                    }
                }
            }
            std::fs::write(&file, &original).unwrap();
        }
        assert!(found > 4, "most damage is noticed: {found}");
        assert_eq!(read_and_compare(&store.reader(), root, &content), 0);
    }
}

/// RocksDB frames every value with lengths, which it follows before our code authenticates
/// anything.
#[test]
fn damage_around_a_value_is_an_error_and_does_not_end_the_process() {
    let store = Store::with(CHUNK as u32, Compression::None, false);
    let content = noise(13, 9 << 20);
    let writer = store.writer();
    let (root, _) = write_all(&writer, None, &content);
    drop(writer);
    // Over 8 MiB: it has a file of its own.
    let path = table_files(&store.path()).remove(0);
    let original = std::fs::read(&path).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    // Chunk 2 begins a block; the block of chunk 1 ends before it.
    let key = 2u64.to_be_bytes();
    let at = original.windows(8).position(|window| window == key).unwrap();
    let mut found = 0;
    for spot in at - 24..at + 24 {
        for value in [0x00, 0x7f, 0xff] {
            let damaged = if original[spot] == value { value ^ 0x55 } else { value };
            file.write_all_at(&[damaged], spot as u64).unwrap();
            let repository = store.reader_with(0);
            let disk = repository.disk(root, content.len() as u64);
            for (index, wanted) in content.chunks(CHUNK).take(3).enumerate() {
                let mut chunk = vec![0; CHUNK];
                match disk.read_at(&mut chunk, (index * CHUNK) as u64) {
                    Ok(()) => assert!(chunk == wanted, "wrong bytes were returned"),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Corrupt);
                        found += 1;
                    }
                }
            }
        }
        file.write_all_at(&original[spot..=spot], spot as u64).unwrap();
    }
    assert_eq!(found, 48 * 3, "each damage is found, in the one chunk that it is in");
}

#[test]
fn truncated_and_missing_store_files_are_found() {
    let store = Store::new();
    let content = half_compressible(12, 3 << 20);
    let writer = store.writer();
    let root = write_point(&writer, &content);
    drop(writer);
    let file = table_files(&store.path()).remove(0);
    let original = std::fs::read(&file).unwrap();
    for length in [0, 100, original.len() / 2, original.len() - 1] {
        std::fs::write(&file, &original[..length]).unwrap();
        match Repository::open(&store.path(), &store.source, &OpenOptions::default()) {
            Ok(repository) => assert!(read_and_compare(&repository, root, &content) > 0),
            Err(error) => assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io)),
        }
    }
    std::fs::remove_file(&file).unwrap();
    match Repository::open(&store.path(), &store.source, &OpenOptions::default()) {
        Ok(repository) => assert!(read_and_compare(&repository, root, &content) > 0),
        Err(error) => assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io)),
    }
}

/// A commit of another process makes the two files of the mark one after the other.
#[test]
fn a_mark_being_written_is_not_reported_as_damaged() {
    let store = Store::new();
    write_all(&store.writer(), None, &noise(1, CHUNK));
    let path = store.path().join("high-water.2");
    let content = std::fs::read(&path).unwrap();
    let reader = store.reader();
    assert!(reader.damaged_marks().is_empty());
    std::fs::remove_file(&path).unwrap();
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| reader.damaged_marks());
        std::thread::sleep(std::time::Duration::from_millis(200));
        std::fs::write(&path, &content).unwrap();
        assert!(looking.join().unwrap().is_empty());
    });
    // One that stays so is damaged.
    std::fs::write(&path, &content[1..]).unwrap();
    assert_eq!(reader.damaged_marks().len(), 1);
}
