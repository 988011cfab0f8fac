//! Names and disks of a real repository.

use coldrise_block::ErrorKind;
use coldrise_export::{ExportTree, Listed, TreeOptions, read_leases};
use coldrise_store::{
    Compression, DiskDocument, DiskName, InitOptions, MachineName, OpenOptions, PassphraseSource,
    PointDocument, PointName, PointOrigin, Repository, RepositoryWriter, SessionName, WriteOptions,
};
use std::path::PathBuf;
use std::sync::Arc;

const CHUNK_BYTES: u32 = 16384;
const SIZE_BYTES: u64 = 4 * CHUNK_BYTES as u64;

struct Fixture {
    directory: tempfile::TempDir,
}

/// A repository with machine web01, disk vda: one chunk of ones, then holes.
fn fixture() -> Fixture {
    let fixture = Fixture { directory: tempfile::tempdir().unwrap() };
    let options = InitOptions {
        chunk_size_bytes: CHUNK_BYTES,
        compression: Compression::None,
        passphrase: None,
    };
    Repository::init(&fixture.path(), &options).unwrap();
    fixture.add_point("20261120T100000Z", 1);
    fixture
}

impl Fixture {
    fn path(&self) -> PathBuf {
        self.directory.path().join("repository")
    }

    fn add_point(&self, name: &str, fill: u8) {
        let writer = RepositoryWriter::open(
            &self.path(),
            &PassphraseSource::None,
            &OpenOptions { cache_bytes: 0 },
        )
        .unwrap();
        let options = WriteOptions { threads: 1 };
        let mut disk = writer.disk_writer(None, SIZE_BYTES, options).unwrap();
        disk.write(0, vec![fill; CHUNK_BYTES as usize]).unwrap();
        let (root, _) = disk.finish().unwrap();
        let document = PointDocument {
            machine: MachineName::parse("web01").unwrap(),
            point: PointName::parse(name).unwrap(),
            created_at_ms: 0,
            origin: PointOrigin::Backup { sources: vec!["test".to_owned()] },
            disks: vec![DiskDocument {
                name: DiskName::parse("vda").unwrap(),
                size_bytes: SIZE_BYTES,
                root,
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
        writer.put_point(&document).unwrap();
    }

    fn repository(&self) -> Arc<Repository> {
        let options = OpenOptions { cache_bytes: 1 << 20 };
        Repository::open(&self.path(), &PassphraseSource::None, &options).unwrap()
    }

    fn tree(&self) -> ExportTree {
        let options = TreeOptions { program: "test", cache_bytes: 1 << 20, folder: None };
        ExportTree::new(&self.repository(), &options).unwrap()
    }

    fn publish(&self, session: &str) {
        let repository = self.repository();
        let machine = MachineName::parse("web01").unwrap();
        let points = coldrise_session::Catalog::new(&repository).points(&machine).unwrap();
        let name = SessionName::parse(session).unwrap();
        coldrise_session::publish(&repository, points.last().unwrap(), Some(name)).unwrap();
    }
}

fn first_byte(export: &coldrise_export::Export) -> u8 {
    let mut byte = [0];
    export.disk().read_at(&mut byte, 0).unwrap();
    byte[0]
}

#[test]
fn a_point_is_found_by_name_even_when_it_is_new() {
    let fixture = fixture();
    let tree = fixture.tree();
    let old = tree.open("web01/latest/vda", false).unwrap();
    assert_eq!(old.name(), "web01/20261120T100000Z/vda");
    assert!(old.disk().is_read_only());

    fixture.add_point("20261121T100000Z", 2);
    let exact = tree.open("web01/20261121T100000Z/vda", false).unwrap();
    assert_eq!(first_byte(&exact), 2);
    let latest = tree.open("web01/latest/vda", false).unwrap();
    assert_eq!((latest.name(), first_byte(&latest)), ("web01/20261121T100000Z/vda", 2));
    let before = tree.open("web01/latest~1/vda", false).unwrap();
    assert_eq!((first_byte(&before), first_byte(&old)), (1, 1));
}

#[test]
fn served_disks_are_leased() {
    let fixture = fixture();
    fixture.publish("trial");
    let tree = fixture.tree();
    let repository = fixture.repository();
    let point = tree.open("web01/latest/vda", false).unwrap();
    let live = tree.open("live/trial/vda", false).unwrap();
    let served = read_leases(&repository).unwrap().pop().unwrap().served;
    let names: Vec<_> = served.iter().map(|served| served.name.as_str()).collect();
    assert_eq!(names, ["web01/20261120T100000Z/vda", "live/trial/vda"]);
    // The document of a session that is written keeps its disks.
    let with_disks: Vec<_> = served.iter().map(|served| served.disk.is_some()).collect();
    assert_eq!(with_disks, [true, false]);
    drop(tree);
    drop(point);
    assert_eq!(read_leases(&repository).unwrap().pop().unwrap().served.len(), 1);
    drop(live);
    assert!(read_leases(&repository).unwrap().is_empty());
}

#[test]
fn every_name_is_listed_and_opens() {
    let fixture = fixture();
    let tree = fixture.tree();
    assert_eq!(tree.default_name().unwrap().as_deref(), Some("web01/20261120T100000Z/vda"));
    fixture.add_point("20261121T100000Z", 2);
    fixture.publish("trial");
    assert_eq!(tree.default_name().unwrap(), None);
    let entries = tree.list(100, Listed::Disks).unwrap();
    let names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(
        names,
        ["live/trial/vda", "web01/20261120T100000Z/vda", "web01/20261121T100000Z/vda"]
    );
    for entry in &entries {
        let export = tree.open(&entry.name, false).unwrap();
        assert_eq!(export.name(), entry.name);
        assert_eq!(export.description(), entry.description);
        assert_eq!(export.disk().size_bytes(), entry.size_bytes);
        assert_eq!(export.disk().is_read_only(), entry.is_read_only);
    }
    let newest: Vec<_> =
        tree.list(2, Listed::Disks).unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(newest, ["live/trial/vda", "web01/20261121T100000Z/vda"]);
    assert!(tree.list(0, Listed::Disks).unwrap().is_empty());
}

#[test]
fn invalid_and_missing_names_are_distinguished() {
    let fixture = fixture();
    fixture.publish("trial");
    let tree = fixture.tree();
    let long = "x".repeat(5000);
    for (name, kind) in [
        ("", ErrorKind::InvalidInput),
        (long.as_str(), ErrorKind::InvalidInput),
        ("web01/latest", ErrorKind::InvalidInput),
        ("live/trial", ErrorKind::InvalidInput),
        ("web01/../vda", ErrorKind::InvalidInput),
        ("live/../web01", ErrorKind::InvalidInput),
        ("web01/latest/vda\0x", ErrorKind::InvalidInput),
        ("web01/latest/vdb", ErrorKind::NotFound),
        ("web01/latest~1/vda", ErrorKind::NotFound),
        ("web02/latest/vda", ErrorKind::NotFound),
        ("live/other/vda", ErrorKind::NotFound),
        ("live/trial/vdb", ErrorKind::NotFound),
    ] {
        let error = match tree.open(name, false) {
            Ok(_) => panic!("{name:?} was opened"),
            Err(error) => error,
        };
        assert_eq!(error.kind(), kind, "{name:?}: {error:?}");
        assert!(error.full_message().len() < 1000, "{name:?}");
    }
    let served = read_leases(&fixture.repository()).unwrap().pop().unwrap().served;
    assert_eq!(served, [], "what was not opened is not leased");
}

#[test]
fn a_session_is_shared_and_closed_by_its_last_export() {
    let fixture = fixture();
    fixture.publish("trial");
    let (tree, other) = (fixture.tree(), fixture.tree());
    let first = tree.open("live/trial/vda", false).unwrap();
    let second = tree.open("live/trial/vda", false).unwrap();
    first.disk().write_at(&[7; 10], 5).unwrap();
    let mut bytes = [0; 10];
    second.disk().read_at(&mut bytes, 5).unwrap();
    assert_eq!(bytes, [7; 10]);

    drop(first);
    let busy = other.open("live/trial/vda", false).err().map(|error| error.kind());
    assert_eq!(busy, Some(ErrorKind::Busy));
    let reader = other.open("live/trial/vda", true).unwrap();
    assert!(reader.disk().is_read_only());
    drop(second);
    let writer = other.open("live/trial/vda", false).unwrap();
    writer.disk().read_at(&mut bytes, 5).unwrap();
    assert_eq!(bytes, [7; 10]);
}

#[test]
fn opening_and_closing_at_once_never_meets_a_busy_session() {
    let fixture = fixture();
    fixture.publish("trial");
    let tree = fixture.tree();
    std::thread::scope(|scope| {
        for number in 0..4u8 {
            let tree = &tree;
            scope.spawn(move || {
                let offset = u64::from(number) * 100;
                for turn in 0..25 {
                    let export = tree.open("live/trial/vda", false).unwrap();
                    let mut byte = [0];
                    export.disk().read_at(&mut byte, offset).unwrap();
                    assert_eq!(byte[0], if turn == 0 { 1 } else { number + 10 });
                    export.disk().write_at(&[number + 10], offset).unwrap();
                }
            });
        }
    });
}

#[test]
fn a_defect_stops_one_session_and_leaves_its_captured_writes() {
    let fixture = fixture();
    fixture.publish("bad");
    fixture.publish("good");
    let tree = fixture.tree();
    let first = tree.open("live/bad/vda", false).unwrap();
    let second = tree.open("live/bad/vda", false).unwrap();
    let good = tree.open("live/good/vda", false).unwrap();
    first.disk().write_at(&[9; 10], 0).unwrap();
    first.disk().flush().unwrap();

    first.poison();
    for export in [&first, &second] {
        assert_eq!(export.check().unwrap_err().kind(), ErrorKind::Internal);
    }
    assert!(good.check().is_ok());
    assert!(tree.open("live/bad/vda", false).is_err());
    drop((first, second));
    let error = tree.open("live/bad/vda", false).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Internal, "{error:?}");
    assert_eq!(first_byte(&tree.open("web01/latest/vda", false).unwrap()), 1);
    good.disk().write_at(&[1], 0).unwrap();
}

#[test]
fn a_prefetch_stays_within_disk_and_cache() {
    let fixture = fixture();
    let tree = fixture.tree();
    let export = tree.open("web01/latest/vda", false).unwrap();
    export.prefetch(0, SIZE_BYTES).unwrap();
    export.prefetch(SIZE_BYTES - 1, 1).unwrap();
    export.prefetch(SIZE_BYTES, 0).unwrap();
    for (offset, length) in [(SIZE_BYTES, 1), (0, SIZE_BYTES + 1), (u64::MAX, 2)] {
        let error = export.prefetch(offset, length).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfRange);
    }
    // An image file's range prefetches the part of the disk that it shows, if any.
    for file in ["vda.raw", "vda.vhdx", "vda.dynamic.vhd", "vda.vmdk"] {
        let export = tree.open(&format!("web01/latest/{file}"), false).unwrap();
        let size_bytes = export.disk().size_bytes();
        export.prefetch(0, size_bytes).unwrap();
        export.prefetch(1, size_bytes / 2).unwrap();
        assert_eq!(export.prefetch(1, size_bytes).unwrap_err().kind(), ErrorKind::OutOfRange);
    }
}
