//! Copies that are further behind than the limit of their job.

use coldrise_block::Result;
use coldrise_inventory::MachineSummary;
use coldrise_replica::{MachineCopies, TargetCopies};

use super::condition::{Condition, Severity, Topic};
use crate::database::Database;
use crate::jobs::{JobKind, MachineNames, StoredJob, any_matches};

const MINUTE_MS: i64 = 60_000;

/// The conditions of all jobs that copy and have a limit. A copy that was never made, or of which nothing is known, is
/// behind since the job exists, or since the only point of the machine.
///
/// # Errors
/// Errors of the database.
pub(super) fn read(
    database: &Database,
    targets: &[TargetCopies],
    machines: &[MachineSummary],
    now_ms: i64,
) -> Result<Vec<Condition>> {
    let mut found = Vec::new();
    for stored in database.jobs()? {
        let StoredJob { job, .. } = &stored;
        let limit = job.behind_limit_minutes.filter(|_| job.enabled && job.kind == JobKind::Copy);
        let (Some(minutes), Some(name)) = (limit, job.copy_target()) else { continue };
        let target = targets.iter().find(|target| target.target == name);
        let is_copied =
            |summary: &&MachineSummary| any_matches(&job.machines, &MachineNames::from(*summary));
        for summary in machines.iter().filter(is_copied) {
            let machine = &summary.machine;
            let far = format!("{}{machine}", job.prefix.as_deref().unwrap_or_default());
            let copies = target
                .and_then(|target| target.machines.iter().find(|copies| copies.far_machine == far));
            // For a new machine, since its only point.
            let only = summary.latest.as_ref().filter(|_| summary.points == 1);
            let only_ms = only.and_then(|point| i64::try_from(point.created_at_ms).ok());
            let begun_ms = only_ms.unwrap_or(stored.created_ms).max(stored.created_ms);
            let since_ms = behind_since_ms(copies, begun_ms);
            let behind_ms = since_ms.map_or(0, |since_ms| now_ms - since_ms);
            if behind_ms > i64::from(minutes) * MINUTE_MS {
                found.push(condition(&stored, machine, &name, copies, target, behind_ms));
            }
        }
    }
    Ok(found)
}

/// Since when a point is not there; `None` if none is missing.
fn behind_since_ms(copies: Option<&MachineCopies>, begun_ms: i64) -> Option<i64> {
    let Some(copies) = copies else { return Some(begun_ms) };
    match copies.points_behind {
        Some(0) => None,
        _ => {
            let since_ms = copies.behind_since_ms.and_then(|since| i64::try_from(since).ok());
            // A job does not answer for the time before it existed.
            Some(since_ms.unwrap_or(begun_ms).max(begun_ms))
        }
    }
}

fn condition(
    stored: &StoredJob,
    machine: &str,
    target: &str,
    copies: Option<&MachineCopies>,
    all: Option<&TargetCopies>,
    behind_ms: i64,
) -> Condition {
    let job = &stored.job.name;
    let age = shown_minutes(behind_ms / MINUTE_MS);
    let limit = shown_minutes(i64::from(stored.job.behind_limit_minutes.unwrap_or(0)));
    let points = copies.and_then(|copies| copies.points_behind);
    let text = match (copies.and_then(|copies| copies.last_cut.as_ref()), points) {
        (None, _) => format!(
            "{machine} was never copied to {target}, and has been waiting for job {job} for {age}"
        ),
        (_, None) => format!("the state of the copies of {machine} at {target} is unknown"),
        (_, Some(1)) => format!("a point of {machine} has been missing at {target} for {age}"),
        (_, Some(points)) => {
            format!("{points} points of {machine} are missing at {target}, the oldest for {age}")
        }
    };
    let key = format!("copies:{job}:{machine}");
    let mut found = Condition::new(key, Topic::Copies, Severity::Fail, text);
    let failure = copies.and_then(|copies| copies.failure.as_ref());
    let failure = failure.or_else(|| all.and_then(|target| target.failure.as_ref()));
    found.details = format!("The limit of job {job} is {limit}.");
    if let Some(failure) = failure {
        found.details += &format!("\nThe last copy failed: {}", failure.message);
    }
    let command = format!("coldrise copies {target}");
    found
        .of_machine(machine)
        .advise("check whether copies run and how fast the line is", Some(command))
}

fn shown_minutes(minutes: i64) -> String {
    match minutes {
        0..=119 => format!("{minutes} min"),
        120..=2879 => format!("{} h", minutes / 60),
        _ => format!("{} days", minutes / 1440),
    }
}
