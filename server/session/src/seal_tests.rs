use super::*;
use crate::publish::publish;
use coldrise_store::{
    Compression, DiskDocument, DiskName, InitOptions, MachineName, MapRoot, OpenOptions,
    PassphraseSource, RepositoryWriter,
};

#[test]
fn a_seal_whose_new_layer_was_tidied_away_changes_nothing() {
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
        is_protected: false,
        files: None,
        quarantine: None,
    };
    writer.put_point(&point).unwrap();
    let name = SessionName::parse("trial").unwrap();
    let before = publish(repository, &point, Some(name.clone())).unwrap();

    let place = Place::of(repository, &name);
    let writing = Arc::new(FileLock::take(&place).unwrap().unwrap());
    let facts = idle_facts(repository, &before, &writing).unwrap();
    let tops = new_tops(&before).unwrap();
    create_tops(repository, tops.iter()).unwrap();
    // A writer comes in between: nothing names the new layer yet.
    assert_eq!(crate::reclaim_layers(&writer).unwrap(), 1);
    let carried = carry_idle(repository, &before).unwrap();
    let error = commit(repository, &place, &facts, &carried, Some(&tops)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert_eq!(SessionDocument::of(repository, &name).unwrap(), before);
    drop(writing);
    seal(repository, &name).unwrap();
}
