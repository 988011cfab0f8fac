//! Tests of runs in one process: two descriptors of one lock conflict as two processes do.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use coldrise_block::ErrorKind;
use serde_json::json;

use crate::{Failure, Plan, Run, RunId, RunsFolder, State, Who, history};

pub(crate) fn plan(command: &str) -> Plan {
    Plan {
        command: command.to_owned(),
        arguments: vec!["backup".to_owned(), "web01".to_owned()],
        repository: Some("/srv/repository".to_owned()),
        machine: Some("web01".to_owned()),
        point: None,
        who: Who::this_process(),
        started_at_ms: 1,
        job: None,
        requested_by: None,
        attempt: 0,
    }
}

pub(crate) fn begin(folder: &RunsFolder, command: &str) -> Run {
    Run::begin(Some(folder), &plan(command), |text| panic!("{text}"), || {})
}

pub(crate) fn state(folder: &RunsFolder, run: &Run) -> State {
    folder.read(run.id().unwrap()).unwrap().state
}

#[test]
fn a_finished_run_has_the_state_of_its_result() {
    let home = tempfile::tempdir().unwrap();
    let folder = RunsFolder::at(home.path().join("a/runs"));
    assert!(folder.list(usize::MAX).unwrap().runs.is_empty());
    for (code, expected) in [(0, State::Ok), (11, State::Failed), (130, State::Cancelled)] {
        let run = begin(&folder, "serve nbd");
        assert_eq!(state(&folder, &run), State::Running);
        let error = Failure { kind: "busy".into(), message: "nbd://a:b@c is busy".into() };
        run.log("warn", "reading nbd://user:pw@host");
        run.finish(code, Some(error), Some(json!({"points": 3})));
        run.finish(1, None, None);
        assert_eq!(state(&folder, &run), expected);
        let record = folder.read(run.id().unwrap()).unwrap();
        assert_eq!(record.plan.unwrap(), plan("serve nbd"));
        let result = record.result.unwrap();
        assert_eq!(result.error.unwrap().message, "nbd://***@c is busy");
        assert_eq!(result.counts.unwrap()["points"], 3);
        let lines = folder.last_lines(run.id().unwrap(), 1).unwrap();
        assert_eq!(lines[0].text, "reading nbd://***@host");
    }
    let lost = begin(&folder, "gc");
    let id = lost.id().unwrap().clone();
    drop(lost);
    assert_eq!(folder.read(&id).unwrap().state, State::Lost);
    let running = begin(&folder, "gc");
    for i in 0..3 {
        finished(&folder, &format!("20990101T000000Z-000{i}-gc"));
    }
    let short = folder.list(2).unwrap();
    let ids: Vec<_> = short.runs.iter().map(|run| run.id.as_str()).collect();
    let newest = ["20990101T000000Z-0002-gc", "20990101T000000Z-0001-gc"];
    assert_eq!(
        (ids, short.hidden),
        (vec![running.id().unwrap().as_str(), newest[0], newest[1]], 5)
    );
    let list = folder.list(usize::MAX).unwrap();
    assert_eq!((list.runs.len(), list.runs[0].id.as_str()), (8, running.id().unwrap().as_str()));
}

#[test]
fn files_of_a_run_are_private() {
    let home = tempfile::tempdir().unwrap();
    let folder = RunsFolder::at(home.path().join("runs"));
    let run = begin(&folder, "gc");
    let path = folder.run_path(run.id().unwrap());
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!([mode(folder.path()), mode(&path)], [0o700, 0o700]);
    run.finish(0, None, None);
    for name in ["plan.json", "lock", "log", "result.json"] {
        assert_eq!(mode(&path.join(name)), 0o600, "{name}");
    }
    assert!(!path.join("control").exists());
}

#[test]
fn a_run_is_cancelled_once_by_its_socket_whatever_the_length_of_its_path() {
    let home = tempfile::tempdir().unwrap();
    let folder = RunsFolder::at(home.path().join("r".repeat(200)));
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let warn = |text: &str| panic!("{text}");
    let run = Run::begin(Some(&folder), &plan("gc"), warn, move || {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let id = run.id().unwrap();
    run.progress(json!({"done_bytes": 5}));
    run.progress(json!({"done_bytes": 6}));
    assert_eq!(folder.status(id).unwrap()["progress"]["done_bytes"], 5);
    // A new phase is not a detail.
    run.progress(json!({"phase": "finishing"}));
    run.progress(json!({"phase": "finishing", "done_bytes": 7}));
    assert_eq!(folder.status(id).unwrap()["progress"], json!({"phase": "finishing"}));
    assert_eq!(folder.first_progress(id, "phase").unwrap().unwrap(), json!({"phase": "finishing"}));
    folder.cancel(id).unwrap();
    folder.cancel(id).unwrap();
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    assert!(!folder.wait(id, Duration::ZERO).unwrap());
    run.finish(130, None, None);
    assert!(folder.wait(id, Duration::ZERO).unwrap());
    assert_eq!(folder.cancel(id).unwrap_err().kind(), ErrorKind::NotFound);
    let lines: Vec<_> = folder.follow(id).unwrap().map(|line| line.unwrap().level).collect();
    assert_eq!(lines, ["progress", "progress", "info"]);
}

#[test]
fn an_unusable_folder_is_reported_once_and_the_run_continues() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("file"), "").unwrap();
    let open = home.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
    for path in [home.path().join("file/runs"), open] {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        let warn = move |_: &str| {
            counted.fetch_add(1, Ordering::SeqCst);
        };
        let run = Run::begin(Some(&RunsFolder::at(path)), &plan("gc"), warn, || {});
        run.log("info", "text");
        run.progress(json!(1));
        run.finish(0, None, None);
        assert_eq!((run.id(), count.load(Ordering::SeqCst)), (None, 1));
    }
}

#[test]
fn a_log_has_two_halves_and_is_followed_across_them() {
    let home = tempfile::tempdir().unwrap();
    let folder = RunsFolder::at(home.path().join("runs"));
    let run = begin(&folder, "gc");
    let id = run.id().unwrap();
    let mut follow = folder.follow(id).unwrap();
    run.log("info", "0");
    assert_eq!(follow.next().unwrap().unwrap().text, "0");
    let long = "é".repeat(6000);
    let mut paged = Vec::new();
    let mut page = |offset, max_bytes| {
        let (lines, next) = folder.log_from(id, offset, max_bytes).unwrap();
        paged.extend(lines);
        next
    };
    let mut offset = 0;
    for i in 0..1200 {
        run.log("info", &long);
        if i % 100 == 0 {
            offset = page(offset, u64::MAX);
        }
    }
    run.log("info", "last");
    loop {
        let next = page(offset, 1);
        if std::mem::replace(&mut offset, next) == next {
            break;
        }
    }
    let texts: Vec<_> = paged.into_iter().map(|line| line.text).collect();
    assert_eq!((texts.len(), texts[1].len(), texts[1201].as_str()), (1202, 8192, "last"));
    assert_eq!(folder.log_from(id, u64::MAX, 0).unwrap(), (Vec::new(), offset));
    run.finish(0, None, None);
    let texts: Vec<_> = follow.map(|line| line.unwrap().text).collect();
    assert_eq!((texts.len(), texts[0].len(), texts[1200].as_str()), (1201, 8192, "last"));
    let size = |name| std::fs::metadata(folder.run_path(id).join(name)).unwrap().len();
    assert!(size("log.1") < (8 << 20) + 9000 && size("log") < 8 << 20);
    // As after a second renaming: the first lines are gone, and the offset is that of the rest.
    std::fs::rename(folder.run_path(id).join("log"), folder.run_path(id).join("log.1")).unwrap();
    let (lines, next) = folder.log_from(id, 0, 0).unwrap();
    assert!(!lines.is_empty() && next > 8 << 20, "{next}");
}

pub(crate) fn finished(folder: &RunsFolder, id: &str) {
    let path = folder.path().join(id);
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join("lock"), "").unwrap();
}

#[test]
fn only_runs_beyond_the_newest_1000_and_older_than_90_days_are_removed() {
    let home = tempfile::tempdir().unwrap();
    let folder = RunsFolder::at(home.path().join("runs"));
    let now: jiff::Timestamp = "2026-11-23T00:00:00Z".parse().unwrap();
    for i in 0..300 {
        finished(&folder, &format!("20260101T000000Z-{i:04x}-gc"));
    }
    let alive = folder.path().join("20260101T000000Z-0005-gc");
    let lock = std::fs::File::open(alive.join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    std::fs::write(folder.path().join("20260101T000000Z-0006-gc/mine"), "").unwrap();
    let outside = home.path().join("outside");
    finished(&RunsFolder::at(home.path()), "outside");
    symlink(&outside, folder.path().join("20250101T000000Z-0000-gc")).unwrap();
    for i in 0..950 {
        finished(&folder, &format!("20261101T000000Z-{i:04x}-gc"));
    }
    // One look removes at most 200; the next goes on, and the one after that is not due.
    history::clean(&folder, now).unwrap();
    let count = |folder: &RunsFolder| folder.list(usize::MAX).unwrap().runs.len();
    assert_eq!(count(&folder), 1250 - 197);
    history::clean(&folder, now).unwrap();
    assert_eq!(count(&folder), 1002);
    finished(&folder, "20260101T000000Z-ffff-gc");
    history::clean(&folder, now).unwrap();
    assert_eq!(count(&folder), 1003);
    assert!(alive.exists() && outside.join("lock").exists());
    assert!(folder.path().join("20260101T000000Z-0006-gc/mine").exists());
}

#[test]
fn a_run_costs_at_most_3_ms_without_its_sync() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let folder = RunsFolder::at(folder.path().join("runs"));
    let begin_one = || begin(&folder, "gc").finish(0, None, None);
    begin_one();
    let started = std::time::Instant::now();
    for _ in 0..100 {
        begin_one();
    }
    let each = started.elapsed() / 100;
    println!("one run: {each:?}");
    assert!(each < Duration::from_millis(3), "{each:?}");
}

#[test]
fn a_discarded_run_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let folder = RunsFolder::at(home.path().join("runs"));
    begin(&folder, "boot").discard();
    assert!(folder.list(usize::MAX).unwrap().runs.is_empty());
    let id: RunId = "20260101T000000Z-0000-gc".parse().unwrap();
    assert_eq!(folder.read(&id).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn an_error_of_any_length_leaves_a_failed_run() {
    let home = tempfile::tempdir().unwrap();
    let folder = RunsFolder::at(home.path().join("runs"));
    let run = begin(&folder, "gc");
    let error = Failure { kind: "io".into(), message: "é".repeat(200_000) };
    run.finish(1, Some(error), None);
    assert_eq!(state(&folder, &run), State::Failed);
}
