use super::*;
use crate::points::catalog::Catalog;
use crate::points::inventory::is_lost;
use crate::session_folder::top_layers::{SEAL_ATTEMPTS, create_tops, new_tops};
use crate::sessions::publish::publish;
use crate::sessions::session::Session;
use coldrise_store::{
    Compression, DiskDocument, DiskName, InitOptions, MachineName, MapRoot, OpenOptions,
    PassphraseSource, RepositoryWriter,
};
use std::collections::HashSet;

/// A repository with session `trial`, which has a disk of 1 MiB.
fn published() -> (tempfile::TempDir, RepositoryWriter, SessionDocument) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("repo");
    let options =
        InitOptions { chunk_size_bytes: 16384, compression: Compression::None, passphrase: None };
    Repository::init(&path, &options).unwrap();
    let options = OpenOptions::default();
    let writer = RepositoryWriter::open(&path, &PassphraseSource::None, &options).unwrap();
    let repository = writer.repository();
    let point = PointDocument {
        machine: MachineName::parse("web01").unwrap(),
        point: PointName::parse("20261120T100000Z").unwrap(),
        created_at_ms: 1,
        origin: PointOrigin::Backup { sources: Vec::new() },
        disks: vec![DiskDocument {
            name: DiskName::parse("vda").unwrap(),
            size_bytes: 1 << 20,
            root: MapRoot::EMPTY,
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
    };
    writer.put_point(&point).unwrap();
    let name = SessionName::parse("trial").unwrap();
    let document = publish(repository, &point, Some(name)).unwrap();
    (folder, writer, document)
}

#[test]
fn a_seal_whose_new_layer_was_tidied_away_changes_nothing() {
    let (_folder, writer, before) = published();
    let repository = writer.repository();
    let name = before.name.clone();
    let place = SessionPaths::of(repository, &name);
    let writing = Arc::new(FileLock::take(&place).unwrap().unwrap());
    let facts = idle_facts(repository, &before, &writing).unwrap();
    let tops = new_tops(&before).unwrap();
    create_tops(repository, tops.iter()).unwrap();
    // A writer runs in between: no document names the new layer yet.
    assert_eq!(crate::remove_unused_layers(&writer).unwrap(), 1);
    let carried = carry_idle(repository, &before).unwrap();
    let committed = {
        let sealed = Sealed { facts: &facts, carried: &carried, mark: None };
        commit(repository, &place, &sealed, Some(&tops), &|| Ok(()))
    };
    let error = committed.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(std::error::Error::source(&error).is_none(), "{error:?}");
    assert_eq!(SessionDocument::of(repository, &name).unwrap(), before);
    drop(writing);
    seal(repository, &name, Duration::ZERO).unwrap();
}

#[test]
fn an_idle_session_is_sealed_beside_a_writer_that_removes_unused_layers() {
    let (_folder, writer, document) = published();
    let repository = writer.repository();
    // Fewer removals in a round than a seal has attempts.
    const REMOVALS: u32 = SEAL_ATTEMPTS / 2;
    for _ in 0..40 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..REMOVALS).for_each(|_| _ = crate::remove_unused_layers(&writer).unwrap());
            });
            seal(repository, &document.name, Duration::ZERO).unwrap();
        });
    }
}

#[test]
fn a_disk_that_outlives_its_session_keeps_other_writers_out() {
    let (_folder, writer, document) = published();
    let place = SessionPaths::of(writer.repository(), &document.name);
    let session = Session::open(writer.repository(), &document.name).unwrap();
    let disk = session.disk(&document.disks[0].name).unwrap();
    drop(session);
    assert!(FileLock::try_take(&place.lock()).unwrap().is_none());
    drop(disk);
    assert!(FileLock::try_take(&place.lock()).unwrap().is_some());
}

#[test]
fn a_timed_out_seal_makes_no_point() {
    let (_folder, writer, document) = published();
    let repository = writer.repository();
    let session = Session::open(repository, &document.name).unwrap();
    let disk = session.disk(&document.disks[0].name).unwrap();
    let (mut sealed, mut given_up) = (1, 0);
    let start = Instant::now();
    seal(repository, &document.name, Duration::from_secs(30)).unwrap();
    let duration = start.elapsed();
    for round in 0.. {
        disk.write_at(&[round as u8; 4096], 0).unwrap();
        // From zero to twice the duration of a seal here.
        let patience = duration * (round % 20) / 10;
        match seal(repository, &document.name, patience) {
            Ok(_) => sealed += 1,
            Err(error) if error.kind() == ErrorKind::Busy => given_up += 1,
            Err(error) => panic!("{error:?}"),
        }
        if round >= 40 && sealed > 5 && given_up > 5 {
            break;
        }
    }
    // Requests are answered in order: after this one all earlier requests are answered.
    seal(repository, &document.name, Duration::from_secs(30)).unwrap();
    assert_eq!(SessionDocument::of(repository, &document.name).unwrap().sealed.len(), sealed + 1);
    assert_eq!(session.document().sealed.len(), sealed + 1);
}

#[test]
fn a_session_published_again_under_its_name_is_not_lost() {
    let (_folder, writer, document) = published();
    let repository = writer.repository();
    let catalog = Catalog::new(repository);
    let marked = ["live/trial".to_owned()];
    // As a verify does that lists the sessions while none has this name.
    let missing = repository.missing(&marked, &HashSet::new());
    assert_eq!(missing.len(), 1);
    assert!(!is_lost(repository, &catalog, "live/trial").unwrap());
    std::fs::remove_file(SessionPaths::of(repository, &document.name).document()).unwrap();
    assert!(is_lost(repository, &catalog, "live/trial").unwrap());
}
