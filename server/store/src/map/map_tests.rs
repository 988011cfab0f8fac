use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;

use super::builder::{MapBuilder, PageSink};
use super::diff::{ChunkRange, for_each_difference};
use super::*;

/// Pages in memory.
#[derive(Default)]
struct Pages {
    stored: HashMap<PageId, (u8, Page)>,
    read: Cell<usize>,
}

impl PageSource for Pages {
    fn page(&self, id: PageId, level: u8) -> Result<Page> {
        self.read.set(self.read.get() + 1);
        let (stored_level, page) = self.stored.get(&id).expect("a page that was stored");
        assert_eq!(*stored_level, level);
        Ok(page.clone())
    }
}

/// Collects built pages. Except for pages stored before it starts, the builder
/// can read them through `Pages` only after `keep`.
struct Sink<'a> {
    pages: &'a std::cell::RefCell<Pages>,
}

impl PageSink for Sink<'_> {
    fn store(&mut self, level: u8, slots: &[u64]) -> Result<PageId> {
        assert_eq!(slots.len(), slots_of(level));
        assert!(slots.iter().any(|slot| *slot != 0), "empty pages are not stored");
        let mut pages = self.pages.borrow_mut();
        let id = pages.stored.len() as u64 + 1;
        pages.stored.insert(id, (level, slots.into()));
        Ok(id)
    }
}

struct Source<'a>(&'a std::cell::RefCell<Pages>);

impl PageSource for Source<'_> {
    fn page(&self, id: PageId, level: u8) -> Result<Page> {
        self.0.borrow().page(id, level)
    }
}

#[derive(Clone, Debug)]
enum Update {
    Set(u64),
    Holes(u64),
}

/// Ascending updates: a gap, then ids or holes.
fn updates() -> impl Strategy<Value = Vec<(u64, Update)>> {
    let gap = prop_oneof![Just(0u64), 0u64..5, 0u64..3000, 0u64..1_000_000];
    let update = prop_oneof![
        3 => (1u64..1000).prop_map(Update::Set),
        1 => prop_oneof![1u64..10, 1u64..5000, 1u64..2_000_000].prop_map(Update::Holes),
    ];
    prop::collection::vec((gap, update), 0..60)
}

type Model = BTreeMap<u64, u64>;

fn apply(
    pages: &std::cell::RefCell<Pages>,
    base: MapRoot,
    model: &mut Model,
    chunks: u64,
    updates: &[(u64, Update)],
) -> MapRoot {
    let source = Source(pages);
    let mut sink = Sink { pages };
    let mut builder = MapBuilder::new(base, chunks, &source, &mut sink).unwrap();
    model.split_off(&chunks);
    let mut at = 0;
    for (gap, update) in updates {
        at += gap;
        if at >= chunks {
            break;
        }
        match update {
            Update::Set(id) => {
                builder.set(at, *id, &source, &mut sink).unwrap();
                model.insert(at, *id);
                at += 1;
            }
            Update::Holes(count) => {
                let count = (*count).min(chunks - at);
                builder.set_holes(at, count, &source, &mut sink).unwrap();
                let after = model.split_off(&(at + count));
                model.split_off(&at);
                model.extend(after);
                at += count;
            }
        }
    }
    builder.finish(&source, &mut sink).unwrap()
}

fn content(source: &dyn PageSource, root: MapRoot) -> Model {
    fn walk(source: &dyn PageSource, id: PageId, level: u8, first: u64, out: &mut Model) {
        for (slot, value) in source.page(id, level).unwrap().iter().enumerate() {
            let index = first + slot as u64 * subtree_chunks(level);
            match (*value, level) {
                (0, _) => {}
                (id, 0) => assert!(out.insert(index, id).is_none()),
                (page, _) => walk(source, page, level - 1, index, out),
            }
        }
    }
    let mut out = Model::new();
    if root.page() != 0 {
        walk(source, root.page(), root.levels() - 1, 0, &mut out);
    }
    out
}

fn expected_difference(from: &Model, to: &Model) -> Vec<ChunkRange> {
    let mut indices: Vec<u64> = from.keys().chain(to.keys()).copied().collect();
    indices.sort_unstable();
    indices.dedup();
    let mut ranges: Vec<ChunkRange> = Vec::new();
    for index in indices {
        if from.get(&index) == to.get(&index) {
            continue;
        }
        let stored = to.contains_key(&index);
        match ranges.last_mut() {
            Some(last) if last.first + last.count == index && last.stored == stored => {
                last.count += 1;
            }
            _ => ranges.push(ChunkRange { first: index, count: 1, stored }),
        }
    }
    ranges
}

fn difference(source: &dyn PageSource, from: MapRoot, to: MapRoot) -> Vec<ChunkRange> {
    let mut ranges = Vec::new();
    for_each_difference(source, from, to, &mut |range| {
        ranges.push(range);
        Ok(())
    })
    .unwrap();
    ranges
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A chain of points, each based on the previous one, with disks that grow
    /// and shrink; no old point changes.
    #[test]
    fn maps_and_their_differences_match_a_model(
        steps in prop::collection::vec(
            (prop_oneof![1u64..3000, 1u64..600_000, 1u64..5_000_000], updates()),
            1..5,
        )
    ) {
        let pages = std::cell::RefCell::new(Pages::default());
        let mut history = vec![(MapRoot::EMPTY, Model::new())];
        for (chunks, updates) in &steps {
            let (base, mut model) = history.last().cloned().unwrap();
            let root = apply(&pages, base, &mut model, *chunks, updates);
            prop_assert_eq!(root.levels(), levels_for(*chunks));
            history.push((root, model));
        }
        for (root, model) in &history {
            prop_assert_eq!(&content(&Source(&pages), *root), model);
        }
        let (last_root, last_model) = history.last().unwrap();
        for (root, model) in &history {
            prop_assert_eq!(
                difference(&Source(&pages), *root, *last_root),
                expected_difference(model, last_model)
            );
        }
    }
}

#[test]
fn an_update_stores_only_the_pages_on_its_way() {
    let pages = std::cell::RefCell::new(Pages::default());
    let chunks = 3_000_000;
    let every: Vec<(u64, Update)> =
        (0..3000).map(|i| (if i == 0 { 0 } else { 999 }, Update::Set(i + 1))).collect();
    let mut model = Model::new();
    let root = apply(&pages, MapRoot::EMPTY, &mut model, chunks, &every);
    let before = pages.borrow().stored.len();
    let next = apply(&pages, root, &mut model, chunks, &[(1_500_000, Update::Set(7))]);
    assert_eq!(pages.borrow().stored.len(), before + usize::from(root.levels()));

    pages.borrow().read.set(0);
    assert_eq!(
        difference(&Source(&pages), root, next),
        [ChunkRange { first: 1_500_000, count: 1, stored: true }]
    );
    assert_eq!(pages.borrow().read.get(), 2 * usize::from(root.levels()));

    // The same ids change nothing and store nothing.
    let stored = pages.borrow().stored.len();
    assert_eq!(apply(&pages, next, &mut model, chunks, &[(1_500_000, Update::Set(7))]), next);
    assert_eq!(pages.borrow().stored.len(), stored);
}

#[test]
fn holes_of_any_size_cost_little() {
    let pages = std::cell::RefCell::new(Pages::default());
    let chunks = subtree_chunks(MAX_LEVELS);
    let mut model = Model::new();
    let ends = [(5, Update::Set(1)), (chunks - 12, Update::Set(2))];
    let root = apply(&pages, MapRoot::EMPTY, &mut model, chunks, &ends);
    assert_eq!(pages.borrow().stored.len(), 2 * 4 - 1);
    pages.borrow().read.set(0);
    let cut = apply(&pages, root, &mut model, chunks, &[(6, Update::Holes(chunks - 12))]);
    assert!(pages.borrow().read.get() <= 8);
    assert_eq!(content(&Source(&pages), cut), model);
    let empty = apply(&pages, cut, &mut model, chunks, &[(0, Update::Holes(chunks))]);
    assert_eq!(empty.page(), 0);
}

#[test]
fn updates_out_of_order_or_bounds_are_refused() {
    let pages = std::cell::RefCell::new(Pages::default());
    let (source, mut sink) = (Source(&pages), Sink { pages: &pages });
    let mut builder = MapBuilder::new(MapRoot::EMPTY, 100, &source, &mut sink).unwrap();
    builder.set(10, 1, &source, &mut sink).unwrap();
    assert!(builder.set(10, 1, &source, &mut sink).is_err());
    assert!(builder.set(100, 1, &source, &mut sink).is_err());
    assert!(builder.set_holes(50, 51, &source, &mut sink).is_err());
    assert!(builder.set_holes(50, u64::MAX, &source, &mut sink).is_err());
    assert!(MapBuilder::new(MapRoot::EMPTY, u64::MAX, &source, &mut sink).is_err());
}

#[test]
fn roots_from_documents_are_checked() {
    for text in [
        r#"{"page":1,"levels":0}"#,
        r#"{"page":1,"levels":5}"#,
        r#"{"page":-1,"levels":1}"#,
        r#"{"page":1,"levels":1,"x":1}"#,
        r#"{"page":1}"#,
    ] {
        assert!(serde_json::from_str::<MapRoot>(text).is_err(), "{text}");
    }
    let root: MapRoot = serde_json::from_str(r#"{"page":9,"levels":4}"#).unwrap();
    assert_eq!(serde_json::to_string(&root).unwrap(), r#"{"page":9,"levels":4}"#);
}
