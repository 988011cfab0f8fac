//! Compares a layer, under a disk view, with a plain byte array.
//!
//! The crash tests cut the power: the file is rebuilt from its content at the last sync and a
//! random choice of the 4 KiB pages written since.

use std::collections::HashMap;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use coldrise_block::{Disk, ErrorKind, Extent, ExtentKind, ReadContext, Result};
use proptest::prelude::*;
use zeroize::Zeroizing;

use super::format::Superblock;
use super::{Layer, LayerKeys, Poison, ReadMode, SealFacts};
use crate::disks::layered_disk::{LayeredDisk, Stack};

pub(super) const PAGE: usize = 4096;
/// Not a multiple of a block, and larger than two groups of the block map.
const DISK_BYTES: u64 = 9 * 1024 * 1024 + 512;

/// A base disk: every third 64 KiB are a hole.
struct Pattern;

static BASE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let byte = |offset: u64| (offset / 512) as u8 ^ offset as u8;
    let mut bytes: Vec<u8> = (0..DISK_BYTES).map(byte).collect();
    bytes.chunks_mut(65536).step_by(3).for_each(|hole| hole.fill(0));
    bytes
});

impl Disk for Pattern {
    fn size_bytes(&self) -> u64 {
        DISK_BYTES
    }
    fn read(&self, buffer: &mut [u8], offset: u64, _: &mut ReadContext) -> Result<()> {
        buffer.copy_from_slice(&BASE[offset as usize..][..buffer.len()]);
        Ok(())
    }
    fn extents(&self, offset_bytes: u64, length_bytes: u64, _: usize) -> Result<Vec<Extent>> {
        let mut extents = Vec::new();
        let mut at = offset_bytes;
        while at < offset_bytes + length_bytes {
            let stop = (at / 65536 * 65536 + 65536).min(offset_bytes + length_bytes);
            let hole = (at / 65536) % 3 == 0;
            let kind = if hole { ExtentKind::Hole } else { ExtentKind::Stored };
            let next = Extent { offset_bytes: at, length_bytes: stop - at, kind };
            coldrise_block::push_extent(&mut extents, next);
            at = stop;
        }
        Ok(extents)
    }
}

pub(super) fn keys() -> LayerKeys {
    LayerKeys::derive(|purpose| Zeroizing::new(*blake3::hash(purpose.as_bytes()).as_bytes()))
}

fn superblock() -> Superblock {
    Superblock { id: [7; 16], disk_size_bytes: DISK_BYTES }
}

pub(super) struct SessionPaths {
    _folder: tempfile::TempDir,
    pub(super) layer: PathBuf,
    pub(super) map: PathBuf,
}

impl SessionPaths {
    pub(super) fn new() -> SessionPaths {
        let folder = tempfile::tempdir().unwrap();
        let layer = folder.path().join("layer");
        let map = folder.path().join("map");
        Layer::create(&layer, &superblock(), &keys()).unwrap();
        SessionPaths { _folder: folder, layer, map }
    }

    pub(super) fn open(&self) -> (Arc<Layer>, LayeredDisk) {
        self.open_copy(&self.layer)
    }

    fn open_copy(&self, path: &Path) -> (Arc<Layer>, LayeredDisk) {
        self.try_open_copy(path).unwrap()
    }

    pub(super) fn try_open_copy(&self, path: &Path) -> Result<(Arc<Layer>, LayeredDisk)> {
        let layer = Layer::open_for_writing(
            path,
            &superblock(),
            keys(),
            &self.map,
            Poison::default(),
            None,
        )?;
        Ok((Arc::clone(&layer), view(layer, false)))
    }

    pub(super) fn open_for_reading(&self, mode: ReadMode<'_>) -> Result<LayeredDisk> {
        let layer = Layer::open_for_reading(&self.layer, &superblock(), keys(), mode)?;
        Ok(view(layer, true))
    }
}

fn view(layer: Arc<Layer>, is_read_only: bool) -> LayeredDisk {
    let base = Arc::new(Pattern);
    LayeredDisk::new(DISK_BYTES, is_read_only, Stack { base, layers: vec![layer] })
}

pub(super) fn base_bytes() -> Vec<u8> {
    BASE.clone()
}

pub(super) fn assert_same(disk: &dyn Disk, model: &[u8]) {
    let mut bytes = vec![0; model.len()];
    disk.read_at(&mut bytes, 0).unwrap();
    if let Some(at) = bytes.iter().zip(model).position(|(a, b)| a != b) {
        panic!("byte {at} is {} and should be {}", bytes[at], model[at]);
    }
    // Extents reported as zero read as zeroes, and extents cover the disk without gaps.
    let mut at = 0;
    while at < model.len() as u64 {
        for extent in disk.extents(at, model.len() as u64 - at, 50).unwrap() {
            assert_eq!(extent.offset_bytes, at);
            let range = at as usize..(at + extent.length_bytes) as usize;
            if extent.kind.reads_zero() {
                assert!(model[range].iter().all(|byte| *byte == 0), "{extent:?}");
            }
            at += extent.length_bytes;
        }
    }
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    Write { offset: u64, length: u64, fill: u8 },
    Zero { offset: u64, length: u64 },
    Trim { offset: u64, length: u64 },
    Read { offset: u64, length: u64 },
    Flush,
    Reopen,
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    let length = prop_oneof![
        4 => 1..20_000u64,
        3 => (1..40u64).prop_map(|blocks| blocks * 4096),
        1 => 1..6_000_000u64,
    ];
    let offset = prop_oneof![0..DISK_BYTES, (0..DISK_BYTES / 4096).prop_map(|block| block * 4096)];
    (offset, length).prop_map(|(offset, length)| (offset, length.min(DISK_BYTES - offset)))
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (range(), any::<u8>())
            .prop_map(|((offset, length), fill)| Step::Write { offset, length, fill }),
        2 => range().prop_map(|(offset, length)| Step::Zero { offset, length }),
        2 => range().prop_map(|(offset, length)| Step::Trim { offset, length }),
        2 => range().prop_map(|(offset, length)| Step::Read { offset, length }),
        2 => Just(Step::Flush),
        1 => Just(Step::Reopen),
    ]
}

impl Step {
    /// The blocks that it may change, in bytes.
    fn blocks(&self) -> Range<usize> {
        match *self {
            Step::Write { offset, length, .. }
            | Step::Zero { offset, length }
            | Step::Trim { offset, length } => {
                let end = (offset + length).next_multiple_of(PAGE as u64).min(DISK_BYTES);
                offset as usize / PAGE * PAGE..end as usize
            }
            Step::Read { .. } | Step::Flush | Step::Reopen => 0..0,
        }
    }
}

pub(super) fn content(offset: u64, length: u64, fill: u8) -> Vec<u8> {
    (0..length).map(|i| fill ^ ((offset + i) / 7) as u8).collect()
}

/// Applies one step to both. A trim leaves partial blocks.
pub(super) fn apply(disk: &LayeredDisk, model: &mut [u8], step: &Step) {
    match *step {
        Step::Write { offset, length, fill } => {
            let bytes = content(offset, length, fill);
            disk.write_at(&bytes, offset).unwrap();
            model[offset as usize..(offset + length) as usize].copy_from_slice(&bytes);
        }
        Step::Zero { offset, length } => {
            disk.write_zeroes(offset, length).unwrap();
            model[offset as usize..(offset + length) as usize].fill(0);
        }
        Step::Trim { offset, length } => {
            disk.trim(offset, length).unwrap();
            let end = offset + length;
            let first = offset.next_multiple_of(4096);
            let last = if end == DISK_BYTES { end } else { end / 4096 * 4096 };
            if first < last {
                model[first as usize..last as usize].fill(0);
            }
        }
        Step::Read { offset, length } => {
            let mut bytes = vec![0; length as usize];
            disk.read_at(&mut bytes, offset).unwrap();
            assert_eq!(bytes, model[offset as usize..(offset + length) as usize]);
        }
        Step::Flush => disk.flush().unwrap(),
        Step::Reopen => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_layered_disk_is_a_byte_array(steps in prop::collection::vec(step(), 1..60)) {
        let place = SessionPaths::new();
        let mut model = base_bytes();
        let mut open = Some(place.open());
        for step in &steps {
            if matches!(step, Step::Reopen) {
                drop(open.take());
                open = Some(place.open());
            }
            apply(&open.as_ref().unwrap().1, &mut model, step);
        }
        assert_same(&open.as_ref().unwrap().1, &model);
        // A reader in another process, while this one has the layer open for writing.
        let live = place.open_for_reading(ReadMode::Attached(&place.map)).unwrap();
        assert_same(&live, &model);
        // The sealed layer is complete. An incomplete one is rejected.
        let facts = open.as_ref().unwrap().0.seal_facts().unwrap();
        drop(open.take());
        prop_assert!(!live.is_current());
        assert_same(&place.open_for_reading(ReadMode::Idle(0)).unwrap(), &model);
        assert_same(&place.open_for_reading(ReadMode::Sealed(facts, u64::MAX)).unwrap(), &model);
        let later = SealFacts { sequence: facts.sequence + 1, ..facts };
        let refused = place.open_for_reading(ReadMode::Sealed(later, u64::MAX)).err().unwrap();
        prop_assert_eq!(refused.kind(), ErrorKind::Corrupt);
    }
}

/// The allowed contents of each block after a crash.
#[derive(Default)]
struct Allowed {
    /// Per block: its content at the last flush, and every content since.
    since_flush: HashMap<usize, Vec<Vec<u8>>>,
}

impl Allowed {
    /// Notes changes of the blocks from number `first` on.
    fn note(&mut self, first: usize, before: &[u8], after: &[u8]) {
        for (block, (before, after)) in (first..).zip(before.chunks(PAGE).zip(after.chunks(PAGE))) {
            if before != after {
                let history =
                    self.since_flush.entry(block).or_insert_with(|| vec![before.to_vec()]);
                history.push(after.to_vec());
            }
        }
    }

    /// Checks the content after a crash.
    fn check(&self, found: &[u8], model: &[u8]) {
        for block in 0..model.len().div_ceil(PAGE) {
            let range = block * PAGE..((block + 1) * PAGE).min(model.len());
            let is_allowed = match self.since_flush.get(&block) {
                Some(history) => history.iter().any(|bytes| *bytes == found[range.clone()]),
                None => model[range.clone()] == found[range],
            };
            assert!(is_allowed, "block {block} is neither what was flushed nor written since");
        }
    }
}

/// A small generator, so that a crash is a function of the test's seed.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// The file after a power cut: every page has its content of the last sync, or its current one.
pub(super) fn cut_power(synced: &[u8], now: &[u8], random: &mut Random) -> Vec<u8> {
    let length = if random.next() % 2 == 0 { now.len() } else { synced.len().min(now.len()) };
    let mut disk = vec![0; length.max(synced.len().min(now.len()))];
    let share = random.next() % 4;
    for page in 0..disk.len() / PAGE {
        let range = page * PAGE..(page + 1) * PAGE;
        let takes_new = match share {
            0 => false,
            1 => true,
            _ => random.next() % 2 == 0,
        };
        let source = if takes_new { now } else { synced };
        if source.len() >= range.end {
            disk[range.clone()].copy_from_slice(&source[range]);
        }
    }
    disk
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_power_cut_loses_nothing_that_was_flushed(
        rounds in prop::collection::vec(prop::collection::vec(step(), 1..25), 1..5),
        seed in 1..u64::MAX,
    ) {
        let place = SessionPaths::new();
        let mut random = Random(seed);
        let mut model = base_bytes();
        for steps in &rounds {
            let (layer, disk) = place.open();
            let mut synced = std::fs::read(&place.layer).unwrap();
            let mut allowed = Allowed::default();
            for step in steps {
                let blocks = step.blocks();
                let before = model[blocks.clone()].to_vec();
                apply(&disk, &mut model, step);
                if matches!(step, Step::Flush) {
                    synced = std::fs::read(&place.layer).unwrap();
                    allowed = Allowed::default();
                } else {
                    allowed.note(blocks.start / PAGE, &before, &model[blocks]);
                }
            }
            let now = std::fs::read(&place.layer).unwrap();
            drop(disk);
            drop(layer);
            std::fs::write(&place.layer, cut_power(&synced, &now, &mut random)).unwrap();
            let (_layer, disk) = place.open();
            let mut found = vec![0; model.len()];
            disk.read_at(&mut found, 0).unwrap();
            allowed.check(&found, &model);
            // Continue from the disk's current content.
            model = found;
        }
    }
}

#[test]
fn rewriting_reuses_slots_once_they_are_flushed() {
    let place = SessionPaths::new();
    let (layer, disk) = place.open();
    for round in 0..200u64 {
        disk.write_at(&content(0, 64 * 4096, round as u8), 0).unwrap();
        disk.flush().unwrap();
    }
    assert!(layer.seal_facts().unwrap().slots <= 2 * 64, "slots are not reused");
    drop(disk);
    drop(layer);
    let length = std::fs::metadata(&place.layer).unwrap().len();
    assert!(length < 6 << 20, "200 rewrites of 256 KiB left {length} bytes");
}

#[test]
fn a_layer_file_contains_no_plaintext() {
    let place = SessionPaths::new();
    let secret = b"the quick brown fox".repeat(300);
    let (layer, disk) = place.open();
    disk.write_at(&secret, 5000).unwrap();
    drop(disk);
    drop(layer);
    let stored = std::fs::read(&place.layer).unwrap();
    assert!(!stored.windows(19).any(|bytes| bytes == b"the quick brown fox"));
}

#[test]
fn equal_content_is_stored_differently_every_time() {
    let place = SessionPaths::new();
    let (_layer, disk) = place.open();
    for block in 0..8 {
        disk.write_at(&[1; 4096], block * 4096).unwrap();
    }
    disk.flush().unwrap();
    let stored = std::fs::read(&place.layer).unwrap();
    let first = super::format::slot_offset_bytes(0) as usize;
    let mut slots: Vec<&[u8]> = stored[first..first + 8 * 4096].chunks(4096).collect();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), 8);
}

#[test]
fn damage_is_reported_and_never_returned() {
    let place = SessionPaths::new();
    let (layer, disk) = place.open();
    disk.write_at(&[9; 8192], 0).unwrap();
    disk.flush().unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&place.layer).unwrap();
    file.write_all_at(&[0xff], super::format::slot_offset_bytes(0) + 100).unwrap();
    let mut bytes = [0; 4096];
    assert_eq!(disk.read_at(&mut bytes, 0).unwrap_err().kind(), ErrorKind::Corrupt);
    disk.read_at(&mut bytes, 4096).unwrap();
    assert_eq!(bytes, [9; 4096]);
    drop((layer, disk));
}

/// Reuses a slot: its old record is durable, and damage to it would be damage to the layer.
#[test]
fn a_kill_in_the_midst_of_a_record_loses_no_more_than_that_write() {
    let place = SessionPaths::new();
    let copy = place.layer.with_extension("copy");
    let (layer, disk) = place.open();
    // The last write has number 521, and the round before the last ends with 480. A mixture of
    // both, the high byte of one and the low byte of the other, is 265.
    const ROUNDS: u8 = 13;
    for byte in 1..=ROUNDS {
        disk.write_at(&[byte; 40 * 4096], 0).unwrap();
        disk.flush().unwrap();
    }
    let before = std::fs::read(&place.layer).unwrap();
    disk.write_at(&[99; 4096], 50 * 4096).unwrap();
    let after = std::fs::read(&place.layer).unwrap();
    drop((layer, disk));
    let record = |slot: u32| {
        let start = super::format::record_offset_bytes(slot) as usize;
        start..start + super::format::RECORD_BYTES
    };
    let changed: Vec<_> =
        (0..100).filter(|slot| before[record(*slot)] != after[record(*slot)]).collect();
    let [slot] = changed[..] else { panic!("{changed:?}") };
    assert_ne!(before[record(slot)], [0; super::format::RECORD_BYTES], "a slot used again");

    let mut kill_after = after.clone();
    kill_after[record(slot)].copy_from_slice(&before[record(slot)]);
    let mut new = [0; super::format::RECORD_BYTES];
    new.copy_from_slice(&after[record(slot)]);
    let mut expected = base_bytes();
    expected[..40 * 4096].fill(ROUNDS);
    let mut steps = 0;
    for (word, value) in crate::layer::mapping::publishing(&new, keys().unfinished()) {
        std::fs::write(&copy, &kill_after).unwrap();
        let (layer, disk) = place.open_copy(&copy);
        assert_same(&disk, &expected);
        drop((disk, layer));
        let start = record(slot).start + word * 8;
        kill_after[start..start + 8].copy_from_slice(&value.to_ne_bytes());
        steps += 1;
    }
    assert!(steps >= 8);
    assert!(kill_after == after);
}

/// Reuses a slot for zero cells: a power cut may keep its record and lose the clearing of its
/// bytes.
#[test]
fn old_content_of_a_reused_zero_slot_is_not_damage_before_its_record_is_durable() {
    let place = SessionPaths::new();
    let copy = place.layer.with_extension("copy");
    let (layer, disk) = place.open();
    for byte in 1..=3 {
        disk.write_at(&[byte; 4096], 0).unwrap();
        disk.flush().unwrap();
    }
    // The record of this write says that the three before it are durable.
    disk.write_at(&[4; 4096], 8 * 4096).unwrap();
    let before = std::fs::read(&place.layer).unwrap();
    disk.write_zeroes(0, 4096).unwrap();
    let mut after = std::fs::read(&place.layer).unwrap();
    let mut expected = base_bytes();
    expected[..4096].fill(0);
    expected[8 * 4096..9 * 4096].fill(4);
    let slots = super::format::slot_offset_bytes(0) as usize;
    let cell = (slots..after.len()).find(|at| before[*at] != after[*at]).unwrap() / 64 * 64;
    // A foreign cell, as old as the first write.
    after[cell + 64..cell + 128].fill(0x5a);
    after[cell + 71..cell + 76].copy_from_slice(&[1, 0, 0, 0, 0]);
    std::fs::write(&copy, &after).unwrap();
    let (opened, read) = place.open_copy(&copy);
    assert_same(&read, &expected);
    drop((read, opened));
    drop((layer, disk));
}

#[test]
fn readers_see_a_block_that_is_rewritten_all_the_time() {
    let place = SessionPaths::new();
    let (_layer, disk) = place.open();
    disk.write_at(&[0; 4096], 0).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let live = place.open_for_reading(ReadMode::Attached(&place.map)).unwrap();
                let mut bytes = [0; 4096];
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    for disk in [&disk as &dyn Disk, &live] {
                        disk.read_at(&mut bytes, 0).unwrap();
                        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a torn block");
                    }
                }
            });
        }
        for round in 0..3000u32 {
            disk.write_at(&[round as u8; 4096], 0).unwrap();
            if round % 10 == 0 {
                disk.flush().unwrap();
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_range_beyond_the_end_is_refused_and_changes_nothing() {
    let place = SessionPaths::new();
    let (_layer, disk) = place.open();
    for (offset, length) in [(DISK_BYTES, 1), (DISK_BYTES - 10, 11), (u64::MAX, 2)] {
        let bytes = vec![1; length as usize];
        assert_eq!(disk.write_at(&bytes, offset).unwrap_err().kind(), ErrorKind::OutOfRange);
        assert_eq!(disk.trim(offset, length).unwrap_err().kind(), ErrorKind::OutOfRange);
    }
    assert_same(&disk, &base_bytes());
}
