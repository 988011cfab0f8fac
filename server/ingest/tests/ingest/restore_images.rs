//! Restoring a disk to image files: every format, read back by QEMU.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use coldrise_block::{Disk, ErrorKind, Extent, ExtentKind, ReadContext, Result};
use coldrise_formats::Format;
use coldrise_ingest::{RestoreOptions, RestoreTarget, restore};

use crate::common::memory::{CancelAfter, MemoryDisk, names, restore_to};
use crate::common::{MIB, assert_same, folder, noise, run, sparse_disk, text};

fn images() -> impl Iterator<Item = Format> {
    Format::ALL.into_iter().filter(|format| *format != Format::Raw)
}

fn options(format: Format) -> RestoreOptions {
    RestoreOptions { format: Some(format), ..RestoreOptions::default() }
}

fn driver(format: Format) -> &'static str {
    match format.word().split('-').next() {
        Some("vhd") => "vpc",
        Some(word) => word,
        None => unreachable!("a word has a first part"),
    }
}

/// The content that QEMU reads from an image, after a check of its tables.
fn read_back(image: &Path, format: Format) -> Vec<u8> {
    let raw = image.with_file_name("read-back");
    let driver = driver(format);
    if driver != "vpc" {
        run("qemu-img", &["check", "-q", "-f", driver, text(image)]);
    }
    run("qemu-img", &["convert", "-f", driver, "-O", "raw", text(image), text(&raw)]);
    let content = std::fs::read(&raw).unwrap();
    std::fs::remove_file(raw).unwrap();
    content
}

fn files_of(format: Format) -> &'static [&'static str] {
    match format {
        Format::Vmdk | Format::VmdkHosted => &["d-flat.vmdk", "d.img"],
        Format::Qcow2External => &["d.img", "d.raw"],
        _ => &["d.img"],
    }
}

#[test]
fn every_format_is_written_sparse_and_reads_back() {
    // More than one block of each format but VHDX, and no whole number of sectors.
    let scattered = sparse_disk(52, 9 * MIB + 777);
    for (content, most_bytes) in [
        (scattered, 2 * MIB),
        (noise(50, 3 * MIB), 4 * MIB),
        (vec![0; 5 * MIB], MIB),
        (noise(53, 512), MIB),
    ] {
        let disk = MemoryDisk::new(content);
        for format in images() {
            let folder = folder();
            let target = folder.path().join("d.img");
            let summary = restore_to(&disk, text(&target), &options(format)).unwrap();
            assert_eq!((summary.format, summary.size_bytes), (format, disk.size_bytes()));
            assert_eq!(names(folder.path()), files_of(format));
            let mut shown = disk.content.clone();
            shown.resize(shown.len().next_multiple_of(512), 0);
            assert_same(&read_back(&target, format), &shown);
            let blocks: u64 = files_of(format)
                .iter()
                .map(|name| std::fs::metadata(folder.path().join(name)).unwrap())
                .inspect(|file| assert_eq!(file.mode() & 0o077, 0, "a disk's content is private"))
                .map(|file| file.blocks())
                .sum();
            assert!(blocks as usize * 512 < most_bytes, "{format}: {blocks} blocks");
        }
    }
}

#[test]
fn pieces_of_many_threads_form_one_stream() {
    let mut content = noise(54, 40 * MIB);
    content[12 * MIB..27 * MIB].fill(0);
    let disk = MemoryDisk::new(content);
    let folder = folder();
    let target = folder.path().join("d.vmdk");
    let options = RestoreOptions { threads: 16, ..options(Format::VmdkStream) };
    let summary = restore_to(&disk, text(&target), &options).unwrap();
    assert!(summary.written_bytes > 25 << 20, "{}", summary.written_bytes);
    assert_same(&read_back(&target, Format::VmdkStream), &disk.content);
}

#[test]
fn an_image_names_itself() {
    let folder = folder();
    let disk = MemoryDisk::new(sparse_disk(55, 2 * MIB));
    let target = folder.path().join("d.vmdk");
    restore_to(&disk, text(&target), &RestoreOptions::default()).unwrap();
    let start = std::fs::read(&target).unwrap();
    assert!(start[..65536].windows(8).any(|window| window == b"\"d.vmdk\""));
}

#[test]
fn each_restore_has_its_own_disk_id() {
    let folder = folder();
    let disk = MemoryDisk::new(sparse_disk(56, 2 * MIB));
    for format in [Format::Vhd, Format::VhdxDynamic, Format::VmdkSparse, Format::Vmdk] {
        let [a, b] = ["a.img", "b.img"].map(|name| folder.path().join(name));
        for target in [&a, &b] {
            let options = RestoreOptions { force: true, ..options(format) };
            restore_to(&disk, text(target), &options).unwrap();
        }
        let differs = std::fs::read(&a).unwrap() != std::fs::read(&b).unwrap();
        assert!(differs, "{format}: an id came twice");
    }
}

#[test]
fn both_files_are_kept_unless_forced() {
    let disk = MemoryDisk::new(sparse_disk(57, 2 * MIB));
    for taken in ["d.vmdk", "d-flat.vmdk"] {
        let folder = folder();
        let target = folder.path().join("d.vmdk");
        std::fs::write(folder.path().join(taken), b"old").unwrap();
        let error = restore_to(&disk, text(&target), &options(Format::Vmdk)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert!(error.full_message().contains(taken), "{error}");
        assert_eq!(names(folder.path()), [taken]);
        assert_eq!(std::fs::read(folder.path().join(taken)).unwrap(), b"old");
        let force = RestoreOptions { force: true, ..options(Format::Vmdk) };
        restore_to(&disk, text(&target), &force).unwrap();
        assert_eq!(names(folder.path()), ["d-flat.vmdk", "d.vmdk"]);
        assert_same(&read_back(&target, Format::Vmdk), &disk.content);
    }
}

/// Removes a name while the restore works.
struct Taker<'d> {
    disk: &'d MemoryDisk,
    path: std::path::PathBuf,
}

#[test]
fn a_name_that_is_taken_meanwhile_is_kept_and_nothing_is_left() {
    let disk = MemoryDisk::new(sparse_disk(58, 2 * MIB));
    for taken in ["d.vmdk", "d-flat.vmdk"] {
        let folder = folder();
        let taker = Taker { disk: &disk, path: folder.path().join(taken) };
        let target = folder.path().join("d.vmdk");
        let error = restore_to(&taker, text(&target), &options(Format::Vmdk)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert_eq!(names(folder.path()), [taken]);
        assert_eq!(std::fs::read(folder.path().join(taken)).unwrap(), b"theirs");
    }
}

#[test]
fn a_failure_or_a_cancel_leaves_nothing() {
    let mut bad = MemoryDisk::new(noise(59, 48 * MIB));
    let good = MemoryDisk::new(bad.content.clone());
    bad.bad_offset = Some(24 << 20);
    for format in images() {
        let folder = folder();
        let target = RestoreTarget::Path(folder.path().join("d.img"));
        let options = RestoreOptions { threads: 6, ..options(format) };
        let cancel = AtomicBool::new(false);
        let never = CancelAfter::new(&cancel, u64::MAX);
        let error = restore(&bad, &target, &options, &never, &cancel).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{format}: {error:?}");
        assert!(error.full_message().contains("chunk 7"), "{format}: {error:?}");
        assert!(names(folder.path()).is_empty(), "{format}");

        let soon = CancelAfter::new(&cancel, 8 << 20);
        let error = restore(&good, &target, &options, &soon, &cancel).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Interrupted, "{format}: {error:?}");
        assert!(soon.last.load(Ordering::Relaxed) < 40 << 20, "{format}");
        assert!(names(folder.path()).is_empty(), "{format}");
    }
}

/// A disk that stores only its first 64 KiB at the first request for extents: a session
/// whose guest continues to write.
struct Growing<'d> {
    disk: &'d MemoryDisk,
    questions: AtomicUsize,
}

#[test]
fn images_stay_valid_if_a_session_grows_meanwhile() {
    let disk = MemoryDisk::new(noise(60, 8 * MIB));
    for format in images().filter(|format| format.is_compact()) {
        let folder = folder();
        let target = folder.path().join("d.img");
        let growing = Growing { disk: &disk, questions: AtomicUsize::new(0) };
        restore_to(&growing, text(&target), &options(format)).unwrap();
        let content = read_back(&target, format);
        assert_eq!(content.len(), disk.content.len());
        assert_same(&content[..64 << 10], &disk.content[..64 << 10]);
    }
}

/// A disk of holes, of any size.
struct Hollow(u64);

#[test]
fn disks_beyond_the_limits_of_a_format_leave_no_files() {
    let folder = folder();
    let target = folder.path().join("d.vhd");
    let error = restore_to(&Hollow(3 << 40), text(&target), &RestoreOptions::default());
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let message = error.full_message();
    assert!(message.contains("2040 GiB") && message.contains("use vhdx"), "{message}");
    let error = restore_to(&Hollow(0), text(&target), &options(Format::VmdkSparse)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    for name in ["a:b.vmdk", "a\"b.vmdk"] {
        let target = RestoreTarget::Path(folder.path().join(name));
        let cancel = AtomicBool::new(false);
        let never = CancelAfter::new(&cancel, u64::MAX);
        let done = restore(&Hollow(512), &target, &RestoreOptions::default(), &never, &cancel);
        assert_eq!(done.unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    assert!(names(folder.path()).is_empty());
}

#[test]
fn a_large_empty_disk_takes_no_room() {
    for format in [Format::VhdxDynamic, Format::VmdkSparse, Format::VmdkStream, Format::Qcow2Sparse]
    {
        let folder = folder();
        let target = folder.path().join("d.img");
        restore_to(&Hollow(1 << 40), text(&target), &options(format)).unwrap();
        let taken = std::fs::metadata(&target).unwrap().blocks() * 512;
        // VMDK has all its tables; those of 1 TiB take 2 x 64 MiB, and their directories 2
        // x 128 KiB. VHDX marks each block as absent: zeroes.
        assert!(taken < 2 << 20, "{format}: {taken} bytes");
        run("qemu-img", &["info", "-f", driver(format), text(&target)]);
    }
}

impl Disk for Hollow {
    fn size_bytes(&self) -> u64 {
        self.0
    }
    fn read(&self, _: &mut [u8], _: u64, _: &mut ReadContext) -> Result<()> {
        unreachable!("holes are not read")
    }
    fn extents(&self, offset_bytes: u64, length_bytes: u64, _: usize) -> Result<Vec<Extent>> {
        Ok(vec![Extent { offset_bytes, length_bytes, kind: ExtentKind::Hole }])
    }
}

impl Disk for Growing<'_> {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }
    fn read(&self, buffer: &mut [u8], offset_bytes: u64, _: &mut ReadContext) -> Result<()> {
        self.disk.read_at(buffer, offset_bytes)
    }
    fn extents(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        if self.questions.fetch_add(1, Ordering::Relaxed) > 0 {
            return self.disk.extents(offset, length, limit);
        }
        let stored = 64 << 10;
        let extent = |offset_bytes, length_bytes, kind| Extent { offset_bytes, length_bytes, kind };
        Ok(vec![
            extent(0, stored, ExtentKind::Stored),
            extent(stored, length - stored, ExtentKind::Hole),
        ])
    }
}

impl Disk for Taker<'_> {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }
    fn read(&self, buffer: &mut [u8], offset_bytes: u64, _: &mut ReadContext) -> Result<()> {
        std::fs::write(&self.path, b"theirs").unwrap();
        self.disk.read_at(buffer, offset_bytes)
    }
    fn extents(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        self.disk.extents(offset, length, limit)
    }
}
