use std::time::Duration;

use coldrise_block::Disk;
use coldrise_store::{
    Compression, DiskName, InitOptions, MachineName, MapRoot, OpenOptions, PassphraseSource,
    PointDocument, PointOrigin, PointSelector, RepositoryWriter,
};

use super::*;
use crate::points::catalog::Catalog;
use crate::sessions::follow::RoundTime;
use crate::sessions::publish::publish;
use crate::sessions::session::Session;
use crate::sessions::unpublish::unpublish;
use crate::{open_point_disk, seal, seal_at};

pub(crate) const DISKS: [&str; 2] = ["vda", "vdb"];
const SIZE_BYTES: u64 = 1 << 20;

const PATIENCE: Duration = Duration::from_secs(60);

/// A repository with session `trial` of two disks. Only the tests make marks in it.
pub(crate) fn published() -> (tempfile::TempDir, RepositoryWriter, SessionDocument) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("repo");
    let options =
        InitOptions { chunk_size_bytes: 16384, compression: Compression::None, passphrase: None };
    Repository::init(&path, &options).unwrap();
    let options = OpenOptions::default();
    let writer = RepositoryWriter::open(&path, &PassphraseSource::None, &options).unwrap();
    let disk = |name| DiskDocument {
        name: DiskName::parse(name).unwrap(),
        size_bytes: SIZE_BYTES,
        root: MapRoot::EMPTY,
        layers: Vec::new(),
    };
    let point = PointDocument {
        machine: MachineName::parse("web01").unwrap(),
        point: PointName::parse("20261120T100000Z").unwrap(),
        created_at_ms: 1,
        origin: PointOrigin::Backup { sources: Vec::new() },
        disks: DISKS.map(disk).to_vec(),
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
    let mut document = publish(writer.repository(), &point, Some(name)).unwrap();
    document.marks = Some(MarkRules::parse("2h=366d").unwrap());
    let place = SessionPaths::of(writer.repository(), &document.name);
    document.write(writer.repository(), &place).unwrap();
    (folder, writer, document)
}

/// Fills both disks of a session with different bytes.
fn fill(session: &Session, byte: u8) {
    for (name, byte) in DISKS.iter().zip([byte, byte ^ 0x80]) {
        let disk = session.disk(&DiskName::parse(name).unwrap()).unwrap();
        disk.write_at(&[byte; 16384], 8192).unwrap();
    }
}

pub(crate) fn filled_with(disk: &dyn Disk) -> u8 {
    let mut bytes = vec![0; 16384];
    disk.read_at(&mut bytes, 8192).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

/// The session, whose own thread makes no marks.
fn open(writer: &RepositoryWriter, document: &SessionDocument) -> Arc<Session> {
    let session = Session::open(writer.repository(), &document.name).unwrap();
    session.stop_listening();
    session
}

/// The marks in the session's layers, whatever the rule says.
fn all(session: &Session) -> Vec<SessionMark> {
    session.marks_of(&session.document())
}

/// The byte that fills both disks of a point.
pub(crate) fn found(repository: &Arc<Repository>, point: &PointDocument) -> u8 {
    let disk = |name| open_point_disk(repository, point, &DiskName::parse(name).unwrap()).unwrap();
    let bytes = DISKS.map(|name| filled_with(&*disk(name)));
    assert_eq!(bytes[0], bytes[1] ^ 0x80, "the disks are of two times");
    bytes[0]
}

fn sealed(repository: &Arc<Repository>, name: &SessionName, mark: &SessionMark) -> PointDocument {
    crate::sessions::seal::seal_mark(repository, name, Some(mark), PATIENCE).unwrap().point
}

#[test]
fn each_mark_of_a_served_session_becomes_a_point_of_that_time() {
    let (_folder, writer, document) = published();
    let (repository, name) = (writer.repository(), &document.name);
    let session = Session::open(repository, name).unwrap();
    assert!(session_marks(repository, name).unwrap().marks.is_empty());
    for byte in 1..=5 {
        fill(&session, byte);
        session.mark().unwrap();
        // Nothing was written since.
        session.mark().unwrap();
    }
    fill(&session, 6);
    let marks = all(&session);
    assert_eq!(marks.len(), 5);
    let listed = session_marks(repository, name).unwrap();
    assert_eq!(listed, session.marks());
    // The rule of this session keeps the first one of two hours, and the newest one.
    assert!(listed.marks.contains(&marks[0]) && listed.marks.contains(&marks[4]));
    // Five states of both disks were superseded, also before a flush.
    assert_eq!(listed.held_bytes, Some(5 * 2 * 16384));
    session.disk(&DiskName::parse("vda").unwrap()).unwrap().flush().unwrap();
    session.disk(&DiskName::parse("vdb").unwrap()).unwrap().flush().unwrap();
    assert_eq!(session.marks().held_bytes, Some(5 * 2 * 16384));
    let mut points = Vec::new();
    for (byte, mark) in [(2, &marks[1]), (5, &marks[4]), (1, &marks[0])] {
        let point = sealed(repository, name, mark);
        assert_eq!(found(repository, &point), byte);
        let at_ms = Some(mark.time_ns / 1_000_000);
        assert!(
            matches!(point.origin, PointOrigin::Synthetic { marked_at_ms, .. } if marked_at_ms == at_ms)
        );
        points.push((byte, point));
    }
    // The session is as it was, its marks remain, and new ones follow.
    assert_eq!(filled_with(&*session.disk(&DiskName::parse("vda").unwrap()).unwrap()), 6);
    fill(&session, 7);
    session.mark().unwrap();
    let after = all(&session);
    assert_eq!(after[..5], marks[..]);
    assert_eq!(found(repository, &sealed(repository, name, after.last().unwrap())), 7);
    assert_eq!(found(repository, &seal(repository, name, PATIENCE).unwrap().point), 7);
    fill(&session, 8);
    for (byte, point) in &points {
        let entered = Catalog::new(repository)
            .point(&point.machine, &PointSelector::Exact(point.point.clone()))
            .unwrap();
        assert_eq!((found(repository, &entered), entered == *point), (*byte, true));
    }
    drop(session);
    // Not served: the same marks.
    let idle = marks_in_layers(repository, &SessionDocument::of(repository, name).unwrap());
    let idle = idle.unwrap();
    assert_eq!(idle, after);
    assert_eq!(found(repository, &sealed(repository, name, &idle[3])), 4);
}

#[test]
fn a_session_that_is_not_served_is_sealed_at_a_mark_of_its_top_layer() {
    let (_folder, writer, document) = published();
    let (repository, name) = (writer.repository(), &document.name);
    let session = Session::open(repository, name).unwrap();
    for byte in 1..=3 {
        fill(&session, byte);
        session.mark().unwrap();
    }
    fill(&session, 4);
    let marks = all(&session);
    drop(session);
    let point = sealed(repository, name, &marks[1]);
    assert_eq!(found(repository, &point), 2);
    // Published, it is independent of the session that it came from.
    let branch = publish(repository, &point, None).unwrap();
    let branch = Session::open(repository, &branch.name).unwrap();
    assert_eq!(filled_with(&*branch.disk(&DiskName::parse("vda").unwrap()).unwrap()), 2);
    fill(&branch, 9);
    assert_eq!(found(repository, &branch.seal().unwrap().point), 9);
    let session = Session::open(repository, name).unwrap();
    assert_eq!(filled_with(&*session.disk(&DiskName::parse("vda").unwrap()).unwrap()), 4);
    assert_eq!(found(repository, &session.seal().unwrap().point), 4);
}

#[test]
fn a_mark_that_is_used_twice_is_one_point() {
    let (_folder, writer, document) = published();
    let (repository, name) = (writer.repository(), &document.name);
    let session = Session::open(repository, name).unwrap();
    fill(&session, 1);
    session.mark().unwrap();
    fill(&session, 2);
    let second = session.marks().marks[0].name().unwrap();
    for time in [SessionTime::At(second.clone()), SessionTime::At(second)] {
        let point = seal_at(repository, name, &time, PATIENCE).unwrap().point;
        assert_eq!((point.point.lineage().1, found(repository, &point)), (1, 1));
    }
    let points = Catalog::new(repository).points(&document.machine).unwrap();
    assert_eq!(points.len(), 2);
}

#[test]
fn writes_before_a_seal_get_a_mark() {
    let (_folder, writer, document) = published();
    let session = open(&writer, &document);
    fill(&session, 1);
    session.mark().unwrap();
    let marked_ms = all(&session)[0].time_ns / 1_000_000;
    fill(&session, 2);
    session.seal().unwrap();
    assert_eq!(all(&session).len(), 1);
    assert_eq!(session.hold(1, &[]).current_ms, marked_ms, "the marks lack writes");
    // With the next turn they get one.
    session.mark().unwrap();
    assert_eq!(all(&session).len(), 2);
    assert_ne!(session.hold(1, &[]).current_ms, marked_ms);
    session.mark().unwrap();
    assert_eq!(all(&session).len(), 2);
    drop(session);
    // A mark is no write.
    assert!(unpublish(writer.repository(), &document.name, false).unwrap().is_none());
}

#[test]
fn sealed_writes_without_a_mark_get_one_after_the_next_opening() {
    let (_folder, writer, document) = published();
    let session = open(&writer, &document);
    fill(&session, 1);
    session.mark().unwrap();
    let marked_ms = all(&session)[0].time_ns / 1_000_000;
    fill(&session, 2);
    session.seal().unwrap();
    drop(session);
    let session = open(&writer, &document);
    assert_eq!(session.hold(1, &[]).current_ms, marked_ms, "the marks lack writes");
    session.mark().unwrap();
    assert_eq!(all(&session).len(), 2);
    drop(session);
    // Nothing was written since.
    let session = open(&writer, &document);
    session.mark().unwrap();
    assert_eq!(all(&session).len(), 2);
}

#[test]
fn a_mark_in_one_disk_after_a_kill_is_followed_by_a_whole_one() {
    let (_folder, writer, document) = published();
    let session = open(&writer, &document);
    fill(&session, 1);
    session.mark().unwrap();
    let marked = all(&session)[0].clone();
    fill(&session, 2);
    session.flush_time_marks().unwrap();
    let top = session.layered().next().unwrap().top().unwrap();
    let later_ns = marked.time_ns + 2 * NS_PER_SECOND;
    top.add_time_mark(&top.pause_writes().unwrap(), later_ns, 0).unwrap();
    drop((top, session));
    let session = open(&writer, &document);
    assert_eq!(all(&session).last(), Some(&marked));
    assert_eq!(session.hold(1, &[]).current_ms, marked.time_ns / 1_000_000);
    session.mark().unwrap();
    let found = all(&session);
    assert!(found.len() == 2 && found[1].time_ns > later_ns, "{found:?}");
}

#[test]
fn writes_after_the_mark_of_a_seal_are_kept_by_unpublish() {
    let (_folder, writer, document) = published();
    let session = open(&writer, &document);
    fill(&session, 1);
    session.seal().unwrap();
    let disk = session.disk(&DiskName::parse("vda").unwrap()).unwrap();
    // Zeroes have no block, only a cell, as a mark has.
    disk.write_zeroes(8192, 4096).unwrap();
    session.mark().unwrap();
    drop((disk, session));
    assert!(unpublish(writer.repository(), &document.name, false).unwrap().is_some());
}

#[test]
fn marks_of_a_session_that_is_being_closed_are_read_after_the_close() {
    let (_folder, writer, document) = published();
    let session = Session::open(writer.repository(), &document.name).unwrap();
    fill(&session, 1);
    session.mark().unwrap();
    // The first step of a close. The mark is not durable yet.
    session.stop_listening();
    let (answer, answered) = std::sync::mpsc::channel();
    let (repository, name) = (Arc::clone(writer.repository()), document.name.clone());
    let asking = std::thread::spawn(move || answer.send(session_marks(&repository, &name)));
    assert!(answered.recv_timeout(Duration::from_millis(300)).is_err());
    drop(session);
    assert_eq!(answered.recv().unwrap().unwrap().marks.len(), 1);
    asking.join().unwrap().unwrap();
}

#[test]
fn marks_are_listed_before_the_first_turn_after_days_without_a_server() {
    let (_folder, writer, document) = published();
    let session = open(&writer, &document);
    fill(&session, 1);
    let long_ago = RoundTime { time_ns: NS_PER_SECOND, at: Instant::now() };
    session.mark_round(None, Some(long_ago)).unwrap();
    fill(&session, 2);
    let later = RoundTime { time_ns: 2 * NS_PER_SECOND, at: Instant::now() };
    session.mark_round(None, Some(later)).unwrap();
    session.flush_time_marks().unwrap();
    drop(session);
    let session = open(&writer, &document);
    assert_eq!(session.marks().marks.len(), 2);
}

#[test]
fn the_grace_after_days_without_a_server_outlives_the_process() {
    let (_folder, writer, document) = published();
    let (repository, name) = (writer.repository(), &document.name);
    let session = open(&writer, &document);
    for second in [1, 2] {
        fill(&session, second);
        let time = RoundTime { time_ns: u64::from(second) * NS_PER_SECOND, at: Instant::now() };
        session.mark_round(None, Some(time)).unwrap();
    }
    session.flush_time_marks().unwrap();
    drop(session);
    // The clock is that of today: long after these marks.
    let session = open(&writer, &document);
    fill(&session, 3);
    // A turn makes none if blocks were kept too fast, as in the first quarter of a millisecond.
    session.mark().unwrap();
    session.mark_turns_now(11);
    assert_eq!(all(&session).len(), 3);
    session.flush_time_marks().unwrap();
    drop(session);
    assert_eq!(session_marks(repository, name).unwrap().marks.len(), 3);
    let session = open(&writer, &document);
    session.mark_turns_now(11);
    assert_eq!(all(&session).len(), 3);
}

#[test]
fn a_time_without_a_mark_is_refused_with_the_nearest_marks() {
    let name = SessionName::parse("trial").unwrap();
    let mark = |seconds: u64| SessionMark {
        time_ns: seconds * NS_PER_SECOND,
        places: Vec::new(),
        round: None,
    };
    // 20261127T030405Z and 20261127T030415Z.
    let marks = [mark(1_795_748_645), mark(1_795_748_655)];
    let chosen = |text: &str| {
        choose(&marks, &SessionTime::parse(text).unwrap(), &name).map(SessionMark::unix_seconds)
    };
    let refused = |text: &str| chosen(text).unwrap_err().to_string();
    assert_eq!(chosen("20261127T030405Z").unwrap(), 1_795_748_645);
    assert_eq!(chosen("last-good-20261127T030415Z").unwrap(), 1_795_748_645);
    assert_eq!(chosen("last-good-20261128T000000Z").unwrap(), 1_795_748_655);
    assert_eq!(
        refused("20261127T030410Z"),
        "session trial has no mark 20261127T030410Z: the nearest are live/trial@20261127T030405Z \
         and live/trial@20261127T030415Z"
    );
    assert!(refused("20261127T030500Z").ends_with("the last one is live/trial@20261127T030415Z"));
    let oldest = "the oldest is live/trial@20261127T030405Z";
    assert!(refused("last-good-20261127T030405Z").ends_with(oldest));
    let none = choose(&[], &SessionTime::parse("-90s").unwrap(), &name).unwrap_err();
    assert_eq!(none.to_string(), "session trial has no mark -90s: it has none");
}

#[test]
fn a_mark_counts_if_all_disks_have_it() {
    let layer = |n| LayerId([n; 16]);
    let mark = |sequence, time_ns| TimeMark { sequence, time_ns, round: 0 };
    let first = vec![(layer(1), vec![mark(5, 10), mark(9, 20)]), (layer(2), vec![mark(3, 30)])];
    let second = vec![(layer(3), vec![mark(7, 10), mark(8, 30)])];
    let whole = whole_marks(&[first, second]);
    let places = [vec![(layer(1), 5), (layer(3), 7)], vec![(layer(2), 3), (layer(3), 8)]];
    let expected = [10, 30].into_iter().zip(places);
    let expected: Vec<_> =
        expected.map(|(time_ns, places)| SessionMark { time_ns, places, round: None }).collect();
    assert_eq!(whole, expected);
}
