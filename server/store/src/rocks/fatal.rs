//! Damage at which RocksDB ends the process, found before it is opened.

use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::table::fatal_flip;

/// The files of a database that must not be opened as they are, and where in each the
/// byte lies that says so. One that goes meanwhile is none of them.
fn fatal_files(database: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let what = || format!("reading {}", database.display());
    let entries = match std::fs::read_dir(database) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.context(what)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.context(what)?.path();
        if path.extension().is_some_and(|extension| extension == "sst") {
            found.extend(fatal_flip(&path).map(|place| (path, place)));
        }
    }
    Ok(found)
}

/// Looks for such damage.
///
/// # Errors
/// `Corrupt`, naming the first file.
pub(super) fn refuse_fatal(database: &Path) -> Result<()> {
    match fatal_files(database)?.first() {
        None => Ok(()),
        Some((path, place)) => Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "{} is damaged at byte {place} and cannot be opened like that: run coldrise repair",
                path.display()
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rocks::table::{fatal_flip, properties_end, HASH_INDEX_BIT};
    use crate::*;

    #[test]
    fn a_bit_at_which_rocksdb_ends_the_process_is_refused_and_mended() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("repo");
        let options = InitOptions {
            chunk_size_bytes: 4096,
            compression: Compression::None,
            passphrase: None,
        };
        Repository::init(&path, &options).unwrap();
        let content: Vec<u8> = (0..3000 * 4096_u32).map(|i| (i / 7 % 251) as u8).collect();
        let options = OpenOptions { cache_bytes: 0 };
        let open_writer = || RepositoryWriter::open(&path, &PassphraseSource::None, &options);
        let writer = open_writer().unwrap();
        let size = content.len() as u64;
        let mut disk = writer.disk_writer(None, size, WriteOptions { threads: 1 }).unwrap();
        disk.write(0, content.clone()).unwrap();
        let root = disk.finish().unwrap().0;
        writer.repository().database().flush().unwrap();
        drop(writer);

        let database = path.join("db");
        let files: Vec<_> = std::fs::read_dir(&database)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "sst"))
            .collect();
        assert!(files.len() >= 3, "{files:?}");
        for file in &files {
            assert_eq!(fatal_flip(file), None);
            let sound = std::fs::read(file).unwrap();
            let place = properties_end(file).unwrap();
            let mut flipped = sound.clone();
            flipped[place as usize] ^= HASH_INDEX_BIT;
            std::fs::write(file, &flipped).unwrap();
            let opened = Repository::open(&path, &PassphraseSource::None, &options);
            for error in [opened.err().unwrap(), open_writer().err().unwrap()] {
                assert_eq!(error.kind(), ErrorKind::Corrupt);
                assert!(error.full_message().contains("coldrise repair"), "{error:?}");
            }
            let repaired =
                RepositoryWriter::open_for_repair(&path, &PassphraseSource::None, &options);
            let (writer, reopened) = repaired.unwrap();
            assert_eq!(reopened, Reopened { mended_files: 1, ..Reopened::default() });
            let mut read = vec![0; content.len()];
            writer.repository().disk(root, size).read_at(&mut read, 0).unwrap();
            assert!(read == content);
            drop(writer);
            if file.exists() {
                assert!(std::fs::read(file).unwrap() == sound);
            }
        }
    }
}
