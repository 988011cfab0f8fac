//! Jobs of kind protect-live with times that the tests choose, as in the other tests.

use std::collections::HashMap;

use coldrise_block::ErrorKind;
use coldrise_runs::State;

use super::job::Job;
use super::rows::{QueueRow, RowState};
use super::rules::choose;
use super::tests::{
    DAY_MS, Fixture, HOUR_MS, Nothing, START_MS, failing, fixture, job, row, step_until,
};

fn live_job() -> Job {
    job(
        r#"{"name":"always","kind":"protect-live","machines":["web01","web02"],"from":"qmp:/run/{machine}.qmp",
        "retries":0,"retry_seconds":10,"schedule":["hourly UTC"]}"#,
    )
}

#[test]
fn a_job_keeps_one_run_per_machine_running() {
    let Fixture { queue, folder: _folder } = fixture();
    queue.database.add_job(&live_job(), START_MS).unwrap();
    let rows = || queue.database.queue_rows().unwrap();
    for _ in 0..2 {
        queue.tick(START_MS, &Nothing).unwrap();
        let machines: Vec<_> = rows().iter().map(|row| row.machine.clone().unwrap()).collect();
        assert_eq!(machines, ["web01", "web02"]);
    }
    let words = ["protect-live", "--from=qmp:/run/web01.qmp", "--", "web01"].map(str::to_owned);
    assert_eq!(rows()[0].arguments, words);
    // They start at once, and take no place of others.
    let mut waiting = rows();
    waiting.insert(0, row("b", "backup", "web03", RowState::Waiting));
    assert_eq!(choose(&waiting, START_MS, 1, &HashMap::new()).start.len(), 3);
    // The schedule makes points of the machines that have a session.
    queue.tick(START_MS + HOUR_MS, &Nothing).unwrap();
    let seals: Vec<_> = rows().into_iter().filter(|row| row.kind == "seal").collect();
    assert_eq!(
        (seals.len(), &seals[0].arguments[..]),
        (1, &["seal", "--", "web01-1"].map(str::to_owned)[..])
    );
    // Disabled: all that waits is cancelled, and nothing comes after it.
    let disabled = Job { enabled: false, ..live_job() };
    queue.database.replace_job(&disabled, START_MS).unwrap();
    let mut dispatcher = failing(&queue);
    step_until(&queue, &mut dispatcher, START_MS, <[QueueRow]>::is_empty);
    assert!(queue.runs.list(10).unwrap().runs.iter().all(|run| run.state == State::Cancelled));
}

#[test]
fn a_run_that_fails_is_tried_again_without_an_end() {
    let Fixture { queue, folder: _folder } = fixture();
    let mut job = live_job();
    job.machines.truncate(1);
    queue.database.add_job(&job, START_MS).unwrap();
    let mut dispatcher = failing(&queue);
    let mut now = START_MS;
    let mut waits = Vec::new();
    for attempt in 2..6 {
        let rows = step_until(&queue, &mut dispatcher, now, |rows| {
            rows.iter().any(|row| row.attempt == attempt && row.state == RowState::Waiting)
        });
        assert_eq!(rows.len(), 1);
        waits.push((rows[0].due_ms - now) / 10_000);
        now = rows[0].due_ms;
    }
    assert_eq!(waits, [1, 2, 4, 8]);
    // Another machine and other words: the run of before ends, and the new one begins.
    job.from = Some("qmp:/srv/{machine}.qmp".to_owned());
    queue.database.replace_job(&job, now).unwrap();
    let is_new = |rows: &[QueueRow]| {
        rows.iter().all(|row| row.arguments[1] == "--from=qmp:/srv/web01.qmp") && !rows.is_empty()
    };
    step_until(&queue, &mut dispatcher, now - 1, is_new);
}

#[test]
fn the_session_of_a_machine_that_runs_from_coldrise_is_sent() {
    let Fixture { queue, folder: _folder } = fixture();
    let here = Job {
        from: Some("live".to_owned()),
        to: Some("far".to_owned()),
        rate_bytes_per_second: Some(5_000_000),
        ..live_job()
    };
    queue.database.add_job(&here, START_MS).unwrap();
    queue.tick(START_MS, &Nothing).unwrap();
    // web02 has no session.
    let rows = queue.database.queue_rows().unwrap();
    let words = ["protect-live", "--to=far", "--rate=5000000", "--", "live/web01-1"];
    let found: Vec<_> = rows.iter().map(|row| &row.arguments[..]).collect();
    assert_eq!(found, [&words.map(str::to_owned)[..]]);
}

#[test]
fn a_killed_run_comes_back_at_once_but_not_in_a_loop() {
    let Fixture { queue, folder: _folder } = fixture();
    let mut job = live_job();
    job.machines.truncate(1);
    job.schedule.clear();
    queue.database.add_job(&job, START_MS).unwrap();
    queue.tick(START_MS, &Nothing).unwrap();
    let ended = |row: &QueueRow, state| {
        let request = row.request(queue.global().unwrap(), &[]);
        queue.runs.plan(&row.id().unwrap(), &request).unwrap();
        let failure = coldrise_runs::Failure { kind: "io".into(), message: "x".into() };
        queue.runs.fail_planned(&row.id().unwrap(), failure).unwrap();
        let run = queue.runs.read(&row.id().unwrap()).unwrap();
        coldrise_runs::RunRecord { state, result: None, ..run }
    };
    // How long it lived, how long the next one waits, and as which attempt.
    let mut now = START_MS;
    for (lived_ms, wait_ms, attempt) in
        [(1000, 0, 2), (1000, 20_000, 3), (DAY_MS, 0, 2), (DAY_MS, 0, 2)]
    {
        let row = queue.database.queue_rows().unwrap().remove(0);
        now = row.due_ms + lived_ms;
        queue.record_end(&row, &ended(&row, State::Lost), now).unwrap();
        let next = queue.database.queue_rows().unwrap().remove(0);
        assert_eq!(((next.due_ms - now) / 5000 * 5000, next.attempt), (wait_ms, attempt));
    }
    // The host shuts down, which no user asked of the job.
    let row = queue.database.queue_rows().unwrap().remove(0);
    queue.record_end(&row, &ended(&row, State::Ok), now).unwrap();
    assert!(queue.database.queue_rows().unwrap().is_empty());
    queue.tick(now, &Nothing).unwrap();
    assert_eq!(queue.database.queue_rows().unwrap().len(), 1);
}

#[test]
fn a_machine_whose_run_a_user_cancelled_is_left_alone_until_the_job_is_started_or_changed() {
    let Fixture { queue, folder: _folder } = fixture();
    let now = crate::clock::now_ms();
    queue.database.add_job(&live_job(), now).unwrap();
    let mut dispatcher = failing(&queue);
    let machines = || -> Vec<String> {
        let rows = queue.database.queue_rows().unwrap();
        rows.into_iter().map(|row| row.machine.unwrap()).collect()
    };
    let mut cancel = || {
        queue.tick(now, &Nothing).unwrap();
        assert_eq!(machines().len(), 2);
        let rows = queue.database.queue_rows().unwrap();
        let row = rows.iter().find(|row| row.machine.as_deref() == Some("web01")).unwrap();
        let run = row.run.parse().unwrap();
        queue.cancel(&run).unwrap();
        let is_recorded = |rows: &[QueueRow]| rows.iter().all(|row| row.run != run.as_str());
        step_until(&queue, &mut dispatcher, now, is_recorded);
        queue.tick(now, &Nothing).unwrap();
        assert_eq!(machines().len(), 1);
    };
    cancel();
    let runs =
        queue.start_job("always", "operator", &|machine| machine == "web01", &Nothing).unwrap();
    assert_eq!((runs.len(), machines().len()), (1, 2));
    // It is followed: now a start makes a point of it.
    let rows = queue.database.queue_rows().unwrap();
    let run = rows.iter().find(|row| row.run == runs[0].as_str()).unwrap();
    queue.database.move_row(&run.run, RowState::Waiting, RowState::Started).unwrap();
    let seals =
        queue.start_job("always", "operator", &|machine| machine == "web01", &Nothing).unwrap();
    assert_eq!(seals.len(), 1);
    let rows = queue.database.queue_rows().unwrap();
    assert_eq!(rows.iter().find(|row| row.run == seals[0].as_str()).unwrap().kind, "seal");
    queue.database.change(|sql| sql.execute("DELETE FROM queue WHERE kind = 'seal'", [])).unwrap();
    queue.database.move_row(&run.run, RowState::Started, RowState::Waiting).unwrap();
    cancel();
    queue.database.replace_job(&live_job(), now).unwrap();
    queue.tick(now, &Nothing).unwrap();
    assert_eq!(machines().len(), 2);
    let disabled = Job { enabled: false, ..live_job() };
    queue.database.replace_job(&disabled, now).unwrap();
    let refused = queue.start_job("always", "operator", &|_| true, &Nothing);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn malformed_jobs_that_follow_machines_are_refused() {
    let is_accepted = |change: &str| {
        let mut document = serde_json::to_value(live_job()).unwrap();
        let change: serde_json::Value = serde_json::from_str(change).unwrap();
        for (field, value) in change.as_object().unwrap() {
            document[field] = value.clone();
        }
        serde_json::from_value::<Job>(document).is_ok_and(|job| job.check().is_ok())
    };
    for change in [
        "{}",
        r#"{"every_seconds":3600,"lag_limit_seconds":1,"push":true,"disks":{"vda":"drive0"}}"#,
        r#"{"consistent_every_minutes":15,"agent":"/run/{machine}.ga"}"#,
        r#"{"from":"live","to":"far","lag_limit_seconds":10,"rate_bytes_per_second":65536}"#,
        r#"{"from":"libvirt","machines":["Web 01"],"hosts":["hv1"],"consistent_every_minutes":15}"#,
    ] {
        assert!(is_accepted(change), "{change}");
    }
    for change in [
        r#"{"from":null}"#,
        r#"{"from":"Live","to":"far"}"#,
        r#"{"machines":["*"]}"#,
        r#"{"from":"live"}"#,
        r#"{"from":"live","to":"far","every_seconds":5}"#,
        r#"{"from":"live","to":"far","machines":["web*"]}"#,
        r#"{"from":"live","to":"far","hosts":["hv1"]}"#,
        r#"{"from":"libvirt","machines":["web*"]}"#,
        r#"{"from":"libvirt","hosts":["hv1","hv2"]}"#,
        r#"{"from":"qmp:/run/one.qmp"}"#,
        r#"{"every_seconds":0}"#,
        r#"{"every_seconds":3601}"#,
        r#"{"lag_limit_seconds":0}"#,
        r#"{"consistent_every_minutes":15}"#,
        r#"{"agent":"/run/{machine}.ga"}"#,
        r#"{"window":"22:00-06:00"}"#,
        r#"{"parallel":1}"#,
        r#"{"retention":{"keep_last":1}}"#,
        r#"{"quiesce":true}"#,
        r#"{"age_limit_hours":1}"#,
        r#"{"kind":"backup","disks":{},"every_seconds":5}"#,
    ] {
        assert!(!is_accepted(change), "{change}");
    }
}
