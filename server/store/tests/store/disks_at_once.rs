//! One writer writes several disks at once: each is stored completely, they share content, and a
//! disk that is cancelled or fails does not disturb the others.

use coldrise_block::ErrorKind;
use coldrise_store::*;

use crate::common::*;

const PIECE: usize = 1 << 20;
const OPTIONS: WriteOptions = WriteOptions { threads: 2 };

fn start(writer: &RepositoryWriter, size_bytes: usize) -> DiskWriter {
    writer.disk_writer(None, size_bytes as u64, OPTIONS).unwrap()
}

fn write_piece(disk: &mut DiskWriter, content: &[u8], number: usize) {
    let start = number * PIECE;
    disk.write(start as u64, content[start..start + PIECE].to_vec()).unwrap();
}

#[test]
fn disks_written_together_share_equal_chunks() {
    let store = Store::new();
    let writer = store.writer();
    // Each pair of neighbours shares one half, which neither has committed yet.
    let contents: Vec<Vec<u8>> = (0..4)
        .map(|number| [noise(100 + number, 6 * PIECE), noise(101 + number, 6 * PIECE)].concat())
        .collect();
    let mut disks: Vec<_> = contents.iter().map(|c| start(&writer, c.len())).collect();
    for number in 0..12 {
        for (disk, content) in disks.iter_mut().zip(&contents) {
            write_piece(disk, content, number);
        }
    }
    let mut stored = 0;
    let mut roots = Vec::new();
    for disk in disks {
        let (root, counts) = disk.finish().unwrap();
        stored += counts.stored_chunks;
        roots.push(root);
    }
    assert_eq!(stored, (5 * 6 * PIECE / CHUNK) as u64);
    assert_eq!(writer.repository().stats().unwrap().chunks, stored);
    drop(writer);
    let reader = store.reader();
    for (root, content) in roots.iter().zip(&contents) {
        assert!(read_all(&reader.disk(*root, content.len() as u64)) == *content);
    }
}

/// The maps of other disks may already name chunks that a cancelled disk stored first.
#[test]
fn a_cancelled_disk_takes_nothing_from_the_others() {
    let store = Store::new();
    let writer = store.writer();
    let content = noise(7, 12 * PIECE);
    for round in 0..8 {
        let mut cancelled = start(&writer, content.len());
        let mut kept = start(&writer, content.len());
        for number in 0..12 {
            write_piece(&mut cancelled, &content, number);
            write_piece(&mut kept, &content, number);
            if number == round {
                break;
            }
        }
        drop(cancelled);
        for number in round + 1..12 {
            write_piece(&mut kept, &content, number);
        }
        let (root, _) = kept.finish().unwrap();
        assert!(read_all(&writer.repository().disk(root, content.len() as u64)) == content);
    }
    drop(writer);
    let (_, counts) = write_all(&store.writer(), None, &content);
    assert_eq!(counts.stored_chunks, 0);
}

#[test]
fn a_disk_whose_base_is_damaged_fails_alone() {
    let store = Store::new();
    let writer = store.writer();
    let content = noise(8, 8 * PIECE);
    let (root, _) = write_all(&writer, None, &content);
    // A page id that the store does not have stands for a damaged page.
    let mut missing = serde_json::to_value(root).unwrap();
    missing["page"] = 4711.into();
    let missing: MapRoot = serde_json::from_value(missing).unwrap();
    let mut kept = start(&writer, content.len());
    write_piece(&mut kept, &content, 0);
    let mut fails = writer.disk_writer(Some(missing), content.len() as u64, OPTIONS).unwrap();
    let failure = (0..8).try_for_each(|number| {
        let start = number * PIECE;
        fails.write(start as u64, content[start..start + PIECE].to_vec())
    });
    let failure = failure.and_then(|()| fails.finish().map(|_| ())).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::Corrupt, "{failure:?}");
    for number in 1..8 {
        write_piece(&mut kept, &content, number);
    }
    let (root, _) = kept.finish().unwrap();
    assert!(read_all(&writer.repository().disk(root, content.len() as u64)) == content);
}

/// Several threads end and cancel disks in any order.
#[test]
fn threads_write_disks_of_one_repository() {
    let store = Store::new();
    let writer = store.writer();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (writer, store) = (&writer, &store);
            scope.spawn(move || {
                for round in 0..4 {
                    let length = (3 + (thread + round) % 5) as usize * PIECE;
                    let content = noise(300 + (thread + 2 * round) % 6, length);
                    let mut disk = start(writer, length);
                    for number in 0..length / PIECE {
                        write_piece(&mut disk, &content, number);
                    }
                    if (thread + round) % 3 == 0 {
                        drop(disk);
                        continue;
                    }
                    let (root, _) = disk.finish().unwrap();
                    let reader = store.reader();
                    assert!(read_all(&reader.disk(root, length as u64)) == content);
                }
            });
        }
    });
}
