//! Making and opening repositories: each failure has its own error.

use std::os::unix::fs::PermissionsExt;

use coldrise_block::ErrorKind;
use coldrise_store::*;

use crate::common::*;

fn init(path: &std::path::Path) -> coldrise_block::Result<()> {
    let options =
        InitOptions { chunk_size_bytes: 4096, compression: Compression::None, passphrase: None };
    Repository::init(path, &options)
}

fn open_kind(path: &std::path::Path, source: &PassphraseSource) -> ErrorKind {
    let options = OpenOptions::default();
    let reading = Repository::open(path, source, &options).err().unwrap();
    let writing = RepositoryWriter::open(path, source, &options).err().unwrap();
    assert_eq!(reading.kind(), writing.kind());
    reading.kind()
}

#[test]
fn opening_a_directory_without_a_repository_fails() {
    let directory = tempfile::tempdir().unwrap();
    let none = PassphraseSource::None;
    assert_eq!(open_kind(directory.path(), &none), ErrorKind::NoRepository);
    assert_eq!(open_kind(&directory.path().join("absent"), &none), ErrorKind::NoRepository);
    let file = directory.path().join("file");
    std::fs::write(&file, b"x").unwrap();
    assert_eq!(open_kind(&file, &none), ErrorKind::NoRepository);
    // A search for a repository leaves nothing behind.
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn passphrases_are_checked_and_versions_and_damage_distinguished() {
    let store = Store::encrypted();
    let wrong = PassphraseSource::Command("echo wrong".into());
    assert_eq!(open_kind(&store.path(), &wrong), ErrorKind::WrongPassphrase);
    assert_eq!(open_kind(&store.path(), &PassphraseSource::None), ErrorKind::WrongPassphrase);
    let failing = PassphraseSource::Command("exit 1".into());
    assert_eq!(open_kind(&store.path(), &failing), ErrorKind::ToolFailed);

    let file = store.path().join("repository.json");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, &text[..text.len() / 2]).unwrap();
    assert_eq!(open_kind(&store.path(), &store.source), ErrorKind::Corrupt);
    let newer = text.replace("\"format_version\": 2", "\"format_version\": 3");
    std::fs::write(&file, newer).unwrap();
    assert_eq!(open_kind(&store.path(), &store.source), ErrorKind::Unsupported);
    std::fs::write(&file, text).unwrap();
    store.reader();
}

/// As when a file system is unmounted while the passphrase is asked for.
#[test]
fn nothing_is_created_where_the_repository_no_longer_is() {
    let store = Store::encrypted();
    let path = store.path();
    let away = path.with_extension("away");
    let PassphraseSource::Command(passphrase) = &store.source else { unreachable!() };
    let (path, away) = (path.to_str().unwrap(), away.to_str().unwrap());
    let command = format!("mv {path} {away} && mkdir {path} && {passphrase}");
    let source = PassphraseSource::Command(command);
    let failed = RepositoryWriter::open(&store.path(), &source, &OpenOptions::default());
    assert_eq!(failed.err().unwrap().kind(), ErrorKind::NoRepository);
    assert_eq!(std::fs::read_dir(path).unwrap().count(), 0);
}

#[test]
fn init_refuses_existing_repositories_and_foreign_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("repo");
    init(&path).unwrap();
    assert_eq!(init(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);

    for foreign in ["notes.txt", "db/photo.jpg", "layers/x", "live/session/session.json"] {
        let path = directory.path().join(foreign.replace('/', "-"));
        let file = path.join(foreign);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, b"mine").unwrap();
        assert_eq!(init(&path).unwrap_err().kind(), ErrorKind::AlreadyExists, "{foreign}");
        assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    }
    let bad = directory.path().join("bad");
    let options =
        InitOptions { chunk_size_bytes: 5000, compression: Compression::None, passphrase: None };
    assert_eq!(Repository::init(&bad, &options).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert!(!bad.exists());
}

#[test]
fn a_killed_init_leaves_no_repository_and_is_simply_run_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("repo");
    init(&path).unwrap();
    std::fs::rename(path.join("repository.json"), path.join("repository.json.new")).unwrap();
    assert_eq!(open_kind(&path, &PassphraseSource::None), ErrorKind::NoRepository);
    init(&path).unwrap();
    Repository::open(&path, &PassphraseSource::None, &OpenOptions::default()).unwrap();
}

#[test]
fn only_the_owner_gets_in() {
    let store = Store::new();
    let mode =
        |name: &str| store.path().join(name).metadata().unwrap().permissions().mode() & 0o777;
    for name in ["", "db", "live", "leases", "layers"] {
        assert_eq!(mode(name), 0o700, "{name}");
    }
    assert_eq!(mode("repository.json"), 0o600);
}

#[test]
fn there_is_one_writer_and_any_number_of_readers() {
    let store = Store::new();
    let reader = store.reader();
    let writer = store.writer();
    let second = RepositoryWriter::open(&store.path(), &store.source, &OpenOptions::default());
    assert_eq!(second.err().unwrap().kind(), ErrorKind::Busy);

    // The writer's repository keeps the lock as long as it lives.
    let repository = writer.repository().clone();
    drop(writer);
    let third = RepositoryWriter::open(&store.path(), &store.source, &OpenOptions::default());
    assert_eq!(third.err().unwrap().kind(), ErrorKind::Busy);
    drop(repository);
    store.writer();
    drop(reader);
}

#[test]
fn nothing_is_logged_on_the_repositorys_disk_and_killed_processes_are_cleaned_up_after() {
    let store = Store::new();
    let abandoned = std::path::Path::new("/dev/shm/coldrise-rocksdb-0011223344556677");
    std::fs::create_dir_all(abandoned).unwrap();
    let reader = store.reader();
    assert!(!abandoned.exists(), "what a killed process left is removed by the next");
    let writer = store.writer();
    assert_eq!(std::fs::read_dir(store.path().join("leases")).unwrap().count(), 0);
    for entry in std::fs::read_dir(store.path().join("db")).unwrap() {
        let name = entry.unwrap().file_name();
        assert!(!name.to_string_lossy().starts_with("LOG"), "{name:?}");
    }
    drop((reader, writer));
}

#[test]
fn derived_keys_and_documents_are_the_repositorys_own() {
    for encrypted in [true, false] {
        let store = Store::with(4096, Compression::None, encrypted);
        let other = Store::with(4096, Compression::None, encrypted);
        let (one, two) = (store.reader(), other.reader());
        let key = one.derive_key("layer", b"id");
        assert_eq!(*key, *store.reader().derive_key("layer", b"id"));
        assert_ne!(*key, *one.derive_key("layer", b"other"));
        assert_ne!(*key, *one.derive_key("layeri", b"d"));
        assert_ne!(*key, *two.derive_key("layer", b"id"));

        let sealed = one.encrypt_document("session", b"guest secret").unwrap();
        assert_eq!(one.decrypt_document("session", &sealed).unwrap(), b"guest secret");
        assert_eq!(sealed.windows(6).any(|w| w == b"secret"), !encrypted);
        let mut changed = sealed.clone();
        changed[20] ^= 1;
        for refused in [
            one.decrypt_document("sessions", &sealed),
            two.decrypt_document("session", &sealed),
            one.decrypt_document("session", &changed),
            one.decrypt_document("session", &sealed[..sealed.len() - 1]),
            one.decrypt_document("session", b""),
        ] {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Corrupt);
        }
        let again = one.encrypt_document("session", b"guest secret").unwrap();
        assert_eq!(sealed != again, encrypted, "nonces are random");
    }
}
