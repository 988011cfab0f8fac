//! Conditions of alarms: problems of the protection.

use std::collections::BTreeMap;

use coldrise_block::Result;
use coldrise_inventory::{MachineSummary, PointSummary};

use super::job::JobKind;
use super::pattern::{MachineNames, any_matches, named};
use super::store::Outcome;
use crate::clock::now_ms;
use crate::database::Database;

const HOUR_MS: i64 = 3_600_000;

/// A machine that has points.
#[derive(Clone, Debug)]
pub(crate) struct KnownMachine {
    pub(crate) names: MachineNames,
    /// The time of its last good backup, in milliseconds since 1970.
    pub(crate) last_good_ms: Option<i64>,
}

impl From<&MachineSummary> for KnownMachine {
    fn from(summary: &MachineSummary) -> KnownMachine {
        let good = summary.last_good_backup.as_ref();
        let age_ms = |point: &PointSummary| point.age_seconds.saturating_mul(1000);
        KnownMachine {
            names: MachineNames::from(summary),
            last_good_ms: good.map(|point| now_ms().saturating_sub_unsigned(age_ms(point))),
        }
    }
}

impl From<&MachineSummary> for MachineNames {
    fn from(summary: &MachineSummary) -> MachineNames {
        let display_name = summary.display_name.clone();
        MachineNames { display_name, ..MachineNames::of(&summary.machine) }
    }
}

/// How bad a condition is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Severity {
    Warning,
    Error,
}

/// Something is wrong now. The key stays the same as long as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Condition {
    /// `age MACHINE`, `job JOB KIND MACHINE` or `uncovered MACHINE`.
    pub(crate) key: String,
    pub(crate) severity: Severity,
    pub(crate) text: String,
    pub(crate) machine: Option<String>,
}

impl Database {
    /// The age limits of machines, in hours, with the time from which they count for a machine without points:
    /// the creation of the job. The strictest job decides.
    /// A pattern means the known machines that match.
    pub(crate) fn age_limits(
        &self,
        known: &[KnownMachine],
    ) -> Result<BTreeMap<String, (u32, i64)>> {
        let names: Vec<MachineNames> = known.iter().map(|known| known.names.clone()).collect();
        let mut limits = BTreeMap::new();
        for stored in self.jobs()? {
            let job = &stored.job;
            let Some(hours) = job.age_limit_hours.filter(|_| job.enabled) else { continue };
            let named = named(&job.machines, &names).map(|(machine, _)| machine);
            let matching = names.iter().filter(|names| any_matches(&job.machines, names));
            for machine in named.chain(matching.map(|names| names.machine.clone())) {
                let limit: &mut (u32, i64) =
                    limits.entry(machine).or_insert((hours, stored.created_ms));
                *limit = (limit.0.min(hours), limit.1.min(stored.created_ms));
            }
        }
        Ok(limits)
    }

    /// The known machines that no enabled job backs up.
    pub(crate) fn uncovered(&self, known: &[KnownMachine]) -> Result<Vec<String>> {
        let jobs = self.jobs()?;
        let is_covered = |names: &MachineNames| jobs.iter().any(|stored| stored.job.covers(names));
        let names = known.iter().map(|known| &known.names).filter(|names| !is_covered(names));
        Ok(names.map(|names| names.machine.clone()).collect())
    }
}

impl Outcome {
    /// The key of the condition that it leads to if it is bad.
    pub(crate) fn condition_key(&self) -> String {
        let machine = self.machine.as_deref().unwrap_or_default();
        format!("job {} {} {machine}", self.job, self.kind).trim_end().to_owned()
    }
}

/// All conditions of jobs and machines: a last good backup beyond its age limit, a job whose last run
/// failed and has no attempts left, a machine in no job.
///
/// # Errors
/// Errors of the database.
pub(crate) fn conditions(
    database: &Database,
    known: &[KnownMachine],
    now_ms: i64,
) -> Result<Vec<Condition>> {
    let mut found = Vec::new();
    for (machine, (hours, since_ms)) in database.age_limits(known)? {
        let good = known.iter().find(|known| known.names.machine == machine);
        let good_ms = good.and_then(|known| known.last_good_ms);
        let age_hours = (now_ms - good_ms.unwrap_or(since_ms)) / HOUR_MS;
        if now_ms - good_ms.unwrap_or(since_ms) > i64::from(hours) * HOUR_MS {
            let text = match good_ms {
                Some(_) => format!(
                    "the last good backup of {machine} is {age_hours} h old; the limit is {hours} h"
                ),
                None => format!(
                    "{machine} has no good backup; its job has existed for {age_hours} h; the limit is {hours} h"
                ),
            };
            let key = format!("age {machine}");
            found.push(Condition { key, severity: Severity::Error, text, machine: Some(machine) });
        }
    }
    let waiting = database.queue_rows()?;
    for outcome in database.outcomes(None)?.into_iter().filter(|outcome| outcome.failures > 0) {
        let is_tried_again = waiting.iter().any(|row| {
            row.job.as_ref() == Some(&outcome.job)
                && row.kind == outcome.kind
                && row.machine == outcome.machine
        });
        if is_tried_again {
            continue;
        }
        let key = outcome.condition_key();
        let Outcome { job, kind, machine, run, message, failures, .. } = outcome;
        let of = machine.as_ref().map(|machine| format!(" of {machine}")).unwrap_or_default();
        let why = message.unwrap_or_default();
        let times = if failures == 1 { "once".to_owned() } else { format!("{failures} times") };
        found.push(Condition {
            key,
            // A machine that does not boot is an error as much as one that has no backup.
            severity: match kind == JobKind::Prune.word() || kind == JobKind::Gc.word() {
                true => Severity::Warning,
                false => Severity::Error,
            },
            text: format!("job {job}: the {kind}{of} failed {times}, last in run {run}: {why}"),
            machine,
        });
    }
    for machine in database.uncovered(known)? {
        found.push(Condition {
            key: format!("uncovered {machine}"),
            severity: Severity::Warning,
            text: format!("no job backs up {machine}"),
            machine: Some(machine),
        });
    }
    Ok(found)
}
