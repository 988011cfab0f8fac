use super::*;
use crate::{
    Compression, DiskDocument, DiskName, InitOptions, MachineName, MapRoot, OpenOptions,
    PassphraseSource, PointName, PointOrigin, RepositoryWriter,
};

fn made() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("repo");
    let options =
        InitOptions { chunk_size_bytes: 4096, compression: Compression::None, passphrase: None };
    Repository::init(&path, &options).unwrap();
    (directory, path)
}

/// A point of web01 with one empty disk.
fn stored(point: &PointName) -> PointDocument {
    PointDocument {
        machine: MachineName::parse("web01").unwrap(),
        point: point.clone(),
        created_at_ms: 0,
        origin: PointOrigin::Backup { sources: Vec::new() },
        disks: vec![DiskDocument {
            name: DiskName::parse("vda").unwrap(),
            size_bytes: 4096,
            root: MapRoot::EMPTY,
            layers: Vec::new(),
        }],
        configuration: None,
        parts: Vec::new(),
        display_name: None,
        is_protected: false,
        files: None,
        quarantine: None,
        made_in: None,
        came_by: Vec::new(),
    }
}

const OPTIONS: OpenOptions = OpenOptions { cache_bytes: 0 };

#[test]
fn a_pending_marker_survives_the_removal_of_unfinished_ones() {
    let (_directory, path) = made();
    let repository = Repository::open(&path, &PassphraseSource::None, &OPTIONS).unwrap();
    let pending = repository.prepare_marker("live/trial").unwrap();
    assert!(!repository.is_marked("live/trial"));
    repository.remove_unfinished_markers();
    pending.commit();
    assert_eq!(repository.marked().unwrap(), ["live/trial"]);
    assert!(repository.marker_damage("live/trial", false).is_none());
}

/// A damaged point exists: it does not count as lost and hides no lost point.
#[test]
fn a_lost_point_is_distinguished_from_a_damaged_one() {
    let (_directory, path) = made();
    let writer = RepositoryWriter::open(&path, &PassphraseSource::None, &OPTIONS).unwrap();
    let machine = MachineName::parse("web01").unwrap();
    let point = |text: &str| PointName::parse(text).unwrap();
    let (damaged, lost) = (point("20261120T100000Z"), point("20261121T100000Z"));
    let repository = writer.repository();
    repository.mark(&format!("{machine}/{damaged}")).unwrap();
    repository.mark(&format!("{machine}/{lost}")).unwrap();
    let mut batch = repository.database().batch();
    catalog::put_damaged_point(repository, &mut batch, &machine, &damaged);
    repository.database().write(batch, true).unwrap();
    assert_eq!(repository.points(&machine).unwrap_err().kind(), ErrorKind::Corrupt);
    for only in [None, Some(&machine)] {
        let lost_points = repository.lost_points(only).unwrap();
        assert_eq!(lost_points, [(machine.clone(), lost.clone())]);
    }
    assert!(repository.is_lost(&machine, &lost).unwrap());
    assert!(!repository.is_lost(&machine, &damaged).unwrap());
    assert!(!repository.is_lost(&machine, &point("20261122T100000Z")).unwrap());
    let other = MachineName::parse("web02").unwrap();
    assert_eq!(repository.lost_points(Some(&other)).unwrap(), []);
}

/// Opening a repository for writing must not take time with the number of its points.
#[test]
fn few_markers_are_read_and_all_missing_ones_are_made() {
    let (_directory, path) = made();
    let writer = RepositoryWriter::open(&path, &PassphraseSource::None, &OPTIONS).unwrap();
    let repository = writer.repository();
    for hour in 10..20 {
        let point = PointName::parse(&format!("20261120T{hour}0000Z")).unwrap();
        writer.put_point(&stored(&point)).unwrap();
    }
    let paths = repository.marker_paths().unwrap();
    assert_eq!(paths.len(), 10);
    paths.iter().for_each(|path| std::fs::write(path, b"damaged").unwrap());
    assert_eq!(repository.mark_points(4).unwrap(), 4);
    assert_eq!(repository.marked().unwrap().len(), 4);
    paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    assert_eq!(repository.mark_points(0).unwrap(), 10);
    assert_eq!(repository.mark_points(usize::MAX).unwrap(), 0);
    assert_eq!(repository.marked().unwrap().len(), 10);
}

/// What concerns one point opens no other: a damaged one would fail it.
#[test]
fn a_point_is_found_without_the_others() {
    let (_directory, path) = made();
    let writer = RepositoryWriter::open(&path, &PassphraseSource::None, &OPTIONS).unwrap();
    let repository = writer.repository();
    let machine = MachineName::parse("web01").unwrap();
    let name = |text: &str| PointName::parse(text).unwrap();
    let names = ["20261119T100000Z", "20261120T100000Z", "20261120T100000Z+2", "20261121T100000Z"];
    for text in names {
        writer.put_point(&stored(&name(text))).unwrap();
    }
    let mut batch = repository.database().batch();
    for text in [names[0], names[1]] {
        catalog::put_damaged_point(repository, &mut batch, &machine, &name(text));
    }
    repository.database().write(batch, true).unwrap();
    assert_eq!(repository.highest_number(&machine, &name(names[1])).unwrap(), 2);
    assert_eq!(repository.highest_number(&machine, &name(names[3])).unwrap(), 0);
    assert_eq!(repository.highest_number(&machine, &name("20261120T110000Z")).unwrap(), 0);
    let after = repository.points_after(&machine, &name(names[1]), 1).unwrap();
    assert_eq!(after.iter().map(|point| point.point.as_str()).collect::<Vec<_>>(), [names[2]]);
    assert!(repository.points_after(&machine, &name(names[1]), 2).unwrap().is_empty());
    let newest = repository.newest_points(&machine, 2).unwrap();
    assert_eq!(newest.iter().map(|point| point.point.as_str()).collect::<Vec<_>>(), names[2..]);
    let other = MachineName::parse("web02").unwrap();
    assert!(repository.has_machine(&machine).unwrap() && !repository.has_machine(&other).unwrap());
    assert_eq!(repository.point_names_of(&machine).unwrap(), names.map(name));
    let found = repository.newest_point_that(&machine, |point| point.point.is_synthetic()).unwrap();
    assert_eq!(found.unwrap().point.as_str(), names[2]);
    assert_eq!(repository.newest_points(&machine, 3).unwrap_err().kind(), ErrorKind::Corrupt);
}
