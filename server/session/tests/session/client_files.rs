//! The files that clients keep in a session: creation, writes, seals, recovery.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, UNIX_EPOCH};

use coldrise_block::{Disk, Error, ErrorKind};
use coldrise_session::{
    CarriedFile, CarriedFiles, Catalog, ClientFilesReader, Creation, FileId, FileKind, Inventory,
    Removal, Session, SessionDocument, enter_sealed_points, open_for_repair, publish,
    publish_with_files, seal, unpublish,
};
use coldrise_store::{
    Compression, DiskDocument, DiskName, InitOptions, MachineName, MapRoot, OpenOptions,
    PointDocument, PointName, PointOrigin, Repository, RepositoryWriter, SessionName,
};
use tempfile::TempDir;

use crate::support::passphrase;

const ROOT: FileId = FileId::ROOT;
const MIB: u64 = 1 << 20;

struct TestRepository {
    _folder: TempDir,
    path: PathBuf,
    point: PointDocument,
}

fn name() -> SessionName {
    SessionName::parse("trial").unwrap()
}

/// A repository with one point of one empty disk.
fn place() -> TestRepository {
    place_in(tempfile::tempdir().unwrap())
}

fn place_in(folder: TempDir) -> TestRepository {
    let path = folder.path().join("repo");
    let secret = passphrase(&path).read().unwrap();
    let options = InitOptions {
        chunk_size_bytes: 16 << 10,
        compression: Compression::None,
        passphrase: secret.as_ref(),
    };
    Repository::init(&path, &options).unwrap();
    let point = PointDocument {
        machine: MachineName::parse("web01").unwrap(),
        point: PointName::parse("20261120T100000Z").unwrap(),
        created_at_ms: 1,
        origin: PointOrigin::Backup { sources: vec![] },
        disks: vec![DiskDocument {
            name: DiskName::parse("vda").unwrap(),
            size_bytes: MIB,
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
    };
    writer(&path).put_point(&point).unwrap();
    TestRepository { _folder: folder, path, point }
}

fn writer(path: &Path) -> RepositoryWriter {
    RepositoryWriter::open(path, &passphrase(path), &OpenOptions::default()).unwrap()
}

impl TestRepository {
    fn open(&self) -> Arc<Repository> {
        Repository::open(&self.path, &passphrase(&self.path), &OpenOptions::default()).unwrap()
    }

    /// `live/HASH/files` of the only session.
    fn files(&self) -> PathBuf {
        let live = std::fs::read_dir(self.path.join("live")).unwrap();
        let folders = live.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
        folders.last().unwrap().join("files")
    }

    fn stored(&self) -> usize {
        std::fs::read_dir(self.files()).unwrap().count()
    }
}

fn read_all(disk: &dyn Disk) -> Vec<u8> {
    let mut bytes = vec![0; disk.size_bytes() as usize];
    disk.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn make(session: &Session, name: &str, content: &[u8]) -> FileId {
    let (entry, is_new) = session.files().create(ROOT, name, Creation::Guarded, 0o644).unwrap();
    assert!(is_new);
    let file = session.files().file(entry.id).unwrap();
    file.write_at(content, 0).unwrap();
    file.flush().unwrap();
    entry.id
}

fn names(session: &Session) -> Vec<String> {
    session.files().tree().entries(ROOT).map(|entry| entry.name.clone()).collect()
}

fn reader(repository: &Arc<Repository>) -> Arc<ClientFilesReader> {
    let document = coldrise_session::session(repository, &name()).unwrap().document;
    Arc::new(ClientFilesReader::new(repository, &document))
}

/// Ends a session like a kill of the process: nothing is closed.
fn kill(session: Arc<Session>) {
    session.stop_listening();
    session.stop();
    drop(session);
}

#[test]
fn flushed_client_files_survive_a_kill() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name())).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    let small = make(&session, "small", b"flushed");
    let large = make(&session, "large", b"");
    let large_file = session.files().file(large).unwrap();
    large_file.write_at(b"far", 3 * MIB).unwrap();
    large_file.flush().unwrap();
    session.files().file(small).unwrap().write_at(b"not stored", 0).unwrap();
    assert_eq!(read_all(&*session.files().file(small).unwrap()), b"not stored");
    session.files().make_folder(ROOT, "folder", 0o755).unwrap();
    session.files().rename((ROOT, "small"), (ROOT, "moved")).unwrap();
    drop(large_file);
    kill(session);
    // The remains of a crash: an unfinished content, and one without a name.
    std::fs::write(place.files().join(format!("{}.new", "0".repeat(32))), b"half").unwrap();
    std::fs::write(place.files().join("7".repeat(32)), b"no name").unwrap();

    let session = Session::open(&repository, &name()).unwrap();
    assert_eq!(names(&session), ["folder", "large", "moved"]);
    assert_eq!(read_all(&*session.files().file(small).unwrap()), b"flushed");
    let large = session.files().file(large).unwrap();
    assert_eq!(large.size_bytes(), 3 * MIB + 3);
    let content = read_all(&*large);
    assert!(content.ends_with(b"far") && content[..3 << 20].iter().all(|byte| *byte == 0));
    assert_eq!(place.stored(), 2, "the list and a layer: the rest is tidied away");
}

#[test]
fn a_short_content_stands_in_the_list() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name())).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    let lock = make(&session, "lock", &[7; 84]);
    assert_eq!(place.stored(), 1, "nothing but the list");
    let log = make(&session, "log", &[8; 84]);
    let files = reader(&place.open());
    let seen = files.file(log).unwrap();
    assert_eq!(read_all(&*seen), [8; 84]);
    let file = session.files().file(log).unwrap();
    file.write_at(&[9; 300], 0).unwrap();
    file.flush().unwrap();
    assert_eq!(place.stored(), 2, "it has become too long");
    assert_eq!(read_all(&*seen), [9; 300]);
    let long_ago = UNIX_EPOCH + Duration::from_secs(1_000_000);
    session.files().set(lock, None, Some(long_ago)).unwrap();
    // A document that the list does not name yet is not a content.
    let unnamed = place.files().join(format!("{:032x}", lock.as_u128()));
    std::fs::write(&unnamed, b"half").unwrap();
    drop(file);
    kill(session);

    let session = Session::open(&repository, &name()).unwrap();
    assert!(!unnamed.exists());
    let file = session.files().file(lock).unwrap();
    assert_eq!((read_all(&*file), file.modified()), (vec![7; 84], long_ago));
    assert_eq!(read_all(&*session.files().file(log).unwrap()), [9; 300]);
    session.files().remove(ROOT, "lock", Removal::Any).unwrap();
    assert_eq!(file.read_at(&mut [0], 0).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_file_grows_into_a_layer_and_shrinks_in_it() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name())).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    let id = make(&session, "log", b"first");
    let file = session.files().file(id).unwrap();
    let kind = || session.files().tree().get(id).unwrap().kind;
    file.set_size_bytes(MIB).unwrap();
    assert!(matches!(kind(), FileKind::Listed { .. }));
    file.flush().unwrap();
    assert_eq!(kind(), FileKind::Small);
    file.write_at(b"beyond", MIB - 2).unwrap();
    assert!(matches!(kind(), FileKind::Large { .. }));
    assert_eq!(file.size_bytes(), MIB + 4);
    let mut content = read_all(&*file);
    assert!(content.starts_with(b"first") && content.ends_with(b"beyond"));
    // A reader in another process sees the file, and later changes.
    let files = reader(&place.open());
    let seen = files.file(id).unwrap();
    assert_eq!(read_all(&*seen), content);
    file.set_size_bytes(3).unwrap();
    file.set_size_bytes(6).unwrap();
    content = b"fir\0\0\0".to_vec();
    assert_eq!(read_all(&*file), content);
    assert_eq!(read_all(&*seen), content);
    assert_eq!(file.set_size_bytes(1 << 41).unwrap_err().kind(), ErrorKind::OutOfRange);
    assert_eq!(file.write_at(b"x", 1 << 40).unwrap_err().kind(), ErrorKind::OutOfRange);

    session.files().remove(ROOT, "log", Removal::Any).unwrap();
    assert_eq!(file.read_at(&mut [0], 0).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(file.write_at(b"x", 0).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(seen.read_at(&mut [0], 0).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(place.stored(), 1, "only the list is left");
}

#[test]
fn readers_see_flushed_content_and_renames() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name())).unwrap();
    let files = reader(&place.open());
    assert!(files.tree().unwrap().is_empty());
    let session = Session::open(&repository, &name()).unwrap();
    let id = make(&session, "lock", b"beat 1");
    let seen = files.file(id).unwrap();
    assert_eq!(files.tree().unwrap().find(ROOT, "lock").unwrap().id, id);
    let file = session.files().file(id).unwrap();
    for beat in 2..40 {
        let content = format!("beat {beat}");
        file.write_at(content.as_bytes(), 0).unwrap();
        file.flush().unwrap();
        assert_eq!(read_all(&*seen), content.as_bytes());
    }
    session.files().rename((ROOT, "lock"), (ROOT, "other")).unwrap();
    assert!(files.tree().unwrap().find(ROOT, "lock").is_none());
    assert_eq!(read_all(&*seen), b"beat 39", "a file is not its name");
}

#[test]
fn an_exclusive_creation_can_be_repeated_by_its_client() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name())).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    let create = |how| session.files().create(ROOT, "lock", how, 0o600);
    let (made, is_new) = create(Creation::Exclusive(7)).unwrap();
    assert!(is_new);
    assert_eq!(create(Creation::Exclusive(7)).unwrap(), (Arc::clone(&made), false));
    assert_eq!(create(Creation::Exclusive(8)).unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(create(Creation::Guarded).unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(create(Creation::Unchecked).unwrap().0.id, made.id);
    session.files().set(made.id, Some(0o640), None).unwrap();
    assert_eq!(create(Creation::Exclusive(7)).unwrap_err().kind(), ErrorKind::AlreadyExists);
}

#[test]
fn a_sealed_point_carries_client_files_and_reports_skipped_ones() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name())).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    make(&session, "vm.vmx", b"memsize = \"96\"");
    make(&session, ".lck-0123456789abcdef", &[1; 84]);
    make(&session, "vm.vswp", b"swap");
    let delta = session.files().file(make(&session, "vda-000001-delta.vmdk", b"")).unwrap();
    delta.set_size_bytes(2 * MIB).unwrap();
    let folder = session.files().make_folder(ROOT, "sub", 0o750).unwrap();
    session.files().create(folder.id, "empty", Creation::Guarded, 0o600).unwrap();
    // Written and not flushed: a seal includes these bytes.
    let (log, _) = session.files().create(ROOT, "vm.log", Creation::Guarded, 0o644).unwrap();
    session.files().file(log.id).unwrap().write_at(b"unflushed", 0).unwrap();

    let sealed = session.seal().unwrap();
    let left: Vec<_> =
        sealed.left_out.iter().map(|f| (&*f.path, f.size_bytes, f.is_snapshot)).collect();
    assert_eq!(left, [("vda-000001-delta.vmdk", 2 * MIB, true)]);
    let of = |point: &PointDocument| Catalog::new(&place.open()).files(point).unwrap();
    let check = |point: &PointDocument| {
        let files = of(point);
        let paths: Vec<_> = files.files.iter().map(|file| &*file.path).collect();
        assert_eq!(paths, ["sub", "sub/empty", "vm.log", "vm.vmx"]);
        assert_eq!(files.find("vm.log").unwrap().content.as_deref(), Some(&b"unflushed"[..]));
        assert_eq!(files.find("sub").unwrap().mode, 0o750);
    };
    check(&sealed.point);
    make(&session, "later", b"x");
    drop(delta);
    drop(session);
    let again = seal(&repository, &name(), std::time::Duration::ZERO).unwrap().point;
    assert!(of(&again).find("later").is_some());
    check(&sealed.point);
    // The files are the same in the catalog, and none stay beside it.
    assert_eq!(enter_sealed_points(&writer(&place.path)).unwrap().points, 2);
    check(&sealed.point);
    let beside = place.files().with_file_name("sealed");
    assert_eq!(std::fs::read_dir(beside).unwrap().count(), 0);

    // A session published from this point begins with the same files.
    let next = SessionName::parse("next").unwrap();
    publish(&repository, &again, Some(next.clone())).unwrap();
    let session = Session::open(&repository, &next).unwrap();
    assert_eq!(names(&session), ["later", "sub", "vm.log", "vm.vmx"]);
    let tree = session.files().tree();
    let log = tree.find(ROOT, "vm.log").unwrap();
    assert_eq!(read_all(&*session.files().file(log.id).unwrap()), b"unflushed");
    drop(session);
    assert_eq!(unpublish(&repository, &next, false).unwrap(), None, "nothing has changed");
}

#[test]
fn a_repair_restores_the_files_of_a_sealed_point_from_its_marker() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name())).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    make(&session, "vm.vmx", b"memsize");
    let point = session.seal().unwrap().point;
    drop((session, repository));
    // Remove the session, and with it the point and its files.
    std::fs::remove_dir_all(place.files().parent().unwrap()).unwrap();
    let secret = passphrase(&place.path);
    let (writer, reopened, _) =
        open_for_repair(&place.path, &secret, &OpenOptions::default()).unwrap();
    assert_eq!(reopened.restored_points, 1);
    assert_eq!(writer.repository().point(&point.machine, &point.point).unwrap(), point);
    let files = Catalog::new(writer.repository()).files(&point).unwrap();
    assert_eq!(files.find("vm.vmx").unwrap().content.as_deref(), Some(&b"memsize"[..]));
}

#[test]
fn a_change_of_files_alone_is_worth_a_point() {
    let place = place();
    let repository = place.open();
    let first = |_: &SessionDocument, mut files: CarriedFiles| {
        files.files.push(CarriedFile {
            path: "trial.vmx".into(),
            content: Some(b"made at publish".to_vec()),
            mode: 0o644,
            modified_ms: 5000,
        });
        Ok(files)
    };
    publish_with_files(&repository, &place.point, Some(name()), first).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    let tree = session.files().tree();
    let vmx = tree.find(ROOT, "trial.vmx").unwrap();
    let file = session.files().file(vmx.id).unwrap();
    assert_eq!(read_all(&*file), b"made at publish");
    file.write_at(b"MADE", 0).unwrap();
    drop(file);
    // Closing the session stores the content.
    drop(session);
    let point = unpublish(&repository, &name(), false).unwrap().unwrap().point;
    let files = Catalog::new(&repository).files(&point).unwrap();
    assert_eq!(files.find("trial.vmx").unwrap().content.as_deref(), Some(&b"MADE at publish"[..]));
}

#[test]
fn a_publish_that_fails_leaves_no_marker() {
    let place = place();
    let repository = place.open();
    let markers = || std::fs::read_dir(repository.path().join("markers")).unwrap().count();
    let before = markers();
    let refused = |_: &SessionDocument, _| Err(Error::new(ErrorKind::Interrupted, "by the test"));
    let error = publish_with_files(&repository, &place.point, Some(name()), refused).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
    assert_eq!(markers(), before);
    publish(&repository, &place.point, Some(name())).unwrap();
    assert_eq!(markers(), before + 1);
}

#[test]
fn names_and_contents_of_client_files_are_encrypted() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("passphrase"), "correct horse").unwrap();
    let place = place_in(folder);
    let repository = place.open();
    publish(&repository, &place.point, Some(name())).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    make(&session, "revealing-name", b"revealing-content");
    session.seal().unwrap();
    drop(session);
    let mut folders = vec![place.path.clone()];
    let mut seen = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            assert!(!path.to_string_lossy().contains("revealing"), "{}", path.display());
            if path.is_dir() {
                folders.push(path);
            } else {
                let bytes = std::fs::read(&path).unwrap();
                assert!(!bytes.windows(9).any(|part| part == b"revealing"), "{}", path.display());
                seen += 1;
            }
        }
    }
    assert!(seen > 5);
    unpublish(&repository, &name(), true).unwrap();
    enter_sealed_points(&writer(&place.path)).unwrap();
    let left = std::fs::read_dir(place.path.join("live")).unwrap();
    assert_eq!(left.filter(|entry| entry.as_ref().unwrap().path().is_dir()).count(), 0);
}

#[test]
fn missing_and_changed_client_files_are_damage() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name())).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    let (first, second) = (make(&session, "first", &[1; 300]), make(&session, "second", &[2; 300]));
    drop(session);
    let files: Vec<_> = std::fs::read_dir(place.files())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| !path.ends_with("tree"))
        .collect();
    let (one, other) = (std::fs::read(&files[0]).unwrap(), std::fs::read(&files[1]).unwrap());
    std::fs::write(&files[0], other).unwrap();
    std::fs::write(&files[1], one).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    for id in [first, second] {
        let opened = session.files().file(id).err().expect("contents were swapped");
        assert_eq!(opened.kind(), ErrorKind::Corrupt);
    }
    drop(session);
    std::fs::remove_file(&files[0]).unwrap();
    std::fs::remove_file(&files[1]).unwrap();
    let opened = reader(&repository).file(first).err().expect("it is missing");
    assert_eq!(opened.kind(), ErrorKind::Corrupt);
    assert_eq!(
        seal(&repository, &name(), std::time::Duration::ZERO).unwrap_err().kind(),
        ErrorKind::Corrupt
    );
    std::fs::remove_file(place.files().join("tree")).unwrap();
    assert_eq!(Session::open(&repository, &name()).err().unwrap().kind(), ErrorKind::Corrupt);
    assert_eq!(reader(&repository).tree().unwrap_err().kind(), ErrorKind::Corrupt);
}

/// If `session.json` is lost, a repair restores the point's files from there.
#[test]
fn damaged_files_with_the_marker_of_a_waiting_point_are_named_and_heal() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name())).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    make(&session, "small", b"settings");
    let point = session.seal().unwrap().point;
    drop(session);
    let markers = std::fs::read_dir(place.path.join("markers")).unwrap();
    let mut paths = markers.map(|entry| entry.unwrap().path());
    let files = paths.find(|path| path.extension().is_some_and(|it| it == "files")).unwrap();
    let damaged = || Inventory::take(&repository, &AtomicBool::new(false)).unwrap().damaged_markers;
    let stored = std::fs::read(&files).unwrap();
    let losses: [&dyn Fn(); 2] = [&|| std::fs::remove_file(&files).unwrap(), &|| {
        std::fs::write(&files, &stored[1..]).unwrap()
    }];
    for lose in losses {
        assert_eq!(damaged(), []);
        lose();
        let what = format!("the files with the marker of web01/{}", point.point);
        assert_eq!(damaged().iter().map(|damage| &damage.what).collect::<Vec<_>>(), [&what]);
        std::fs::write(&files, &stored).unwrap();
    }
    std::fs::remove_file(&files).unwrap();
    enter_sealed_points(&writer(&place.path)).unwrap();
    assert!(files.exists());
    assert_eq!(damaged(), []);
}

/// A drive error during one read must not make a file shorter for its reader.
#[test]
fn an_unreadable_file_list_keeps_the_size_of_open_files() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name())).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    let id = make(&session, "small", b"settings");
    session.seal().unwrap();
    drop(session);
    let (list, away) = (place.files().join("tree"), place.files().join("away"));
    let file = reader(&repository).file(id).unwrap();
    std::fs::rename(&list, &away).unwrap();
    assert_eq!(file.size_bytes(), 8);
    assert_eq!(file.extents(0, 8, 1).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(file.read_at(&mut [0; 8], 0).unwrap_err().kind(), ErrorKind::Corrupt);
    std::fs::rename(&away, &list).unwrap();
    assert_eq!(read_all(&*file), b"settings");
}

#[test]
fn a_verify_reports_unreadable_client_files() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name())).unwrap();
    let session = Session::open(&repository, &name()).unwrap();
    make(&session, "good", b"1");
    let bad = make(&session, "bad", &[2; 300]);
    let point = session.seal().unwrap().point;
    let damaged = || -> Vec<String> {
        let inventory = Inventory::take(&place.open(), &AtomicBool::new(false)).unwrap();
        inventory.damaged.into_iter().map(|damage| damage.what).collect()
    };
    assert_eq!(damaged(), Vec::<String>::new());
    let path = place.files().join(format!("{:032x}", bad.as_u128()));
    let mut stored = std::fs::read(&path).unwrap();
    stored[40] ^= 1;
    std::fs::write(&path, stored).unwrap();
    assert_eq!(damaged(), ["live/trial/bad"]);
    std::fs::remove_dir_all(place.files().with_file_name("sealed")).unwrap();
    let carried = format!("the files that web01/{} carries", point.point);
    assert_eq!(damaged(), ["live/trial/bad".to_owned(), carried]);
}
