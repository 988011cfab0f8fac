use super::*;
use crate::{Compression, InitOptions, OpenOptions, Repository};

fn secret(text: &str) -> Passphrase {
    Passphrase::new(text.as_bytes().to_vec()).unwrap()
}

fn source(text: &str) -> PassphraseSource {
    PassphraseSource::Command(format!("printf %s '{text}'"))
}

fn label(text: &str) -> Option<KeyLabel> {
    Some(KeyLabel::parse(text).unwrap())
}

fn new<'a>(passphrase: &'a Passphrase, name: &str) -> NewPassphrase<'a> {
    NewPassphrase { passphrase, label: label(name), guess_time: None }
}

/// A repository with the passphrase `first`, and the id that it opens with.
fn repository() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("repo");
    let options = InitOptions {
        chunk_size_bytes: 4096,
        compression: Compression::None,
        passphrase: Some(&secret("first")),
    };
    Repository::init(&path, &options).unwrap();
    (folder, path)
}

fn opens(path: &Path, text: &str) -> bool {
    match Repository::open(path, &source(text), &OpenOptions { cache_bytes: 0 }) {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WrongPassphrase);
            false
        }
    }
}

fn key_of(path: &Path, text: &str) -> Zeroizing<Key> {
    let repository = Repository::open(path, &source(text), &OpenOptions { cache_bytes: 0 });
    repository.unwrap().derive_key("a test", b"")
}

#[test]
fn several_passphrases_open_one_repository_until_they_are_removed() {
    let (_folder, path) = repository();
    let key = key_of(&path, "first");
    add_passphrase(&path, &source("first"), &new(&secret("second"), "night-shift")).unwrap();
    let third = secret("third");
    let entries = add_passphrase(&path, &source("second"), &new(&third, "vault")).unwrap();
    let shown: Vec<_> = entries.iter().map(|e| (e.label.clone(), e.is_given)).collect();
    assert_eq!(shown, [(None, false), (label("night-shift"), true), (label("vault"), false)]);
    assert!(entries[1].added_at_ms.is_some());
    for text in ["first", "second", "third"] {
        assert_eq!(key_of(&path, text), key);
    }
    let removed = remove_passphrase(&path, &source("third"), &PassphraseSelector::Initial).unwrap();
    assert_eq!(removed.len(), 2);
    assert!(removed[1].is_given);
    assert!(!opens(&path, "first"));
    let own = PassphraseSelector::Label(KeyLabel::parse("vault").unwrap());
    let left = remove_passphrase(&path, &source("third"), &own).unwrap();
    assert!(left.iter().all(|entry| !entry.is_given));
    assert!(!opens(&path, "third") && opens(&path, "second"));
    assert_eq!(passphrases(&path, &source("second")).unwrap()[0].label, label("night-shift"));
}

#[test]
fn a_passphrase_is_replaced_in_one_step() {
    let (_folder, path) = repository();
    let key = key_of(&path, "first");
    add_passphrase(&path, &source("first"), &new(&secret("second"), "vault")).unwrap();
    let third = secret("third");
    let nameless = NewPassphrase { passphrase: &third, label: None, guess_time: None };
    let entries = replace_passphrase(&path, &source("second"), &nameless).unwrap();
    assert_eq!((entries.len(), entries[1].label.clone()), (2, label("vault")));
    assert!(!opens(&path, "second") && opens(&path, "first"));
    assert_eq!(key_of(&path, "third"), key);
    // The same passphrase at another cost: higher, unless the machine is too busy to reach it.
    let costly = NewPassphrase { guess_time: Some(Duration::from_millis(100)), ..nameless };
    let entries = replace_passphrase(&path, &source("third"), &costly).unwrap();
    assert!(entries[1].memory_kib >= GuessCost::DEFAULT.memory_kib);
    assert_eq!(key_of(&path, "third"), key);
}

#[test]
fn a_guess_gets_cheaper_only_where_that_is_asked_for() {
    let (_folder, path) = repository();
    let costs = |entries: &[PassphraseEntry]| -> Vec<(u32, u32)> {
        entries.iter().map(|entry| (entry.memory_kib, entry.passes)).collect()
    };
    // As --guess-ms sets it on a machine that is twice as fast.
    let mut config = RepositoryConfig::read(&path).unwrap();
    let master = config.master(Some(&secret("first"))).unwrap();
    let costly = GuessCost { memory_kib: GuessCost::DEFAULT.memory_kib * 2, ..GuessCost::DEFAULT };
    let bound = config.bound();
    config.key_slots[0] =
        KeySlot::wrap(&master, &secret("first"), &bound, costly, None, None).unwrap();
    config.set_checksum().unwrap();
    config.write_synced(&path).unwrap();
    let [high, low] = [costly, GuessCost::DEFAULT].map(|cost| (cost.memory_kib, cost.passes));

    let second = secret("second");
    let nameless = NewPassphrase { passphrase: &second, label: None, guess_time: None };
    let entries = replace_passphrase(&path, &source("first"), &nameless).unwrap();
    assert_eq!(costs(&entries), [high], "rotated as it was");
    let third = secret("third");
    let cheap = NewPassphrase { guess_time: Some(Duration::ZERO), ..new(&third, "cheap") };
    let entries = add_passphrase(&path, &source("second"), &cheap).unwrap();
    assert_eq!(costs(&entries), [high, low], "lower by a choice");
    let fourth = secret("fourth");
    let entries = add_passphrase(&path, &source("third"), &new(&fourth, "vault")).unwrap();
    assert_eq!(costs(&entries), [high, low, high], "added as the costliest one");
    let own = NewPassphrase { passphrase: &third, label: None, guess_time: None };
    let entries = replace_passphrase(&path, &source("third"), &own).unwrap();
    assert_eq!(costs(&entries), [high, low, high], "that one's own");
}

#[test]
fn refused_passphrase_changes_leave_the_file_unchanged() {
    let (_folder, path) = repository();
    let before = std::fs::read(path.join("repository.json")).unwrap();
    let second = secret("second");
    let wrong = add_passphrase(&path, &source("wrong"), &new(&second, "vault")).unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::WrongPassphrase);
    let none = passphrases(&path, &PassphraseSource::None).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::WrongPassphrase);
    let same = add_passphrase(&path, &source("first"), &new(&secret("first"), "again"));
    assert_eq!(same.unwrap_err().kind(), ErrorKind::AlreadyExists);
    let last = remove_passphrase(&path, &source("first"), &PassphraseSelector::Initial);
    assert_eq!(last.unwrap_err().kind(), ErrorKind::InvalidInput);
    let unknown = PassphraseSelector::Label(KeyLabel::parse("vault").unwrap());
    let unknown = remove_passphrase(&path, &source("first"), &unknown).unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::NotFound);
    assert_eq!(std::fs::read(path.join("repository.json")).unwrap(), before);

    add_passphrase(&path, &source("first"), &new(&second, "vault")).unwrap();
    let taken = add_passphrase(&path, &source("first"), &new(&secret("third"), "vault"));
    assert_eq!(taken.unwrap_err().kind(), ErrorKind::AlreadyExists);
    for number in 2..MAX_KEY_SLOTS {
        let passphrase = secret(&format!("passphrase {number}"));
        let name = format!("n{number}");
        add_passphrase(&path, &source("first"), &new(&passphrase, &name)).unwrap();
    }
    let full = add_passphrase(&path, &source("first"), &new(&secret("one more"), "more"));
    assert_eq!(full.unwrap_err().kind(), ErrorKind::InvalidInput);
    let missing = add_passphrase(&path.join("x"), &source("first"), &new(&second, "y"));
    assert_eq!(missing.unwrap_err().kind(), ErrorKind::NoRepository);
}

#[test]
fn names_and_costs_cannot_be_exchanged_without_a_passphrase() {
    let (_folder, path) = repository();
    add_passphrase(&path, &source("first"), &new(&secret("second"), "one")).unwrap();
    add_passphrase(&path, &source("first"), &new(&secret("third"), "two")).unwrap();
    let sound = RepositoryConfig::read(&path).unwrap();
    let mut swapped = sound.clone();
    swapped.key_slots[1].label = label("two");
    swapped.key_slots[2].label = label("one");
    swapped.set_checksum().unwrap();
    swapped.write_synced(&path).unwrap();
    assert!(!opens(&path, "second") && !opens(&path, "third") && opens(&path, "first"));
    let mut costlier = sound;
    costlier.key_slots[1].cost.memory_kib *= 2;
    costlier.set_checksum().unwrap();
    costlier.write_synced(&path).unwrap();
    assert!(!opens(&path, "second") && opens(&path, "third"));
}

#[test]
fn changes_at_the_same_time_are_all_made() {
    let (_folder, path) = repository();
    std::thread::scope(|scope| {
        for number in 0..4 {
            let path = &path;
            scope.spawn(move || {
                let passphrase = secret(&format!("passphrase {number}"));
                let name = format!("n{number}");
                add_passphrase(path, &source("first"), &new(&passphrase, &name)).unwrap();
            });
        }
    });
    assert_eq!(passphrases(&path, &source("first")).unwrap().len(), 5);
    assert!((0..4).all(|number| opens(&path, &format!("passphrase {number}"))));
}

#[test]
fn a_repository_without_encryption_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("repo");
    let options =
        InitOptions { chunk_size_bytes: 4096, compression: Compression::None, passphrase: None };
    Repository::init(&path, &options).unwrap();
    let error = add_passphrase(&path, &PassphraseSource::None, &new(&secret("x"), "x"));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Unsupported);
}
