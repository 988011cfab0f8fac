//! Raw image files as sources.

use coldrise_block::{ErrorKind, ExtentKind};

use crate::common::{
    self, assert_same, folder, noise, open, open_error, read_all, sparse_disk, text,
};

#[test]
fn holes_are_seen_and_not_read() {
    let folder = folder();
    let path = folder.path().join("disk.raw");
    let disk = sparse_disk(1, 40 * common::MIB + 777);
    common::write_sparse(&path, &disk);
    let source = open(&format!("vda={}", text(&path))).unwrap();
    assert_eq!(source.size_bytes(), disk.len() as u64);
    let (content, read) = read_all(source.as_ref());
    assert_same(&content, &disk);
    assert!(read < 2 * common::MIB as u64, "{read} bytes were read");
    // From the middle of a hole, too.
    let extents = source.extents(10_000_000, 1_000).unwrap();
    assert_eq!(extents.len(), 1);
    assert_eq!(
        (extents[0].offset_bytes, extents[0].length_bytes, extents[0].kind),
        (10_000_000, 1_000, ExtentKind::Hole)
    );
    assert_eq!(source.check_after_reading().unwrap(), None);
}

#[test]
fn a_file_without_a_single_byte_of_content_is_one_hole() {
    let folder = folder();
    let path = folder.path().join("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    let source = open(&format!("vda={}", text(&path))).unwrap();
    let extents = source.extents(0, 1 << 40).unwrap();
    assert_eq!(extents.len(), 1);
    assert_eq!(extents[0].kind, ExtentKind::Hole);
}

#[test]
fn a_file_that_shrinks_while_it_is_read_is_incomplete() {
    let folder = folder();
    let path = folder.path().join("disk.raw");
    std::fs::write(&path, noise(5, 1 << 20)).unwrap();
    let source = open(&format!("vda={}", text(&path))).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 19).unwrap();
    let mut buffer = vec![0; 4096];
    let error = source.reader().unwrap().read_at(&mut buffer, 1_000_000).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Incomplete);
    assert!(error.full_message().contains("changed while it was read"), "{error}");
    let error = source.check_after_reading().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Incomplete);
}

#[test]
fn a_file_that_is_removed_while_it_is_read_is_incomplete() {
    let folder = folder();
    let path = folder.path().join("disk.raw");
    std::fs::write(&path, noise(5, 1 << 20)).unwrap();
    let source = open(&format!("vda={}", text(&path))).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(source.check_after_reading().unwrap_err().kind(), ErrorKind::Incomplete);
}

#[test]
fn a_file_that_is_written_to_while_it_is_read_is_warned_about() {
    let folder = folder();
    let path = folder.path().join("disk.raw");
    std::fs::write(&path, noise(5, 1 << 20)).unwrap();
    let source = open(&format!("vda={}", text(&path))).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
    let warning = source.check_after_reading().unwrap().unwrap();
    assert!(warning.contains("was written to"), "{warning}");
}

#[test]
fn missing_empty_and_non_regular_files_are_refused() {
    let folder = folder();
    let missing = folder.path().join("none.raw");
    let error = open_error(&format!("vda={}", text(&missing)));
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.full_message().contains(text(&missing)));

    let error = open_error(&format!("vda=raw:{}", text(folder.path())));
    assert_eq!(error.kind(), ErrorKind::InvalidInput);

    let pipe = folder.path().join("pipe.raw");
    common::run("mkfifo", &[text(&pipe)]);
    let error = open_error(&format!("vda={}", text(&pipe)));
    assert_eq!(error.kind(), ErrorKind::InvalidInput);

    let empty = folder.path().join("empty.raw");
    std::fs::write(&empty, b"").unwrap();
    let error = open_error(&format!("vda={}", text(&empty)));
    assert!(error.full_message().contains("empty"), "{error}");
}
