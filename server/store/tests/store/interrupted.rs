//! Writers that end early: nothing is half-visible, committed data is kept, and nothing is left
//! behind or stored twice.

use coldrise_block::ErrorKind;
use coldrise_store::*;

use crate::common::*;

fn staged(store: &Store) -> usize {
    std::fs::read_dir(store.path().join("db/coldrise-staging")).map_or(0, |e| e.count())
}

/// Starts a backup, gives it `content`, and does not finish it.
fn start(writer: &RepositoryWriter, content: &[u8]) -> DiskWriter {
    let mut disk =
        writer.disk_writer(None, content.len() as u64, WriteOptions { threads: 2 }).unwrap();
    for (number, piece) in content.chunks(1 << 20).enumerate() {
        disk.write((number as u64) << 20, piece.to_vec()).unwrap();
    }
    disk
}

#[test]
fn a_dropped_backup_leaves_nothing_and_the_next_one_works() {
    let store = Store::new();
    let writer = store.writer();
    let content = noise(21, 20 << 20);
    for _ in 0..3 {
        drop(start(&writer, &content));
    }
    assert_eq!(staged(&store), 0);
    assert_eq!(writer.repository().stats().unwrap().chunks, 0);
    let (root, counts) = write_all(&writer, None, &content);
    assert_eq!(counts.known_chunks, 0);
    assert_eq!(read_all(&writer.repository().disk(root, content.len() as u64)), content);
    drop(writer);
    let (_, counts) = write_all(&store.writer(), None, &content);
    assert_eq!(counts.stored_chunks, 0);
}

/// A copy during which no file appeared or disappeared: no crash leaves a manifest that names a
/// file made after the copy of its folder began.
fn copy_at_work(store: &Store) -> Store {
    loop {
        let directory = tempfile::tempdir().unwrap();
        let copy = Store { directory, source: PassphraseSource::None };
        let before = names(&store.path());
        let is_whole = std::panic::catch_unwind(|| copy_tree(&store.path(), &copy.path()));
        if is_whole.is_ok() && names(&store.path()) == before {
            return copy;
        }
    }
}

fn names(folder: &std::path::Path) -> std::collections::BTreeSet<std::path::PathBuf> {
    let mut found = std::collections::BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        // The file may disappear meanwhile.
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(entry.path());
            }
            found.insert(entry.path());
        }
    }
    found
}

/// The files of a repository as after a crash: copied while the writer works, so that they belong
/// to no single moment.
#[test]
fn crash_copies_of_a_store_open_with_all_committed_data() {
    let store = Store::with(CHUNK as u32, Compression::None, false);
    let writer = store.writer();
    let committed = noise(22, 12 << 20);
    let (root, _) = write_all(&writer, None, &committed);
    let document = point("web01", "20261120T100000Z", root, committed.len() as u64);
    writer.put_point(&document).unwrap();

    let more = noise(23, 12 << 20);
    for round in 0..6 {
        let disk = start(&writer, &more[..(round + 1) * (2 << 20)]);
        if round % 2 == 1 {
            disk.finish().unwrap();
        }
        let crashed = copy_at_work(&store);

        let writer = crashed.writer();
        assert_eq!(staged(&crashed), 0);
        let machine = MachineName::parse("web01").unwrap();
        let points = writer.repository().points(&machine).unwrap();
        assert_eq!(points, std::slice::from_ref(&document));
        let size = committed.len() as u64;
        assert_eq!(read_all(&writer.repository().disk(root, size)), committed);
        // Committed chunks are found again, and new content is stored correctly.
        let (_, counts) = write_all(&writer, None, &committed);
        assert_eq!(counts.stored_chunks, 0);
        let (root, _) = write_all(&writer, None, &more);
        assert_eq!(read_all(&writer.repository().disk(root, more.len() as u64)), more);
        drop(writer);
        let (_, counts) = write_all(&crashed.writer(), None, &more);
        assert_eq!(counts.stored_chunks, 0);
    }
}

/// A separate drive of a few megabytes.
struct SmallDrive(tempfile::TempDir);

impl SmallDrive {
    /// `None` if mounting is not allowed: it needs root.
    fn mount(bytes: u64) -> Option<SmallDrive> {
        let directory = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])
            .arg(directory.path())
            .status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(SmallDrive(directory));
        }
        assert!(std::env::var_os("CI").is_none(), "mounting a tmpfs needs root");
        eprintln!("not run: mounting a tmpfs needs root");
        None
    }
}

impl Drop for SmallDrive {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Backs up 128 MiB in this many parts, until one fails.
fn fill_drive(writer: &RepositoryWriter, parts: usize) -> coldrise_block::Error {
    for part in 0..parts {
        let content = noise((100 * parts + part) as u64, (128 << 20) / parts);
        let mut disk =
            writer.disk_writer(None, content.len() as u64, WriteOptions { threads: 2 }).unwrap();
        for (number, bytes) in content.chunks(1 << 20).enumerate() {
            if let Err(error) = disk.write((number as u64) << 20, bytes.to_vec()) {
                return error;
            }
        }
        if let Err(error) = disk.finish() {
            return error;
        }
    }
    panic!("the drive is not full")
}

#[test]
fn a_full_drive_is_reported_and_the_repository_stays_usable() {
    let Some(drive) = SmallDrive::mount(96 << 20) else { return };
    let path = drive.0.path().join("repo");
    let options = InitOptions {
        chunk_size_bytes: CHUNK as u32,
        compression: Compression::None,
        passphrase: None,
    };
    Repository::init(&path, &options).unwrap();
    let source = PassphraseSource::None;
    let open = || RepositoryWriter::open(&path, &source, &OpenOptions::default()).unwrap();
    let writer = open();
    let kept = noise(31, 10 << 20);
    let (root, _) = write_all(&writer, None, &kept);
    let document = point("web01", "20261120T100000Z", root, kept.len() as u64);
    writer.put_point(&document).unwrap();

    // More than the drive can hold: one large backup, then many small ones.
    let mut writer = Some(writer);
    for pieces in [1, 32] {
        let current = writer.take().unwrap_or_else(open);
        let failure = fill_drive(&current, pieces);
        assert_eq!(failure.kind(), ErrorKind::NoSpace, "{failure:?}");
        let next = current.disk_writer(None, 4096, WriteOptions { threads: 1 });
        assert_eq!(next.err().unwrap().kind(), ErrorKind::NoSpace);
        drop(current);
        let left = rustix::fs::statvfs(&path).unwrap();
        let left_bytes = left.f_bavail * left.f_frsize;
        assert!(left_bytes >= 1 << 20, "{left_bytes} bytes are left to make room with");
    }
    for _ in 0..2 {
        let writer = open();
        let machine = MachineName::parse("web01").unwrap();
        let points = writer.repository().points(&machine).unwrap();
        assert_eq!(points, std::slice::from_ref(&document));
        assert_eq!(read_all(&writer.repository().disk(root, kept.len() as u64)), kept);
        // The space of data that did not fit is free again.
        let small = noise(60, 1 << 20);
        let (root, _) = write_all(&writer, None, &small);
        assert_eq!(read_all(&writer.repository().disk(root, small.len() as u64)), small);
    }
    let reader = Repository::open(&path, &source, &OpenOptions::default()).unwrap();
    assert_eq!(read_all(&reader.disk(root, kept.len() as u64)), kept);
}
