//! Tests of planned runs, of starters and of the watch.

use std::time::{Duration, Instant};

use coldrise_block::ErrorKind;

use crate::tests::{begin, finished, plan, state};
use crate::{Failure, Request, Run, RunId, RunsFolder, Starter, State, Watch};

fn request() -> Request {
    let arguments = ["backup", "web01", "vda=nbd://u:secret@host/x"].map(str::to_owned).to_vec();
    let (machine, job) = (Some("web01".to_owned()), Some("nightly".to_owned()));
    Request { arguments, machine, job, attempt: 2, ..Request::default() }
}

fn begin_planned(folder: &RunsFolder, id: &RunId) -> coldrise_block::Result<Run> {
    let planned = folder.take(id)?;
    assert_eq!(planned.request().unwrap(), request());
    Run::begin_planned(planned, &plan("backup"), |text| panic!("{text}"), || {})
}

#[test]
fn a_planned_run_is_begun_once() {
    let home = tempfile::tempdir().unwrap();
    let folder = RunsFolder::at(home.path().join("runs"));
    let id = folder.new_id("backup");
    assert_eq!(folder.take(&id).err().unwrap().kind(), ErrorKind::NotFound);
    folder.plan(&id, &request()).unwrap();
    // A plan that exists stays.
    folder.plan(&id, &Request::default()).unwrap();
    assert_eq!(folder.planned().unwrap(), std::slice::from_ref(&id));
    assert!(folder.list(usize::MAX).unwrap().runs.is_empty());
    let taken = folder.take(&id).unwrap();
    assert_eq!(begin_planned(&folder, &id).err().unwrap().kind(), ErrorKind::Busy);
    let failure = || Failure { kind: "tool_failed".into(), message: "no nbd://a:b@c".into() };
    assert!(!folder.fail_planned(&id, failure()).unwrap());
    drop(taken);
    // Two threads at a time: one begins it.
    let begun: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| begin_planned(&folder, &id))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (mut begun, refused): (Vec<_>, Vec<_>) = begun.into_iter().partition(Result::is_ok);
    assert!(refused.iter().all(|run| run.as_ref().err().unwrap().kind() == ErrorKind::Busy));
    let run = begun.pop().unwrap().unwrap();
    assert!(begun.is_empty());
    folder.plan(&id, &request()).unwrap();
    assert!(folder.planned().unwrap().is_empty());
    assert!(!folder.run_path(&id).join("request.json").exists());
    assert_eq!(state(&folder, &run), State::Running);
    // It restarts as another program: planned again, and begun again.
    run.log("info", "first");
    run.discard();
    assert_eq!(folder.planned().unwrap(), std::slice::from_ref(&id));
    let run = begin_planned(&folder, &id).unwrap();
    assert!(folder.last_lines(&id, 9).unwrap().is_empty());
    run.finish(0, None, None);
    assert_eq!(state(&folder, &run), State::Ok);
    assert!(!folder.fail_planned(&id, failure()).unwrap());
    // A second plan beside the run, as of two planners at a time, does nothing.
    let other = folder.new_id("backup");
    folder.plan(&other, &request()).unwrap();
    std::fs::rename(folder.planned_path(&other), folder.planned_path(&id)).unwrap();
    assert_eq!(begin_planned(&folder, &id).err().unwrap().kind(), ErrorKind::Busy);
    assert!(folder.planned().unwrap().is_empty());
    assert_eq!(state(&folder, &run), State::Ok);
}

#[test]
fn a_planned_run_that_cannot_be_started_is_recorded() {
    let home = tempfile::tempdir().unwrap();
    let folder = RunsFolder::at(home.path().join("runs"));
    for (kind, expected) in [("tool_failed", State::Failed), ("interrupted", State::Cancelled)] {
        let id = folder.new_id("serve nbd");
        folder.plan(&id, &request()).unwrap();
        let message = "nbd://a:b@c".to_owned();
        assert!(folder.fail_planned(&id, Failure { kind: kind.into(), message }).unwrap());
        let record = folder.read(&id).unwrap();
        assert_eq!((record.state, record.problems.len()), (expected, 0));
        let plan = record.plan.unwrap();
        assert_eq!((plan.job.as_deref(), plan.attempt), (Some("nightly"), 2));
        assert_eq!(plan.machine.as_deref(), Some("web01"));
        assert_eq!(plan.arguments[2], "vda=nbd://***@host/x");
        let message = record.result.unwrap().error.unwrap().message;
        assert_eq!(message, "could not be started: nbd://***@c");
        assert!(!folder.run_path(&id).join("request.json").exists());
    }
    let long = Request { arguments: vec!["x".repeat(70_000)], ..Request::default() };
    let refused = folder.plan(&folder.new_id("gc"), &long).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidInput);
    assert!(folder.planned().unwrap().is_empty());
}

#[test]
fn a_starter_that_fails_says_why() {
    let home = tempfile::tempdir().unwrap();
    let folder = RunsFolder::at(home.path().join("runs"));
    let id = folder.new_id("gc");
    folder.plan(&id, &request()).unwrap();
    let missing = Starter::detached(Some("/nowhere/coldrise".into())).start(&folder, &id);
    assert!(missing.unwrap_err().full_message().contains("/nowhere/coldrise"));
    assert_eq!(folder.planned().unwrap(), std::slice::from_ref(&id));
    // No system has this unit.
    let refused = Starter::Systemd.start(&folder, &id).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ToolFailed);
    assert!(refused.full_message().contains(&format!("coldrise-run@{id}.service")));
    // A program that ends at once.
    let mut watch = Watch::new(&folder).unwrap();
    watch.next(Duration::ZERO).unwrap();
    Starter::detached(Some("/bin/false".into())).start(&folder, &id).unwrap();
    wait_for(&mut watch, |_| folder.read(&id).is_ok_and(|run| run.state == State::Failed));
    let message = folder.read(&id).unwrap().result.unwrap().error.unwrap().message;
    assert!(message.contains("exit status: 1"), "{message}");
}

/// Waits for events until something is true, at most 10 s in all. `is_true` gets what is seen.
fn wait_for(watch: &mut Watch, mut is_true: impl FnMut(&[RunId]) -> bool) {
    let started = Instant::now();
    let mut seen = Vec::new();
    while !is_true(&seen) {
        assert!(started.elapsed() < Duration::from_secs(10), "no event");
        seen = watch.next(Duration::from_secs(10)).unwrap();
    }
}

#[test]
fn a_watch_reports_each_change_at_once() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a/runs");
    let folder = RunsFolder::at(&path);
    let mut watch = Watch::new(&folder).unwrap();
    assert!(watch.next(Duration::from_millis(1)).unwrap().is_empty());
    let first = begin(&folder, "gc");
    let id = first.id().unwrap();
    wait_for(&mut watch, |seen| seen == [id.clone()]);
    first.log("info", "text");
    wait_for(&mut watch, |seen| seen == [id.clone()]);
    // The last event comes when the lock is free.
    first.finish(0, None, None);
    wait_for(&mut watch, |seen| seen == [id.clone()] && state(&folder, &first) == State::Ok);
    let lost = begin(&folder, "verify");
    let lost_id = lost.id().unwrap().clone();
    wait_for(&mut watch, |seen| seen == [lost_id.clone()]);
    drop(lost);
    let is_lost = || folder.read(&lost_id).unwrap().state == State::Lost;
    wait_for(&mut watch, |seen| seen == [lost_id.clone()] && is_lost());
    let planned = folder.new_id("gc");
    folder.plan(&planned, &request()).unwrap();
    wait_for(&mut watch, |seen| seen == [planned.clone()]);
    // The folder goes and comes back: its living runs are seen, then all.
    let living = begin(&folder, "boot");
    let living_id = living.id().unwrap();
    wait_for(&mut watch, |seen| seen == [living_id.clone()]);
    std::fs::rename(&path, home.path().join("b")).unwrap();
    wait_for(&mut watch, |seen| seen == [living_id.clone()]);
    std::fs::rename(home.path().join("b"), &path).unwrap();
    let mut all = vec![id.clone(), lost_id.clone(), planned, living_id.clone()];
    all.sort();
    wait_for(&mut watch, |seen| seen == all);
    living.log("info", "text");
    wait_for(&mut watch, |seen| seen == [living_id.clone()]);
}

#[test]
fn a_watch_that_misses_events_reports_every_run() {
    let home = tempfile::tempdir().unwrap();
    let folder = RunsFolder::at(home.path().join("runs"));
    let run = begin(&folder, "gc");
    let mut watch = Watch::new(&folder).unwrap();
    watch.next(Duration::ZERO).unwrap();
    finished(&folder, "20260101T000000Z-0001-gc");
    watch.next(Duration::from_secs(1)).unwrap();
    let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
    let limit: usize = limit.trim().parse().unwrap();
    let [one, two] = [1, 2].map(|n| folder.run_path(run.id().unwrap()).join(format!("{n}")));
    std::fs::write(&one, "").unwrap();
    for _ in 0..limit {
        std::fs::rename(&one, &two).unwrap();
        std::fs::rename(&two, &one).unwrap();
    }
    std::fs::remove_file(&one).unwrap();
    wait_for(&mut watch, |seen| seen.len() == 2);
    run.log("info", "text");
    wait_for(&mut watch, |seen| seen == [run.id().unwrap().clone()]);
}
