//! NBD exports as sources, with and without a dirty bitmap.

use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::ErrorKind;
use coldrise_ingest::SourceSpec;
use coldrise_ingest::source::{SourceOptions, open_source};

use crate::common::{
    self, Server, assert_same, folder, open, open_error, open_with, read_all, run, text,
};

fn with_bitmap(name: &str) -> SourceOptions {
    SourceOptions { bitmap: Some(name.to_string()), ..SourceOptions::default() }
}

#[test]
fn an_export_is_read_through_its_extents() {
    let folder = folder();
    let disk = common::sparse_disk(21, 33 * common::MIB + 512);
    let raw = folder.path().join("disk.raw");
    common::write_sparse(&raw, &disk);
    let server = Server::nbdkit(folder.path(), &["file", text(&raw)]);
    let source = open(&format!("vda={}", server.uri())).unwrap();
    let (content, read) = read_all(source.as_ref());
    assert_same(&content, &disk);
    assert!(read < 2 * common::MIB as u64, "{read} bytes were read");
}

#[test]
fn a_server_with_small_requests_and_one_connection_is_read_too() {
    let folder = folder();
    let disk = common::sparse_disk(22, 9 * common::MIB);
    let raw = folder.path().join("disk.raw");
    common::write_sparse(&raw, &disk);
    let server = Server::nbdkit(
        folder.path(),
        &[
            "--filter=blocksize-policy",
            "--filter=multi-conn",
            "--filter=noextents",
            "file",
            text(&raw),
            "blocksize-minimum=4096",
            "blocksize-preferred=4096",
            "blocksize-maximum=65536",
            "blocksize-error-policy=error",
            "multi-conn-mode=disable",
        ],
    );
    let source = open(&format!("vda={}", server.uri())).unwrap();
    assert_eq!(source.alignment_bytes(), 4096);
    assert_eq!(source.useful_readers(), 1);
    let (content, read) = read_all(source.as_ref());
    assert_same(&content, &disk);
    assert_eq!(read, disk.len() as u64, "without extents everything is read");
}

#[test]
fn a_server_that_goes_away_is_an_error_with_the_offset() {
    let folder = folder();
    let raw = folder.path().join("disk.raw");
    std::fs::write(&raw, common::noise(23, 4 * common::MIB)).unwrap();
    let mut server = Server::nbdkit(folder.path(), &["file", text(&raw)]);
    let uri = server.uri();
    let source = open(&format!("vda={uri}")).unwrap();
    let mut reader = source.reader().unwrap();
    server.kill();
    let mut buffer = vec![0; common::MIB];
    let error = reader.read_at(&mut buffer, 1 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    let message = error.full_message();
    assert!(message.contains(&uri) && message.contains("offset 1048576"), "{message}");
    let error = open_error(&format!("vda={uri}"));
    assert!(error.full_message().contains("connect"), "{}", error.full_message());
}

#[test]
fn a_read_error_of_the_server_is_an_error() {
    let folder = folder();
    let server =
        Server::nbdkit(folder.path(), &["--filter=error", "memory", "4M", "error-pread-rate=100%"]);
    let source = open(&format!("vda={}", server.uri())).unwrap();
    let error = source.reader().unwrap().read_at(&mut [0; 8192], 4096).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.full_message().contains("offset 4096"), "{}", error.full_message());
}

#[test]
fn a_silent_server_can_be_cancelled() {
    let folder = folder();
    let server =
        Server::nbdkit(folder.path(), &["--filter=delay", "memory", "4M", "delay-read=3600"]);
    let cancel = AtomicBool::new(false);
    let spec = SourceSpec::parse(&format!("vda={}", server.uri())).unwrap();
    let source = open_source(&spec, &SourceOptions::default(), &cancel).unwrap();
    let mut reader = source.reader().unwrap();
    let error = std::thread::scope(|scope| {
        let read = scope.spawn(move || reader.read_at(&mut [0; 4096], 0).unwrap_err());
        cancel.store(true, Ordering::Relaxed);
        read.join().unwrap()
    });
    assert_eq!(error.kind(), ErrorKind::Interrupted);
}

#[test]
fn a_named_bitmap_gives_the_changed_ranges() {
    let folder = folder();
    let image = folder.path().join("disk.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "64M"]);
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 16M", text(&image)]);
    run("qemu-img", &["bitmap", "-f", "qcow2", "--add", "-g", "64k", text(&image), "changes"]);
    run(
        "qemu-io",
        &["-f", "qcow2", "-c", "write -P 2 1M 64k", "-c", "write -P 3 40M 4k", text(&image)],
    );
    let dirty = |source: &dyn coldrise_ingest::source::Source| {
        let (mut at, mut dirty) = (0, Vec::new());
        while at < source.size_bytes() {
            for run in source.dirty_runs(at, source.size_bytes() - at).unwrap() {
                assert_eq!(run.offset_bytes, at);
                at += run.length_bytes;
                if run.is_dirty {
                    dirty.push((run.offset_bytes, run.length_bytes));
                }
            }
        }
        dirty
    };
    let expected = vec![(1 << 20, 65536), (40 << 20, 65536)];
    // From the image itself …
    let spec = format!("vda={}", text(&image));
    let source = open_with(&spec, &with_bitmap("changes")).unwrap();
    assert_eq!(dirty(source.as_ref()), expected);
    drop(source);
    let error = open_with(&spec, &with_bitmap("none")).err().unwrap();
    assert!(error.full_message().contains("none"), "{}", error.full_message());
    // … and from a server that exports it.
    let server = Server::qemu_nbd(
        folder.path(),
        &["--read-only", "--format=qcow2", "--bitmap=changes", text(&image)],
    );
    let spec = format!("vda={}", server.uri());
    let source = open_with(&spec, &with_bitmap("changes")).unwrap();
    assert_eq!(dirty(source.as_ref()), expected);
    let error = open_with(&spec, &with_bitmap("none")).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.full_message().contains("block-export-add"), "{}", error.full_message());
}

#[test]
fn bitmaps_are_refused_for_formats_without_them() {
    let folder = folder();
    let raw = folder.path().join("disk.raw");
    std::fs::write(&raw, [1; 4096]).unwrap();
    let error = open_with(&format!("vda={}", text(&raw)), &with_bitmap("b")).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let error = open_with(&format!("vda=vhdx:{}", text(&raw)), &with_bitmap("b")).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
