//! Backups into a real repository, and their restored content.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use coldrise_block::{ErrorKind, NoProgress, Phase, Progress, ProgressState, Result};
use coldrise_ingest::{
    BackupRequest, BackupSummary, RestoreOptions, RestoreTarget, SourceSpec, backup,
    read_configuration, restore,
};
use coldrise_store::{
    ChunkedDisk, Compression, DiskName, InitOptions, MachineName, MachinePart, OpenOptions,
    PassphraseSource, PointName, PointOrigin, Repository, RepositoryWriter, SWTPM_PERMALL,
    TPM_STATE,
};

use crate::common::{self, MIB, Server, assert_same, folder, noise, run, sparse_disk, text};

const CHUNK_BYTES: u32 = 64 << 10;

/// A repository and its writer.
struct Store {
    writer: RepositoryWriter,
    folder: tempfile::TempDir,
}

impl Store {
    fn new() -> Store {
        Store::with_chunks(CHUNK_BYTES)
    }

    fn with_chunks(chunk_size_bytes: u32) -> Store {
        let folder = folder();
        let path = folder.path().join("repository");
        let compression = Compression::Zstd(1);
        Repository::init(&path, &InitOptions { chunk_size_bytes, compression, passphrase: None })
            .unwrap();
        let options = OpenOptions { cache_bytes: 0 };
        let writer = RepositoryWriter::open(&path, &PassphraseSource::None, &options).unwrap();
        Store { writer, folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn backup(&self, request: &BackupRequest) -> Result<BackupSummary> {
        backup(&self.writer, request, &NoProgress, &AtomicBool::new(false))
    }

    fn points(&self) -> Vec<PointName> {
        let points = self.writer.repository().points(&machine()).unwrap();
        points.into_iter().map(|point| point.point).collect()
    }

    fn chunks(&self) -> u64 {
        self.writer.repository().stats().unwrap().chunks
    }

    /// A disk of a point, restored to a raw file and read.
    fn content(&self, point: &PointName, disk: &str) -> Vec<u8> {
        let target = self.path("restored.raw");
        let options = RestoreOptions { force: true, ..RestoreOptions::default() };
        let never = AtomicBool::new(false);
        let target_path = RestoreTarget::Path(target.clone());
        restore(&self.disk(point, disk), &target_path, &options, &NoProgress, &never).unwrap();
        std::fs::read(target).unwrap()
    }

    fn disk(&self, point: &PointName, disk: &str) -> ChunkedDisk {
        let repository = self.writer.repository();
        let point = repository.point(&machine(), point).unwrap();
        let disk = point.disk(&DiskName::parse(disk).unwrap()).unwrap().clone();
        repository.disk(disk.root, disk.size_bytes)
    }
}

fn machine() -> MachineName {
    MachineName::parse("web01").unwrap()
}

fn request(disks: &[impl AsRef<str>]) -> BackupRequest {
    BackupRequest {
        machine: machine(),
        disks: disks.iter().map(|disk| SourceSpec::parse(disk.as_ref()).unwrap()).collect(),
        bitmap: None,
        follow_backing: false,
        configuration: None,
        parts: Vec::new(),
        display_name: None,
        point: None,
        threads: 2,
        rate: None,
    }
}

fn with_bitmap(disks: &[impl AsRef<str>], bitmap: &str) -> BackupRequest {
    BackupRequest { bitmap: Some(bitmap.to_string()), ..request(disks) }
}

fn write_raw(path: &Path, content: &[u8]) -> String {
    common::write_sparse(path, content);
    format!("vda={}", text(path))
}

#[test]
fn all_disks_and_the_configuration_make_one_point() {
    let store = Store::new();
    let (a, b) = (sparse_disk(51, 20 * MIB + 1000), sparse_disk(52, 33 * MIB));
    let raw_a = write_raw(&store.path("a.raw"), &a);
    write_raw(&store.path("b.raw"), &b);
    let image = store.path("b.qcow2");
    run("qemu-img", &["convert", "-O", "qcow2", text(&store.path("b.raw")), text(&image)]);
    let configuration = store.path("web01.xml");
    std::fs::write(&configuration, "<domain type='kvm'/>").unwrap();
    let request = BackupRequest {
        configuration: Some(read_configuration(&configuration).unwrap()),
        parts: vec![MachinePart::new(TPM_STATE, SWTPM_PERMALL, b"keys").unwrap()],
        ..request(&[raw_a, format!("vdb={}", text(&image))])
    };
    let summary = store.backup(&request).unwrap();
    assert!(summary.warnings.is_empty(), "{:?}", summary.warnings);
    assert_eq!(store.points(), std::slice::from_ref(&summary.point));
    assert_same(&store.content(&summary.point, "vda"), &a);
    assert_same(&store.content(&summary.point, "vdb"), &b);
    for disk in &summary.disks {
        assert!(disk.read_bytes < 2 << 20, "holes cost no reading: {disk:?}");
    }
    let document = store.writer.repository().point(&machine(), &summary.point).unwrap();
    assert_eq!(document.part(TPM_STATE).unwrap().content().unwrap(), b"keys");
    assert_eq!(document.configuration.unwrap().text, "<domain type='kvm'/>");
    let PointOrigin::Backup { sources } = document.origin else { panic!("not a backup") };
    assert_eq!(sources[1], text(&image));
}

#[test]
fn every_chunk_size_takes_every_disk_size() {
    for chunk_bytes in [4 << 10, 16 << 10, 256 << 10] {
        let store = Store::with_chunks(chunk_bytes);
        for (index, size) in [3 * MIB, 3 * MIB + 1, 9000, 8192].into_iter().enumerate() {
            let disk = sparse_disk(60 + index as u64, size);
            let spec = write_raw(&store.path("a.raw"), &disk);
            let point = PointName::parse(&format!("20260101T00000{index}Z")).unwrap();
            let named = BackupRequest { point: Some(point.clone()), ..request(&[spec]) };
            store.backup(&named).unwrap();
            assert_same(&store.content(&point, "vda"), &disk);
        }
    }
}

#[test]
fn unchanged_content_is_not_stored_again() {
    let store = Store::new();
    let mut disk = noise(53, 8 * MIB);
    let spec = write_raw(&store.path("a.raw"), &disk);
    let first = store.backup(&request(&[&spec])).unwrap();
    assert_eq!(first.disks[0].counts.stored_chunks, 128);
    let second = store.backup(&request(&[&spec])).unwrap();
    assert_ne!(first.point, second.point, "two backups within a second have two names");
    assert_eq!(second.disks[0].counts.stored_chunks, 0);
    assert_eq!(second.disks[0].base, Some(first.point.clone()));
    let root = |point: &PointName| store.disk(point, "vda").root();
    assert_eq!(root(&first.point), root(&second.point), "an unchanged map is shared whole");
    // One changed chunk, one that became zero.
    disk[5 * MIB + 7] ^= 0xFF;
    disk[MIB..MIB + 65536].fill(0);
    write_raw(&store.path("a.raw"), &disk);
    let third = store.backup(&request(&[spec])).unwrap();
    assert_eq!(third.disks[0].counts.stored_chunks, 1);
    assert_same(&store.content(&third.point, "vda"), &disk);
    assert_same(&store.content(&first.point, "vda"), &noise(53, 8 * MIB));
}

#[test]
fn a_bitmap_limits_the_ranges_read() {
    let store = Store::new();
    let image = store.path("a.qcow2");
    let raw = store.path("a.raw");
    let mut disk = noise(54, 12 * MIB);
    disk[8 * MIB..9 * MIB].fill(0);
    write_raw(&raw, &disk);
    run("qemu-img", &["convert", "-O", "qcow2", text(&raw), text(&image)]);
    let spec = [format!("vda={}", text(&image))];
    let error = store.backup(&with_bitmap(&spec, "changes")).unwrap_err();
    assert!(error.full_message().contains("changes"), "{error:?}");

    run("qemu-img", &["bitmap", "--add", "-g", "4k", text(&image), "changes"]);
    let error = store.backup(&with_bitmap(&spec, "changes")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.full_message().contains("without --bitmap"), "{error:?}");
    let full = store.backup(&request(&spec)).unwrap();
    assert!(!full.disks[0].is_incremental);

    // Not on chunk boundaries: the rest of the chunk comes from the source, too.
    let write = |command: &str| run("qemu-io", &["-f", "qcow2", "-c", command, text(&image)]);
    write("write -P 17 3149824 4096");
    disk[3149824..3149824 + 4096].fill(17);
    write("write -P 18 8M 512k");
    disk[8 * MIB..8 * MIB + (512 << 10)].fill(18);
    write("write -z -u 10M 1M");
    disk[10 * MIB..11 * MIB].fill(0);
    let server = Server::qemu_nbd(
        store.folder.path(),
        &["--read-only", "--format=qcow2", "--bitmap=changes", text(&image)],
    );
    for spec in [format!("vda={}", text(&image)), format!("vda={}", server.uri())] {
        let summary = store.backup(&with_bitmap(&[spec], "changes")).unwrap();
        let vda = &summary.disks[0];
        assert!(vda.is_incremental);
        assert_eq!(vda.read_bytes, 65536 + (512 << 10), "{vda:?}");
        assert_same(&store.content(&summary.point, "vda"), &disk);
    }
}

#[test]
fn incremental_backups_follow_growing_and_shrinking_disks() {
    let store = Store::new();
    let image = store.path("a.qcow2");
    let spec = [format!("vda={}", text(&image))];
    // Not a multiple of the chunk, so that the old end lies inside a chunk.
    let old = 10 * MIB + 5 * 512;
    let mut disk = noise(55, old);
    let raw = store.path("a.raw");
    write_raw(&raw, &disk);
    run("qemu-img", &["convert", "-O", "qcow2", text(&raw), text(&image)]);
    store.backup(&request(&spec)).unwrap();

    run("qemu-img", &["resize", "-q", text(&image), "16M"]);
    run("qemu-img", &["bitmap", "--add", text(&image), "changes"]);
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 3 12M 1M", text(&image)]);
    disk.resize(16 * MIB, 0);
    disk[12 * MIB..13 * MIB].fill(3);
    let grown = store.backup(&with_bitmap(&spec, "changes")).unwrap();
    assert_same(&store.content(&grown.point, "vda"), &disk);
    let read = grown.disks[0].read_bytes;
    assert!(read <= 2 << 20, "only the bitmap's and the new part is read: {read}");

    run("qemu-img", &["bitmap", "--remove", text(&image), "changes"]);
    run("qemu-img", &["resize", "-q", "--shrink", text(&image), "6M"]);
    run("qemu-img", &["bitmap", "--add", text(&image), "changes"]);
    disk.truncate(6 * MIB);
    let shrunk = store.backup(&with_bitmap(&spec, "changes")).unwrap();
    assert!(!shrunk.disks[0].is_incremental, "a smaller disk is read whole");
    assert_same(&store.content(&shrunk.point, "vda"), &disk);

    // The content behind the end does not come back.
    run("qemu-img", &["bitmap", "--remove", text(&image), "changes"]);
    run("qemu-img", &["resize", "-q", text(&image), "16M"]);
    run("qemu-img", &["bitmap", "--add", text(&image), "changes"]);
    disk.resize(16 * MIB, 0);
    let again = store.backup(&with_bitmap(&spec, "changes")).unwrap();
    assert_same(&store.content(&again.point, "vda"), &disk);
}

#[test]
fn an_export_without_extents_is_stored_as_sparsely() {
    let store = Store::new();
    let disk = sparse_disk(56, 16 * MIB);
    write_raw(&store.path("a.raw"), &disk);
    let server = Server::nbdkit(
        store.folder.path(),
        &["--filter=noextents", "file", text(&store.path("a.raw"))],
    );
    let summary = store.backup(&request(&[format!("vda={}", server.uri())])).unwrap();
    let vda = &summary.disks[0];
    assert_eq!(vda.read_bytes, disk.len() as u64);
    assert!(vda.counts.stored_chunks <= 16, "{vda:?}");
    assert_same(&store.content(&summary.point, "vda"), &disk);
}

/// Acts once, when a disk has reached an offset.
struct At<'a> {
    bytes: u64,
    done: AtomicBool,
    action: &'a (dyn Fn() + Sync),
    last: AtomicU64,
}

impl<'a> At<'a> {
    fn new(bytes: u64, action: &'a (dyn Fn() + Sync)) -> At<'a> {
        At { bytes, done: AtomicBool::new(false), action, last: AtomicU64::new(0) }
    }
}

impl Progress for At<'_> {
    fn update(&self, state: &ProgressState<'_>) {
        if state.phase != Phase::Storing {
            return;
        }
        let before = self.last.swap(state.done_bytes, Ordering::Relaxed);
        assert!(before <= state.done_bytes, "progress never goes back");
        assert!(state.done_bytes <= state.total_bytes);
        if state.done_bytes >= self.bytes && !self.done.swap(true, Ordering::Relaxed) {
            (self.action)();
        }
    }
}

#[test]
fn a_cancelled_backup_leaves_nothing_and_runs_again() {
    let store = Store::new();
    let disk = noise(57, 48 * MIB);
    let spec = write_raw(&store.path("a.raw"), &disk);
    let cancel = AtomicBool::new(false);
    let stop = || cancel.store(true, Ordering::Relaxed);
    let progress = At::new(16 << 20, &stop);
    let error = backup(&store.writer, &request(&[&spec]), &progress, &cancel).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
    assert!(progress.last.load(Ordering::Relaxed) < 24 << 20, "it stops at once");
    assert!(store.points().is_empty());
    let summary = store.backup(&request(&[spec])).unwrap();
    assert_same(&store.content(&summary.point, "vda"), &disk);
    assert_eq!(store.chunks(), 48 * 16, "no chunk is stored twice");
}

/// While the first backup reads, a backup of another machine completes, and a second one of
/// the same machine is refused.
#[test]
fn machines_are_backed_up_at_once_and_each_by_one_backup() {
    let store = Store::new();
    let (first, second) = (noise(62, 24 * MIB), noise(63, 4 * MIB));
    let second = [&first[..8 * MIB], &second].concat();
    let (a, b) = (store.path("a.raw"), store.path("b.raw"));
    let (first_request, again) = (request(&[write_raw(&a, &first)]), request(&["vda=raw:/x"]));
    let mut other = request(&[write_raw(&b, &second)]);
    other.machine = MachineName::parse("db01").unwrap();
    let made = Mutex::new(None);
    let meanwhile = || {
        let refused = store.backup(&again).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy, "{refused:?}");
        *made.lock().unwrap() = Some(store.backup(&other).unwrap());
    };
    let progress = At::new(16 << 20, &meanwhile);
    let cancel = AtomicBool::new(false);
    let summary = backup(&store.writer, &first_request, &progress, &cancel).unwrap();
    assert_same(&store.content(&summary.point, "vda"), &first);
    let counts = made.lock().unwrap().as_ref().unwrap().disks[0].counts;
    assert_eq!((counts.known_chunks, counts.stored_chunks), (8 * 16, 4 * 16));
    // The machine is free again.
    store.backup(&first_request).unwrap();
}

#[test]
fn a_file_that_shrinks_midway_leaves_nothing_visible() {
    let store = Store::new();
    let path = store.path("a.raw");
    let spec = write_raw(&path, &noise(58, 64 * MIB));
    let good = write_raw(&store.path("b.raw"), &noise(59, MIB)).replace("vda", "vdb");
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let shrink = || file.set_len(40 << 20).unwrap();
    let progress = At::new(8 << 20, &shrink);
    let disks = request(&[&good, &spec]);
    let error = backup(&store.writer, &disks, &progress, &AtomicBool::new(false));
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Incomplete);
    let message = error.full_message();
    assert!(message.contains("vda") && message.contains(text(&path)), "{message}");
    assert!(store.points().is_empty(), "no point with one disk only");
    // The repository is usable as before.
    let summary = store.backup(&request(&[good])).unwrap();
    assert_same(&store.content(&summary.point, "vdb"), &noise(59, MIB));
}

#[test]
fn a_server_that_goes_away_midway_leaves_nothing_visible() {
    let store = Store::new();
    let path = store.path("a.raw");
    write_raw(&path, &noise(61, 64 * MIB));
    let server = Server::nbdkit(store.folder.path(), &["file", text(&path)]);
    let spec = format!("vda={}", server.uri());
    let server = Arc::new(Mutex::new(server));
    let kill = || server.lock().unwrap().kill();
    let progress = At::new(8 << 20, &kill);
    let error = backup(&store.writer, &request(&[spec]), &progress, &AtomicBool::new(false));
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    let message = error.full_message();
    assert!(message.contains("vda") && message.contains("offset"), "{message}");
    assert!(message.contains("nbdkit.sock"), "{message}");
    assert!(store.points().is_empty());
}

#[test]
fn invalid_backup_requests_are_refused() {
    let store = Store::new();
    let spec = write_raw(&store.path("a.raw"), &noise(62, MIB));
    let refused = |request: &BackupRequest| store.backup(request).unwrap_err();
    assert_eq!(refused(&request(&[""; 0])).kind(), ErrorKind::InvalidInput);
    let error = refused(&request(&[&spec, &spec]));
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.full_message().contains("twice"));
    let named = |name: &str| BackupRequest {
        point: Some(PointName::parse(name).unwrap()),
        ..request(&[&spec])
    };
    assert_eq!(refused(&named("20260101T000000Z+1")).kind(), ErrorKind::InvalidInput);
    store.backup(&named("20260101T000000Z")).unwrap();
    assert_eq!(refused(&named("20260101T000000Z")).kind(), ErrorKind::AlreadyExists);
    // A mistake in the last disk shows before the first is read.
    let missing = format!("vdb={}", text(&store.path("none.raw")));
    let before = store.chunks();
    let error = refused(&request(&[write_raw(&store.path("c.raw"), &noise(63, MIB)), missing]));
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(store.chunks(), before);
}

#[test]
fn an_overlay_is_backed_up_whole_when_its_backing_is_followed() {
    let store = Store::new();
    let mut disk = sparse_disk(64, 12 * MIB);
    write_raw(&store.path("base.raw"), &disk);
    let top = store.path("top.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", text(&top)]);
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 5 2M 100k", text(&top)]);
    disk[2 * MIB..2 * MIB + 102400].fill(5);
    let refused = request(&[format!("vda={}", text(&top))]);
    assert_eq!(store.backup(&refused).unwrap_err().kind(), ErrorKind::Unsupported);
    let followed = BackupRequest { follow_backing: true, ..refused };
    let summary = store.backup(&followed).unwrap();
    assert_same(&store.content(&summary.point, "vda"), &disk);
}
