//! Records beside catalogs: what counts as behind, and in which state a target is.

use coldrise_store::PointName;

use super::*;

fn cut(day: u64) -> Cut {
    Cut { created_at_ms: day * 1000, point: name(day) }
}

fn name(day: u64) -> PointName {
    format!("202611{day:02}T100000Z").parse().unwrap()
}

fn points(days: impl IntoIterator<Item = u64>) -> Vec<KnownPoint> {
    days.into_iter()
        .map(|day| KnownPoint { cut: cut(day), is_quarantined: day == 4, before: Vec::new() })
        .collect()
}

fn record(newest: Option<u64>) -> MachineRecord {
    let mut record = MachineRecord::new("web01".parse().unwrap());
    record.newest = newest.map(cut);
    record.seen_at_ms = newest.map(|day| day * 1000);
    record
}

fn shown(record: MachineRecord, days: impl IntoIterator<Item = u64>, now_ms: u64) -> MachineCopies {
    let missing = record.missing(points(days).iter(), false);
    let bytes = Bytes { bytes: 10 * missing.len() as u64, is_exact: true };
    record.into_copies(&"web01".parse().unwrap(), Ok(missing), Some(bytes), now_ms)
}

#[test]
fn points_newer_than_the_newest_copied_one_are_missing() {
    let days = |record: MachineRecord| -> Vec<u64> {
        record
            .missing(points(1..=6).iter(), false)
            .iter()
            .map(|cut| cut.created_at_ms / 1000)
            .collect()
    };
    assert_eq!(days(record(None)), [1, 2, 3, 5, 6], "4 is in quarantine");
    assert_eq!(days(record(Some(3))), [5, 6]);
    assert_eq!(days(record(Some(6))), [0_u64; 0]);
    // It was forgotten here; what came before it is not wanted all the same.
    assert_eq!(days(record(Some(9))), [0_u64; 0]);
    // A copy with --all has not come to these.
    let older = vec![name(2), name(4), name(7)];
    assert_eq!(days(MachineRecord { older, ..record(Some(5)) }), [2, 6]);
    // A point that is dated in the future is there already.
    let ahead = vec![name(6)];
    assert_eq!(days(MachineRecord { ahead, ..record(Some(3)) }), [5]);
}

#[test]
fn a_state_needs_evidence() {
    assert_eq!(shown(record(None), 1..=2, 0).state, CopyState::Never);
    assert_eq!(shown(record(Some(2)), 1..=2, 0).state, CopyState::Current);
    let behind = shown(record(Some(2)), 1..=3, 0);
    assert_eq!((behind.state, behind.points_behind), (CopyState::Behind, Some(1)));
    assert_eq!(behind.behind_since_ms, Some(3000));
    let error = Error::new(ErrorKind::Io, "gone");
    let failed = MachineRecord { failure: Some(FailedCopy::of(&error, 5)), ..record(Some(2)) };
    assert_eq!(shown(failed, 1..=2, 0).state, CopyState::Failing);
    // Its points cannot be read.
    let unread = record(Some(2)).into_copies(&"web01".parse().unwrap(), Err(error), None, 0);
    assert_eq!((unread.state, unread.points_behind), (CopyState::Unknown, None));
    let target = TargetCopies::of(None, vec![behind, unread]);
    assert_eq!((target.state, target.points_behind), (CopyState::Unknown, None));
}

#[test]
fn a_copy_runs_while_its_record_is_fresh() {
    let mut running = record(Some(2));
    running.last.started_at_ms = 1;
    running.last.updated_at_ms = 100_000;
    running.last.bytes_per_second = 5;
    running.last.done_bytes = 3;
    let at = |now_ms| shown(running.clone(), 1..=3, now_ms);
    assert_eq!(at(110_000).state, CopyState::Copying);
    // It was killed; or the clock was set back long ago.
    assert_eq!((at(140_000).state, at(10_000).state), (CopyState::Behind, CopyState::Behind));
    let target = TargetCopies::of(None, vec![at(110_000), shown(record(Some(1)), 1..=2, 0)]);
    assert_eq!((target.state, target.bytes_behind), (CopyState::Copying, Some(20)));
    assert_eq!((target.bytes_per_second, target.remaining_ms), (Some(5), Some(3400)));
    running.last.ended_at_ms = Some(100_000);
    assert_eq!(shown(running, 1..=3, 100_001).state, CopyState::Behind);
}
