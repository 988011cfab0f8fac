use super::*;
use crate::{
    Compression, InitOptions, MachineName, OpenOptions, PassphraseSource, PointName,
    RepositoryWriter,
};

fn made() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("repo");
    let options =
        InitOptions { chunk_size_bytes: 4096, compression: Compression::None, passphrase: None };
    Repository::init(&path, &options).unwrap();
    (directory, path)
}

const OPTIONS: OpenOptions = OpenOptions { cache_bytes: 0 };

#[test]
fn a_marker_on_its_way_comes_though_a_writer_took_it_for_a_crashs() {
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
