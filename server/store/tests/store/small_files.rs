//! The number of files stays small, whatever the number of points.

use coldrise_store::*;

use crate::common::*;

fn files(store: &Store) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(store.path().join("db")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "sst")).collect()
}

fn name(number: usize) -> String {
    format!("20261120T{:02}{:02}{:02}Z", number / 3600, number / 60 % 60, number % 60)
}

#[test]
fn many_small_points_leave_few_files_and_large_files_stay() {
    let store = Store::with(CHUNK as u32, Compression::None, false);
    let mut content = noise(1, 12 << 20);
    let mut root = write_all(&store.writer(), None, &content).0;
    let large: Vec<_> =
        files(&store).into_iter().filter(|f| f.metadata().unwrap().len() > 8 << 20).collect();
    assert_eq!(large.len(), 1);
    let mut writer = store.writer();
    let mut first = None;
    for number in 0..100 {
        if number % 10 == 0 {
            drop(writer);
            writer = store.writer();
        }
        let offset = number * 2 * CHUNK;
        content[offset..offset + CHUNK].copy_from_slice(&noise(number as u64 + 9, CHUNK));
        let options = WriteOptions { threads: 1 };
        let mut disk = writer.disk_writer(Some(root), content.len() as u64, options).unwrap();
        disk.write(offset as u64, content[offset..offset + CHUNK].to_vec()).unwrap();
        root = disk.finish().unwrap().0;
        writer.put_point(&point("web01", &name(number), root, content.len() as u64)).unwrap();
        first.get_or_insert((root, content.clone()));
    }
    drop(writer);
    assert!(files(&store).len() < 45, "{} files", files(&store).len());
    assert!(large[0].exists(), "a large file was rewritten");
    let reader = store.reader();
    for (root, content) in [first.unwrap(), (root, content)] {
        assert!(read_all(&reader.disk(root, content.len() as u64)) == content);
    }
}

/// RocksDB searches all of a few files on level 0, whatever their keys.
#[test]
fn damage_to_one_small_file_leaves_the_chunks_of_others_readable() {
    let store = Store::with(CHUNK as u32, Compression::None, false);
    let content: Vec<_> = (0..3).map(|seed| noise(seed + 1, 16 * CHUNK)).collect();
    let roots: Vec<_> = content
        .iter()
        .enumerate()
        .map(|(number, content)| {
            let writer = store.writer();
            let root = write_all(&writer, None, content).0;
            let size = content.len() as u64;
            writer.put_point(&point("web01", &name(number), root, size)).unwrap();
            root
        })
        .collect();
    for damaged in 0..3 {
        let copy = tempfile::tempdir().unwrap();
        copy_tree(&store.path(), copy.path());
        let needle = &content[damaged][..64];
        let mut found = 0;
        for entry in std::fs::read_dir(copy.path().join("db")).unwrap() {
            let path = entry.unwrap().path();
            let mut bytes = std::fs::read(&path).unwrap();
            let is_table = path.extension().is_some_and(|extension| extension == "sst");
            let places: Vec<_> = memchr(&bytes, needle).into_iter().filter(|_| is_table).collect();
            for place in &places {
                bytes[*place] ^= 1;
                found += 1;
            }
            if !places.is_empty() {
                std::fs::write(&path, bytes).unwrap();
            }
        }
        assert!(found >= 1, "the first chunk is in no file");
        let options = OpenOptions { cache_bytes: 0 };
        let reader = Repository::open(copy.path(), &PassphraseSource::None, &options).unwrap();
        for (number, (root, content)) in roots.iter().zip(&content).enumerate() {
            for at in (0..content.len()).step_by(CHUNK) {
                let mut read = vec![0; CHUNK];
                let disk = reader.disk(*root, content.len() as u64);
                let done = disk.read_at(&mut read, at as u64);
                if (number, at) == (damaged, 0) {
                    assert_eq!(done.unwrap_err().kind(), coldrise_block::ErrorKind::Corrupt);
                } else {
                    done.unwrap();
                    assert!(read == content[at..at + CHUNK]);
                }
            }
        }
    }
}

/// The positions of `needle`.
fn memchr(bytes: &[u8], needle: &[u8]) -> Vec<usize> {
    let windows = bytes.windows(needle.len()).enumerate();
    windows.filter(|(_, window)| *window == needle).map(|(at, _)| at).collect()
}
