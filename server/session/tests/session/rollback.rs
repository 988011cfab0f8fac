//! Older versions of a session's files that were put back, and damage to one of two copies.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind};
use coldrise_session::{
    Inventory, Session, SessionDocument, enter_sealed_points, open_for_repair, open_live_disk,
    publish, seal, unpublish,
};
use coldrise_store::{Coverage, OpenOptions, PointDocument, Repository, VerifyOptions};

use crate::support::{
    self, PATIENCE, TestRepository, content, disk_name, name, place, point_bytes, writer,
};

static NEVER: AtomicBool = AtomicBool::new(false);

/// The folder of the only session.
fn session_folder(place: &TestRepository) -> PathBuf {
    let mut live =
        fs::read_dir(place.path.join("live")).unwrap().map(|entry| entry.unwrap().path());
    live.find(|path| path.is_dir()).unwrap()
}

fn write(repository: &Arc<Repository>, at: u64, byte: u8) -> SessionDocument {
    let open = Session::open(repository, &name("trial")).unwrap();
    open.disk(&disk_name("vda")).unwrap().write_at(&[byte; 4096], at).unwrap();
    open.document()
}

fn open_error(repository: &Arc<Repository>) -> Error {
    match Session::open(repository, &name("trial")) {
        Ok(_) => panic!("it was opened"),
        Err(error) => error,
    }
}

/// The damage of sessions and layers that verify reports.
fn damage(repository: &Arc<Repository>) -> Vec<String> {
    let inventory = Inventory::take(repository, &NEVER).unwrap();
    let options = VerifyOptions {
        coverage: Coverage::Everything,
        threads: 1,
        cancel: &NEVER,
        progress: &|_| {},
    };
    let layers = inventory.verify_layers(repository, &options).unwrap();
    let damaged = inventory.damaged.iter().chain(&inventory.damaged_markers).chain(&layers.damaged);
    damaged.map(|damage| damage.message()).collect()
}

fn copies(paths: &[PathBuf]) -> Vec<(PathBuf, Vec<u8>)> {
    paths.iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

fn put_back(files: &[(PathBuf, Vec<u8>)]) {
    files.iter().for_each(|(path, content)| fs::write(path, content).unwrap());
}

fn top(repository: &Repository, document: &SessionDocument) -> PathBuf {
    repository.layers_dir().join(document.disks[0].top.to_string())
}

#[test]
fn an_older_layer_with_both_progress_files_is_refused() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let document = write(&repository, 0, 1);
    let folder = session_folder(&place);
    let set = [top(&repository, &document), folder.join("progress"), folder.join("progress-copy")];
    let older = copies(&set);
    write(&repository, 4096, 2);
    put_back(&older);
    let error = open_error(&repository);
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.full_message().contains("older"), "{error:?}");
    assert_eq!(seal(&repository, &name("trial"), PATIENCE).unwrap_err().kind(), ErrorKind::Corrupt);
    assert!(damage(&repository).iter().any(|text| text.contains("older")));
}

/// Puts back the whole session from before two seals. Returns the second point.
fn rolled_back_behind_seals(
    place: &TestRepository,
    repository: &Arc<Repository>,
    is_entered: bool,
) -> PointDocument {
    publish(repository, &place.point, Some(name("trial"))).unwrap();
    let document = write(repository, 0, 1);
    let folder = session_folder(place);
    let mut set =
        ["session.json", "progress", "progress-copy"].map(|file| folder.join(file)).to_vec();
    // Nothing of the other disk is sealed, and its layer is removed.
    set.push(repository.layers_dir().join(document.disks[1].top.to_string()));
    let older = copies(&set);
    let points = [2, 3].map(|byte| {
        write(repository, 4096, byte);
        seal(repository, &name("trial"), PATIENCE).unwrap().point
    });
    if is_entered {
        enter_sealed_points(&writer(&place.path)).unwrap();
    }
    // The first disk's layer belongs to the first point now, and exists.
    put_back(&older);
    let [_, last] = points;
    last
}

#[test]
fn a_session_older_than_its_last_seal_is_refused_and_can_be_discarded() {
    for is_entered in [false, true] {
        older_than_its_last_seal(is_entered);
    }
}

/// `is_entered`: the points are in the catalog, and not only in markers.
fn older_than_its_last_seal(is_entered: bool) {
    let place = place();
    let repository = place.open();
    let point = rolled_back_behind_seals(&place, &repository, is_entered);
    let (is_refused, text) = {
        let error = open_error(&repository);
        (error.kind() == ErrorKind::Corrupt, error.full_message())
    };
    // The last point has the writes of the first.
    assert!(is_refused && text.contains(&format!("{} ", point.point)), "{text}");
    assert!(text.contains("coldrise unpublish trial --discard"), "{text}");
    assert_eq!(text.contains("coldrise repair"), !is_entered, "{text}");
    let refused = seal(&repository, &name("trial"), PATIENCE).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Corrupt);
    let Err(unread) = open_live_disk(&repository, &name("trial"), &disk_name("vda")) else {
        panic!("a reader got the older version");
    };
    assert_eq!((unread.kind(), unread.full_message()), (ErrorKind::Corrupt, text));
    assert_eq!(
        unpublish(&repository, &name("trial"), false).unwrap_err().kind(),
        ErrorKind::Corrupt
    );
    let found = damage(&repository);
    assert!(found.iter().any(|damage| damage.starts_with("live/trial: ")), "{found:?}");

    unpublish(&repository, &name("trial"), true).unwrap();
    let (passphrase, options) = (support::passphrase(&place.path), OpenOptions::default());
    drop(open_for_repair(&place.path, &passphrase, &options).unwrap());
    repository.catch_up().unwrap();
    let mut expected = content(1);
    expected[..4096].fill(1);
    expected[4096..8192].fill(3);
    assert_eq!(point_bytes(&repository, &point, "vda"), expected);
    assert_eq!(damage(&repository), [""; 0]);
    publish(&repository, &point, Some(name("trial"))).unwrap();
    write(&repository, 0, 3);
}

#[test]
fn sessions_of_the_same_name_and_of_the_same_point_are_not_taken_for_older_ones() {
    let place = place();
    let repository = place.open();
    for _ in 0..2 {
        publish(&repository, &place.point, Some(name("trial"))).unwrap();
        publish(&repository, &place.point, Some(name("other"))).unwrap();
        for round in 0..2 {
            write(&repository, 0, round + 1);
            seal(&repository, &name("other"), PATIENCE).unwrap();
            seal(&repository, &name("trial"), PATIENCE).unwrap();
            // The points of the first round are still in the sessions, and in markers.
            if round == 1 {
                enter_sealed_points(&writer(&place.path)).unwrap();
            }
        }
        write(&repository, 0, 9);
        for session in ["trial", "other"] {
            unpublish(&repository, &name(session), false).unwrap();
        }
        assert_eq!(damage(&repository), [""; 0]);
    }
}

fn scribble(path: &Path, at: usize) {
    let mut content = fs::read(path).unwrap();
    content[at] ^= 0x5a;
    fs::write(path, content).unwrap();
}

#[test]
fn damage_to_one_copy_is_named_and_heals() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let document = write(&repository, 0, 1);
    let folder = session_folder(&place);
    for (file, is_removed) in
        [("progress", false), ("progress-copy", false), ("progress", true), ("progress-copy", true)]
    {
        assert_eq!(damage(&repository), [""; 0]);
        if is_removed {
            fs::remove_file(folder.join(file)).unwrap();
        } else {
            scribble(&folder.join(file), 40);
        }
        let found = damage(&repository);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].contains("live/trial") && found[0].contains(&format!("{file}: ")),
            "{found:?}"
        );
        enter_sealed_points(&writer(&place.path)).unwrap();
    }
    for at in [4096 + 3, 8192 + 3] {
        assert_eq!(damage(&repository), [""; 0]);
        scribble(&top(&repository, &document), at);
        let found = damage(&repository);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("live/trial/vda") && found[0].contains("mark"), "{found:?}");
        write(&repository, 8192, 4);
    }
    assert_eq!(damage(&repository), [""; 0]);
}
