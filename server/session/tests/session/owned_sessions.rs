//! Sessions that end with the process that published them.

use std::path::PathBuf;

use coldrise_block::ErrorKind;
use coldrise_session::{
    CaptureLimit, OwnedSession, Session, discard_abandoned_sessions, publish, sessions, unpublish,
};

use crate::support::{TestRepository, disk_name, name, place};

/// The folder of the only session.
fn folder(place: &TestRepository) -> PathBuf {
    let entries = std::fs::read_dir(place.path.join("live")).unwrap().flatten();
    let mut folders = entries.filter(|entry| entry.file_type().unwrap().is_dir());
    let only = folders.next().unwrap().path();
    assert!(folders.next().is_none());
    only
}

const LIMIT: CaptureLimit = CaptureLimit { most_bytes: 1 << 20, free_space_divisor: 10 };

#[test]
fn only_the_owner_ends_its_session() {
    let place = place();
    let repository = place.open();
    let owned = OwnedSession::publish(&repository, &place.point, name("check"), LIMIT).unwrap();
    assert_eq!(discard_abandoned_sessions(&repository).unwrap(), []);
    for discard in [false, true] {
        let refused = unpublish(&repository, &name("check"), discard).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy);
    }
    assert!(!sessions(&repository).unwrap()[0].is_abandoned);
    let second = OwnedSession::publish(&repository, &place.point, name("check"), LIMIT);
    assert_eq!(second.err().map(|error| error.kind()), Some(ErrorKind::AlreadyExists));
    owned.end().unwrap();
    assert!(sessions(&repository).unwrap().is_empty());
    drop(OwnedSession::publish(&repository, &place.point, name("check"), LIMIT).unwrap());
    assert!(sessions(&repository).unwrap().is_empty());
}

/// A machine that nobody trusts must not fill the drive.
#[test]
fn an_owned_session_captures_as_much_as_its_limit() {
    let place = place();
    let repository = place.open();
    let owned = OwnedSession::publish(&repository, &place.point, name("check"), LIMIT).unwrap();
    let session = Session::open(&repository, &name("check")).unwrap();
    let disk = session.disk(&disk_name("vda")).unwrap();
    let write_all = || disk.write_at(&[7; 4 << 20], 0);
    // The layer has space in whole segments, and the first one takes the disk once.
    write_all().unwrap();
    disk.flush().unwrap();
    // The first blocks' slots are only free after the next flush: this needs others.
    assert_eq!(write_all().unwrap_err().kind(), ErrorKind::NoSpace);
    let mut bytes = vec![0; 4096];
    disk.read_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [7; 4096]);
    session.stop_listening();
    drop(disk);
    drop(session);
    owned.end().unwrap();
}

/// A process that is killed leaves the file without a lock.
#[test]
fn an_abandoned_session_is_discarded_once_it_is_not_served() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("check"))).unwrap();
    let other = publish(&repository, &place.point, Some(name("other"))).unwrap();
    assert_eq!(discard_abandoned_sessions(&repository).unwrap(), []);
    unpublish(&repository, &other.name, true).unwrap();
    std::fs::write(folder(&place).join("owner"), "").unwrap();
    let served = Session::open(&repository, &name("check")).unwrap();
    assert_eq!(discard_abandoned_sessions(&repository).unwrap(), []);
    served.stop_listening();
    drop(served);
    assert!(sessions(&repository).unwrap()[0].is_abandoned);
    assert_eq!(discard_abandoned_sessions(&repository).unwrap(), [name("check")]);
    assert!(sessions(&repository).unwrap().is_empty());
}

/// A folder can outlive its session, with what a kill left in it.
#[test]
fn a_session_of_the_same_name_has_no_owner() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("check"))).unwrap();
    let folder = folder(&place);
    unpublish(&repository, &name("check"), true).unwrap();
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("owner"), "").unwrap();
    publish(&repository, &place.point, Some(name("check"))).unwrap();
    assert_eq!(discard_abandoned_sessions(&repository).unwrap(), []);
    assert_eq!(sessions(&repository).unwrap().len(), 1);
}
