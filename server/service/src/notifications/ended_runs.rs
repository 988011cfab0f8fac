//! Ended runs: each is looked at once, also those that ended while the service was down.
//!
//! The result of a job's run is kept for the alarm of the job. Other runs that were requested
//! over the API lead to one message. A run started by hand on the command line has shown its error there;
//! only its loss is reported. Damage that a verify has found is an alarm: see [`super::found_damage`].

use std::collections::HashSet;

use coldrise_block::{Context, ErrorKind, Result};
use coldrise_runs::{BOOT_FAILED, BOOT_NOT_PROVEN, RunId, RunRecord, RunsFolder, State};
use rusqlite::{Connection, OptionalExtension, Transaction, params};

use super::condition::{Condition, Severity, Topic};
use super::{found_damage, settings};
use crate::database::{Database, SqlResult};
use crate::jobs::copy_failures;

/// Ended runs are remembered this long, in milliseconds; their folders are removed earlier.
const HISTORY_MS: i64 = 100 * 24 * 3600 * 1000;
/// The setting that says that runs of before the service are known.
const BASELINE: &str = "runs_baseline";

/// The runs of the folder at one time.
pub(super) struct Sweep {
    /// Runs that ended and were not known.
    pub(super) ended: Vec<RunRecord>,
    /// Number of running ones.
    pub(super) running: usize,
}

/// Reads the runs that are not known to have ended.
///
/// # Errors
/// Errors of reading the folder.
pub(super) fn sweep(runs: &RunsFolder, known: &HashSet<String>) -> Result<Sweep> {
    let mut sweep = Sweep { ended: Vec::new(), running: 0 };
    let entries = match std::fs::read_dir(runs.path()) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(sweep),
        entries => entries.context(|| format!("reading {}", runs.path().display()))?,
    };
    for entry in entries.filter_map(std::result::Result::ok) {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(id) = name.parse::<RunId>() else { continue };
        if known.contains(&name) {
            continue;
        }
        match runs.read(&id) {
            Ok(run) if run.state == State::Running => sweep.running += 1,
            Ok(run) => sweep.ended.push(run),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => tracing::warn!("{}", error.full_message()),
        }
    }
    sweep.ended.sort_by_key(ended_ms);
    Ok(sweep)
}

fn ended_ms(run: &RunRecord) -> i64 {
    let ended = run.result.as_ref().map(|result| result.ended_at_ms);
    let started = run.plan.as_ref().map(|plan| plan.started_at_ms);
    i64::try_from(ended.or(started).unwrap_or(0)).unwrap_or(0)
}

/// The ids of the runs that were looked at.
pub(super) fn known(sql: &Connection) -> SqlResult<HashSet<String>> {
    let mut found = sql.prepare_cached("SELECT id FROM ended_runs")?;
    let found = found.query_map([], |row| row.get(0))?;
    found.collect()
}

/// Records ended runs, and returns the conditions of those that lead to a message and to no alarm.
/// `machine_of` says of a session's name which machine it is of.
/// At the very first start of the service there are none.
pub(super) fn record(
    sql: &Transaction<'_>,
    ended: &[RunRecord],
    machine_of: &dyn Fn(&str) -> Option<String>,
    now_ms: i64,
) -> SqlResult<Vec<Condition>> {
    let is_first = settings::get(sql, BASELINE)?.is_none();
    if is_first {
        settings::set(sql, BASELINE, Some("known"))?;
    }
    let mut messages = Vec::new();
    for run in ended {
        let is_of_job = run.plan.as_ref().is_some_and(|plan| plan.job.is_some());
        let condition = condition(run, machine_of);
        let stored = condition.as_ref().map(serde_json::to_string).transpose();
        sql.prepare_cached(
            "INSERT INTO ended_runs (id, state, ended_ms, condition) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT DO NOTHING",
        )?
        .execute(params![
            run.id,
            run.state.word(),
            // A run without a time, or with one of a wrong clock, must not be forgotten at once: it would be sent again.
            ended_ms(run).max(now_ms),
            stored.map_err(|_| rusqlite::Error::InvalidQuery)?,
        ])?;
        let is_success = run.state == State::Ok;
        let is_alarm = |condition: &Condition| condition.topic == Topic::Damage;
        messages.extend(
            condition.filter(|condition| {
                !is_first && (is_success || !is_of_job) && !is_alarm(condition)
            }),
        );
    }
    sql.execute("DELETE FROM ended_runs WHERE ended_ms < ?1", [now_ms - HISTORY_MS])?;
    Ok(messages)
}

/// The condition of an ended run.
fn condition(run: &RunRecord, machine_of: &dyn Fn(&str) -> Option<String>) -> Option<Condition> {
    if let Some(damage) = found_damage::condition(run, machine_of) {
        return Some(damage);
    }
    let plan = run.plan.as_ref();
    let is_asked = plan.is_some_and(|plan| plan.job.is_some() || plan.requested_by.is_some());
    let command = plan.map_or("a run", |plan| plan.command.as_str());
    // Who browses files sees what went wrong, and nothing else depends on it.
    if command == "files serve" {
        return None;
    }
    let machine = plan.and_then(|plan| plan.machine.as_deref());
    let of = machine.map_or_else(String::new, |machine| format!(" of {machine}"));
    let by = match plan.and_then(|plan| plan.job.as_ref()) {
        Some(job) => format!(" (job {job})"),
        None => String::new(),
    };
    let exit_code = run.result.as_ref().map_or(0, |result| result.exit_code);
    // Boot checks have alarms of their own; and a busy repository is tried again.
    let is_verdict = [BOOT_FAILED, BOOT_NOT_PROVEN, coldrise_runs::exit_code(ErrorKind::Busy)]
        .contains(&exit_code);
    let (topic, severity, ending) = match run.state {
        State::Running | State::Cancelled => return None,
        State::Ok if is_asked => (Topic::RunSucceeded, Severity::Info, "succeeded"),
        State::Failed if is_asked && !is_verdict => (Topic::RunFailed, Severity::Fail, "failed"),
        State::Lost => (Topic::RunLost, Severity::Fail, "was lost"),
        State::Ok | State::Failed => return None,
    };
    let key = format!(
        "run:{}:{}:{command}",
        plan.and_then(|plan| plan.job.as_deref()).unwrap_or_default(),
        machine.unwrap_or_default()
    );
    let mut condition = Condition::new(key, topic, severity, format!("{command}{of} {ending}{by}"));
    condition.machine = machine.map(str::to_owned);
    condition.run = Some(run.id.clone());
    if let Some(error) = run.result.as_ref().and_then(|result| result.error.as_ref()) {
        condition.details = format!("{}\nExit code: {exit_code}", error.message);
    } else if let Some(failures) = copy_failures(run) {
        condition.details = failures;
    } else if run.state == State::Lost {
        condition.details = run.problems.join("\n");
        condition.advice = Some("start it again".to_owned());
    }
    condition.command = plan
        .filter(|_| topic != Topic::RunSucceeded)
        .map(|plan| format!("coldrise {}", plan.arguments.join(" ")));
    Some(condition)
}

/// The report on a run that was looked at; `None` if nothing, or if it was not.
pub(super) fn condition_of(sql: &Connection, run: &str) -> SqlResult<Option<Condition>> {
    let found: Option<Option<String>> = sql
        .prepare_cached("SELECT condition FROM ended_runs WHERE id = ?1")?
        .query_row([run], |row| row.get(0))
        .optional()?;
    let parsed = found.flatten().map(|text| serde_json::from_str(&text)).transpose();
    parsed.map_err(|_| rusqlite::Error::InvalidQuery)
}

impl Database {
    /// When a run was found lost, in milliseconds since 1970; `None` if it was not looked at yet.
    pub(crate) fn found_lost_ms(&self, run: &str) -> Result<Option<i64>> {
        self.read(|sql| {
            let found = "SELECT ended_ms FROM ended_runs WHERE id = ?1 AND state = ?2";
            let words = params![run, State::Lost.word()];
            sql.prepare_cached(found)?.query_row(words, |row| row.get(0)).optional()
        })
    }

    /// Number of ended runs by state.
    pub(crate) fn count_ended_runs(&self) -> Result<Vec<(String, u64)>> {
        self.read(|sql| {
            let mut found =
                sql.prepare_cached("SELECT state, count(*) FROM ended_runs GROUP BY state")?;
            let found = found.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            found.collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Topic, condition_of, known, record};
    use crate::database::Database;
    use coldrise_runs::RunRecord;

    fn run(id: u32, job: Option<&str>, by: Option<&str>, exit_code: Option<u8>) -> RunRecord {
        let state = match exit_code {
            None => coldrise_runs::State::Lost,
            Some(0) => coldrise_runs::State::Ok,
            Some(_) => coldrise_runs::State::Failed,
        };
        let plan = serde_json::json!({
            "command": "backup", "arguments": ["backup", "web01"], "repository": null,
            "machine": "web01", "point": null, "started_at_ms": 1000 * id, "job": job,
            "requested_by": by,
            "who": {"uid": 0, "user": null, "pid": 1, "host": "h", "boot_id": "b"},
        });
        let result = exit_code.map(|exit_code| {
            let error = (exit_code != 0).then(|| serde_json::json!({"kind": "io", "message": "no"}));
            serde_json::from_value(serde_json::json!({
                "exit_code": exit_code, "error": error, "counts": null, "ended_at_ms": 1000 * id + 1,
            }))
            .unwrap()
        });
        let plan = serde_json::from_value(plan).unwrap();
        let id = format!("20261123T014500Z-{id:04x}-backup");
        let (ended_at_ms, machine, progress, problems) = (None, None, None, vec![]);
        RunRecord { id, state, plan, result, ended_at_ms, machine, progress, problems }
    }

    #[test]
    fn a_run_is_reported_once_if_a_user_waits_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(folder.path()).unwrap();
        let now_ms = super::HISTORY_MS * 2;
        let take = |run: RunRecord| {
            let reported = database.change(|sql| record(sql, &[run], &|_| None, now_ms)).unwrap();
            reported.first().map(|condition| condition.topic)
        };
        assert_eq!(take(run(1, None, Some("operator"), Some(1))), None, "of before the service");
        assert_eq!(take(run(2, None, None, Some(1))), None, "the terminal showed it");
        assert_eq!(take(run(3, None, Some("operator"), Some(1))), Some(Topic::RunFailed));
        assert_eq!(take(run(4, None, None, None)), Some(Topic::RunLost));
        assert_eq!(take(run(5, Some("nightly"), None, Some(0))), Some(Topic::RunSucceeded));
        assert_eq!(take(run(6, None, Some("operator"), Some(11))), None, "the repository was busy");
        let failed = run(7, Some("nightly"), None, Some(1));
        let id = failed.id.clone();
        assert_eq!(take(failed), None, "the job has an alarm");
        let kept = database.read(|sql| condition_of(sql, &id)).unwrap().unwrap();
        assert_eq!(kept.summary, "backup of web01 failed (job nightly)");
        assert_eq!(kept.details, "no\nExit code: 1");
        // Killed before it had a plan.
        assert_eq!(
            take(RunRecord { plan: None, ..run(8, None, None, None) }),
            Some(Topic::RunLost)
        );
        assert_eq!(database.read(known).unwrap().len(), 8);
    }
}
