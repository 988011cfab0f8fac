//! A gc during the backup of a disk.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use super::tests::{CHUNK, NEVER, fixture, noise};
use super::*;
use crate::*;

/// Waits until the workers have seen this many chunks.
fn wait_for(disk: &DiskWriter, chunks: u64) {
    let give_up = Instant::now() + Duration::from_secs(60);
    loop {
        let counts = disk.counts();
        if counts.known_chunks + counts.stored_chunks == chunks {
            return;
        }
        assert!(Instant::now() < give_up, "{counts:?} and not {chunks}");
        std::thread::yield_now();
    }
}

/// At each step of the gc the disk refers to 30 more unreferenced chunks of a file that is
/// rewritten, and to 30 new chunks.
#[test]
fn a_backup_beside_a_gc_loses_no_data() {
    let mut fixture = fixture();
    let writer = fixture.writer();
    let reachable = fixture.reachable(writer.repository());
    let dead = noise(3, 700);
    let size_bytes = dead.len() as u64;
    let mut disk = writer.disk_writer(None, size_bytes, WriteOptions { threads: 2 }).unwrap();
    let mut content = fixture.first[..10 * CHUNK].to_vec();
    disk.write(0, content.clone()).unwrap();
    let mut writes = 0;
    let mut write_more = || {
        let start = writes * 30 * CHUNK;
        let mut bytes = dead[start..start + 30 * CHUNK].to_vec();
        bytes.extend(noise(1000 + writes as u64, 30));
        disk.write(content.len() as u64, bytes.clone()).unwrap();
        content.extend(bytes);
        writes += 1;
        wait_for(&disk, 10 + 60 * writes as u64);
    };
    write_more();
    let write_more = RefCell::new(write_more);
    let options =
        GcOptions { max_unused: MaxUnused::default(), cancel: &NEVER, progress: &|_progress| {} };
    let steps = Cell::new(0);
    let done = writer.collect_until(reachable, &options, &|_step| {
        steps.set(steps.get() + 1);
        write_more.borrow_mut()();
        Ok(())
    });
    let done = done.unwrap();
    assert!(steps.get() >= 4, "{steps:?}");
    // Chunks that the backup found before they were condemned stay: 60 of the file
    // that is rewritten, and ten that keep a whole file without other references.
    assert_eq!((done.chunks, done.kept_chunks), (100 + 700 - 60, 20 + 600 - 10));
    let counts = disk.counts();
    assert_eq!(counts.known_chunks, 10 + 60);
    let (root, _) = disk.finish().unwrap();
    content.resize(size_bytes as usize, 0);
    fixture.live.push((root, content));
    drop(writer);
    fixture.assert_sound();
    fixture.assert_counted();

    // The next gc finds the others.
    let next = fixture.collect();
    assert_eq!((next.chunks, next.kept_chunks), (600 - 10, 20));
    fixture.assert_sound();
    fixture.assert_counted();
}

#[test]
fn a_backup_that_ends_without_a_point_beside_a_gc_leaves_nothing() {
    let fixture = fixture();
    let writer = fixture.writer();
    let reachable = fixture.reachable(writer.repository());
    let mut disk = writer.disk_writer(None, 64 << 20, WriteOptions { threads: 2 }).unwrap();
    disk.write(0, noise(77, 600)).unwrap();
    wait_for(&disk, 600);
    let options =
        GcOptions { max_unused: MaxUnused::default(), cancel: &NEVER, progress: &|_progress| {} };
    writer.collect_garbage(reachable, &options).unwrap();
    drop(disk);
    drop(writer);
    fixture.assert_sound();
    fixture.collect();
    fixture.assert_counted();
    let reader = fixture.reader();
    let chunks = reader.stats().unwrap().chunks;
    assert_eq!(chunks, fixture.reachable(&reader).chunks() + 20);
}

#[test]
fn one_gc_at_a_time() {
    let fixture = fixture();
    let writer = fixture.writer();
    let options =
        GcOptions { max_unused: MaxUnused::default(), cancel: &NEVER, progress: &|_progress| {} };
    let outer = writer.collect_until(fixture.reachable(writer.repository()), &options, &|_step| {
        let inner = writer.collect_garbage(fixture.reachable(writer.repository()), &options);
        assert_eq!(inner.unwrap_err().kind(), ErrorKind::Busy);
        Ok(())
    });
    assert!(outer.unwrap().chunks > 0);
}
