//! The catalog's memory of removed points, and of points that must not be removed.

use coldrise_block::ErrorKind;
use coldrise_store::*;

use crate::common::*;

const FIRST: &str = "20261120T100000Z";
const SECOND: &str = "20261121T100000Z";

fn machine() -> MachineName {
    MachineName::parse("web01").unwrap()
}

fn name(text: &str) -> PointName {
    PointName::parse(text).unwrap()
}

fn of(points: &[&str]) -> Vec<(MachineName, PointName)> {
    points.iter().map(|text| (machine(), name(text))).collect()
}

fn put(writer: &RepositoryWriter, text: &str) {
    let mut document = point("web01", text, MapRoot::EMPTY, 4096);
    if name(text).is_synthetic() {
        let session = SessionName::parse("trial").unwrap();
        document.origin = PointOrigin::Synthetic { base: name(FIRST), session, marked_at_ms: None };
    }
    writer.put_point(&document).unwrap();
}

#[test]
fn the_last_backup_is_known_after_it_was_forgotten() {
    let store = Store::new();
    let writer = store.writer();
    let last = || writer.repository().last_backup(&machine()).unwrap();
    assert_eq!(last(), None);
    put(&writer, FIRST);
    put(&writer, SECOND);
    put(&writer, "20261120T100000Z+1");
    assert_eq!(last(), Some(name(SECOND)), "a synthetic point is not a backup");
    writer.remove_points(&of(&[SECOND])).unwrap();
    assert_eq!(last(), Some(name(SECOND)));
    // The backup stored later counts, whatever its name's time.
    put(&writer, "20200101T000000Z");
    assert_eq!(last(), Some(name("20200101T000000Z")));
    let all = of(&[FIRST, "20261120T100000Z+1", "20200101T000000Z"]);
    writer.remove_points(&all).unwrap();
    assert_eq!(last(), None, "it went with the machine");
}

#[test]
fn a_number_is_given_once_for_as_long_as_its_time_has_points() {
    let store = Store::new();
    let writer = store.writer();
    let highest = |text: &str| writer.repository().highest_number(&machine(), &name(text)).unwrap();
    for text in [FIRST, "20261120T100000Z+1", "20261120T100000Z+2", SECOND] {
        put(&writer, text);
    }
    assert_eq!((highest(FIRST), highest(SECOND)), (2, 0));
    writer.remove_points(&of(&["20261120T100000Z+2", "20261120T100000Z+1"])).unwrap();
    assert_eq!((highest(FIRST), highest("20261120T100000Z+1"), highest(SECOND)), (2, 2, 0));
    // A backup replaces the machine's document, and a lower number does not count.
    put(&writer, "20261122T100000Z");
    put(&writer, "20261120T100000Z+1");
    writer.remove_points(&of(&["20261120T100000Z+1"])).unwrap();
    assert_eq!(highest(FIRST), 2);
    drop(writer);
    let reader = store.reader();
    assert_eq!(reader.highest_number(&machine(), &name(FIRST)).unwrap(), 2);
    // Nothing is sealed from points that are completely gone.
    let writer = store.writer();
    writer.remove_points(&of(&[FIRST])).unwrap();
    assert_eq!(writer.repository().highest_number(&machine(), &name(FIRST)).unwrap(), 0);
}

#[test]
fn protection_is_all_that_changes_of_a_point() {
    let store = Store::new();
    let (writer, reader) = (store.writer(), store.reader());
    put(&writer, FIRST);
    put(&writer, SECOND);
    reader.catch_up().unwrap();
    let before = reader.point(&machine(), &name(FIRST)).unwrap();
    let missing = of(&[FIRST, "20261123T100000Z"]);
    assert_eq!(writer.set_protected(&missing, true).unwrap_err().kind(), ErrorKind::NotFound);
    reader.catch_up().unwrap();
    assert_eq!(reader.point(&machine(), &name(FIRST)).unwrap(), before, "all or none");

    writer.set_protected(&of(&[FIRST, SECOND]), true).unwrap();
    reader.catch_up().unwrap();
    let protected = PointDocument { is_protected: true, ..before.clone() };
    assert_eq!(reader.point(&machine(), &name(FIRST)).unwrap(), protected);
    writer.set_protected(&of(&[FIRST]), false).unwrap();
    reader.catch_up().unwrap();
    let points = reader.points(&machine()).unwrap();
    assert_eq!(points[0], before);
    assert!(points[1].is_protected);
}

#[test]
fn a_document_without_the_field_is_not_protected_and_the_field_is_only_there_where_it_is() {
    let text = r#"{"machine":"web01","point":"20261120T100000Z","created_at_ms":1,
        "origin":{"backup":{"sources":["raw:/images/disk"]}},
        "disks":[{"name":"vda","size_bytes":4096,"root":{"page":0,"levels":1}}]}"#;
    let document: PointDocument = serde_json::from_str(text).unwrap();
    assert!(!document.is_protected);
    let written = serde_json::to_string(&document).unwrap();
    assert_eq!(written, text.split_whitespace().collect::<String>());
    let protected = PointDocument { is_protected: true, ..document };
    let written = serde_json::to_string(&protected).unwrap();
    assert!(written.ends_with(r#","is_protected":true}"#), "{written}");
}
