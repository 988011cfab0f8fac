//! Finds damage that would end the process inside RocksDB, before RocksDB opens the database.

use std::path::Path;

use coldrise_block::{Error, ErrorKind, Result};

use super::log_check::check_logs;
use super::sound::table_files;
use super::table::fatal_damage;
use crate::advice::REPAIR;

/// Looks for such damage. Ignores a file that is deleted meanwhile.
///
/// # Errors
/// `Corrupt`, naming the first file.
pub(super) fn refuse_fatal(database: &Path) -> Result<()> {
    for path in table_files(database)? {
        if let Some(place) = fatal_damage(&path) {
            let path = path.display();
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("{path} is damaged at byte {place} and cannot be opened"),
            )
            .advise(REPAIR));
        }
    }
    check_logs(database)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rocks::table::{HASH_INDEX_BIT, fatal_damage, properties_end};
    use crate::*;

    #[test]
    fn a_bit_at_which_rocksdb_ends_the_process_is_refused_and_mended() {
        let directory = tempfile::tempdir().unwrap();
        let whole = directory.path().join("whole");
        let path = directory.path().join("repo");
        let options = InitOptions {
            chunk_size_bytes: 4096,
            compression: Compression::None,
            passphrase: None,
        };
        Repository::init(&path, &options).unwrap();
        let content: Vec<u8> = (0..600 * 4096_u32).map(|i| (i / 7 % 251) as u8).collect();
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
        std::fs::rename(&path, &whole).unwrap();
        for file in &files {
            let _ = std::fs::remove_dir_all(&path);
            let copied = std::process::Command::new("cp").arg("-r").args([&whole, &path]).status();
            assert!(copied.unwrap().success());
            assert_eq!(fatal_damage(file), None);
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
            assert_eq!(
                (reopened.mended_files, reopened.lost_blocks, reopened.dropped_files),
                (1, 0, 0)
            );
            let mut read = vec![0; content.len()];
            writer.repository().disk(root, size).read_at(&mut read, 0).unwrap();
            assert!(read == content);
        }
    }
}
