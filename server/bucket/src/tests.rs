use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use coldrise_block::Disk;
use coldrise_objects::Listed;
use parking_lot::Mutex;
use tempfile::TempDir;

use super::*;
use coldrise_store::{
    BackupTarget, MachineName, MachinePart, PointDocument, PointName, PointOrigin, SWTPM_PERMALL,
    TPM_STATE, WriteOptions,
};

pub(super) const CHUNK: usize = 4096;

/// Objects in memory. Its clock goes on by a minute with each call.
#[derive(Default)]
pub(super) struct Memory {
    objects: Mutex<BTreeMap<String, (Vec<u8>, u64)>>,
    pub(super) clock_minutes: AtomicU64,
    /// Puts that succeed before all later ones fail; below 0: no end.
    puts_left: AtomicI64,
    /// Gets that succeed before all later ones are cancelled; below 0: no end.
    pub(super) gets_left: AtomicI64,
    puts: AtomicU64,
    pub(super) refuses_removal: AtomicBool,
}

impl Memory {
    pub(super) fn new() -> Arc<Memory> {
        let memory = Memory::default();
        memory.puts_left.store(-1, Ordering::Relaxed);
        memory.gets_left.store(-1, Ordering::Relaxed);
        Arc::new(memory)
    }

    pub(super) fn count(&self, prefix: &str) -> usize {
        self.objects.lock().keys().filter(|name| name.starts_with(prefix)).count()
    }

    pub(super) fn flip(&self, name: &str, at: usize) {
        self.objects.lock().get_mut(name).unwrap().0[at] ^= 1;
    }

    pub(super) fn largest_pack(&self) -> String {
        let objects = self.objects.lock();
        let packs = objects.iter().filter(|(name, _)| name.starts_with(pack::FOLDER));
        packs.max_by_key(|(_, (content, _))| content.len()).unwrap().0.clone()
    }
}

impl Objects for Memory {
    fn put(&self, name: &str, content: Vec<u8>) -> Result<()> {
        if self.puts_left.load(Ordering::Relaxed) == 0 {
            return Err(Error::new(ErrorKind::Io, "the bucket is out of reach"));
        }
        self.puts_left.fetch_sub(1, Ordering::Relaxed);
        self.puts.fetch_add(1, Ordering::Relaxed);
        let now = self.clock_minutes.fetch_add(1, Ordering::Relaxed) * 60_000;
        self.objects.lock().insert(name.to_owned(), (content, now));
        Ok(())
    }

    fn get(&self, name: &str, most_bytes: u64) -> Result<Vec<u8>> {
        self.get_range(name, 0, most_bytes)
    }

    fn get_range(&self, name: &str, offset_bytes: u64, length_bytes: u64) -> Result<Vec<u8>> {
        if self.gets_left.load(Ordering::Relaxed) == 0 {
            return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
        self.gets_left.fetch_sub(1, Ordering::Relaxed);
        let objects = self.objects.lock();
        let missing = || Error::new(ErrorKind::NotFound, format!("{name} is not there"));
        let (content, _) = objects.get(name).ok_or_else(missing)?;
        let start = (offset_bytes as usize).min(content.len());
        let end = (offset_bytes.saturating_add(length_bytes) as usize).min(content.len());
        Ok(content[start..end].to_vec())
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>> {
        let objects = self.objects.lock();
        let below = objects.iter().filter(|(name, _)| name.starts_with(prefix));
        Ok(below
            .map(|(name, (content, modified_ms))| Listed {
                name: name.clone(),
                size_bytes: content.len() as u64,
                modified_ms: *modified_ms,
            })
            .collect())
    }

    fn delete(&self, name: &str) -> Result<()> {
        if self.refuses_removal.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Forbidden, "it may not be removed"));
        }
        self.objects.lock().remove(name);
        Ok(())
    }

    fn place(&self) -> &str {
        "memory"
    }
}

pub(super) struct Bucket {
    pub(super) memory: Arc<Memory>,
    pub(super) repository: Arc<BucketRepository>,
    pub(super) local: TempDir,
}

impl Bucket {
    pub(super) fn new() -> Bucket {
        let memory = Memory::new();
        let options = InitOptions {
            chunk_size_bytes: CHUNK as u32,
            compression: Compression::Zstd(1),
            passphrase: None,
        };
        let objects = Arc::clone(&memory) as Arc<dyn Objects>;
        BucketRepository::init(&objects, &options, None).unwrap();
        let repository = open(&memory);
        Bucket { memory, repository, local: TempDir::new().unwrap() }
    }

    pub(super) fn writer(&self) -> Result<BucketWriter> {
        BucketWriter::begin_in(&self.repository, &self.local.path().join("index"))
    }

    /// Adds a point of one disk.
    pub(super) fn add(
        &self,
        second: u32,
        base: Option<&PointDocument>,
        content: &[u8],
    ) -> PointDocument {
        self.try_add(second, base, content).unwrap()
    }

    fn try_add(
        &self,
        second: u32,
        base: Option<&PointDocument>,
        content: &[u8],
    ) -> Result<PointDocument> {
        let writer = self.writer()?;
        let root = base.map(|base| base.disks[0].root);
        let mut disk = writer.start_disk(root, content.len() as u64, WriteOptions::default())?;
        disk.write(0, content.to_vec())?;
        let (root, _) = disk.finish()?;
        let document = point(second, root, content.len() as u64);
        writer.put_point(&document, None)?;
        Ok(document)
    }

    pub(super) fn content(&self, point: &PointDocument) -> Result<Vec<u8>> {
        let disk = open(&self.memory).disk(&point.disks[0]);
        let mut content = vec![0xff; disk.size_bytes() as usize];
        disk.read_at(&mut content, 0)?;
        Ok(content)
    }
}

pub(super) fn open(memory: &Arc<Memory>) -> Arc<BucketRepository> {
    BucketRepository::open(Arc::clone(memory) as Arc<dyn Objects>, &PassphraseSource::None).unwrap()
}

pub(super) fn point(second: u32, root: MapRoot, size_bytes: u64) -> PointDocument {
    PointDocument {
        machine: MachineName::parse("web01").unwrap(),
        point: PointName::parse(&format!("20261125T1000{second:02}Z")).unwrap(),
        created_at_ms: u64::from(second) * 1000,
        origin: PointOrigin::Backup { sources: Vec::new() },
        disks: vec![DiskDocument {
            name: coldrise_store::DiskName::parse("vda").unwrap(),
            size_bytes,
            root,
            layers: Vec::new(),
        }],
        configuration: None,
        parts: vec![MachinePart::new(TPM_STATE, SWTPM_PERMALL, b"keys").unwrap()],
        is_protected: false,
        files: None,
        quarantine: None,
        made_in: None,
        display_name: None,
        came_by: Vec::new(),
    }
}

/// Chunks that do not compress, different for each seed.
pub(super) fn random(seed: u8, chunks: usize) -> Vec<u8> {
    let mut content = vec![0; chunks * CHUNK];
    blake3::Hasher::new().update(&[seed]).finalize_xof().fill(&mut content);
    content
}

#[test]
fn copied_content_reads_back() {
    let bucket = Bucket::new();
    let mut content = random(1, 3000);
    content[5 * CHUNK..900 * CHUNK].fill(0);
    content.extend_from_slice(b"the end");
    let first = bucket.add(1, None, &content);
    assert!(bucket.content(&first).unwrap() == content);
    let disk = bucket.repository.disk(&first.disks[0]);
    let extents = disk.extents(0, disk.size_bytes(), 100).unwrap();
    let lengths: Vec<_> = extents.iter().map(|extent| extent.length_bytes / CHUNK as u64).collect();
    assert_eq!(lengths, [5, 895, 2100]);
    // Parts, at every kind of edge.
    for (offset, length) in [(0, 1), (4095, 2), (CHUNK * 899 + 7, 9000), (content.len() - 3, 3)] {
        let mut part = vec![0xff; length];
        disk.read_at(&mut part, offset as u64).unwrap();
        assert!(part == content[offset..offset + length], "{offset}");
    }
    assert_eq!(bucket.repository.machines().unwrap(), std::slice::from_ref(&first.machine));
    assert_eq!(bucket.repository.points(&first.machine).unwrap(), [first]);
}

#[test]
fn existing_content_is_not_uploaded_again() {
    let bucket = Bucket::new();
    let content = random(1, 2000);
    let first = bucket.add(1, None, &content);
    let sent = |bucket: &Bucket| {
        let listed = bucket.memory.list(pack::FOLDER).unwrap();
        listed.iter().map(|listed| listed.size_bytes).sum::<u64>()
    };
    let before = sent(&bucket);
    // Without a base, and with an index that is made anew.
    std::fs::remove_dir_all(bucket.local.path().join("index")).unwrap();
    let second = bucket.add(2, None, &content);
    assert!(sent(&bucket) - before < 20_000, "{}", sent(&bucket) - before);
    // With a base, only what was changed.
    let mut changed = content.clone();
    changed[7 * CHUNK..9 * CHUNK].copy_from_slice(&random(2, 2));
    let third = bucket.add(3, Some(&second), &changed);
    let disk = |point: &PointDocument| bucket.repository.disk(&point.disks[0]);
    let differences = disk(&third).changed_since(&disk(&second)).unwrap();
    assert_eq!(differences, [(7 * CHUNK as u64, 2 * CHUNK as u64)]);
    assert!(disk(&second).changed_since(&disk(&first)).unwrap().is_empty());
    assert!(bucket.content(&third).unwrap() == changed);
    assert!(bucket.content(&first).unwrap() == content);
}

#[test]
fn equal_chunks_are_stored_once() {
    let bucket = Bucket::new();
    let mut content = random(1, 1).repeat(700);
    content.extend_from_slice(&random(2, 3));
    let writer = bucket.writer().unwrap();
    let mut disk = writer.start_disk(None, content.len() as u64, WriteOptions::default()).unwrap();
    disk.write(0, content.clone()).unwrap();
    let (root, counts) = disk.finish().unwrap();
    assert_eq!((counts.stored_chunks, counts.known_chunks), (4, 699));
    assert!(bucket.content(&point(1, root, content.len() as u64)).unwrap() == content);
}

#[test]
fn disks_grow_and_shrink() {
    let bucket = Bucket::new();
    let content = random(1, 1500);
    let first = bucket.add(1, None, &content);
    // Above the end of the first level of the map, and back.
    let size_bytes = (CHUNK * 600_000) as u64;
    let writer = bucket.writer().unwrap();
    let root = Some(first.disks[0].root);
    let mut disk = writer.start_disk(root, size_bytes, WriteOptions::default()).unwrap();
    let tail = random(3, 2);
    let tail_at = size_bytes - tail.len() as u64;
    disk.write(tail_at, tail.clone()).unwrap();
    let (root, _) = disk.finish().unwrap();
    drop(writer);
    let grown = open(&bucket.memory).disk(&point(2, root, size_bytes).disks[0]);
    let extents = grown.extents(0, size_bytes, 100).unwrap();
    let chunks: Vec<_> = extents.iter().map(|extent| extent.length_bytes / CHUNK as u64).collect();
    assert_eq!(chunks, [1500, 600_000 - 1502, 2]);
    for (offset, wanted) in [(0, &content), (tail_at, &tail)] {
        let mut shown = vec![0; wanted.len()];
        grown.read_at(&mut shown, offset).unwrap();
        assert!(shown == *wanted, "{offset}");
    }
    let small = 10 * CHUNK + 100;
    let writer = bucket.writer().unwrap();
    let disk = writer.start_disk(Some(root), small as u64, WriteOptions::default()).unwrap();
    let (root, _) = disk.finish().unwrap();
    let mut shown = content[..11 * CHUNK].to_vec();
    shown[small..].fill(0);
    assert!(bucket.content(&point(3, root, 11 * CHUNK as u64)).unwrap() == shown);
}

#[test]
fn a_copy_that_ends_anywhere_leaves_whole_points() {
    for puts in 0..12 {
        let bucket = Bucket::new();
        let content = random(1, 560);
        let first = bucket.add(1, None, &content);
        let mut changed = content.clone();
        changed[..540 * CHUNK].copy_from_slice(&random(2, 540));
        bucket.memory.puts_left.store(puts, Ordering::Relaxed);
        let second = bucket.try_add(2, Some(&first), &changed);
        bucket.memory.puts_left.store(-1, Ordering::Relaxed);
        let repository = open(&bucket.memory);
        let points = repository.points(&first.machine).unwrap();
        assert_eq!(points.len(), 1 + usize::from(second.is_ok()), "{puts}");
        assert!(points.iter().all(|point| bucket.content(point).is_ok()));
        let again = bucket.add(3, Some(&first), &changed);
        assert!(bucket.content(&again).unwrap() == changed, "{puts}");
        let report = repository.verify(BucketCheck::Full).unwrap();
        assert_eq!(report.damaged, []);
        repository.compact(false).unwrap();
        assert!(bucket.content(&again).unwrap() == changed, "{puts}");
    }
}

#[test]
fn compaction_removes_only_unreferenced_data() {
    let bucket = Bucket::new();
    let content = random(1, 500);
    let first = bucket.add(1, None, &content);
    let mut changed = random(2, 500);
    changed[..50 * CHUNK].copy_from_slice(&content[..50 * CHUNK]);
    let second = bucket.add(2, Some(&first), &changed);
    // A reader that knows where everything was.
    let reader = open(&bucket.memory);
    let shown = |repository: &Arc<BucketRepository>, point: &PointDocument| {
        let disk = repository.disk(&point.disks[0]);
        let mut content = vec![0; disk.size_bytes() as usize];
        disk.read_at(&mut content, 0).map(|()| content)
    };
    assert!(shown(&reader, &second).unwrap() == changed);
    assert_eq!(bucket.repository.compact(false).unwrap().returned_bytes, 0);
    bucket.repository.remove_point(&first).unwrap();
    let report = open(&bucket.memory).compact(false).unwrap();
    assert!(report.returned_bytes > 430 * CHUNK as u64, "{report:?}");
    assert!(report.rewritten_packs == 1 && report.removed_packs >= 1, "{report:?}");
    assert!(bucket.content(&second).unwrap() == changed);
    assert!(shown(&reader, &second).unwrap() == changed);
    assert_eq!(reader.verify(BucketCheck::Full).unwrap().damaged, []);
    // What was removed is stored again: the index has learnt of it.
    let third = bucket.add(3, None, &content);
    assert!(bucket.content(&third).unwrap() == content);
    assert_eq!(open(&bucket.memory).verify(BucketCheck::Full).unwrap().damaged, []);
}

#[test]
fn a_copy_and_a_compaction_exclude_each_other() {
    let bucket = Bucket::new();
    let writer = bucket.writer().unwrap();
    let refused = bucket.repository.compact(false).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy);
    let second = bucket.writer().map(|_| ()).unwrap_err();
    assert_eq!(second.kind(), ErrorKind::Busy, "one copy has the index");
    drop(writer);
    bucket.repository.compact(false).unwrap();
    assert_eq!(bucket.memory.count("busy/"), 0);
    // One that was killed is forgotten after a quarter of an hour.
    bucket.memory.put("busy/t-killed", Vec::new()).unwrap();
    assert_eq!(bucket.writer().map(|_| ()).unwrap_err().kind(), ErrorKind::Busy);
    bucket.memory.clock_minutes.fetch_add(20, Ordering::Relaxed);
    bucket.writer().unwrap();
}

#[test]
fn damage_is_named_and_never_shown() {
    let bucket = Bucket::new();
    let content = random(1, 500);
    let first = bucket.add(1, None, &content);
    let name = bucket.memory.largest_pack();
    let size = bucket.memory.get(&name, u64::MAX).unwrap().len();
    for at in [0, 9, 13, 25, 2000, size / 2, size - 1] {
        bucket.memory.flip(&name, at);
        let failed = bucket.content(&first).map(|shown| shown == content);
        if let Ok(is_equal) = failed {
            // The names are not needed to read.
            assert!(is_equal, "{at}");
        }
        let report = open(&bucket.memory).verify(BucketCheck::Full).unwrap();
        assert_eq!(report.damaged.len(), 1, "{at}");
        assert!(report.damaged[0].address.ends_with("/vda"), "{at}");
        bucket.memory.flip(&name, at);
    }
    let kept = bucket.memory.get(&name, u64::MAX).unwrap();
    bucket.memory.delete(&name).unwrap();
    assert_eq!(bucket.content(&first).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(open(&bucket.memory).verify(BucketCheck::Quick).unwrap().damaged.len(), 1);
    // Its content is stored again; the old point stays damaged until the pack is back.
    let second = bucket.add(2, None, &content);
    assert!(bucket.content(&second).unwrap() == content);
    bucket.memory.put(&name, kept).unwrap();
    assert_eq!(open(&bucket.memory).verify(BucketCheck::Full).unwrap().damaged, []);
}

#[test]
fn a_bucket_is_made_once() {
    let bucket = Bucket::new();
    let objects = Arc::clone(&bucket.memory) as Arc<dyn Objects>;
    let options = InitOptions {
        chunk_size_bytes: CHUNK as u32,
        compression: Compression::None,
        passphrase: None,
    };
    let again = BucketRepository::init(&objects, &options, None).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::AlreadyExists);
    bucket.add(1, None, &random(1, 10));
    bucket.memory.delete(CONFIG).unwrap();
    // The copy serves.
    open(&bucket.memory);
    bucket.memory.delete(CONFIG_COPY).unwrap();
    let again = BucketRepository::init(&objects, &options, None).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::AlreadyExists);
    let lost = BucketRepository::open(objects, &PassphraseSource::None).map(|_| ()).unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Corrupt);
    let objects = Memory::new() as Arc<dyn Objects>;
    let none = BucketRepository::open(objects, &PassphraseSource::None).map(|_| ()).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::NoRepository);
}
