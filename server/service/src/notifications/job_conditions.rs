//! Conditions of jobs and of the ages of backups, as alarms.

use coldrise_block::Result;
use coldrise_inventory::MachineSummary;
use rusqlite::Connection;

use super::condition::{Condition, Severity, Topic};
use super::ended_runs;
use crate::database::{Database, SqlResult};
use crate::jobs::{self, KnownMachine, Outcome};

/// Reads the conditions, and the keys of jobs that failed and are tried again: it is not known yet whether
/// that is a condition.
///
/// # Errors
/// Errors of the database.
pub(super) fn read(
    database: &Database,
    machines: &[MachineSummary],
    now_ms: i64,
) -> Result<(Vec<Condition>, Vec<String>)> {
    let known: Vec<KnownMachine> = machines.iter().map(KnownMachine::from).collect();
    let outcomes = database.outcomes(None)?;
    let found = jobs::conditions(database, &known, now_ms)?;
    let found: Vec<_> = found.into_iter().map(|condition| alarm(condition, &outcomes)).collect();
    let failed = outcomes.iter().filter(|outcome| outcome.failures > 0);
    let undecided = failed
        .map(|outcome| alarm_key(&outcome.condition_key()))
        .filter(|key| !found.iter().any(|condition| condition.key == *key))
        .collect();
    Ok((found, undecided))
}

/// Part of an address: no spaces.
fn alarm_key(key: &str) -> String {
    key.replace(' ', ":")
}

fn alarm(condition: jobs::Condition, outcomes: &[Outcome]) -> Condition {
    let severity = match condition.severity {
        jobs::Severity::Warning => Severity::Warn,
        jobs::Severity::Error => Severity::Fail,
    };
    let (word, _) = condition.key.split_once(' ').unwrap_or_default();
    let topic = match word {
        "age" => Topic::Age,
        "uncovered" => Topic::Uncovered,
        _ => Topic::RunFailed,
    };
    let mut alarm = Condition::new(alarm_key(&condition.key), topic, severity, condition.text);
    let outcome = outcomes.iter().find(|outcome| outcome.condition_key() == condition.key);
    alarm.run = outcome.map(|outcome| outcome.run.clone());
    let name = condition.machine.clone().unwrap_or_default();
    alarm.machine = condition.machine;
    match topic {
        Topic::Age => alarm.advise(
            "start its job, and see why it did not run",
            Some(format!("coldrise list {name}")),
        ),
        Topic::Uncovered => alarm.advise("add it to a job, or forget its points", None),
        _ => alarm,
    }
}

/// Adds to the alarms of jobs what their last run said: its error, exit code and command line. A boot check that failed has an
/// alarm of its machine already.
pub(super) fn complete(sql: &Connection, conditions: &mut Vec<Condition>) -> SqlResult<()> {
    let of_boot: Vec<String> = conditions
        .iter()
        .filter(|condition| condition.topic == Topic::Boot)
        .filter_map(|condition| condition.machine.clone())
        .collect();
    conditions.retain(|condition| {
        let is_check =
            condition.topic == Topic::RunFailed && condition.key.contains(":check-boot:");
        !(is_check && condition.machine.as_ref().is_some_and(|machine| of_boot.contains(machine)))
    });
    for condition in conditions.iter_mut().filter(|condition| condition.topic == Topic::RunFailed) {
        let Some(run) = &condition.run else { continue };
        let Some(said) = ended_runs::condition_of(sql, run)? else { continue };
        condition.topic = said.topic;
        condition.machine = condition.machine.take().or(said.machine);
        condition.affects = said.affects;
        condition.details = format!("{}\n{}", condition.summary, said.details);
        condition.summary = said.summary;
        condition.advice = said.advice;
        condition.command = said.command;
    }
    Ok(())
}
