//! Restoring a disk to raw files, devices and NBD exports. The disk is a plain byte
//! array here: what matters is what arrives at the target.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Disk, ErrorKind};
use coldrise_formats::Format;
use coldrise_ingest::{RestoreOptions, RestoreTarget, restore};

use crate::common::memory::{CancelAfter, MemoryDisk, names, restore_to};
use crate::common::{self, Server, assert_same, folder, open, read_all, run, sparse_disk, text};

const SIZE: usize = 24 * common::MIB;

#[test]
fn a_raw_file_is_whole_and_sparse() {
    let folder = folder();
    for size in [SIZE, SIZE + 777, 8192, 9001] {
        let disk = MemoryDisk::new(sparse_disk(31, size));
        let target = folder.path().join(format!("disk{size}.raw"));
        let summary = restore_to(&disk, text(&target), &RestoreOptions::default()).unwrap();
        assert_eq!(summary.size_bytes, disk.size_bytes());
        assert_same(&std::fs::read(&target).unwrap(), &disk.content);
        let metadata = std::fs::metadata(&target).unwrap();
        assert!(metadata.blocks() * 512 <= 1_500_000, "{} blocks", metadata.blocks());
        assert_eq!(metadata.mode() & 0o077, 0, "a disk's content is private");
        assert!(summary.written_bytes <= 1_500_000);
    }
}

#[test]
fn an_existing_file_is_kept_unless_forced() {
    let folder = folder();
    let disk = MemoryDisk::new(sparse_disk(32, SIZE));
    let target = folder.path().join("disk.raw");
    std::fs::write(&target, b"old").unwrap();
    let error = restore_to(&disk, text(&target), &RestoreOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    assert!(error.full_message().contains("--force"), "{error}");
    assert_eq!(std::fs::read(&target).unwrap(), b"old");
    let force = RestoreOptions { force: true, ..RestoreOptions::default() };
    restore_to(&disk, text(&target), &force).unwrap();
    assert_same(&std::fs::read(&target).unwrap(), &disk.content);
    assert_eq!(names(folder.path()), ["disk.raw"]);
}

#[test]
fn an_unknown_extension_needs_a_format() {
    let folder = folder();
    let disk = MemoryDisk::new(sparse_disk(35, SIZE));
    let target = folder.path().join("disk.iso");
    let error = restore_to(&disk, text(&target), &RestoreOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(names(folder.path()).is_empty());
    let raw = RestoreOptions { format: Some(Format::Raw), ..RestoreOptions::default() };
    restore_to(&disk, text(&target), &raw).unwrap();
    assert_same(&std::fs::read(&target).unwrap(), &disk.content);
}

#[test]
fn an_export_is_written_in_place_zeroes_included() {
    let disk = MemoryDisk::new(sparse_disk(36, SIZE));
    for filter in [None, Some("--filter=nozero")] {
        let folder = folder();
        // Larger than the disk and full of other bytes.
        let raw = folder.path().join("target.raw");
        std::fs::write(&raw, vec![0xEE; SIZE + common::MIB]).unwrap();
        let mut arguments: Vec<&str> = filter.into_iter().collect();
        arguments.extend(["file", text(&raw)]);
        let server = Server::nbdkit(folder.path(), &arguments);
        restore_to(&disk, &server.uri(), &RestoreOptions::default()).unwrap();
        let written = std::fs::read(&raw).unwrap();
        assert_same(&written[..SIZE], &disk.content);
        assert!(written[SIZE..].iter().all(|&byte| byte == 0xEE), "only the disk is written");
    }
}

#[test]
fn an_export_that_does_not_fit_is_refused_before_it_is_written() {
    let folder = folder();
    let disk = MemoryDisk::new(sparse_disk(37, SIZE));
    let small = Server::nbdkit(folder.path(), &["memory", "1M"]);
    let error = restore_to(&disk, &small.uri(), &RestoreOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    let vhd = RestoreOptions { format: Some(Format::VhdDynamic), ..RestoreOptions::default() };
    let error = restore_to(&disk, &small.uri(), &vhd).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    drop(small);
    let read_only = Server::nbdkit(folder.path(), &["--readonly", "memory", "64M"]);
    let error = restore_to(&disk, &read_only.uri(), &RestoreOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly);
}

#[test]
fn a_failed_restore_leaves_nothing_and_names_the_place() {
    for name in ["d.raw", "d.qcow2", "d.vhd"] {
        let folder = folder();
        let mut disk = MemoryDisk::new(sparse_disk(38, SIZE));
        disk.bad_offset = Some(SIZE as u64 / 2 + 20_000);
        let target = folder.path().join(name);
        let error = restore_to(&disk, text(&target), &RestoreOptions::default()).unwrap_err();
        assert!(error.full_message().contains("chunk 7"), "{name}: {error:?}");
        assert!(error.full_message().contains("offset"), "{name}: {error:?}");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{name}");
        assert!(names(folder.path()).is_empty(), "{name}: {:?}", names(folder.path()));
    }
}

#[test]
fn a_failing_export_is_an_error() {
    let folder = folder();
    let disk = MemoryDisk::new(sparse_disk(39, SIZE));
    let server = Server::nbdkit(
        folder.path(),
        &["--filter=error", "memory", "64M", "error-pwrite=ENOSPC", "error-pwrite-rate=100%"],
    );
    let error = restore_to(&disk, &server.uri(), &RestoreOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error:?}");
    assert!(error.full_message().contains(&server.uri()), "{error:?}");
}

#[test]
fn a_cancelled_restore_leaves_nothing() {
    let folder = folder();
    let disk = MemoryDisk::new(common::noise(40, 64 * common::MIB));
    for name in ["d.raw", "d.vmdk"] {
        let target = RestoreTarget::Path(folder.path().join(name));
        let cancel = AtomicBool::new(false);
        let progress = CancelAfter::new(&cancel, 8 << 20);
        let error =
            restore(&disk, &target, &RestoreOptions::default(), &progress, &cancel).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Interrupted);
        assert!(progress.last.load(Ordering::Relaxed) < 32 << 20);
        assert!(names(folder.path()).is_empty());
    }
}

#[test]
fn remains_of_a_killed_restore_are_removed() {
    let folder = folder();
    let disk = MemoryDisk::new(sparse_disk(41, SIZE));
    let left = folder.path().join(".d.raw.coldrise-part");
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("d.raw"), b"half").unwrap();
    let target = folder.path().join("d.raw");
    restore_to(&disk, text(&target), &RestoreOptions::default()).unwrap();
    assert_same(&std::fs::read(&target).unwrap(), &disk.content);
    assert_eq!(names(folder.path()), ["d.raw"]);
    // While another restore holds the folder, this one leaves it alone.
    let other = folder.path().join(".e.raw.coldrise-part");
    std::fs::create_dir(&other).unwrap();
    let held = std::fs::File::open(&other).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let error = restore_to(&disk, text(&folder.path().join("e.raw")), &RestoreOptions::default());
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Busy);
}

#[test]
fn a_block_device_is_written_in_place() {
    let folder = folder();
    let backing = folder.path().join("device.raw");
    std::fs::write(&backing, vec![0xEE; SIZE]).unwrap();
    let device = run("losetup", &["--find", "--show", text(&backing)]).trim().to_string();
    struct Detach(String);
    impl Drop for Detach {
        fn drop(&mut self) {
            run("losetup", &["--detach", &self.0]);
        }
    }
    let device = Detach(device);
    let disk = MemoryDisk::new(sparse_disk(42, SIZE));
    restore_to(&disk, &device.0, &RestoreOptions::default()).unwrap();
    assert_same(&std::fs::read(&device.0).unwrap(), &disk.content);
    // A backup can read it.
    let source = open(&format!("vda=raw:{}", device.0)).unwrap();
    assert_same(&read_all(source.as_ref()).0, &disk.content);
    let small = MemoryDisk::new(sparse_disk(42, SIZE + 4096));
    let error = restore_to(&small, &device.0, &RestoreOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
}
