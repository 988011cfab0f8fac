//! Damage to a layer that a crash left behind: a read never returns older data.

use std::path::Path;
use std::time::{Duration, Instant};

use coldrise_block::{Disk, ErrorKind};

use super::ReadMode;
use super::format::{
    RECORD_BYTES, SUPERBLOCK_AREA_BYTES, record_offset_bytes, segment_offset_bytes,
    slot_offset_bytes,
};
use super::mark::{MARK_OFFSETS_BYTES, Mark};
use super::tests::{PAGE, SessionPaths, base_bytes, keys};

/// The file's current content: a kill would leave exactly this.
fn kill(place: &SessionPaths) -> Vec<u8> {
    std::fs::read(&place.layer).unwrap()
}

/// The file after a power cut: `changed` pages come from `now`, all others from `synced`.
fn cut(synced: &[u8], now: &[u8], changed: &[u64]) -> Vec<u8> {
    let mut disk = synced.to_vec();
    disk.resize(now.len(), 0);
    for &offset in changed {
        let page = offset as usize / PAGE * PAGE..offset as usize / PAGE * PAGE + PAGE;
        disk[page.clone()].copy_from_slice(&now[page]);
    }
    disk
}

/// The first slot whose record differs.
fn changed_slot(before: &[u8], after: &[u8]) -> u32 {
    let record = |slot: u32| record_offset_bytes(slot) as usize;
    (0..1024)
        .find(|slot| {
            let range = record(*slot)..record(*slot) + RECORD_BYTES;
            before.get(range.clone()) != Some(&after[range])
        })
        .unwrap()
}

/// Two power cuts. The first keeps zero cells without the record of their slot. The second keeps
/// the record of the slot's next use without its new content.
#[test]
fn zeroes_that_a_crash_lost_do_not_come_back_with_the_next_crash() {
    let place = SessionPaths::new();
    let (layer, disk) = place.open();
    disk.write_at(&[1; 16 * PAGE], 0).unwrap();
    disk.flush().unwrap();
    let synced = kill(&place);
    disk.write_zeroes(0, 16 * PAGE as u64).unwrap();
    let now = kill(&place);
    drop((disk, layer));
    let slot = changed_slot(&synced, &now);
    std::fs::write(&place.layer, cut(&synced, &now, &[slot_offset_bytes(slot)])).unwrap();

    let (layer, disk) = place.open();
    let mut expected = base_bytes();
    expected[..16 * PAGE].fill(1);
    let mut found = vec![0; expected.len()];
    disk.read_at(&mut found, 0).unwrap();
    assert!(found == expected);
    let synced = kill(&place);
    disk.write_zeroes(100 * PAGE as u64, PAGE as u64).unwrap();
    let now = kill(&place);
    drop((disk, layer));
    let changed = [record_offset_bytes(slot)];
    std::fs::write(&place.layer, cut(&synced, &now, &changed)).unwrap();
    let (_layer, disk) = place.open();
    disk.read_at(&mut found, 0).unwrap();
    assert!(found == expected, "blocks that read as written read as zeroes");
}

/// Reuses a slot for cells. From the recovery on its record is durable.
#[test]
fn old_content_of_a_reused_cell_slot_is_not_damage_after_recovery() {
    let place = SessionPaths::new();
    let (layer, disk) = place.open();
    disk.write_at(&[1; PAGE], 0).unwrap();
    disk.flush().unwrap();
    disk.write_at(&[2; PAGE], 0).unwrap();
    disk.flush().unwrap();
    let synced = kill(&place);
    disk.write_zeroes(PAGE as u64, PAGE as u64).unwrap();
    let now = kill(&place);
    drop((disk, layer));
    let slot = changed_slot(&synced, &now);
    assert_eq!(slot, 0, "a slot used again");
    std::fs::write(&place.layer, cut(&synced, &now, &[record_offset_bytes(slot)])).unwrap();
    for _ in 0..2 {
        let (layer, disk) = place.open();
        let mut found = [0; PAGE];
        disk.read_at(&mut found, 0).unwrap();
        assert_eq!(found, [2; PAGE]);
        disk.write_at(&[7; PAGE], 9 * PAGE as u64).unwrap();
        disk.flush().unwrap();
        let killed = kill(&place);
        drop((disk, layer));
        std::fs::write(&place.layer, killed).unwrap();
    }
}

/// Changes a file at a slot.
type Damage = fn(&mut [u8], u32);

/// Possible damage to the records of a slot and its neighbours.
const DAMAGES: [(&str, Damage); 9] = [
    ("a sector of zeroes", |file, slot| file[sector(slot)].fill(0)),
    ("a sector of something else", |file, slot| {
        file[sector(slot)].iter_mut().enumerate().for_each(|(i, byte)| *byte ^= i as u8 | 1);
    }),
    ("a record of zeroes", |file, slot| file[record(slot, 64)].fill(0)),
    ("its first 8 bytes", |file, slot| file[record(slot, 8)].fill(0)),
    ("its first 16 bytes", |file, slot| file[record(slot, 16)].fill(0)),
    ("4 KiB of records", |file, slot| {
        let start = record_offset_bytes(slot) as usize / PAGE * PAGE;
        file[start..start + PAGE].fill(0);
    }),
    ("a sector of the slot", |file, slot| {
        let start = slot_offset_bytes(slot) as usize;
        file[start..start + 512].fill(0);
    }),
    ("the slot", |file, slot| {
        let start = slot_offset_bytes(slot) as usize;
        file[start..start + PAGE].fill(0x5a);
    }),
    ("record and slot", |file, slot| {
        file[record(slot, 64)].fill(0);
        let start = slot_offset_bytes(slot) as usize;
        file[start..start + PAGE].fill(0);
    }),
];

fn record(slot: u32, length: usize) -> std::ops::Range<usize> {
    let start = record_offset_bytes(slot) as usize;
    start..start + length
}

fn sector(slot: u32) -> std::ops::Range<usize> {
    let start = record_offset_bytes(slot) as usize / 512 * 512;
    start..start + 512
}

/// Waits until the layer's own thread has written a mark that says that everything is durable. No
/// test asks the thread for it.
fn wait_for_mark(place: &SessionPaths, sequence: u64) {
    let file = std::fs::File::open(&place.layer).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while Mark::read(&file, &place.layer, keys().marks()).unwrap().facts.sequence < sequence {
        assert!(Instant::now() < deadline, "no mark of what was flushed");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The file of a killed session, and the content of its disk: blocks that were flushed repeatedly,
/// and zeroes, by two writers one after the other.
fn written(place: &SessionPaths) -> (Vec<u8>, Vec<u8>) {
    let mut expected = base_bytes();
    expected[20 * PAGE..21 * PAGE].fill(9);
    let (layer, disk) = place.open();
    disk.write_at(&[9; PAGE], 20 * PAGE as u64).unwrap();
    drop((layer, disk));
    let (layer, disk) = place.open();
    for round in 1..=3u8 {
        expected[..16 * PAGE].fill(round);
        disk.write_at(&[round; 16 * PAGE], 0).unwrap();
        disk.flush().unwrap();
    }
    expected[20 * PAGE..24 * PAGE].fill(0);
    disk.write_zeroes(20 * PAGE as u64, 4 * PAGE as u64).unwrap();
    let facts = layer.seal_facts().unwrap();
    wait_for_mark(place, facts.sequence);
    let killed = kill(place);
    drop((layer, disk));
    (killed, expected)
}

fn is_right_or_corrupt(place: &SessionPaths, path: &Path, expected: &[u8], what: &str) {
    let disk = match place.try_open_copy(path) {
        Ok((_layer, disk)) => disk,
        Err(error) => return assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {error}"),
    };
    let mut found = vec![0; expected.len()];
    for (block, right) in expected.chunks(PAGE).enumerate() {
        let found = &mut found[..right.len()];
        match disk.read_at(found, (block * PAGE) as u64) {
            Ok(()) => assert!(*found == *right, "{what}: block {block} is older data"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}"),
        }
    }
}

#[test]
fn damage_to_a_session_that_was_killed_is_never_older_data() {
    let place = SessionPaths::new();
    let (killed, expected) = written(&place);
    let copy = place.layer.with_extension("copy");
    let file = std::fs::File::open(&place.layer).unwrap();
    std::fs::write(&place.layer, &killed).unwrap();
    let mark = Mark::read(&file, &place.layer, keys().marks()).unwrap();
    assert!(!mark.is_closed && mark.facts.slots > 30 && mark.facts.cells == 1, "{mark:?}");
    for (what, damage) in DAMAGES {
        for slot in 0..mark.facts.slots {
            let mut damaged = killed.clone();
            damage(&mut damaged, slot);
            std::fs::write(&copy, &damaged).unwrap();
            is_right_or_corrupt(&place, &copy, &expected, &format!("{what}, slot {slot}"));
        }
    }
    for slot in [0, mark.facts.slots - 1] {
        std::fs::write(&copy, &killed[..slot_offset_bytes(slot) as usize]).unwrap();
        is_right_or_corrupt(&place, &copy, &expected, "cut short");
    }
    // Without damage everything is readable, and so it is with one mark.
    let mut damaged = killed.clone();
    damaged[MARK_OFFSETS_BYTES[mark.number as usize % 2] as usize..][..512].fill(0);
    std::fs::write(&place.layer, &damaged).unwrap();
    let disk = place.open_for_reading(ReadMode::Idle(0)).unwrap();
    let mut found = vec![0; expected.len()];
    disk.read_at(&mut found, 0).unwrap();
    assert!(found == expected);
}

/// Damage to the beginning of a record differs from a store that a kill interrupted.
#[test]
fn a_damaged_record_start_is_not_an_interrupted_store() {
    let place = SessionPaths::new();
    let (layer, disk) = place.open();
    disk.write_at(&[1; 2 * PAGE], 0).unwrap();
    wait_for_mark(&place, layer.seal_facts().unwrap().sequence);
    let killed = kill(&place);
    drop((layer, disk));
    let copy = place.layer.with_extension("copy");
    let open_with = |first: u64| {
        let mut damaged = killed.clone();
        damaged[record(0, 8)].copy_from_slice(&first.to_ne_bytes());
        std::fs::write(&copy, &damaged).unwrap();
        place.try_open_copy(&copy).map(|_| ())
    };
    for first in [0, u64::MAX, 1] {
        assert_eq!(open_with(first).unwrap_err().kind(), ErrorKind::Corrupt);
    }
    open_with(keys().unfinished()).unwrap();
}

/// Slots of writes that failed, or that a crash dropped, have a record. So a record that is lost
/// later is not mistaken for one of these.
#[test]
fn every_slot_below_the_end_has_a_record_after_a_crash() {
    let place = SessionPaths::new();
    let (layer, disk) = place.open();
    disk.write_at(&[1; 4 * PAGE], 0).unwrap();
    disk.flush().unwrap();
    let synced = kill(&place);
    disk.write_at(&[2; 200 * PAGE], 0).unwrap();
    let now = kill(&place);
    drop((layer, disk));
    // Only the second page of records is kept, and no slot.
    std::fs::write(&place.layer, cut(&synced, &now, &[record_offset_bytes(128)])).unwrap();
    let (layer, disk) = place.open();
    let mut expected = base_bytes();
    expected[..4 * PAGE].fill(1);
    let mut found = vec![0; expected.len()];
    disk.read_at(&mut found, 0).unwrap();
    assert!(found == expected);
    assert_eq!(layer.seal_facts().unwrap().slots, 192);
    let settled = kill(&place);
    for slot in 0..192 {
        assert!(settled[record(slot, 64)].iter().any(|byte| *byte != 0), "slot {slot}");
    }
    drop((layer, disk));
}

/// Only the owner closes a layer; the layer's own thread does not.
#[test]
fn a_layer_is_closed_when_its_owner_has_gone() {
    let place = SessionPaths::new();
    for round in 0..300u32 {
        let (layer, disk) = place.open();
        disk.write_at(&[round as u8; PAGE], 0).unwrap();
        layer.want_ahead();
        drop((layer, disk));
        assert!(!place.map.exists(), "round {round}");
        let file = std::fs::File::open(&place.layer).unwrap();
        assert!(Mark::read(&file, &place.layer, keys().marks()).unwrap().is_closed);
    }
}

/// A reader examines records while the writer gives back space that it never used.
#[test]
fn readers_survive_the_release_of_unused_space() {
    let place = SessionPaths::new();
    let (layer, disk) = place.open();
    disk.write_at(&[1; 16 * PAGE], 0).unwrap();
    drop((layer, disk));
    let is_done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..40 {
                drop(place.open());
            }
            is_done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
            if let Err(error) = place.open_for_reading(ReadMode::Idle(0)) {
                assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
            }
        }
    });
}

/// An access to a mapping beyond the end of its file would end this process.
#[test]
fn a_truncated_layer_is_not_accessed_through_its_mapping() {
    let place = SessionPaths::new();
    drop(place.open());
    for bytes in [0, 1, 4095, 4096] {
        std::fs::File::options()
            .write(true)
            .open(&place.layer)
            .and_then(|file| file.set_len(bytes))
            .unwrap();
        super::Layer::announce_change(&place.layer);
        super::Layer::forget_private_map(&place.layer);
        assert_eq!(std::fs::metadata(&place.layer).unwrap().len(), bytes);
    }
}

/// Another process truncates the file under a running session. The records are mapped, and the
/// kernel reports an access beyond the end of a file by SIGBUS.
#[test]
fn a_truncated_file_fails_its_session_and_not_the_process() {
    let (place, other) = (SessionPaths::new(), SessionPaths::new());
    let (_layer, disk) = place.open();
    let (_other_layer, other_disk) = other.open();
    for disk in [&disk, &other_disk] {
        disk.write_at(&[1; 4 * PAGE], 0).unwrap();
        disk.flush().unwrap();
    }
    let file = std::fs::OpenOptions::new().write(true).open(&place.layer).unwrap();
    file.set_len(SUPERBLOCK_AREA_BYTES).unwrap();

    let mut found = [0; PAGE];
    disk.read_at(&mut found, 0).unwrap_err();
    let error = disk.write_at(&[2; PAGE], 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    let error = disk.flush().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");

    other_disk.write_at(&[3; PAGE], 0).unwrap();
    other_disk.flush().unwrap();
    other_disk.read_at(&mut found, 0).unwrap();
    assert_eq!(found, [3; PAGE]);
}

/// The records are whole, so that nothing but the length shows it.
#[test]
fn a_file_that_lost_its_end_takes_no_flush() {
    let place = SessionPaths::new();
    let (_layer, disk) = place.open();
    disk.write_at(&[1; 4 * PAGE], 0).unwrap();
    disk.flush().unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&place.layer).unwrap();
    file.set_len(segment_offset_bytes(1) - 1).unwrap();

    disk.write_at(&[2; PAGE], 0).unwrap();
    let error = disk.flush().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(disk.write_at(&[3; PAGE], 0).unwrap_err().kind(), ErrorKind::Poisoned);
}
