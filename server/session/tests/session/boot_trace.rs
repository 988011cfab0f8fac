//! What a machine reads first in one session is in memory early in the next one.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use coldrise_block::{ErrorKind, ReadContext, Waiting};
use coldrise_session::{Session, collect_garbage, publish, unpublish};
use coldrise_store::{GcOptions, MaxUnused, OpenOptions, Repository};

use crate::support::{CHUNK, DISK_BYTES, TestRepository, content, disk_name, name, place, writer};

/// The chunks of a boot, of both disks: neither in order nor all of them. Every fourth chunk is a
/// hole.
fn boot_chunks() -> Vec<(&'static str, u64)> {
    let of_disk = |disk| (0..60).map(move |i| (disk, (i * 37) % 200)).filter(|(_, c)| c % 4 != 3);
    of_disk("vda").chain(of_disk("vdb")).collect()
}

/// Publishes the point as session `session` and opens it.
fn open(place: &TestRepository, session: &str) -> Arc<Session> {
    open_in(&place.open(), place, session)
}

fn open_in(repository: &Arc<Repository>, place: &TestRepository, session: &str) -> Arc<Session> {
    publish(repository, &place.point, Some(name(session))).unwrap();
    Session::open(repository, &name(session)).unwrap()
}

fn read_chunk(session: &Session, (disk, chunk): (&str, u64), waiting: Waiting) -> Option<Vec<u8>> {
    let disk = session.disk(&disk_name(disk)).unwrap();
    let mut bytes = vec![0; CHUNK as usize];
    match disk.read(&mut bytes, chunk * CHUNK, &mut ReadContext::new(waiting)) {
        Ok(()) => Some(bytes),
        Err(error) if error.kind() == ErrorKind::WouldWait => None,
        Err(error) => panic!("{}", error.full_message()),
    }
}

fn boot(session: &Session) {
    for (disk, chunk) in boot_chunks() {
        let bytes = read_chunk(session, (disk, chunk), Waiting::Allowed).unwrap();
        let whole = content(if disk == "vda" { 1 } else { 2 });
        assert_eq!(bytes, whole[(chunk * CHUNK) as usize..][..CHUNK as usize]);
    }
}

fn traces(place: &TestRepository) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(place.path.join("traces"));
    folder.map_or(Vec::new(), |folder| folder.map(|entry| entry.unwrap().path()).collect())
}

#[test]
fn the_next_boot_finds_its_chunks_in_memory() {
    let place = place();
    let session = open(&place, "first");
    boot(&session);
    assert_eq!(traces(&place).len(), 0);
    drop(session);
    assert_eq!(traces(&place).len(), 1);

    let session = open(&place, "second");
    let (first, rest) = boot_chunks().split_first().map(|(a, b)| (*a, b.to_vec())).unwrap();
    assert!(rest.iter().all(|chunk| read_chunk(&session, *chunk, Waiting::Refused).is_none()));
    read_chunk(&session, first, Waiting::Allowed).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    for chunk in rest {
        while read_chunk(&session, chunk, Waiting::Refused).is_none() {
            assert!(Instant::now() < until, "{chunk:?} is not read ahead");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_boot_is_read_ahead_into_three_quarters_of_the_cache() {
    const CACHED: usize = 32;
    let place = place();
    boot(&open(&place, "first"));

    let repository = place.open_with(&OpenOptions { cache_bytes: CACHED as u64 * CHUNK });
    let session = open_in(&repository, &place, "second");
    let chunks = boot_chunks();
    let (ahead, rest) = chunks.split_at(CACHED / 4 * 3);
    let is_cached = |chunk: &_| read_chunk(&session, *chunk, Waiting::Refused).is_some();
    read_chunk(&session, ahead[0], Waiting::Allowed).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !ahead.iter().all(is_cached) {
        assert!(Instant::now() < until, "what is read ahead does not stay");
        std::thread::yield_now();
    }
    assert!(!rest.iter().any(is_cached), "more is read ahead than three quarters of the cache");
    boot(&session);
}

#[test]
fn only_the_boot_of_a_fresh_session_is_recorded() {
    let place = place();
    let session = open(&place, "short");
    for chunk in 0..40 {
        read_chunk(&session, ("vda", chunk), Waiting::Allowed).unwrap();
    }
    drop(session);
    assert_eq!(traces(&place).len(), 0, "40 chunks are no boot");

    let session = open(&place, "copied");
    session.disk(&disk_name("vda")).unwrap().read_at(&mut vec![0; DISK_BYTES as usize], 0).unwrap();
    drop(session);
    assert_eq!(traces(&place).len(), 0, "one long read is not a boot");

    let session = open(&place, "written");
    session.disk(&disk_name("vda")).unwrap().write_at(&[1; 4096], 0).unwrap();
    drop(session);
    let session = Session::open(&place.open(), &name("written")).unwrap();
    boot_chunks().iter().skip(2).for_each(|chunk| {
        read_chunk(&session, *chunk, Waiting::Allowed).unwrap();
    });
    drop(session);
    assert_eq!(traces(&place).len(), 0, "the machine had written");
}

#[test]
fn a_damaged_trace_only_makes_the_boot_slower() {
    let place = place();
    boot(&open(&place, "first"));
    let path = traces(&place).remove(0);
    let stored = std::fs::read(&path).unwrap();
    for damaged in [Vec::new(), stored[..stored.len() / 2].to_vec(), vec![0xff; 2 << 20]] {
        std::fs::write(&path, &damaged).unwrap();
        let repository = place.open();
        let session = Session::open(&repository, &name("first")).unwrap();
        boot(&session);
        drop(session);
        unpublish(&repository, &name("first"), true).unwrap();
        publish(&repository, &place.point, Some(name("first"))).unwrap();
    }
}

#[test]
fn a_gc_removes_the_traces_of_machines_that_are_gone() {
    let place = place();
    boot(&open(&place, "first"));
    unpublish(&place.open(), &name("first"), true).unwrap();
    let writer = writer(&place.path);
    let never = AtomicBool::new(false);
    let options = GcOptions { max_unused: MaxUnused::default(), cancel: &never, progress: &|_| {} };
    collect_garbage(&writer, &options).unwrap();
    assert_eq!(traces(&place).len(), 1, "the machine has a point");
    let point = (place.point.machine.clone(), place.point.point.clone());
    writer.remove_points(&[point]).unwrap();
    collect_garbage(&writer, &options).unwrap();
    assert_eq!(traces(&place).len(), 0);
}
