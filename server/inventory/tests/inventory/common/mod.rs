//! A repository of many points.

use std::path::{Path, PathBuf};

use coldrise_store::{
    Compression, DiskDocument, DiskName, InitOptions, MachineName, MapRoot, OpenOptions,
    PassphraseSource, PointDocument, PointName, PointOrigin, Repository, RepositoryWriter,
};

pub(crate) const FIRST_SECOND: i64 = 1_750_000_000;
pub(crate) const SIZE_BYTES: u64 = 1 << 20;
pub(crate) const OPEN: OpenOptions = OpenOptions { cache_bytes: 1 << 20 };

/// An empty repository in `folder`.
pub(crate) fn init(folder: &Path) -> PathBuf {
    let path = folder.join("repository");
    let options =
        InitOptions { chunk_size_bytes: 16384, compression: Compression::None, passphrase: None };
    Repository::init(&path, &options).unwrap();
    path
}

pub(crate) fn writer(path: &Path) -> RepositoryWriter {
    RepositoryWriter::open(path, &PassphraseSource::None, &OPEN).unwrap()
}

pub(crate) fn machine(name: &str) -> MachineName {
    MachineName::parse(name).unwrap()
}

/// The name of a machine's point number `number`.
pub(crate) fn point(number: i64) -> PointName {
    PointName::from_time(jiff::Timestamp::from_second(FIRST_SECOND + number).unwrap()).unwrap()
}

/// A backup with an empty disk.
pub(crate) fn document(machine: &MachineName, number: i64) -> PointDocument {
    PointDocument {
        machine: machine.clone(),
        point: point(number),
        created_at_ms: 1000 * (FIRST_SECOND + number) as u64 + 500,
        origin: PointOrigin::Backup { sources: vec!["raw:/dev/vg/root".into()] },
        disks: vec![DiskDocument {
            name: DiskName::parse("vda").unwrap(),
            size_bytes: SIZE_BYTES,
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
    }
}
