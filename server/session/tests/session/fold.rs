//! Folding sealed layers into chunks: all content stays readable as before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::ErrorKind;
use coldrise_session::{
    Catalog, FoldReport, Folded, Session, fold, open_live_disk, open_point_disk, publish, seal,
    session,
};
use coldrise_store::{
    DiskDocument, PointDocument, PointSelector, Repository, RepositoryWriter, WriteOptions,
};
use proptest::prelude::*;

use crate::support::{
    CHUNK, DISK_BYTES, PATIENCE, content, disk_name, name, place, point_bytes, read_all, writer,
};

fn fold_points(writer: &RepositoryWriter, points: &[PointDocument]) -> Folded {
    let options = WriteOptions { threads: 2 };
    let folded = fold(writer, points, options, &|_, _, _| {}, &AtomicBool::new(false)).unwrap();
    assert!(folded.failed.is_none());
    folded
}

fn fold_point(writer: &RepositoryWriter, point: &PointDocument) -> (FoldReport, Folded) {
    let folded = fold_points(writer, std::slice::from_ref(point));
    (folded.points[0], folded)
}

fn stored(repository: &Repository, point: &PointDocument) -> PointDocument {
    repository.catch_up().unwrap();
    repository.point(&point.machine, &point.point).unwrap()
}

fn layer_files(repository: &Repository) -> usize {
    std::fs::read_dir(repository.layers_dir()).unwrap().count()
}

#[test]
fn points_and_sessions_read_as_before_and_the_layers_are_gone() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let mut expected = content(1);
    let mut points = Vec::new();
    for round in 0..3u8 {
        let open = Session::open(&repository, &name("trial")).unwrap();
        let vda = open.disk(&disk_name("vda")).unwrap();
        let at = 70_000 * (usize::from(round) + 1);
        vda.write_at(&[round + 10; 50_000], at as u64).unwrap();
        expected[at..at + 50_000].fill(round + 10);
        // A whole chunk, and a part of one.
        let zeroed = (1 << 20) + usize::from(round) * 100_000..(1 << 20) + 90_000 * 3;
        vda.write_zeroes(zeroed.start as u64, zeroed.len() as u64).unwrap();
        expected[zeroed].fill(0);
        points.push((open.seal().unwrap().point, expected.clone()));
    }
    let live = open_live_disk(&repository, &name("trial"), &disk_name("vda")).unwrap();
    assert_eq!(read_all(&*live), expected);

    let writer = writer(&place.path);
    let (report, folded) = fold_point(&writer, &points[0].0);
    assert_eq!((folded.other_points, folded.sessions, report.removed_layers), (2, 1, 1));
    assert!(report.removed_bytes > 0);
    // The other points no longer have the lower layer, and keep their own.
    let second = stored(&repository, &points[1].0);
    assert_eq!(second.disk(&disk_name("vda")).unwrap().layers.len(), 1);
    let (report, folded) = fold_point(&writer, &points[2].0);
    assert_eq!((folded.other_points, report.removed_layers), (0, 1));
    fold_point(&writer, &points[1].0);

    for (point, bytes) in &points {
        let point = stored(&repository, point);
        assert!(point.disks.iter().all(|disk| disk.layers.is_empty()));
        assert_eq!(point_bytes(&repository, &point, "vda"), *bytes);
        assert_eq!(point_bytes(&repository, &point, "vdb"), content(2));
    }
    assert_eq!(point_bytes(&repository, &place.point, "vda"), content(1));
    // Only the session's own, empty layers are left, and an open disk stays readable.
    assert_eq!(layer_files(&repository), 2);
    assert!(session(&repository, &name("trial")).unwrap().document.disks[0].layers.is_empty());
    assert_eq!(read_all(&*live), expected);
    let open = Session::open(&repository, &name("trial")).unwrap();
    open.disk(&disk_name("vda")).unwrap().write_at(&[99; 512], 0).unwrap();
    expected[..512].fill(99);
    assert_eq!(read_all(&*live), expected);
    assert_eq!(point_bytes(&repository, &open.seal().unwrap().point, "vda"), expected);
}

#[test]
fn a_fold_shares_chunks_with_existing_disks() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let open = Session::open(&repository, &name("trial")).unwrap();
    // Write the content of the other disk, chunk by chunk.
    let vda = open.disk(&disk_name("vda")).unwrap();
    vda.write_at(&content(2)[..8 * CHUNK as usize], 0).unwrap();
    let point = open.seal().unwrap().point;
    let writer = writer(&place.path);
    let (report, _) = fold_point(&writer, &point);
    assert_eq!(report.read_bytes, 8 * CHUNK);
    assert_eq!((report.stored_chunks, report.stored_bytes), (0, 0));
    // A second fold has nothing to do.
    assert_eq!(fold_point(&writer, &point).0, FoldReport::default());
}

#[test]
fn a_served_session_is_moved_and_its_readers_continue() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let open = Session::open(&repository, &name("trial")).unwrap();
    let vda = open.disk(&disk_name("vda")).unwrap();
    let live = open_live_disk(&repository, &name("trial"), &disk_name("vda")).unwrap();
    let mut expected = content(1);
    let mut points = Vec::new();
    for round in 0..3u8 {
        let at = usize::from(round) * 4096;
        vda.write_at(&[round + 7; 8192], at as u64).unwrap();
        expected[at..at + 8192].fill(round + 7);
        points.push((open.seal().unwrap().point, expected.clone()));
    }
    // Written and not sealed: these bytes stay in the layer.
    vda.write_at(&[99; 4096], 4096).unwrap();
    expected[4096..8192].fill(99);
    assert_eq!(layer_files(&repository), 5);
    let writer = writer(&place.path);
    for (left, (point, _)) in (0..3).rev().zip(&points) {
        let (report, folded) = fold_point(&writer, point);
        assert_eq!((folded.sessions, folded.served_sessions, report.removed_layers), (1, 0, 1));
        assert_eq!(open.document().disks[0].layers.len(), left);
        assert_eq!(
            open.document().disks,
            session(&repository, &name("trial")).unwrap().document.disks
        );
        assert_eq!(read_all(&*vda), expected);
        assert_eq!(read_all(&*live), expected);
    }
    assert_eq!(layer_files(&repository), 2);
    for (point, bytes) in &points {
        assert_eq!(point_bytes(&repository, &stored(&repository, point), "vda"), *bytes);
    }
    vda.write_at(&[8; 512], 100_000).unwrap();
    expected[100_000..100_512].fill(8);
    assert_eq!(read_all(&*live), expected);
    let last = open.seal().unwrap().point;
    assert_eq!(last.disk(&disk_name("vda")).unwrap().layers.len(), 1);
    assert_eq!(point_bytes(&repository, &last, "vda"), expected);
    drop((vda, open));
    assert_eq!(
        read_all(
            &*Session::open(&repository, &name("trial")).unwrap().disk(&disk_name("vda")).unwrap()
        ),
        expected
    );
}

/// The fold and the seals of the served session change the same document.
#[test]
fn seals_and_writes_beside_folds_lose_nothing() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let open = Session::open(&repository, &name("trial")).unwrap();
    let vda = open.disk(&disk_name("vda")).unwrap();
    let write_and_seal = || {
        let (mut expected, mut points) = (content(1), Vec::new());
        for round in 0..16u64 {
            let (at, byte) = ((round * 37 % 61) * 5000, round as u8 + 1);
            vda.write_at(&[byte; 9000], at).unwrap();
            expected[at as usize..at as usize + 9000].fill(byte);
            let point = open.seal().unwrap().point.point;
            assert!(read_all(&*vda) == expected, "round {round}");
            if round % 8 == 0 {
                points.push((point, expected.clone()));
            }
        }
        points
    };
    let machine = &place.point.machine;
    let (points, moved) = std::thread::scope(|scope| {
        let seals = scope.spawn(write_and_seal);
        let writer = writer(&place.path);
        let (mut moved, mut is_last) = (0, false);
        while !is_last {
            // The last round folds the layers of the last seal.
            is_last = seals.is_finished();
            for point in Catalog::new(writer.repository()).points(machine).unwrap() {
                moved += fold_point(&writer, &point).1.sessions;
            }
        }
        (seals.join().unwrap(), moved)
    });
    assert!(moved > 1, "{moved}");
    assert_eq!(open.document().disks[0].layers.len(), 0);
    assert_eq!(layer_files(&repository), 2);
    repository.catch_up().unwrap();
    for (point, bytes) in points {
        let point = repository.point(machine, &point).unwrap();
        assert!(point_bytes(&repository, &point, "vda") == bytes, "{}", point.point);
    }
}

#[test]
fn a_cancelled_fold_changes_nothing() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let open = Session::open(&repository, &name("trial")).unwrap();
    open.disk(&disk_name("vda")).unwrap().write_at(&[7; 4096], 0).unwrap();
    let point = open.seal().unwrap().point;
    drop(open);
    let writer = writer(&place.path);
    let cancel = AtomicBool::new(true);
    let points = std::slice::from_ref(&point);
    let refused = fold(&writer, points, WriteOptions { threads: 1 }, &|_, _, _| {}, &cancel);
    assert_eq!(refused.unwrap().failed.unwrap().kind(), ErrorKind::Interrupted);
    assert_eq!(stored(&repository, &point), point);
    assert_eq!(fold_point(&writer, &point).0.removed_layers, 1);
}

#[test]
fn points_before_a_cancelled_one_are_folded() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let open = Session::open(&repository, &name("trial")).unwrap();
    let vda = open.disk(&disk_name("vda")).unwrap();
    let mut points = Vec::new();
    for round in 0..4u8 {
        vda.write_at(&[round + 1; 4096], 0).unwrap();
        points.push(open.seal().unwrap().point);
    }
    let writer = writer(&place.path);
    let cancel = AtomicBool::new(false);
    let third = |point: &PointDocument, _: &DiskDocument, _| {
        cancel.store(point.point == points[2].point, Ordering::Relaxed);
    };
    let folded = fold(&writer, &points, WriteOptions { threads: 1 }, &third, &cancel).unwrap();
    assert_eq!(folded.failed.unwrap().kind(), ErrorKind::Interrupted);
    let removed: Vec<u64> = folded.points.iter().map(|point| point.removed_layers).collect();
    assert_eq!((removed, folded.other_points, folded.sessions), (vec![1, 1], 2, 1));
    for (point, layers) in points.iter().zip([0, 0, 1, 2]) {
        let point = stored(&repository, point);
        assert_eq!(point.disk(&disk_name("vda")).unwrap().layers.len(), layers);
    }
    let removed: u64 = fold_points(&writer, &points).points.iter().map(|p| p.removed_layers).sum();
    assert_eq!((removed, layer_files(&repository)), (2, 2));
    for (round, point) in points.iter().enumerate() {
        let bytes = point_bytes(&repository, &stored(&repository, point), "vda");
        assert_eq!(bytes[..4096], [round as u8 + 1; 4096]);
    }
}

/// A reader must not continue with the state of the session before it was served.
#[test]
fn a_reader_of_an_idle_session_sees_the_state_after_a_seal() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let write = |byte: u8, at: u64| {
        let open = Session::open(&repository, &name("trial")).unwrap();
        open.disk(&disk_name("vda")).unwrap().write_at(&[byte; 512], at).unwrap();
    };
    write(1, 0);
    let live = open_live_disk(&repository, &name("trial"), &disk_name("vda")).unwrap();
    seal(&repository, &name("trial"), PATIENCE).unwrap();
    write(2, 512);
    let mut found = [0; 1024];
    live.read_at(&mut found, 0).unwrap();
    assert_eq!((found[0], found[512]), (1, 2));
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        at: u64,
        length: u64,
        byte: u8,
    },
    Zeroes {
        at: u64,
        length: u64,
    },
    Seal,
    /// The point with this number, or all if there is none.
    Fold {
        which: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..DISK_BYTES, 1..200_000u64);
    let range = range.prop_map(|(at, length)| (at, length.min(DISK_BYTES - at)));
    prop_oneof![
        4 => (range.clone(), 1..=255u8)
            .prop_map(|((at, length), byte)| Step::Write { at, length, byte }),
        2 => range.prop_map(|(at, length)| Step::Zeroes { at, length }),
        2 => Just(Step::Seal),
        2 => (0..8usize).prop_map(|which| Step::Fold { which }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn in_any_order_every_point_reads_as_it_was_sealed(
        steps in proptest::collection::vec(step(), 1..24),
        is_served in any::<bool>(),
    ) {
        read_as_sealed(steps, is_served);
    }
}

#[test]
fn a_point_whose_layers_an_earlier_fold_moved_is_folded() {
    let zeroes = Step::Zeroes { at: 3_353_890, length: 199_787 };
    let write = Step::Write { at: 0, length: 29, byte: 93 };
    let (first, third) = (Step::Fold { which: 0 }, Step::Fold { which: 2 });
    read_as_sealed(vec![write, Step::Seal, zeroes, Step::Seal, first, Step::Seal, third], false);
}

fn read_as_sealed(steps: Vec<Step>, is_served: bool) {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let mut open: Option<Arc<Session>> = None;
    let mut expected = content(1);
    let mut points: Vec<(PointDocument, Vec<u8>)> = Vec::new();
    for step in steps {
        let session =
            open.take().unwrap_or_else(|| Session::open(&repository, &name("trial")).unwrap());
        let vda = session.disk(&disk_name("vda")).unwrap();
        match step {
            Step::Write { at, length, byte } => {
                vda.write_at(&vec![byte; length as usize], at).unwrap();
                expected[at as usize..(at + length) as usize].fill(byte);
            }
            Step::Zeroes { at, length } => {
                vda.write_zeroes(at, length).unwrap();
                expected[at as usize..(at + length) as usize].fill(0);
            }
            Step::Seal => points.push((session.seal().unwrap().point, expected.clone())),
            Step::Fold { which } => {
                open = is_served.then_some(session);
                drop(vda);
                let all = || points.iter().map(|(point, _)| point.clone()).collect();
                let chosen = points.get(which).map_or_else(all, |(point, _)| vec![point.clone()]);
                fold_points(&writer(&place.path), &chosen);
                continue;
            }
        }
        open = is_served.then_some(session);
    }
    // A reader sees points that were folded after it was opened.
    repository.catch_up().unwrap();
    for (point, bytes) in &points {
        let point = Catalog::new(&repository)
            .point(&point.machine, &PointSelector::Exact(point.point.clone()))
            .unwrap();
        assert!(point_bytes(&repository, &point, "vda") == *bytes);
    }
    let live = open_live_disk(&repository, &name("trial"), &disk_name("vda")).unwrap();
    assert!(read_all(&*live) == expected);
    let original = open_point_disk(&repository, &place.point, &disk_name("vda")).unwrap();
    assert!(read_all(&*original) == content(1));
}
