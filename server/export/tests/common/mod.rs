//! A repository of many points, and its tree.

use coldrise_export::{Folders, Node, TreeOptions};
use coldrise_store::{
    Compression, Configuration, DiskDocument, DiskName, InitOptions, MachineName, MapRoot,
    OpenOptions, PassphraseSource, PointDocument, PointName, PointOrigin, Repository,
    RepositoryWriter,
};
use std::sync::Arc;

const SIZE_BYTES: u64 = 1 << 20;
const FIRST_SECOND: i64 = 1_795_000_000;

/// A repository of one machine with so many empty points.
pub(crate) fn repository(folder: &tempfile::TempDir, points: i64) -> Arc<Repository> {
    let path = folder.path().join("repository");
    let options =
        InitOptions { chunk_size_bytes: 16384, compression: Compression::None, passphrase: None };
    Repository::init(&path, &options).unwrap();
    let open = OpenOptions { cache_bytes: 1 << 20 };
    let writer = RepositoryWriter::open(&path, &PassphraseSource::None, &open).unwrap();
    for number in 0..points {
        let time = jiff::Timestamp::from_second(FIRST_SECOND + number).unwrap();
        let disk = |name: &str| DiskDocument {
            name: DiskName::parse(name).unwrap(),
            size_bytes: SIZE_BYTES,
            root: MapRoot::EMPTY,
            layers: Vec::new(),
        };
        let document = PointDocument {
            machine: MachineName::parse("web01").unwrap(),
            point: PointName::from_time(time).unwrap(),
            created_at_ms: 1000 * (FIRST_SECOND + number) as u64,
            origin: PointOrigin::Backup { sources: vec![] },
            disks: vec![disk("vda")],
            configuration: Some(Configuration { format: "vmx".into(), text: "a = \"b\"\n".into() }),
            parts: Vec::new(),
            is_protected: false,
            files: None,
            quarantine: None,
            made_in: None,
            display_name: None,
            came_by: Vec::new(),
        };
        writer.put_point(&document).unwrap();
    }
    drop(writer);
    Repository::open(&path, &PassphraseSource::None, &open).unwrap()
}

/// The tree of a repository.
pub(crate) fn folders(repository: &Arc<Repository>) -> Folders {
    let options = TreeOptions { program: "test", cache_bytes: 1 << 20, folder: None };
    Folders::new(repository, &options, false).unwrap()
}

/// The node at a path.
pub(crate) fn at(folders: &Folders, path: &str) -> Node {
    path.split('/').fold(folders.root(), |node, name| folders.find(&node, name).unwrap())
}
