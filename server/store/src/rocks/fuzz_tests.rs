//! The readers of RocksDB's files with made-up bytes and damaged files: no panic, no endless
//! loop, and nothing wrong from a file whose checksums do not match.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use proptest::prelude::*;

use super::log_check::{check_logs, usable_logs};
use super::manifest::{piece, sound_manifest};
use super::sound::files_ending;
use super::sst::SstWriter;
use super::sst_reader::{BlockBuffers, BlockFile, raw_entries};
use super::table::{TableProperties, entries, family_of, fatal_damage};
use super::{Database, Family};

/// A closed database: a file of chunks beside it, its log and its manifest.
struct Files {
    folder: tempfile::TempDir,
    table: Vec<u8>,
    log: Vec<u8>,
    manifest: Vec<u8>,
    chunks: Vec<(Vec<u8>, Vec<u8>)>,
}

static FILES: LazyLock<parking_lot::Mutex<Files>> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let (path, log) = (folder.path().join("db"), folder.path().join("log"));
    std::fs::create_dir(&log).unwrap();
    let database = Database::open_primary(&path, &log, true).unwrap();
    let mut sst = SstWriter::create(&database, &folder.path().join("table")).unwrap();
    let mut chunks = Vec::new();
    for number in 0..400_u64 {
        let value = vec![number as u8; 100 + number as usize];
        sst.put(&number.to_be_bytes(), &value).unwrap();
        chunks.push((number.to_be_bytes().to_vec(), value));
    }
    let table = std::fs::read(sst.finish().unwrap()).unwrap();
    for number in 0..40_u8 {
        let mut batch = database.batch();
        batch.put(Family::Catalog, &[number], &vec![number; 3000]).unwrap();
        database.write(batch, true).unwrap();
    }
    drop(database);
    let only = |ending| {
        let mut found = files_ending(&path, ending).unwrap();
        found.retain(|path| path.metadata().unwrap().len() > 0);
        assert_eq!(found.len(), 1);
        found.remove(0)
    };
    let log = std::fs::read(only("log")).unwrap();
    let manifest = std::fs::read(super::manifest::manifest(&path).unwrap().0).unwrap();
    parking_lot::Mutex::new(Files { folder, table, log, manifest, chunks })
});

impl Files {
    /// A new folder with this file.
    fn with(&self, name: &str, bytes: &[u8]) -> (PathBuf, PathBuf) {
        let folder = self.folder.path().join("made");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        (folder, path)
    }
}

fn read_all(path: &Path) -> coldrise_block::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut found = Vec::new();
    BlockFile::open(path)?.read(
        (&[], &[0xff; 9]),
        &mut BlockBuffers::default(),
        |_, _| true,
        |key, value| {
            found.push((key.to_vec(), value.to_vec()));
            Ok(())
        },
    )?;
    Ok(found)
}

/// Other bytes in one place, and perhaps fewer bytes than before.
#[derive(Clone, Debug)]
struct Damage {
    at: prop::sample::Index,
    bytes: Vec<u8>,
    end: Option<prop::sample::Index>,
}

impl Damage {
    fn any() -> impl Strategy<Value = Damage> {
        let bytes = prop::collection::vec(any::<u8>(), 1..64);
        (
            any::<prop::sample::Index>(),
            bytes,
            prop::option::weighted(0.2, any::<prop::sample::Index>()),
        )
            .prop_map(|(at, bytes, end)| Damage { at, bytes, end })
    }

    /// Half of it near the end, where tables have their footer and properties.
    fn done_to(&self, bytes: &[u8]) -> Vec<u8> {
        let mut damaged = bytes.to_vec();
        let at = self.at.index(2 * damaged.len());
        let at = at
            .checked_sub(damaged.len())
            .unwrap_or(damaged.len() - 1 - at % damaged.len().min(600));
        for (place, byte) in damaged[at..].iter_mut().zip(&self.bytes) {
            *place = *byte;
        }
        damaged.truncate(self.end.map_or(damaged.len(), |end| end.index(damaged.len())));
        damaged
    }
}

proptest! {
    #[test]
    fn fuzz_made_up_blocks(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = (raw_entries(&bytes), entries(&bytes), TableProperties::parse(&bytes));
        if let Some((_, content)) = piece(&bytes) {
            prop_assert!(content.len() < bytes.len());
        }
    }

    #[test]
    fn fuzz_a_damaged_table_reads_as_written_or_is_an_error(damage in Damage::any()) {
        let files = FILES.lock();
        let damaged = damage.done_to(&files.table);
        let (_, path) = files.with("000009.sst", &damaged);
        let _ = (fatal_damage(&path), family_of(&path));
        if let Ok(found) = read_all(&path) {
            prop_assert!(found == files.chunks);
        }
    }

    #[test]
    fn fuzz_a_damaged_log_is_used_at_most_once(damage in Damage::any()) {
        let files = FILES.lock();
        let (folder, path) = files.with("000009.log", &damage.done_to(&files.log));
        let _ = check_logs(&folder);
        let usable = usable_logs(&folder).unwrap();
        prop_assert!(usable.paths.is_empty() || usable.paths == [path]);
    }

    #[test]
    fn fuzz_a_damaged_manifest_ends_before_its_damage(damage in Damage::any()) {
        let files = FILES.lock();
        let damaged = damage.done_to(&files.manifest);
        let (folder, _) = files.with("MANIFEST-000009", &damaged);
        std::fs::write(folder.join("CURRENT"), "MANIFEST-000009\n").unwrap();
        let end = sound_manifest(&folder).unwrap().bytes as usize;
        prop_assert!(end <= damaged.len() && damaged[..end] == files.manifest[..end]);
    }
}

#[test]
fn fuzz_files_are_whole() {
    let files = FILES.lock();
    let (_, path) = files.with("000009.sst", &files.table);
    assert!(read_all(&path).unwrap() == files.chunks);
    let (folder, _) = files.with("000009.log", &files.log);
    check_logs(&folder).unwrap();
    let (folder, _) = files.with("MANIFEST-000009", &files.manifest);
    std::fs::write(folder.join("CURRENT"), "MANIFEST-000009\n").unwrap();
    assert_eq!(sound_manifest(&folder).unwrap().bytes, files.manifest.len() as u64);
}
