use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;
use crate::keys::check_memory;

fn passphrase(text: &str) -> Passphrase {
    Passphrase::new(text.as_bytes().to_vec()).unwrap()
}

fn create_encrypted() -> RepositoryConfig {
    RepositoryConfig::create(16_384, Compression::Zstd(3), Some(&passphrase("right")), None)
        .unwrap()
}

/// One for all tests: its key takes time.
fn encrypted() -> RepositoryConfig {
    static CONFIG: LazyLock<RepositoryConfig> = LazyLock::new(create_encrypted);
    CONFIG.clone()
}

fn written(config: &RepositoryConfig) -> serde_json::Value {
    serde_json::to_value(config).unwrap()
}

/// Edits as a person does who knows the format: with a new checksum.
fn edited(edit: impl FnOnce(&mut serde_json::Value)) -> Result<RepositoryConfig> {
    let mut value = written(&encrypted());
    edit(&mut value);
    if let Ok(mut config) = serde_json::from_value::<RepositoryConfig>(value.clone()) {
        config.checksum = config.expected_checksum().unwrap();
        value = written(&config);
    }
    RepositoryConfig::parse(&serde_json::to_vec(&value).unwrap())
}

#[test]
fn the_right_passphrase_gives_the_same_key_every_time() {
    let config = encrypted();
    let parsed = RepositoryConfig::parse(&serde_json::to_vec(&config).unwrap()).unwrap();
    assert_eq!(parsed, config);
    let key = parsed.master(Some(&passphrase("right"))).unwrap();
    assert_eq!(*key, *config.master(Some(&passphrase("right"))).unwrap());
    assert_ne!(*key, *create_encrypted().master(Some(&passphrase("right"))).unwrap());
}

#[test]
fn wrong_missing_and_superfluous_passphrases_are_refused() {
    let plain = RepositoryConfig::create(16_384, Compression::None, None, None).unwrap();
    assert!(!plain.is_encrypted() && plain.master(None).is_ok());
    for error in [
        encrypted().master(Some(&passphrase("wrong"))).unwrap_err(),
        encrypted().master(None).unwrap_err(),
        plain.master(Some(&passphrase("right"))).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::WrongPassphrase);
    }
}

#[test]
fn edited_fields_do_not_open_even_with_a_new_checksum() {
    let edits: [fn(&mut serde_json::Value); 6] = [
        |v| v["chunk_size_bytes"] = 4096.into(),
        |v| v["compression"] = "lz4".into(),
        |v| v["id"] = "00112233445566778899aabbccddeeff".into(),
        |v| v["key_slots"][0]["cost"]["memory_kib"] = 20_000.into(),
        |v| v["key_slots"][0]["cost"]["passes"] = 3.into(),
        |v| v["key_slots"][0]["salt"] = "00112233445566778899aabbccddeeff".into(),
    ];
    for edit in edits {
        let error = edited(edit).unwrap().master(Some(&passphrase("right"))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WrongPassphrase);
    }
}

#[test]
fn impossible_fields_are_refused_before_any_work() {
    let edits: [fn(&mut serde_json::Value); 11] = [
        |v| v["key_slots"][0]["cost"]["memory_kib"] = 19_455.into(),
        |v| v["key_slots"][0]["cost"]["memory_kib"] = u32::MAX.into(),
        |v| v["key_slots"][0]["cost"]["passes"] = 1.into(),
        |v| v["key_slots"][0]["cost"]["passes"] = 1000.into(),
        // Each is within its bounds; together they take minutes.
        |v| {
            v["key_slots"][0]["cost"] =
                serde_json::json!({ "memory_kib": 1 << 20, "passes": 64, "lanes": 1 })
        },
        |v| v["key_slots"][0]["cost"]["lanes"] = 0.into(),
        |v| v["chunk_size_bytes"] = 5000.into(),
        |v| v["chunk_size_bytes"] = (1 << 30).into(),
        |v| v["compression"] = "zstd:99".into(),
        |v| v["surplus"] = 1.into(),
        |v| v["key_slots"] = vec![v["key_slots"][0].clone(); 9].into(),
    ];
    for edit in edits {
        assert_eq!(edited(edit).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn malformed_key_slots_are_corrupt() {
    for field in ["salt", "nonce", "wrapped_key"] {
        let error = edited(|v| v["key_slots"][0][field] = "zz".into())
            .unwrap()
            .master(Some(&passphrase("right")))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn damage_is_distinguished_from_another_version_and_from_a_wrong_passphrase() {
    let text = serde_json::to_vec_pretty(&encrypted()).unwrap();
    let kind = |text: &[u8]| RepositoryConfig::parse(text).unwrap_err().kind();
    for length in [0, 1, text.len() / 2, text.len() - 1] {
        assert_eq!(kind(&text[..length]), ErrorKind::Corrupt);
    }
    assert_eq!(kind(b"{}"), ErrorKind::Corrupt);
    assert_eq!(kind(br#"{"format":"borg","format_version":1}"#), ErrorKind::Corrupt);
    assert_eq!(kind(&vec![b' '; 1 << 20]), ErrorKind::Corrupt);
    let newer = br#"{"format":"coldrise repository","format_version":3,"new":true}"#;
    assert_eq!(kind(newer), ErrorKind::Unsupported);
    let older = RepositoryConfig::parse(br#"{"format":"coldrise repository","format_version":1}"#);
    let older = older.unwrap_err();
    assert_eq!(older.kind(), ErrorKind::Unsupported);
    assert!(older.to_string().contains("make a new repository"), "{older}");
    let text = String::from_utf8(text).unwrap();
    let flipped = text.replacen("\"chunk_size_bytes\": 16384", "\"chunk_size_bytes\": 32768", 1);
    assert_ne!(text, flipped);
    assert_eq!(kind(flipped.as_bytes()), ErrorKind::Corrupt);
}

proptest! {
    #[test]
    fn arbitrary_files_are_refused(text: Vec<u8>) {
        prop_assert_eq!(RepositoryConfig::parse(&text).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn a_changed_file_is_refused_or_means_the_same(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let config = encrypted();
        let mut text = serde_json::to_vec_pretty(&config).unwrap();
        for (at, byte) in changes {
            let at = at.index(text.len());
            text[at] = byte;
        }
        if let Some(cut) = cut {
            text.truncate(cut.index(text.len()));
        }
        match RepositoryConfig::parse(&text) {
            // White space between the fields, or the same byte again.
            Ok(parsed) => prop_assert_eq!(written(&parsed), written(&config)),
            Err(error) => {
                let kind = error.kind();
                prop_assert!(matches!(kind, ErrorKind::Corrupt | ErrorKind::Unsupported));
            }
        }
    }
}

#[test]
fn a_flipped_bit_is_put_right_and_nothing_else_is() {
    let folder = tempfile::tempdir().unwrap();
    let config = encrypted();
    config.write_synced(folder.path()).unwrap();
    let path = folder.path().join(FILE_NAME);
    let sound = std::fs::read(&path).unwrap();
    assert!(!RepositoryConfig::mend(folder.path()).unwrap());
    let text = String::from_utf8(sound.clone()).unwrap();
    let version = text.find("\"format_version\": 2").unwrap() + 18;
    for place in (0..sound.len()).step_by(61).chain([version]) {
        let mut damaged = sound.clone();
        damaged[place] ^= 2;
        std::fs::write(&path, &damaged).unwrap();
        if RepositoryConfig::read(folder.path()).is_ok() {
            continue; // a change within white space is harmless
        }
        assert!(RepositoryConfig::mend(folder.path()).unwrap(), "byte {place}");
        assert!(std::fs::read(&path).unwrap() == sound, "byte {place}");
        damaged[place + 1] ^= 2;
        std::fs::write(&path, &damaged).unwrap();
        if RepositoryConfig::read(folder.path()).is_err() {
            let mended = RepositoryConfig::mend(folder.path());
            assert!(
                mended.map_or_else(
                    |error| error.kind() == ErrorKind::Corrupt,
                    |is_mended| !is_mended
                )
            );
            assert!(std::fs::read(&path).unwrap() == damaged);
        }
    }
}

#[test]
fn a_guess_that_takes_more_memory_than_the_machine_has_is_refused() {
    let cost = GuessCost { memory_kib: 1 << 20, ..GuessCost::DEFAULT };
    check_memory(cost, 2 << 20).unwrap();
    let error = check_memory(cost, 1 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("1024 MiB"), "{error}");
}
