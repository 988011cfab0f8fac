use super::*;
use coldrise_store::{Compression, InitOptions, OpenOptions, Passphrase, PassphraseSource};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;

struct Fixture {
    _directory: tempfile::TempDir,
    repository: Arc<Repository>,
}

fn fixture() -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("repository");
    let file = directory.path().join("passphrase");
    std::fs::write(&file, "secret\n").unwrap();
    let passphrase = Passphrase::new(b"secret".to_vec()).unwrap();
    let options = InitOptions {
        chunk_size_bytes: 16384,
        compression: Compression::None,
        passphrase: Some(&passphrase),
    };
    Repository::init(&path, &options).unwrap();
    let source = PassphraseSource::File(file);
    let repository = Repository::open(&path, &source, &OpenOptions::default()).unwrap();
    Fixture { _directory: directory, repository }
}

fn served(name: &str) -> Served {
    Served { name: name.to_owned(), disk: None }
}

fn names(repository: &Repository) -> BTreeSet<String> {
    let leases = read_leases(repository).unwrap();
    leases.into_iter().flat_map(|lease| lease.served).map(|served| served.name).collect()
}

fn files(repository: &Repository) -> Vec<PathBuf> {
    lease_files(&repository.leases_dir()).unwrap()
}

#[test]
fn a_lease_lists_each_name_until_its_last_holder_drops_it() {
    let Fixture { repository, _directory } = fixture();
    let lease = Lease::take(&repository, "test").unwrap();
    assert_eq!(names(&repository), BTreeSet::new());
    let first = lease.hold(served("web01/a")).unwrap();
    let again = lease.hold(served("web01/a")).unwrap();
    let other = lease.hold(served("web01/b")).unwrap();
    assert_eq!(names(&repository), ["web01/a", "web01/b"].map(str::to_owned).into());
    drop(first);
    assert!(names(&repository).contains("web01/a"), "the second holder still needs it");
    drop(again);
    assert_eq!(names(&repository), ["web01/b".to_owned()].into());
    let document = read_leases(&repository).unwrap().pop().unwrap();
    assert_eq!(document.program, "test");
    assert_eq!(document.process_id, std::process::id());

    drop(lease);
    assert!(names(&repository).contains("web01/b"), "a lease lasts as long as its last hold");
    drop(other);
    assert_eq!(files(&repository), Vec::<PathBuf>::new());
}

#[test]
fn one_name_may_stand_for_two_contents() {
    let Fixture { repository, _directory } = fixture();
    let disk = |size_bytes| DiskDocument {
        name: coldrise_store::DiskName::parse("vda").unwrap(),
        size_bytes,
        root: serde_json::from_str(r#"{"page":0,"levels":1}"#).unwrap(),
        layers: Vec::new(),
    };
    let served = |size_bytes| Served { name: "a".to_owned(), disk: Some(disk(size_bytes)) };
    let sizes = |repository: &Repository| -> Vec<u64> {
        let leases = read_leases(repository).unwrap();
        let served = leases.into_iter().flat_map(|lease| lease.served);
        served.filter_map(|served| served.disk).map(|disk| disk.size_bytes).collect()
    };
    let lease = Lease::take(&repository, "test").unwrap();
    let before = lease.hold(served(512)).unwrap();
    before.confirm();
    let after = lease.hold(served(1024)).unwrap();
    assert!(!after.is_confirmed());
    assert_eq!(sizes(&repository), [512, 1024]);
    drop(before);
    assert_eq!(sizes(&repository), [1024]);
}

#[test]
fn a_name_is_confirmed_once_for_all_its_holders() {
    let Fixture { repository, _directory } = fixture();
    let lease = Lease::take(&repository, "test").unwrap();
    let first = lease.hold(served("a")).unwrap();
    let second = lease.hold(served("a")).unwrap();
    assert!(!first.is_confirmed() && !second.is_confirmed());
    first.confirm();
    assert!(second.is_confirmed());
    drop((first, second));
    let later = lease.hold(served("a")).unwrap();
    assert!(!later.is_confirmed(), "it was not leased in between");
}

#[test]
fn leases_of_dead_processes_are_removed() {
    let Fixture { repository, _directory } = fixture();
    let living = Lease::take(&repository, "living").unwrap();
    let hold = living.hold(served("kept")).unwrap();
    let directory = repository.leases_dir();
    for dead in ["lease-dead", "lease-dead.new"] {
        std::fs::copy(&living.path, directory.join(dead)).unwrap();
    }
    std::fs::write(directory.join("something-else"), b"not ours").unwrap();
    assert_eq!(read_leases(&repository).unwrap().len(), 1, "the dead hold nothing");

    let next = Lease::take(&repository, "next").unwrap();
    let left: BTreeSet<_> = files(&repository).into_iter().collect();
    assert_eq!(left, [living.path.clone(), next.path.clone()].into());
    assert!(directory.join("something-else").exists());
    assert_eq!(names(&repository), ["kept".to_owned()].into());
    drop(hold);
}

#[test]
fn a_lease_is_private() {
    let Fixture { repository, _directory } = fixture();
    let lease = Lease::take(&repository, "secret-program").unwrap();
    let _hold = lease.hold(served("secret-machine")).unwrap();
    let bytes = std::fs::read(&lease.path).unwrap();
    assert!(!bytes.windows(6).any(|window| window == b"secret"));
    assert_eq!(std::fs::metadata(&lease.path).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn a_damaged_lease_of_a_living_process_is_an_error() {
    let Fixture { repository, _directory } = fixture();
    let lease = Lease::take(&repository, "test").unwrap();
    let mut bytes = std::fs::read(&lease.path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    // Write in place: the locked file must stay the same.
    std::fs::write(&lease.path, &bytes).unwrap();
    let error = read_leases(&repository).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.full_message().contains("lease-"), "{error:?}");
}

#[test]
fn a_lease_that_cannot_be_changed_stays_as_it_was() {
    let Fixture { repository, _directory } = fixture();
    let lease = Lease::take(&repository, "test").unwrap();
    let hold = lease.hold(served("before")).unwrap();
    let mut blocked = lease.path.clone().into_os_string();
    blocked.push(NEW_SUFFIX);
    let blocked = PathBuf::from(blocked);
    std::fs::create_dir(&blocked).unwrap();
    assert!(lease.hold(served("more")).is_err());
    std::fs::remove_dir(&blocked).unwrap();
    assert_eq!(names(&repository), ["before".to_owned()].into());
    let more = lease.hold(served("more")).unwrap();
    assert_eq!(names(&repository).len(), 2);
    drop((hold, more));
}

#[test]
fn two_points_that_had_one_name_after_the_other_are_both_named() {
    let Fixture { repository, _directory } = fixture();
    let lease = Lease::take(&repository, "test").unwrap();
    let of = |size_bytes| {
        let root = coldrise_store::MapRoot::EMPTY;
        let name = coldrise_store::DiskName::parse("vda").unwrap();
        let disk = DiskDocument { name, size_bytes, root, layers: Vec::new() };
        Served { name: "web01/a/vda".to_owned(), disk: Some(disk) }
    };
    let held = || -> Vec<Served> { read_leases(&repository).unwrap().remove(0).served };
    let first = lease.hold(of(4096)).unwrap();
    first.confirm();
    let second = lease.hold(of(8192)).unwrap();
    assert!(!second.is_confirmed());
    assert_eq!(held(), [of(4096), of(8192)]);
    drop(first);
    assert_eq!(held(), [of(8192)]);
}

#[test]
fn many_are_held_at_once_and_more_than_a_document_holds_keeps_everything() {
    let Fixture { repository, _directory } = fixture();
    let lease = Lease::take(&repository, "test").unwrap();
    let one = lease.hold(served("b")).unwrap();
    let some = lease.hold_all(["a", "b", "c"].map(served).into()).unwrap();
    assert_eq!(names(&repository), ["a", "b", "c"].map(str::to_owned).into());
    drop(some);
    assert_eq!(names(&repository), ["b".to_owned()].into());
    drop(one);

    let huge = lease.hold(served(&"x".repeat(17 << 20))).unwrap();
    assert_eq!(read_leases(&repository).unwrap_err().kind(), ErrorKind::Corrupt);
    drop(huge);
    assert_eq!(names(&repository), BTreeSet::new());
}
