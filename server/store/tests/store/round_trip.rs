//! Reads return what was written, for all chunk sizes, compressions and encryption, through the
//! writer and through readers.

use coldrise_block::{Disk, ErrorKind, ExtentKind};
use coldrise_store::*;

use crate::common::*;

#[test]
fn every_chunk_size_compression_and_encryption_gives_the_bytes_back() {
    let cases = [
        (4096, Compression::Zstd(1), true),
        (16_384, Compression::Zstd(3), true),
        (65_536, Compression::Lz4, true),
        (262_144, Compression::None, true),
        (16_384, Compression::Zstd(3), false),
        (8192, Compression::Lz4, false),
        (4096, Compression::None, false),
    ];
    for (chunk_size, compression, encrypted) in cases {
        let store = Store::with(chunk_size, compression, encrypted);
        // Ends within a chunk, holds zeroes and noise.
        let mut content = half_compressible(7, 3 * 1024 * 1024 + 4096 + 512);
        content[1_048_576..2_097_152].fill(0);
        let writer = store.writer();
        let (root, counts) = write_all(&writer, None, &content);
        assert!(counts.zero_chunks > 0 && counts.stored_chunks > 0, "{counts:?}");
        assert_eq!(
            read_all(&writer.repository().disk(root, content.len() as u64)),
            content,
            "{chunk_size} {compression}"
        );
        drop(writer);
        for cache_bytes in [0, 1 << 20, 64 << 20] {
            let reader = store.reader_with(cache_bytes);
            assert_eq!(reader.is_encrypted(), encrypted);
            let disk = reader.disk(root, content.len() as u64);
            assert_eq!(read_all(&disk), content);
            for (offset, length) in [(0, 1), (4095, 2), (1_048_000, 5000), (3_000_000, 90_000)] {
                for _ in 0..2 {
                    let mut part = vec![1; length];
                    disk.read_at(&mut part, offset as u64).unwrap();
                    assert_eq!(part, content[offset..offset + length]);
                }
            }
        }
    }
}

#[test]
fn cached_chunks_are_read_without_waiting() {
    let store = Store::new();
    let content = noise(3, 400_000);
    let (root, _) = write_all(&store.writer(), None, &content);
    let reader = store.reader_with(64 << 20);
    let disk = reader.disk(root, content.len() as u64);
    let mut part = vec![0; 20_000];
    let kind = |part: &mut [u8], at| Disk::read_in_memory(&disk, part, at).map_err(|e| e.kind());
    assert_eq!(kind(&mut part, 100_000), Err(ErrorKind::WouldWait));
    disk.read_at(&mut part, 100_000).unwrap();
    part.fill(0);
    assert_eq!(kind(&mut part, 100_000), Ok(()));
    assert_eq!(part, content[100_000..120_000]);
    // One of its chunks is not decoded.
    assert_eq!(kind(&mut vec![0; 80_000], 100_000), Err(ErrorKind::WouldWait));
    assert_eq!(kind(&mut part, 390_000), Err(ErrorKind::OutOfRange));
    // Without a cache, every read has to wait.
    let disk = store.reader_with(0).disk(root, content.len() as u64);
    disk.read_at(&mut part, 100_000).unwrap();
    let failed = Disk::read_in_memory(&disk, &mut part, 100_000).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::WouldWait);
}

#[test]
fn reads_beyond_the_end_are_refused() {
    let store = Store::new();
    let writer = store.writer();
    let (root, _) = write_all(&writer, None, &noise(1, 10_000));
    let disk = writer.repository().disk(root, 10_000);
    let mut byte = [0];
    for offset in [10_000, 10_001, u64::MAX] {
        assert_eq!(disk.read_at(&mut byte, offset).unwrap_err().kind(), ErrorKind::OutOfRange);
        assert_eq!(disk.extents(offset, 1, 9).unwrap_err().kind(), ErrorKind::OutOfRange);
    }
    disk.read_at(&mut byte, 9_999).unwrap();
    disk.read_at(&mut [], 10_000).unwrap();
}

#[test]
fn extents_distinguish_holes_from_stored_chunks() {
    let store = Store::new();
    let writer = store.writer();
    let size = 3u64 << 40;
    let mut disk = writer.disk_writer(None, size, WriteOptions { threads: 1 }).unwrap();
    disk.write(8192, noise(1, 8192)).unwrap();
    disk.write(1 << 40, noise(2, 4096)).unwrap();
    disk.write_hole((1 << 40) + 4096, 1 << 40).unwrap();
    let (root, counts) = disk.finish().unwrap();
    assert_eq!((counts.stored_chunks, counts.zero_chunks), (3, 0));
    let disk = writer.repository().disk(root, size);
    let kinds: Vec<_> = disk
        .extents(0, size, 100)
        .unwrap()
        .iter()
        .map(|extent| (extent.offset_bytes, extent.length_bytes, extent.kind))
        .collect();
    assert_eq!(
        kinds,
        [
            (0, 8192, ExtentKind::Hole),
            (8192, 8192, ExtentKind::Stored),
            (16_384, (1 << 40) - 16_384, ExtentKind::Hole),
            (1 << 40, 4096, ExtentKind::Stored),
            ((1 << 40) + 4096, (2 << 40) - 4096, ExtentKind::Hole),
        ]
    );
    assert_eq!(disk.extents(9000, 100, 1).unwrap()[0].length_bytes, 100);
    assert_eq!(disk.extents(0, size, 2).unwrap().len(), 2);
    assert_eq!(disk.extents(0, 0, 2).unwrap(), []);
}

#[test]
fn an_incremental_keeps_unwritten_ranges_of_its_base() {
    let store = Store::new();
    let writer = store.writer();
    let mut content = noise(3, 40 * CHUNK);
    let (full, _) = write_all(&writer, None, &content);
    let mut disk =
        writer.disk_writer(Some(full), content.len() as u64, WriteOptions { threads: 2 }).unwrap();
    disk.write(8 * CHUNK as u64, noise(4, 2 * CHUNK)).unwrap();
    disk.write_hole(20 * CHUNK as u64, 3 * CHUNK as u64).unwrap();
    let (incremental, counts) = disk.finish().unwrap();
    assert_eq!((counts.stored_chunks, counts.known_chunks), (2, 0));
    let before = content.clone();
    content[8 * CHUNK..10 * CHUNK].copy_from_slice(&noise(4, 2 * CHUNK));
    content[20 * CHUNK..23 * CHUNK].fill(0);
    let repository = writer.repository();
    let old = repository.disk(full, before.len() as u64);
    let new = repository.disk(incremental, before.len() as u64);
    assert_eq!(read_all(&old), before);
    assert_eq!(read_all(&new), content);
    let mut differences = Vec::new();
    diff(&old, &new, |extent| {
        differences.push((extent.offset_bytes, extent.length_bytes, extent.kind));
        Ok(())
    })
    .unwrap();
    let chunk = CHUNK as u64;
    assert_eq!(
        differences,
        [(8 * chunk, 2 * chunk, ExtentKind::Stored), (20 * chunk, 3 * chunk, ExtentKind::Hole)]
    );
}

#[test]
fn a_disk_that_shrank_and_grew_shows_no_old_bytes() {
    let store = Store::new();
    let writer = store.writer();
    let content = noise(5, 10 * CHUNK);
    let (root, _) = write_all(&writer, None, &content);
    let options = WriteOptions { threads: 1 };
    let small = 2 * CHUNK + 100;
    let (root, _) =
        writer.disk_writer(Some(root), small as u64, options).unwrap().finish().unwrap();
    let large = 9000 * CHUNK;
    let (root, _) =
        writer.disk_writer(Some(root), large as u64, options).unwrap().finish().unwrap();
    let seen = read_all(&writer.repository().disk(root, large as u64));
    assert_eq!(seen[..small], content[..small]);
    assert!(seen[small..].iter().all(|byte| *byte == 0));
}

#[test]
fn the_same_content_is_stored_once() {
    let store = Store::new();
    let content = noise(6, 300 * CHUNK);
    let writer = store.writer();
    let (first, counts) = write_all(&writer, None, &content);
    assert_eq!((counts.stored_chunks, counts.known_chunks), (300, 0));
    // Within one disk, in another order, and from a later writer.
    let mut turned: Vec<u8> = content.chunks(CHUNK).rev().flatten().copied().collect();
    turned.extend_from_slice(&content);
    let (_, counts) = write_all(&writer, None, &turned);
    assert_eq!((counts.stored_chunks, counts.known_chunks), (0, 600));
    drop(writer);
    let writer = store.writer();
    let (again, counts) = write_all(&writer, None, &content);
    assert_eq!((counts.stored_chunks, counts.known_chunks), (0, 300));
    let repository = writer.repository();
    let size = content.len() as u64;
    diff(&repository.disk(first, size), &repository.disk(again, size), |extent| {
        panic!("{extent:?} differs");
    })
    .unwrap();
    assert_eq!(repository.stats().unwrap().chunks, 300);
}

#[test]
fn writes_out_of_order_or_out_of_bounds_are_refused() {
    let store = Store::new();
    let writer = store.writer();
    let options = WriteOptions { threads: 1 };
    let mut disk = writer.disk_writer(None, 10 * CHUNK as u64 + 7, options).unwrap();
    let chunk = CHUNK as u64;
    disk.write(2 * chunk, noise(1, CHUNK)).unwrap();
    for (offset, length) in [
        (2 * chunk, CHUNK),
        (0, CHUNK),
        (3 * chunk + 1, CHUNK),
        (3 * chunk, CHUNK + 1),
        (10 * chunk, CHUNK),
        (u64::MAX - 4095, CHUNK),
    ] {
        let error = disk.write(offset, vec![1; length]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{offset} {length}");
        assert!(disk.write_hole(offset, length as u64).is_err());
    }
    disk.write(10 * chunk, vec![1; 7]).unwrap();
    let (root, _) = disk.finish().unwrap();
    assert_eq!(read_all(&writer.repository().disk(root, 10 * chunk + 7))[10 * CHUNK..], [1; 7]);
    assert!(writer.disk_writer(None, 0, options).is_err());
    assert!(writer.disk_writer(None, u64::MAX, options).is_err());
    assert!(writer.disk_writer(None, 1, WriteOptions { threads: 0 }).is_err());
}
