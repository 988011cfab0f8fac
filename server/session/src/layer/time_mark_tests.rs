//! Compares a layer at its time marks with copies of a byte array.

use std::collections::{BTreeMap, BTreeSet};

use coldrise_block::Disk;
use proptest::prelude::*;

use super::tests::{
    Random, SessionPaths, Step, apply, assert_same, base_bytes, content, cut_power, step,
};
use super::{Layer, ReadMode, RemovedMarks, TimeMark};

const BLOCK: u64 = 4096;

#[derive(Clone, Debug)]
enum Event {
    Step(Step),
    Mark,
    /// Removes the marks from one place in their list to another, in 256ths of its length.
    Remove(u8, u8),
    Close,
    CutPower,
}

fn event() -> impl Strategy<Value = Event> {
    // Rewrites of the same few blocks, so that slots are superseded, kept, freed and reused.
    let rewrite = (0..12u64, 1..5u64, any::<u8>()).prop_map(|(first, blocks, fill)| {
        Event::Step(Step::Write { offset: first * BLOCK, length: blocks * BLOCK, fill })
    });
    let zero = (0..12u64, 1..5u64).prop_map(|(first, blocks)| {
        Event::Step(Step::Zero { offset: first * BLOCK, length: blocks * BLOCK })
    });
    prop_oneof![
        10 => rewrite,
        2 => zero,
        2 => step().prop_map(Event::Step),
        4 => Just(Event::Step(Step::Flush)),
        6 => Just(Event::Mark),
        2 => (any::<u8>(), any::<u8>()).prop_map(|(from, to)| Event::Remove(from, to)),
        1 => Just(Event::Close),
        1 => Just(Event::CutPower),
    ]
}

/// Adds a mark under the next time, and returns the time.
fn mark(layer: &Layer, time_ns: u64) {
    layer.reserve_time_marks().unwrap();
    let paused = layer.pause_writes().unwrap();
    layer.add_time_mark(&paused, time_ns, time_ns << 7).unwrap();
}

fn removed(layer: &Layer, from: u8, to: u8) -> Option<RemovedMarks> {
    let marks = layer.time_marks();
    let at = |place: u8| marks.get(usize::from(place) * marks.len() / 256).map(|m| m.sequence);
    Some(RemovedMarks { first: at(from.min(to))?, last: at(from.max(to))? })
}

/// Checks every mark that a reader of the closed layer finds.
fn check_marks(place: &SessionPaths, contents: &BTreeMap<u64, Vec<u8>>) -> BTreeSet<u64> {
    let (layer, disk) = place.open();
    let (facts, marks) = (layer.seal_facts().unwrap(), layer.time_marks());
    drop((layer, disk));
    for mark in &marks {
        let view = place.open_for_reading(ReadMode::Sealed(facts, mark.sequence)).unwrap();
        assert_same(&view, &contents[&mark.time_ns]);
        let seen = view.top().unwrap().time_marks();
        let before: Vec<_> = marks.iter().filter(|m| m.sequence <= mark.sequence).collect();
        assert_eq!(seen.iter().collect::<Vec<_>>(), before);
    }
    times(&marks)
}

fn times(marks: &[TimeMark]) -> BTreeSet<u64> {
    marks.iter().map(|mark| mark.time_ns).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_disk_at_each_mark_is_what_it_was(
        events in prop::collection::vec(event(), 1..80),
        seed in 1..u64::MAX,
    ) {
        let place = SessionPaths::new();
        let mut random = Random(seed);
        let mut model = base_bytes();
        let mut contents = BTreeMap::new();
        let mut open = Some(place.open());
        let mut synced = std::fs::read(&place.layer).unwrap();
        // The marks that a crash must not lose: a later record, also durable, says that they are.
        let (mut durable, mut flushed) = (BTreeSet::new(), BTreeSet::new());
        for (time_ns, event) in (1..).zip(&events) {
            let (layer, disk) = open.as_ref().unwrap();
            match event {
                Event::Step(step) => {
                    apply(disk, &mut model, step);
                    if matches!(step, Step::Flush) {
                        let now = std::fs::read(&place.layer).unwrap();
                        if now != synced {
                            durable = std::mem::replace(&mut flushed, times(&layer.time_marks()));
                        }
                        synced = now;
                    }
                }
                Event::Mark => {
                    mark(layer, time_ns);
                    contents.insert(time_ns, model.clone());
                }
                Event::Remove(from, to) => {
                    let ranges: Vec<_> = removed(layer, *from, *to).into_iter().collect();
                    layer.remove_time_marks(&ranges).unwrap();
                    let left = times(&layer.time_marks());
                    durable.retain(|time| left.contains(time));
                    flushed.retain(|time| left.contains(time));
                    assert!(ranges.iter().all(|range| {
                        let is_in = |mark: &TimeMark| {
                            (range.first..=range.last).contains(&mark.sequence)
                        };
                        !layer.time_marks().iter().any(is_in)
                    }));
                }
                Event::Close => {
                    durable = times(&layer.time_marks());
                    drop(open.take());
                    prop_assert_eq!(&check_marks(&place, &contents), &durable);
                    flushed.clone_from(&durable);
                    open = Some(place.open());
                    synced = std::fs::read(&place.layer).unwrap();
                }
                Event::CutPower => {
                    let now = std::fs::read(&place.layer).unwrap();
                    drop(open.take());
                    std::fs::write(&place.layer, cut_power(&synced, &now, &mut random)).unwrap();
                    let found = check_marks(&place, &contents);
                    assert!(found.is_superset(&durable), "{found:?} of {durable:?}");
                    open = Some(place.open());
                    let disk = &open.as_ref().unwrap().1;
                    disk.read_at(&mut model, 0).unwrap();
                    synced = std::fs::read(&place.layer).unwrap();
                    flushed.clone_from(&found);
                    durable = found;
                }
            }
        }
        drop(open.take());
        check_marks(&place, &contents);
    }
}

#[test]
fn the_slots_of_removed_marks_are_reused() {
    let place = SessionPaths::new();
    let (layer, disk) = place.open();
    let rewrite = |round: u8| {
        disk.write_at(&content(0, 64 * BLOCK, round), 0).unwrap();
        disk.flush().unwrap();
    };
    for round in 0..20 {
        rewrite(round);
        mark(&layer, u64::from(round) + 1);
    }
    rewrite(20);
    // Each rewrite but the last superseded 64 slots that a mark needs.
    assert_eq!(layer.kept_bytes(), 20 * 64 * BLOCK);
    let slots = layer.seal_facts().unwrap().slots;
    let marks = layer.time_marks();
    let range = RemovedMarks { first: marks[1].sequence, last: marks[18].sequence };
    layer.remove_time_marks(&[range]).unwrap();
    assert_eq!(layer.kept_bytes(), 2 * 64 * BLOCK);
    assert_eq!(layer.time_marks(), [marks[0], marks[19]]);
    for round in 0..100 {
        rewrite(round);
    }
    // One more slot may hold cells.
    assert!(layer.seal_facts().unwrap().slots <= slots + 64 + 1, "slots are not reused");
    assert!(layer.remove_all_time_marks().unwrap());
    assert_eq!((layer.kept_bytes(), layer.time_marks().len()), (0, 0));
    assert!(!layer.remove_all_time_marks().unwrap());
}

#[test]
fn only_writes_count_as_unmarked() {
    let place = SessionPaths::new();
    let (layer, disk) = place.open();
    assert!(!layer.has_unmarked_writes());
    disk.write_at(&[1; 100], 5).unwrap();
    assert!(layer.has_unmarked_writes());
    for time_ns in 1..100 {
        mark(&layer, time_ns);
        assert!(!layer.has_unmarked_writes());
    }
    let first = layer.time_marks()[0].sequence;
    layer.remove_time_marks(&[RemovedMarks { first, last: first }]).unwrap();
    assert!(!layer.has_unmarked_writes());
    disk.trim(0, 8192).unwrap();
    assert!(layer.has_unmarked_writes());
    mark(&layer, 100);
    drop((layer, disk));
    let (layer, disk) = place.open();
    assert!(!layer.has_unmarked_writes());
    disk.write_at(&[2; 100], 5).unwrap();
    drop((layer, disk));
    assert!(place.open().0.has_unmarked_writes(), "written after the last mark");
}

#[test]
fn a_write_without_space_takes_the_space_of_marks() {
    let place = SessionPaths::new();
    let (layer, disk) = place.open();
    // Space for the disk's blocks twice and for cells, not for a third state.
    layer.bound((2 * 64 + 8) * BLOCK);
    for round in 0..10 {
        disk.write_at(&content(0, 64 * BLOCK, round), 0).unwrap();
        disk.flush().unwrap();
        mark(&layer, u64::from(round) + 1);
    }
    let mut bytes = vec![0; 64 * BLOCK as usize];
    disk.read_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, content(0, 64 * BLOCK, 9));
}

#[test]
fn marks_of_quick_rounds_count_after_a_power_cut_without_a_later_flush() {
    let place = SessionPaths::new();
    let (layer, disk) = place.open();
    for time_ns in 1..=4 {
        disk.write_at(&[time_ns as u8; 4096], 0).unwrap();
        mark(&layer, time_ns);
        layer.flush_time_marks().unwrap();
    }
    let durable = std::fs::read(&place.layer).unwrap();
    // A round that did not end.
    disk.write_at(&[9; 4096], 0).unwrap();
    drop((layer, disk));
    std::fs::write(&place.layer, durable).unwrap();
    let (layer, _disk) = place.open();
    assert_eq!(times(&layer.time_marks()), (1..=4).collect());
}
