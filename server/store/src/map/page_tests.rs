use proptest::prelude::*;

use super::*;
use crate::keys::Keys;
use crate::map::{INNER_SLOTS, LEAF_SLOTS};

const REPOSITORY: RepositoryId = RepositoryId([3; 16]);

fn keys() -> Keys {
    Keys::new(&[5; 32], true).unwrap()
}

fn value_of(id: PageId, level: u8, slots: &[u64]) -> Vec<u8> {
    page_value(&REPOSITORY, &keys().pages, id, level, slots).unwrap()
}

fn parse(id: PageId, level: u8, value: &[u8]) -> Result<Vec<u64>> {
    parse_page_value(&REPOSITORY, &keys().pages, id, level, value)
}

/// Typical slots: runs of holes, of ascending ids, and single ids.
fn slots(count: usize) -> impl Strategy<Value = Vec<u64>> {
    let id = prop_oneof![0u64..10, 1_000_000..1_000_100u64, any::<u64>()];
    prop::collection::vec((id, 1usize..200, any::<bool>()), 1..40).prop_map(move |runs| {
        let mut slots = Vec::new();
        for (first, length, counting) in runs {
            for i in 0..length as u64 {
                slots.push(if counting { first.wrapping_add(i) } else { first });
            }
        }
        slots.resize(count, 0);
        slots
    })
}

proptest! {
    #[test]
    fn every_page_survives(leaf in slots(LEAF_SLOTS), inner in slots(INNER_SLOTS), id in 1u64..) {
        prop_assert_eq!(parse(id, 0, &value_of(id, 0, &leaf)).unwrap(), leaf);
        prop_assert_eq!(parse(id, 2, &value_of(id, 2, &inner)).unwrap(), inner);
    }

    #[test]
    fn any_changed_byte_is_noticed(slots in slots(LEAF_SLOTS), at: prop::sample::Index, mask in 1u8..) {
        let mut value = value_of(9, 0, &slots);
        let at = at.index(value.len());
        value[at] ^= mask;
        prop_assert_eq!(parse(9, 0, &value).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn arbitrary_runs_decode_to_a_full_page_or_not_at_all(runs: Vec<u8>, leaf: bool) {
        let count = if leaf { LEAF_SLOTS } else { INNER_SLOTS };
        if let Some(slots) = decode_runs(&runs, count) {
            prop_assert_eq!(slots.len(), count);
        }
    }

    #[test]
    fn arbitrary_values_are_refused(value: Vec<u8>) {
        prop_assert_eq!(parse(9, 0, &value).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn a_page_opens_only_under_its_id_and_level() {
    let slots: Vec<u64> = (1..=INNER_SLOTS as u64).collect();
    let value = value_of(9, 1, &slots);
    assert_eq!(parse(9, 1, &value).unwrap(), slots);
    for (id, level) in [(10, 1), (9, 2), (9, 0), (9, MAX_LEVELS), (9, 255)] {
        assert_eq!(parse(id, level, &value).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn consecutive_ids_take_almost_nothing_and_the_worst_page_is_within_its_bound() {
    let mut runs = Vec::new();
    encode_runs(&(501..501 + LEAF_SLOTS as u64).collect::<Vec<_>>(), &mut runs);
    assert_eq!(runs.len(), 4);
    runs.clear();
    let worst: Vec<u64> =
        (0..LEAF_SLOTS as u64).map(|i| if i % 2 == 0 { 1 } else { u64::MAX / 2 }).collect();
    encode_runs(&worst, &mut runs);
    assert!(runs.len() <= MAX_SEALED_BYTES);
    assert_eq!(decode_runs(&runs, LEAF_SLOTS).unwrap(), worst);
}

#[test]
fn malformed_runs_are_refused() {
    let whole = (LEAF_SLOTS as u64 - 1) * 2;
    let mut hole = Vec::new();
    put_varint(whole, &mut hole);
    assert!(decode_runs(&hole, LEAF_SLOTS).is_some());
    let mut stored = Vec::new();
    put_varint(whole + 1, &mut stored);
    // The first id: 0; the last one before an overflow of the run.
    let with_first = |delta: u64| {
        let mut runs = stored.clone();
        put_varint(delta, &mut runs);
        decode_runs(&runs, LEAF_SLOTS)
    };
    assert!(with_first(0).is_some());
    assert!(with_first(1).is_none(), "first id 0");
    assert!(with_first(3).is_none(), "counts beyond the largest id");
    for (bytes, why) in [
        (&hole[..1], "truncated varint"),
        (&[hole.clone(), vec![1]].concat()[..], "bytes after the end"),
        (&[hole.clone(), vec![0; QUANTUM_BYTES]].concat()[..], "too much padding"),
        (&[0x80, 0x00][..], "varint not as short as possible"),
        (&[0xff; 11][..], "varint too long"),
        (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02][..], "varint over 64 bits"),
        (&[][..], "nothing"),
    ] {
        assert!(decode_runs(bytes, LEAF_SLOTS).is_none(), "{why}");
    }
    let mut long = Vec::new();
    put_varint(whole + 2, &mut long);
    assert!(decode_runs(&long, LEAF_SLOTS).is_none(), "more slots than the page has");
}
