//! A process with few descriptors reads and writes a repository of many files. It runs as its own
//! test process, because the limit holds for the whole process.

mod common;

use coldrise_store::*;
use common::*;
use rustix::process::{Resource, Rlimit, setrlimit};

const POINTS: usize = 80;
const LIMIT: u64 = 150;

#[test]
fn many_files_are_read_and_written_with_few_descriptors() {
    let store = Store::with(CHUNK as u32, Compression::None, false);
    let mut points = Vec::new();
    // Without a point, the files are not merged.
    for number in 0..POINTS {
        let content = noise(number as u64 + 1, 2 * CHUNK);
        let root = write_all(&store.writer(), None, &content).0;
        points.push((root, content));
    }
    let folder = std::fs::read_dir(store.path().join("db")).unwrap();
    let is_table = |entry: &std::fs::DirEntry| entry.path().extension().is_some_and(|e| e == "sst");
    let files = folder.map(Result::unwrap).filter(is_table).count();
    assert!(files > LIMIT as usize, "{files} files");

    let limit = Rlimit { current: Some(LIMIT), maximum: Some(LIMIT) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let reader = store.reader_with(0);
    let assert_read = || {
        for (root, content) in &points {
            assert!(read_all(&reader.disk(*root, content.len() as u64)) == *content);
        }
    };
    assert_read();
    // The writer merges the files, so files that the reader opens again are gone.
    let writer = store.writer();
    let (root, content) = &points[0];
    for number in 0..3 {
        let name = format!("20261120T10000{number}Z");
        writer.put_point(&point("web01", &name, *root, content.len() as u64)).unwrap();
    }
    assert_read();
    drop(writer);
    assert_read();
}
