//! The queue and the schedule with times that the tests choose. Processes that cannot succeed stand
//! for runs here; tests/test_service_jobs.py has real ones.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use coldrise_block::{ErrorKind, Result};
use coldrise_runs::{RunId, Starter, State};

use super::commands::runs_of;
use super::conditions::{KnownMachine, conditions};
use super::dispatcher::{Clocks, Dispatcher};
use super::job::Job;
use super::pattern::MachineNames;
use super::queue::{NewRun, Queue};
use super::rows::{QueueRow, RowState};
use super::rules::{JobLimits, choose};
use super::store::StoredJob;
use super::{due_between, preview, schedule};
use crate::arguments::Arguments;
use crate::database::Database;
use crate::events::Events;

pub(super) const HOUR_MS: i64 = 3_600_000;
pub(super) const DAY_MS: i64 = 24 * HOUR_MS;
/// A Monday, 2026-11-23T00:00:00Z.
pub(super) const START_MS: i64 = 1_795_392_000_000;

pub(super) struct Fixture {
    pub(super) folder: tempfile::TempDir,
    pub(super) queue: Arc<Queue>,
}

pub(super) fn fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().to_str().unwrap();
    let words = ["coldrised", "--state", state, "--repo", "/nowhere"];
    let options = Arguments::try_parse_from(words).unwrap().options;
    let database = Database::open(folder.path()).unwrap();
    let queue = Queue::new(&options, database, Arc::new(Events::new("e".into()))).unwrap();
    Fixture { folder, queue: Arc::new(queue) }
}

pub(super) fn job(text: &str) -> Job {
    let job: Job = serde_json::from_str(text).unwrap();
    job.check().unwrap();
    job
}

fn backup_job() -> Job {
    job(r#"{"name":"nightly","kind":"backup","machines":["web01","web02"],
        "disks":{"vda":"raw:/srv/{machine}-{disk}.img"},"schedule":["hourly UTC"]}"#)
}

pub(super) fn row(run: &str, kind: &str, machine: &str, state: RowState) -> QueueRow {
    QueueRow {
        run: run.into(),
        kind: kind.into(),
        machine: Some(machine.to_owned()).filter(|name| !name.is_empty()),
        job: Some("nightly".into()),
        arguments: Vec::new(),
        requested_by: None,
        attempt: 1,
        due_ms: 0,
        created_ms: 0,
        state,
        reason: None,
        busy_since_ms: None,
    }
}

fn started(rows: &[QueueRow], max: usize, limits: JobLimits) -> Vec<String> {
    choose(rows, 1, max, &HashMap::from([("nightly".to_owned(), limits)])).start
}

const FREE: JobLimits = JobLimits { parallel: None, is_open: true };

/// No machine has a point, and no host a machine.
pub(super) struct Nothing;

impl schedule::Known for Nothing {
    fn machines(&self) -> Result<Vec<MachineNames>> {
        Ok(Vec::new())
    }

    fn domains_on(&self, _host: &str) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn followed(&self, _job: &Job) -> Result<Vec<MachineNames>> {
        Ok(vec![MachineNames { session: Some("web01-1".into()), ..MachineNames::of("web01") }])
    }
}

#[test]
fn runs_that_exclude_each_other_wait() {
    use RowState::{Started, Waiting};
    // Active run, waiting run, whether it may start.
    for (active, waiting, may_start) in [
        (("backup", "web01"), ("backup", "web01"), false),
        (("backup", "web01"), ("backup", "web02"), true),
        (("backup", "web01"), ("prune", "web01"), true),
        (("backup", "web01"), ("gc", ""), true),
        (("backup", "web01"), ("repair", ""), false),
        (("repair", ""), ("backup", "web01"), false),
        (("gc", ""), ("prune", "web01"), false),
        (("gc", ""), ("verify", ""), true),
        (("check-boot", "web01"), ("check-boot", "web01"), false),
        (("check-boot", "web01"), ("backup", "web01"), true),
    ] {
        let rows = [row("a", active.0, active.1, Started), row("b", waiting.0, waiting.1, Waiting)];
        let chosen = started(&rows, 4, FREE);
        assert_eq!(chosen.len(), usize::from(may_start), "{waiting:?} beside {active:?}");
    }
}

#[test]
fn copies_wait_for_copies_of_the_same_machine_to_the_same_target() {
    use RowState::{Started, Waiting};
    let to = |run: &str, machine: &str, target: &str, state| QueueRow {
        arguments: vec!["copy".into(), format!("--to={target}")],
        ..row(run, "copy", machine, state)
    };
    for (active, waiting, may_start) in [
        (("web01", "far"), ("web01", "far"), false),
        (("web01", "far"), ("web02", "far"), true),
        (("web01", "far"), ("web01", "near"), true),
        // All machines.
        (("", "far"), ("web01", "far"), false),
        (("web01", "far"), ("", "far"), false),
        (("", "far"), ("", "near"), true),
    ] {
        let rows = [to("a", active.0, active.1, Started), to("b", waiting.0, waiting.1, Waiting)];
        assert_eq!(
            started(&rows, 4, FREE).len(),
            usize::from(may_start),
            "{waiting:?} beside {active:?}"
        );
    }
    // Copies take no backup's place, and there are not too many of them.
    let mut rows = vec![to("a", "web01", "far", Started), to("b", "web02", "far", Waiting)];
    rows.push(row("c", "backup", "web01", Waiting));
    assert_eq!(started(&rows, 1, FREE), ["c"]);
}

#[test]
fn copies_below_a_rate_run_one_after_the_other() {
    let limits = |more: &str| {
        job(&format!(r#"{{"name":"far","kind":"copy","to":"far"{more}}}"#)).limits_a_line()
    };
    assert!(limits(r#","rate_bytes_per_second":2000000"#));
    assert!(limits(r#","rate_windows":["Mon..Fri 08:00-18:00=5M"]"#));
    assert!(!limits(""));
}

#[test]
fn limits_hold_and_recoveries_start_at_once() {
    use RowState::Waiting;
    let machines: Vec<String> = (0..50).map(|n| format!("m{n}")).collect();
    let rows: Vec<QueueRow> =
        machines.iter().map(|machine| row(machine, "backup", machine, Waiting)).collect();
    assert_eq!(started(&rows, 4, FREE).len(), 4);
    assert_eq!(started(&rows, 4, JobLimits { parallel: Some(2), ..FREE }).len(), 2);
    let closed = JobLimits { is_open: false, ..FREE };
    assert!(started(&rows, 4, closed).is_empty());
    let mut by_hand = rows[..1].to_vec();
    by_hand[0].requested_by = Some("operator".into());
    assert_eq!(started(&by_hand, 4, closed).len(), 1);
    let mut recovery = row("r", "restore", "m9", Waiting);
    recovery.job = None;
    let rows: Vec<QueueRow> = rows.into_iter().chain([recovery]).collect();
    assert!(started(&rows, 4, FREE).contains(&"r".to_owned()));
}

#[test]
fn a_waiting_run_is_not_overtaken() {
    use RowState::{Started, Waiting};
    let rows = [
        row("a", "backup", "web01", Started),
        row("b", "repair", "", Waiting),
        row("c", "backup", "web02", Waiting),
    ];
    let choice = choose(&rows, 1, 4, &HashMap::new());
    assert!(choice.start.is_empty());
    assert_eq!(choice.held[1], ("c".to_owned(), "waits for run b".to_owned()));
}

#[test]
fn missed_times_are_made_up_for_once() {
    let Fixture { queue, folder: _folder } = fixture();
    queue.database.add_job(&backup_job(), START_MS).unwrap();
    queue.tick(START_MS + 1, &Nothing).unwrap();
    assert!(queue.database.queue_rows().unwrap().is_empty());
    // A day later: 24 times were missed.
    let now = START_MS + DAY_MS;
    queue.tick(now, &Nothing).unwrap();
    queue.tick(now, &Nothing).unwrap();
    let rows = queue.database.queue_rows().unwrap();
    let machines: Vec<_> = rows.iter().map(|row| row.machine.as_deref().unwrap()).collect();
    assert_eq!(machines, ["web01", "web02"]);
    assert_eq!(rows[0].arguments, ["backup", "--", "web01", "vda=raw:/srv/web01-vda.img"]);
    let next = queue.database.job("nightly").unwrap().next_due_ms;
    assert_eq!(next, Some(now + 3_600_000));
    // The next time finds them still waiting: they are not queued twice.
    queue.tick(now + 3_600_000, &Nothing).unwrap();
    assert_eq!(queue.database.queue_rows().unwrap().len(), 2);
}

#[test]
fn a_clock_that_is_set_back_delays_no_job() {
    let Fixture { queue, folder: _folder } = fixture();
    queue.database.add_job(&backup_job(), START_MS + DAY_MS).unwrap();
    let due = || queue.database.job("nightly").unwrap().next_due_ms.unwrap();
    assert_eq!(due(), START_MS + DAY_MS + 3_600_000);
    queue.follow_clock(START_MS).unwrap();
    assert_eq!(due(), START_MS + 3_600_000);
    // Forwards: it stays due, and is made up for.
    queue.follow_clock(START_MS + 2 * DAY_MS).unwrap();
    assert_eq!(due(), START_MS + 3_600_000);
}

#[test]
fn a_clock_that_is_set_back_a_little_repeats_no_occurrence() {
    let Fixture { queue, folder: _folder } = fixture();
    queue.database.add_job(&backup_job(), START_MS).unwrap();
    let due = || queue.database.job("nightly").unwrap().next_due_ms.unwrap();
    let hour = 3_600_000;
    // The occurrence of the first hour is done; then the clock is set back over it.
    queue.tick(START_MS + hour, &Nothing).unwrap();
    assert_eq!(due(), START_MS + 2 * hour);
    queue.follow_clock(START_MS + hour - 30_000).unwrap();
    assert_eq!(due(), START_MS + 2 * hour);
    queue.follow_clock(START_MS + 1).unwrap();
    assert_eq!(due(), START_MS + 2 * hour);
    // Over more than one: it would wait for too long.
    queue.follow_clock(START_MS - 1).unwrap();
    assert_eq!(due(), START_MS);
}

#[test]
fn a_jump_of_the_clock_is_noticed() {
    let Fixture { queue, folder: _folder } = fixture();
    queue.database.add_job(&backup_job(), START_MS + DAY_MS).unwrap();
    let mut dispatcher = failing(&queue);
    let steady = Instant::now();
    dispatcher.step(Clocks { wall_ms: START_MS + DAY_MS, steady }).unwrap();
    let steady = steady + Duration::from_secs(30);
    dispatcher.step(Clocks { wall_ms: START_MS + 30_000, steady }).unwrap();
    let due = queue.database.job("nightly").unwrap().next_due_ms;
    assert_eq!(due, Some(START_MS + 3_600_000));
}

/// A dispatcher whose processes end at once.
pub(super) fn failing(queue: &Arc<Queue>) -> Dispatcher {
    let starter = Starter::Detached(PathBuf::from("/bin/false"));
    Dispatcher::new(Arc::clone(queue), starter, Box::new(Nothing))
}

/// Steps until the queue has `count` rows that were started, or panics.
pub(super) fn step_until(
    queue: &Queue,
    dispatcher: &mut Dispatcher,
    wall_ms: i64,
    is_done: impl Fn(&[QueueRow]) -> bool,
) -> Vec<QueueRow> {
    let started = Instant::now();
    loop {
        dispatcher.step(Clocks { wall_ms, steady: Instant::now() }).unwrap();
        let rows = queue.database.queue_rows().unwrap();
        if is_done(&rows) {
            return rows;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "{rows:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn failures_are_tried_again_and_raise_a_condition() {
    let Fixture { queue, folder: _folder } = fixture();
    let mut job = backup_job();
    (job.retries, job.retry_seconds) = (1, 10);
    job.machines.truncate(1);
    queue.database.add_job(&job, START_MS).unwrap();
    let mut dispatcher = failing(&queue);
    let now = START_MS + 3_600_000;
    let rows = step_until(&queue, &mut dispatcher, now, |rows| rows.iter().any(|r| r.attempt == 2));
    assert_eq!(rows.len(), 1);
    assert!(rows[0].due_ms >= now + 10_000 && rows[0].due_ms <= now + 12_500);
    assert!(rows[0].reason.as_ref().unwrap().contains("could not be started"));
    let known = [KnownMachine { names: MachineNames::of("db01"), last_good_ms: Some(now) }];
    // While an attempt is left, the failure is not a condition.
    let keys = |now| -> Vec<String> {
        let found = conditions(&queue.database, &known, now).unwrap();
        found.into_iter().map(|condition| condition.key).collect()
    };
    assert_eq!(keys(now), ["uncovered db01"]);
    step_until(&queue, &mut dispatcher, now + 60_000, <[QueueRow]>::is_empty);
    assert_eq!(keys(now), ["job nightly backup web01", "uncovered db01"]);
    let outcome = &queue.database.outcomes(Some("nightly")).unwrap()[0];
    assert_eq!((outcome.failures, outcome.last_success_ms), (2, None));
    let runs = queue.runs.list(10).unwrap().runs;
    assert_eq!(runs.len(), 2);
    assert!(runs.iter().all(|run| run.state == State::Failed));
}

#[test]
fn an_old_backup_is_a_condition() {
    let Fixture { queue, folder: _folder } = fixture();
    let mut job = backup_job();
    job.age_limit_hours = Some(24);
    queue.database.add_job(&job, START_MS).unwrap();
    let machine =
        |name: &str, last_good_ms| KnownMachine { names: MachineNames::of(name), last_good_ms };
    let known = [machine("web01", Some(START_MS))];
    let keys = |now| -> Vec<String> {
        let found = conditions(&queue.database, &known, now).unwrap();
        found.into_iter().map(|condition| condition.key).collect()
    };
    assert!(keys(START_MS + DAY_MS).is_empty());
    // web02 never had a backup: its age counts from the job's.
    assert_eq!(keys(START_MS + DAY_MS + 1), ["age web01", "age web02"]);
}

fn new_run(machine: &str) -> NewRun {
    NewRun {
        kind: "backup".into(),
        machine: Some(machine.into()),
        arguments: vec!["backup".into(), machine.into(), "vda=raw:/nowhere".into()],
        requested_by: Some("operator".into()),
        job: None,
    }
}

#[test]
fn a_cancelled_run_does_not_vanish() {
    let Fixture { queue, folder: _folder } = fixture();
    let id = queue.enqueue(new_run("web01")).unwrap();
    queue.cancel(&id).unwrap();
    // The service is killed here: the next one records it.
    let mut dispatcher = failing(&queue);
    step_until(&queue, &mut dispatcher, crate::clock::now_ms(), <[QueueRow]>::is_empty);
    let run = queue.runs.read(&id).unwrap();
    assert_eq!(run.state, State::Cancelled);
    assert_eq!(run.plan.unwrap().requested_by.as_deref(), Some("operator"));
    assert_eq!(queue.cancel(&id).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_start_continues_wherever_it_was_cut_off() {
    let Fixture { queue, folder: _folder } = fixture();
    let ids: Vec<RunId> =
        ["a", "b", "c"].map(|machine| queue.enqueue(new_run(machine)).unwrap()).into();
    // Killed after each step: the row, the plan, the end of the process.
    for id in &ids {
        assert!(
            queue.database.move_row(id.as_str(), RowState::Waiting, RowState::Starting).unwrap()
        );
    }
    let rows = queue.database.queue_rows().unwrap();
    let request = |id: &RunId| {
        let row = rows.iter().find(|row| row.run == id.as_str()).unwrap();
        row.request(queue.global().unwrap(), &[])
    };
    queue.runs.plan(&ids[1], &request(&ids[1])).unwrap();
    queue.runs.plan(&ids[2], &request(&ids[2])).unwrap();
    let failure = coldrise_runs::Failure { kind: "io".into(), message: "x".into() };
    assert!(queue.runs.fail_planned(&ids[2], failure).unwrap());
    let mut dispatcher = failing(&queue);
    step_until(&queue, &mut dispatcher, crate::clock::now_ms(), <[QueueRow]>::is_empty);
    let runs = queue.runs.list(10).unwrap().runs;
    let mut found: Vec<&str> = runs.iter().map(|run| run.id.as_str()).collect();
    found.sort_unstable();
    let mut wanted: Vec<&str> = ids.iter().map(RunId::as_str).collect();
    wanted.sort_unstable();
    assert_eq!(found, wanted);
}

#[test]
fn a_run_that_cannot_be_planned_waits() {
    let Fixture { queue, folder } = fixture();
    let id = queue.enqueue(new_run("web01")).unwrap();
    // A file in place of the folder of runs stands for a drive that takes nothing.
    std::fs::write(folder.path().join("runs"), "").unwrap();
    let mut dispatcher = failing(&queue);
    let now = crate::clock::now_ms();
    dispatcher.step(Clocks { wall_ms: now, steady: Instant::now() }).unwrap();
    let rows = queue.database.queue_rows().unwrap();
    assert_eq!((rows[0].state, rows[0].due_ms), (RowState::Waiting, now + 30_000));
    std::fs::remove_file(folder.path().join("runs")).unwrap();
    step_until(&queue, &mut dispatcher, now + 30_000, <[QueueRow]>::is_empty);
    assert_eq!(queue.runs.read(&id).unwrap().state, State::Failed);
}

#[test]
fn malformed_jobs_are_refused() {
    let refused = |change: &str| {
        let mut document = serde_json::to_value(backup_job()).unwrap();
        let change: serde_json::Value = serde_json::from_str(change).unwrap();
        for (field, value) in change.as_object().unwrap() {
            document[field] = value.clone();
        }
        let parsed = serde_json::from_value::<Job>(document);
        parsed.map_or(true, |job| job.check().is_err())
    };
    assert!(!refused("{}"));
    for change in [
        r#"{"name":"../x"}"#,
        r#"{"name":""}"#,
        r#"{"machines":["web*"]}"#,
        r#"{"machines":[]}"#,
        r#"{"machines":["web01","web01"]}"#,
        r#"{"machines":["-x"]}"#,
        r#"{"disks":{}}"#,
        r#"{"disks":{"--repo":"/x"}}"#,
        r#"{"disks":{"vda":"relative.img"}}"#,
        r#"{"disks":{"vda":"/x/{point}"}}"#,
        r#"{"disks":{"vda":"http://x/y"}}"#,
        r#"{"disks":{"vda":"nbd://user:secret@host/x"}}"#,
        r#"{"disks_of":{"db01":{"vda":"/x"}}}"#,
        r#"{"from":"/run/x.qmp","disks":{}}"#,
        r#"{"from":"qmp:{machine}.qmp","disks":{}}"#,
        r#"{"from":"qmp:/run/{machine}{point}","disks":{}}"#,
        r#"{"from":"qmp:/run/{machine}.qmp","disks":{"vda":""}}"#,
        r#"{"from":"qmp:/run/{machine}.qmp","disks":{},"bitmap":"x"}"#,
        r#"{"from":"qmp:/run/{machine}.qmp","disks":{},"agent":"x"}"#,
        r#"{"push":true}"#,
        r#"{"machines":["web*"]}"#,
        r#"{"from":"libvirtx","disks":{}}"#,
        r#"{"from":"libvirt:web02","machines":["web*"],"disks":{}}"#,
        r#"{"from":"libvirt:web02","machines":["web02","web03"],"disks":{}}"#,
        r#"{"from":"qmp:/run/one.qmp","machines":["web02","web03"],"disks":{}}"#,
        r#"{"from":"qmp:/run/{machine}.qmp","machines":["web02","web03"],"disks":{},"agent":"/run/x.ga"}"#,
        r#"{"from":"libvirt","disks":{},"agent":"/x"}"#,
        r#"{"from":"qmp:/x/{machine}","disks":{},"quiesce":true}"#,
        r#"{"schedule":["sometimes"]}"#,
        r#"{"window":"always"}"#,
        r#"{"parallel":0}"#,
        r#"{"rate_bytes_per_second":0}"#,
        r#"{"rate_bytes_per_second":65535}"#,
        r#"{"kind":"gc","machines":["*"],"disks":{},"rate_bytes_per_second":65536}"#,
        r#"{"retries":1000}"#,
        r#"{"retention":{}}"#,
        r#"{"kind":"prune"}"#,
        r#"{"colour":"red"}"#,
    ] {
        assert!(refused(change), "{change}");
    }
    assert!(!refused(r#"{"from":"libvirt","machines":["web*","db01"],"disks":{},"quiesce":true}"#));
    assert!(!refused(
        r#"{"from":"qmp:/run/{machine}.qmp","disks":{},"agent":"/run/{machine}.ga"}"#
    ));
    assert!(!refused(r#"{"disks":{"vda":"nbds://user@host/{machine}?tls-psk-file=/etc/k"}}"#));
}

#[test]
fn times_of_several_lines_are_merged() {
    let lines = ["*-*-* 02:00:00 UTC".to_owned(), "*-*-* 01:00:00 UTC".to_owned()];
    let hours: Vec<i64> = preview(&lines, START_MS, 3)
        .unwrap()
        .iter()
        .map(|ms| (ms - START_MS) / 3_600_000)
        .collect();
    assert_eq!(hours, [1, 2, 25]);
    assert!(preview(&["x".to_owned()], START_MS, 1).is_err());
    assert_eq!(schedule::next_due_ms(&Job { enabled: false, ..backup_job() }, START_MS), None);
}

#[test]
fn days_count_the_times_that_are_still_to_come() {
    let bounds = [START_MS, START_MS + DAY_MS, START_MS + 2 * DAY_MS];
    let now_ms = START_MS + 10 * HOUR_MS;
    let counts = |next_due_ms: Option<i64>| {
        let stored = StoredJob { job: backup_job(), created_ms: 0, next_due_ms };
        let days = due_between(&stored, now_ms, &bounds).into_iter();
        days.map(|due| due.map(|due| ((due.first_ms - START_MS) / HOUR_MS, due.times))).collect()
    };
    let found: Vec<_> = counts(Some(now_ms + HOUR_MS));
    assert_eq!(found, [Some((11, 13)), Some((24, 24))]);
    // What is due now is as good as queued. After the clock was set back, a time that is done is not repeated.
    assert_eq!(counts(Some(now_ms)), found);
    assert_eq!(counts(Some(now_ms + 2 * HOUR_MS)), [Some((12, 12)), Some((24, 24))]);
    assert_eq!(counts(None), [None, None]);
}

#[test]
fn a_pattern_of_a_libvirt_job_finds_domains_by_each_of_their_names() {
    let domains = ["web01", "Web Server 02", "db.1", "サーバー", "WEB01", "--rate=1", "Mail"];
    let domains = domains.map(str::to_owned).to_vec();
    let stored =
        MachineNames { display_name: Some("Web Proxy".to_owned()), ..MachineNames::of("db.1") };
    let known = schedule::machines_of_domains(domains, &[stored], |domain| domain == "Mail");
    let found = |machines: &str| {
        let text =
            format!(r#"{{"name":"x","kind":"backup","from":"libvirt","machines":{machines}}}"#);
        let runs = runs_of(&job(&text), &known).into_iter();
        runs.map(|(machine, words)| (machine.unwrap(), words.last().unwrap().clone()))
            .collect::<Vec<_>>()
    };
    let pair = |machine: &str, word: &str| (machine.to_owned(), word.to_owned());
    // WEB01 would be stored as another machine.
    let all =
        [pair("db.1", "db.1"), pair("web-server-02", "Web Server 02"), pair("web01", "web01")];
    assert_eq!(found(r#"["*"]"#), all);
    assert_eq!(found(r#"["Web *"]"#), all[..2]);
    assert_eq!(found(r#"["web server 02"]"#), all[1..2]);
    // One that does not run fails, which is told.
    assert_eq!(found(r#"["Web Server 9"]"#), [pair("web-server-9", "Web Server 9")]);
}

#[test]
fn a_backup_job_names_machines_by_their_own_names_unless_libvirt_knows_them() {
    let check = |more: &str, machine: &str| {
        let text = format!(r#"{{"name":"x","kind":"backup","machines":["{machine}"]{more}}}"#);
        serde_json::from_str::<Job>(&text).unwrap().check().is_ok()
    };
    let raw = r#","disks":{"vda":"raw:/srv/{machine}.img"}"#;
    for (more, machine, is_accepted) in [
        (raw, "web01", true),
        (raw, "Web 01", false),
        (raw, "web*", false),
        (r#","from":"libvirt""#, "Web 01", true),
        (r#","from":"libvirt""#, "Web *", true),
        (r#","from":"libvirt""#, "--rate=1", false),
        (r#","from":"libvirt""#, "サーバー", false),
    ] {
        assert_eq!(check(more, machine), is_accepted, "{machine}{more}");
    }
}

#[test]
fn jobs_find_machines_by_display_name() {
    let prune =
        job(r#"{"name":"p","kind":"prune","machines":["Web *"],"retention":{"keep_last":2}}"#);
    let named = |machine: &str, name: &str| MachineNames {
        display_name: Some(name.to_owned()),
        ..MachineNames::of(machine)
    };
    let known = [named("vm17", "Web 1"), named("vm18", "Mail"), MachineNames::of("web1")];
    let runs = runs_of(&prune, &known);
    assert_eq!(
        runs,
        [(None, ["prune", "--keep-last=2", "--", "vm17"].map(str::to_owned).to_vec())]
    );
}
