//! The parts that a gc keeps: everything that a session or a running program needs.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::ErrorKind;
use coldrise_session::{
    Catalog, InUse, ReadLease, Session, enter_sealed_points, open_live_disk, open_point_disk,
    publish, remove_unused_layers, unpublish,
};
use coldrise_store::{
    Compression, DiskDocument, DiskName, GcOptions, GcReport, InitOptions, MachineName, MaxUnused,
    OpenOptions, PassphraseSource, PointDocument, PointName, PointOrigin, Repository,
    RepositoryWriter, SessionName, WriteOptions,
};

const DISK_BYTES: u64 = 4 << 20;
static NEVER: AtomicBool = AtomicBool::new(false);

struct TestRepository {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

/// Content of which no two chunks are the same.
fn content(seed: u8) -> Vec<u8> {
    let words = (0..DISK_BYTES / 4).map(|i| (u32::from(seed) << 16) | ((i / 4096) as u32 + 1));
    words.flat_map(u32::to_le_bytes).collect()
}

fn vda() -> DiskName {
    DiskName::parse("vda").unwrap()
}

fn trial() -> SessionName {
    SessionName::parse("trial").unwrap()
}

impl TestRepository {
    fn new() -> TestRepository {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("repo");
        let options = InitOptions {
            chunk_size_bytes: 16384,
            compression: Compression::None,
            passphrase: None,
        };
        Repository::init(&path, &options).unwrap();
        TestRepository { _folder: folder, path }
    }

    fn reader(&self) -> Arc<Repository> {
        Repository::open(&self.path, &PassphraseSource::None, &OpenOptions::default()).unwrap()
    }

    fn writer(&self) -> RepositoryWriter {
        let options = OpenOptions::default();
        RepositoryWriter::open(&self.path, &PassphraseSource::None, &options).unwrap()
    }

    fn backup(&self, name: &str, seed: u8) -> PointDocument {
        let writer = self.writer();
        let options = WriteOptions { threads: 1 };
        let mut disk = writer.disk_writer(None, DISK_BYTES, options).unwrap();
        disk.write(0, content(seed)).unwrap();
        let (root, _) = disk.finish().unwrap();
        let point = PointDocument {
            machine: MachineName::parse("web01").unwrap(),
            point: PointName::parse(name).unwrap(),
            created_at_ms: u64::from(seed),
            origin: PointOrigin::Backup { sources: vec!["a".into()] },
            disks: vec![DiskDocument {
                name: vda(),
                size_bytes: DISK_BYTES,
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
        writer.put_point(&point).unwrap();
        point
    }

    fn forget(&self, point: &PointDocument) {
        self.writer().remove_points(&[(point.machine.clone(), point.point.clone())]).unwrap();
    }

    /// Runs a gc as the command does.
    fn gc(&self) -> coldrise_block::Result<(GcReport, u64)> {
        let writer = self.writer();
        let layers = remove_unused_layers(&writer)?;
        enter_sealed_points(&writer)?;
        let in_use = InUse::collect(writer.repository())?;
        let reachable = writer.repository().reachable(in_use.roots, &NEVER)?;
        let options = GcOptions {
            max_unused: MaxUnused::default(),
            cancel: &NEVER,
            progress: &|_progress| {},
        };
        Ok((writer.collect_garbage(reachable, &options)?, layers))
    }

    fn layers(&self) -> usize {
        std::fs::read_dir(self.path.join("layers")).unwrap().count()
    }
}

fn read(disk: &dyn coldrise_block::Disk) -> Vec<u8> {
    let mut bytes = vec![0; disk.size_bytes() as usize];
    disk.read_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn unfinished_session_documents_are_removed() {
    let place = TestRepository::new();
    let folder = place.path.join("live").join("0123456789abcdef0123456789abcdef");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["session.json.new", "progress.new"] {
        std::fs::write(folder.join(name), b"half").unwrap();
    }
    remove_unused_layers(&place.writer()).unwrap();
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn a_session_keeps_the_data_of_its_forgotten_point_until_it_ends() {
    let place = TestRepository::new();
    let point = place.backup("20261120T100000Z", 1);
    publish(&place.reader(), &point, Some(trial())).unwrap();
    place.forget(&point);
    let (kept, _) = place.gc().unwrap();
    assert_eq!((kept.chunks, kept.pages), (0, 0));
    let repository = place.reader();
    let open = Session::open(&repository, &trial()).unwrap();
    open.disk(&vda()).unwrap().write_at(&[9; 4096], 0).unwrap();
    drop(open);
    let mut expected = content(1);
    expected[..4096].fill(9);
    let sealed = unpublish(&repository, &trial(), false).unwrap().unwrap().point;
    // The point waits in the session's document first, and is then in the catalog.
    for _ in 0..2 {
        assert_eq!(place.gc().unwrap(), (GcReport::default(), 0));
        let disk = open_point_disk(&place.reader(), &sealed, &vda()).unwrap();
        assert_eq!(read(&*disk), expected);
    }
    place.forget(&sealed);
    let (gone, layers) = place.gc().unwrap();
    assert_eq!((gone.chunks, gone.pages, layers), (256, 1, 1));
    assert_eq!(place.layers(), 0);
}

#[test]
fn leases_keep_data_of_forgotten_points_and_ended_sessions() {
    let place = TestRepository::new();
    let point = place.backup("20261120T100000Z", 1);
    let repository = place.reader();
    publish(&repository, &point, Some(trial())).unwrap();
    let open = Session::open(&repository, &trial()).unwrap();
    open.disk(&vda()).unwrap().write_at(&[9; 4096], 0).unwrap();
    let mut sealed = open.seal().unwrap().point;
    drop(open);
    let mut expected = content(1);
    expected[..4096].fill(9);

    let held = ReadLease::point(&repository, "test", &mut sealed).unwrap();
    let document = coldrise_session::session(&repository, &trial()).unwrap().document;
    let held_session = ReadLease::session(&repository, "test", &document).unwrap();
    let live = open_live_disk(&repository, &trial(), &vda()).unwrap();
    unpublish(&repository, &trial(), true).unwrap();
    enter_sealed_points(&place.writer()).unwrap();
    place.forget(&point);
    place.forget(&sealed);
    for _ in 0..2 {
        let (kept, layers) = place.gc().unwrap();
        assert_eq!((kept.chunks, kept.pages, layers, place.layers()), (0, 0, 0, 1));
        repository.catch_up().unwrap();
        // The disk is opened only now: the layer's file must exist.
        let disk = open_point_disk(&repository, &sealed, &vda()).unwrap();
        assert_eq!(read(&*disk), expected);
    }
    drop(held);
    let (kept, layers) = place.gc().unwrap();
    assert_eq!((kept.chunks, layers), (0, 0), "who reads the ended session holds them, too");
    repository.catch_up().unwrap();
    drop(live);
    drop(held_session);
    let (gone, layers) = place.gc().unwrap();
    assert_eq!((gone.chunks, gone.pages, layers, place.layers()), (256, 1, 1, 0));
}

#[test]
fn a_point_that_was_forgotten_meanwhile_is_neither_published_nor_held() {
    let place = TestRepository::new();
    let point = place.backup("20261120T100000Z", 1);
    // This reader has seen the point, and not its removal.
    let repository = place.reader();
    assert_eq!(repository.point(&point.machine, &point.point).unwrap(), point);
    place.forget(&point);
    let refused = publish(&repository, &point, Some(trial())).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotFound);
    assert_eq!(place.layers(), 0);
    let sessions = std::fs::read_dir(place.path.join("live")).unwrap();
    assert_eq!(sessions.filter(|entry| entry.as_ref().unwrap().path().is_dir()).count(), 0);
    let refused =
        ReadLease::point(&repository, "test", &mut point.clone()).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotFound);
    assert_eq!(InUse::collect(&repository).unwrap(), InUse::default(), "no lease is left");

    // A new point of the same name is a different point.
    let other = place.backup("20261120T100000Z", 2);
    let refused = publish(&repository, &point, Some(trial())).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotFound);
    Catalog::new(&repository).confirm(&other).unwrap();
    publish(&repository, &other, Some(trial())).unwrap();
}

#[test]
fn nothing_is_deleted_if_the_data_in_use_is_unknown() {
    let place = TestRepository::new();
    let first = place.backup("20261120T100000Z", 1);
    let second = place.backup("20261121T100000Z", 2);
    let repository = place.reader();
    let session = publish(&repository, &second, Some(trial())).unwrap();
    place.forget(&first);
    let folder = std::fs::read_dir(place.path.join("live")).unwrap();
    let folder = folder.map(|entry| entry.unwrap().path()).find(|path| path.is_dir()).unwrap();
    let file = folder.join("session.json");
    let sound = std::fs::read(&file).unwrap();
    let mut damaged = sound.clone();
    damaged[20] ^= 1;
    std::fs::write(&file, damaged).unwrap();
    let error = place.gc().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let message = error.full_message();
    assert!(message.contains("session.json") && message.contains("coldrise verify"), "{message}");
    // Other writers continue, and remove no layer.
    let layers = || std::fs::read_dir(repository.layers_dir()).unwrap().count();
    let before = layers();
    assert_eq!(enter_sealed_points(&place.writer()).unwrap().points, 0);
    assert_eq!(layers(), before);
    std::fs::write(&file, sound).unwrap();

    let held = ReadLease::session(&repository, "test", &session).unwrap();
    let leases = std::fs::read_dir(repository.leases_dir()).unwrap();
    let lease = leases.map(|entry| entry.unwrap().path()).find(|path| !path.ends_with("lock"));
    let lease = lease.unwrap();
    let sound = std::fs::read(&lease).unwrap();
    std::fs::write(&lease, b"").unwrap();
    let error = place.gc().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.full_message().contains("lease-"), "{error:?}");
    std::fs::write(&lease, sound).unwrap();
    drop(held);
    assert_eq!(place.gc().unwrap().0.chunks, 256);
}
