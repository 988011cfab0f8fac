//! Secrets are wiped from memory when they are no longer needed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use coldrise_store::{
    Compression, InitOptions, NewPassphrase, OpenOptions, Passphrase, PassphraseSource, Repository,
    RepositoryWriter, replace_passphrase,
};

/// The passphrase in `rot13`, so that this process does not contain it otherwise.
const HIDDEN: &[u8] = b"cnffcuenfr-gung-orybatf-va-ab-zrzbel";

/// Another process writes the file.
fn passphrase_file(folder: &Path) -> PathBuf {
    let path = folder.join("passphrase");
    let hidden = String::from_utf8_lossy(HIDDEN);
    let script = format!("printf %s {hidden} | tr a-z n-za-m > {}", path.display());
    assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
    path
}

fn rot13(byte: u8) -> u8 {
    match byte {
        b'a'..=b'm' => byte + 13,
        b'n'..=b'z' => byte - 13,
        other => other,
    }
}

/// Counts the copies in the memory that this process can write: heap, stacks, data.
fn copies_in_memory() -> usize {
    let memory = File::open("/proc/self/mem").unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut buffer = vec![0; 1 << 20];
    let mut found = 0;
    for line in maps.lines().filter(|line| line.contains(" rw")) {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let mut at = u64::from_str_radix(start, 16).unwrap();
        let end = u64::from_str_radix(end, 16).unwrap();
        // Neighbouring reads overlap.
        while at + (HIDDEN.len() as u64) <= end {
            let bytes = buffer.len().min((end - at) as usize);
            // Some parts cannot be read.
            if memory.read_exact_at(&mut buffer[..bytes], at).is_ok() {
                let is_it =
                    |window: &&[u8]| window.iter().zip(HIDDEN).all(|(a, b)| rot13(*a) == *b);
                found += buffer[..bytes].windows(HIDDEN.len()).filter(is_it).count();
            }
            at += (bytes - HIDDEN.len() + 1) as u64;
        }
        // This buffer must not count as a copy.
        buffer.fill(0);
    }
    found
}

#[test]
fn a_passphrase_is_in_memory_only_while_it_is_needed() {
    let folder = tempfile::tempdir().unwrap();
    let source = PassphraseSource::File(passphrase_file(folder.path()));
    assert_eq!(copies_in_memory(), 0);
    let passphrase = source.read().unwrap().unwrap();
    assert!(copies_in_memory() > 0, "what is there is found");
    let path = folder.path().join("repository");
    let options = InitOptions {
        chunk_size_bytes: 4096,
        compression: Compression::None,
        passphrase: Some(&passphrase),
    };
    Repository::init(&path, &options).unwrap();
    drop(passphrase);
    assert_eq!(copies_in_memory(), 0, "after init");
    let options = OpenOptions { cache_bytes: 0 };
    let reader = Repository::open(&path, &source, &options).unwrap();
    assert_eq!(copies_in_memory(), 0, "while a reader has the repository open");
    let writer = RepositoryWriter::open(&path, &source, &options).unwrap();
    assert_eq!(copies_in_memory(), 0, "while a writer has the repository open");
    drop((reader, writer));
    let file = folder.path().join("passphrase");
    let printed = PassphraseSource::Command(format!("cat {}", file.display()));
    let reader = Repository::open(&path, &printed, &options).unwrap();
    assert_eq!(copies_in_memory(), 0, "a command prints it");
    drop(reader);
    let another = Passphrase::new(b"another".to_vec()).unwrap();
    let new = NewPassphrase { passphrase: &another, label: None, guess_time: None };
    replace_passphrase(&path, &source, &new).unwrap();
    assert_eq!(copies_in_memory(), 0, "when it was changed");
    Repository::open(&path, &source, &options).err().expect("it opens nothing any more");
    assert_eq!(copies_in_memory(), 0, "when it was refused");
}
