//! Tests attribution against explicit sets of every point's references.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use proptest::prelude::*;

use super::*;
use crate::map::{Page, PageId, PageSource, slots_of};
use crate::{DiskName, LayerReference, MapRoot};

const CHUNK: u64 = 4096;
const LEAVES: u64 = 6;
const INNER: u64 = 4;

/// Pages 1 to 6 are leaves, 7 to 10 lead to leaves, 11 to 12 to those.
#[derive(Clone, Debug)]
struct Pages(HashMap<PageId, (u8, Vec<(usize, u64)>)>, Cell<usize>);

impl PageSource for Pages {
    fn page(&self, id: PageId, level: u8) -> Result<Page> {
        self.1.set(self.1.get() + 1);
        let (stored_level, filled) = &self.0[&id];
        assert_eq!(*stored_level, level);
        let mut slots = vec![0; slots_of(level)];
        for (slot, id) in filled {
            slots[*slot] = *id;
        }
        Ok(slots.into())
    }
}

fn pages() -> impl Strategy<Value = Pages> {
    let leaf = prop::collection::vec((0usize..1024, 1u64..60), 0..12);
    let inner = prop::collection::vec((0usize..512, 1u64..=LEAVES), 0..4);
    let upper = prop::collection::vec((0usize..512, LEAVES + 1..=LEAVES + INNER), 0..3);
    (
        prop::collection::vec(leaf, LEAVES as usize),
        prop::collection::vec(inner, INNER as usize),
        prop::collection::vec(upper, 2),
    )
        .prop_map(|(leaves, inner, upper)| {
            let all = leaves.into_iter().map(|page| (0, page));
            let all = all.chain(inner.into_iter().map(|page| (1, page)));
            let all = all.chain(upper.into_iter().map(|page| (2, page)));
            Pages((1..).zip(all).collect(), Cell::new(0))
        })
}

fn disk(page: PageId, size_chunks: u64, layers: &[u8]) -> DiskDocument {
    let levels = match page {
        0..=LEAVES => 1,
        7..=10 => 2,
        _ => 3,
    };
    DiskDocument {
        name: DiskName::parse("vda").unwrap(),
        size_bytes: size_chunks * CHUNK - 512,
        root: MapRoot::new(page, levels).unwrap(),
        layers: layers
            .iter()
            .map(|id| LayerReference {
                id: layer(*id),
                sealed_sequence: 1,
                sealed_slots: 1,
                layer_sequence: None,
                marks_until_ms: None,
                sealed_cells: 0,
            })
            .collect(),
    }
}

fn layer(id: u8) -> LayerId {
    LayerId([id; 16])
}

fn machines() -> impl Strategy<Value = Vec<Holdings>> {
    let disk = (
        0u64..=12,
        prop::sample::select(vec![1u64, 700, 1024, 600_000]),
        prop::collection::vec(0u8..6, 0..3),
    );
    let disk = disk.prop_map(|(page, size, layers)| self::disk(page, size, &layers));
    let disks = prop::collection::vec(disk, 1..3);
    let machine = (prop::collection::vec(disks.clone(), 0..4), prop::option::weighted(0.3, disks))
        .prop_map(|(points, sessions)| Holdings { points, sessions: sessions.unwrap_or_default() });
    prop::collection::vec(machine, 1..4)
}

/// The chunks of a map, by index.
fn content(pages: &Pages, root: MapRoot) -> BTreeMap<u64, u64> {
    fn walk(pages: &Pages, page: PageId, level: u8, first: u64, out: &mut BTreeMap<u64, u64>) {
        for (slot, id) in pages.page(page, level).unwrap().iter().enumerate() {
            let index = first + slot as u64 * crate::map::subtree_chunks(level);
            match (level, *id) {
                (_, 0) => {}
                (0, id) => assert!(out.insert(index, id).is_none()),
                (_, id) => walk(pages, id, level - 1, index, out),
            }
        }
    }
    let mut out = BTreeMap::new();
    if root.page() != 0 {
        walk(pages, root.page(), root.levels() - 1, 0, &mut out);
    }
    out
}

/// The chunks and layers of disks.
fn referred(pages: &Pages, disks: &[DiskDocument]) -> (BTreeSet<u64>, BTreeSet<LayerId>) {
    let chunks = disks.iter().flat_map(|disk| content(pages, disk.root).into_values()).collect();
    (chunks, disks.iter().flat_map(|disk| disk.layers.iter().map(|layer| layer.id)).collect())
}

fn without(
    mine: (BTreeSet<u64>, BTreeSet<LayerId>),
    others: impl Iterator<Item = (BTreeSet<u64>, BTreeSet<LayerId>)>,
) -> HeldAmount {
    let (mut chunks, mut layers) = mine;
    for (other_chunks, other_layers) in others {
        chunks.retain(|chunk| !other_chunks.contains(chunk));
        layers.retain(|layer| !other_layers.contains(layer));
    }
    let chunks = chunks.len() as u64;
    HeldAmount { chunks, stored_bytes: chunks * 1000, layers: layers.into_iter().collect() }
}

fn found(pages: &Pages, machines: &[Holdings], window: u64) -> Vec<MachineAttribution> {
    let mut walk = Walk::new(pages, machines, 13, CHUNK, window);
    walk.count_recoverable().unwrap();
    for start in (0..60).step_by(window as usize) {
        walk.own_chunks(start..start + window, &ChunkSizes::all(1000)).unwrap();
    }
    walk.finish()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn exclusive_content_is_in_no_other_set(pages in pages(), machines in machines()) {
        let answer = found(&pages, &machines, 60);
        for (number, (machine, holdings)) in answer.iter().zip(&machines).enumerate() {
            let all = |holdings: &Holdings| {
                let points: Vec<_> = holdings.points.concat();
                referred(&pages, &[points, holdings.sessions.clone()].concat())
            };
            let others = machines.iter().enumerate().filter(|(other, _)| *other != number);
            let elsewhere: Vec<_> = others.map(|(_, other)| all(other)).collect();
            prop_assert_eq!(&machine.alone, &without(all(holdings), elsewhere.clone().into_iter()));
            for (at, (point, disks)) in machine.points.iter().zip(&holdings.points).enumerate() {
                let siblings = holdings.points.iter().enumerate().filter(|(other, _)| *other != at);
                let siblings = siblings.map(|(_, disks)| referred(&pages, disks));
                let sessions = std::iter::once(referred(&pages, &holdings.sessions));
                let rest = elsewhere.clone().into_iter().chain(siblings).chain(sessions);
                prop_assert_eq!(&point.alone, &without(referred(&pages, disks), rest));
                let bytes: u64 = disks.iter().map(|disk| {
                    let last = disk.size_bytes / CHUNK;
                    let content = content(&pages, disk.root);
                    let beyond = if content.contains_key(&last) { 512 } else { 0 };
                    content.len() as u64 * CHUNK - beyond
                }).sum();
                prop_assert_eq!(point.recoverable_bytes, bytes);
            }
        }
        // Several windows give the same result.
        prop_assert_eq!(found(&pages, &machines, 7), answer);
    }
}

#[test]
fn shared_pages_are_read_a_few_times_however_many_points_share_them() {
    let leaves = (1..=6).map(|page| (page, (0, vec![(0, page)])));
    let root = (7, (1, (0..512).map(|slot| (slot, slot as u64 % 6 + 1)).collect()));
    let pages = Pages(leaves.chain([root]).collect(), Cell::new(0));
    let point = vec![disk(7, 600_000, &[])];
    let machines = vec![Holdings { points: vec![point; 1000], sessions: Vec::new() }; 2];
    let answer = found(&pages, &machines, 60);
    assert!(answer.iter().all(|machine| machine.alone.chunks == 0));
    // Each page once to count, and once for each of three owners: one point,
    // one machine, several. The others are the 2,000 visits of a disk's last
    // chunk, one at the root and one at a leaf.
    assert!(pages.1.get() <= 4 * 7 + 2 * 2000, "{}", pages.1.get());
}

#[test]
fn a_page_that_was_never_stored_is_damage() {
    let pages = Pages(HashMap::from([(7, (1, vec![(0, 99)]))]), Cell::new(0));
    let machines = [Holdings { points: vec![vec![disk(7, 1024, &[])]], sessions: Vec::new() }];
    let mut walk = Walk::new(&pages, &machines, 13, CHUNK, 60);
    let error = walk.count_recoverable().unwrap_err();
    assert_eq!(error.kind(), coldrise_block::ErrorKind::Corrupt);
}
