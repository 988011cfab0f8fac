//! Damage that verifies have found: an alarm until a verify of the same has found none.
//!
//! The verify of a job has the alarm of its job. All others, also those of the command line, are kept here: what
//! a verify of everything has found replaces all before it, and none found ends all. A verify of an address
//! speaks for this address alone; one of a sample, or of recent data, shows damage and never its absence.

use std::path::Path;

use coldrise_runs::{Plan, RunRecord, State};
use rusqlite::{Connection, Transaction};

use super::condition::{Condition, Severity, Topic};
use super::settings;
use crate::database::SqlResult;
use crate::verify_result::FoundDamage;

/// The setting with the conditions, a JSON list.
const FOUND: &str = "found_damage";
/// The key of what a verify of everything has found.
const WHOLE: &str = "damage:verify";
const ADVICE: &str = "restore from points that are not affected, repair, and verify again";

/// Whether the run is a verify.
pub(super) fn is_verify(run: &RunRecord) -> bool {
    run.plan.as_ref().is_some_and(|plan| plan.command == "verify")
}

/// The scope of a verify.
enum Scope {
    Everything,
    Address(String),
    /// A sample, or recent data.
    Part,
}

impl Scope {
    fn of(plan: &Plan) -> Scope {
        let words = &plan.arguments;
        if words.iter().any(|word| word.starts_with("--sample") || word.starts_with("--since")) {
            return Scope::Part;
        }
        let machine = plan.machine.as_ref().map(|machine| format!("{machine}/"));
        let is_address = |word: &&String| {
            let is_of = |machine: &String| format!("{word}/").starts_with(machine);
            word.starts_with("live/") || machine.as_ref().is_some_and(is_of)
        };
        let found = words.iter().rev().find(is_address);
        found.map_or(Scope::Everything, |word| Scope::Address(word.clone()))
    }

    fn key(&self) -> String {
        match self {
            Scope::Everything | Scope::Part => WHOLE.to_owned(),
            Scope::Address(address) => format!("{WHOLE}:{address}"),
        }
    }
}

/// The condition of damage that this run has found, if any. `machine_of` says of a session's name which
/// machine it is of.
pub(super) fn condition(
    run: &RunRecord,
    machine_of: &dyn Fn(&str) -> Option<String>,
) -> Option<Condition> {
    let plan = run.plan.as_ref()?;
    let damage = FoundDamage::of(run)?;
    let by = plan.job.as_ref().map_or_else(String::new, |job| format!(" (job {job})"));
    let summary = format!("{}{by}", damage.summary);
    let mut found = Condition::new(Scope::of(plan).key(), Topic::Damage, Severity::Fail, summary);
    let owners = damage.affected.iter().map(|owner| match owner.strip_prefix("live/") {
        Some(session) => machine_of(session),
        None => Some(owner.clone()),
    });
    let owners: Option<Vec<String>> = owners.collect();
    // Whose a session is can be unknown: then only callers who see all machines see its name.
    let is_known = owners.is_some();
    found.affects = owners.unwrap_or_else(|| {
        damage.affected.into_iter().filter(|owner| !owner.starts_with("live/")).collect()
    });
    found.affects.sort();
    found.affects.dedup();
    if let ([machine], true) = (found.affects.as_slice(), is_known) {
        found.machine = Some(machine.clone());
    }
    found.run = Some(run.id.clone());
    found.details = damage.details;
    let command = format!("coldrise {}", plan.arguments.join(" "));
    Some(found.advise(ADVICE, Some(command)))
}

/// Takes the results of verifies of this repository among `ended`, the oldest first.
pub(super) fn note(
    sql: &Transaction<'_>,
    ended: &[RunRecord],
    repository: Option<&Path>,
    machine_of: &dyn Fn(&str) -> Option<String>,
) -> SqlResult<()> {
    let own = repository.and_then(|path| path.canonicalize().ok());
    let before = read(sql)?;
    let mut all = before.clone();
    for run in ended.iter().filter(|run| is_verify(run)) {
        let Some(plan) = &run.plan else { continue };
        let place = plan.repository.as_ref().map(|path| Path::new(path).canonicalize().ok());
        if place.is_some_and(|place| place != own) {
            continue;
        }
        let found = condition(run, machine_of);
        let scope = Scope::of(plan);
        match (&scope, found.is_some() || run.state == State::Ok) {
            (_, false) => continue,
            (Scope::Everything, true) => all.clear(),
            (Scope::Part, true) if found.is_none() => continue,
            (_, true) => all.retain(|condition| condition.key != scope.key()),
        }
        all.extend(found.filter(|_| plan.job.is_none()));
    }
    if all == before {
        return Ok(());
    }
    let text = serde_json::to_string(&all).map_err(|_| rusqlite::Error::InvalidQuery)?;
    settings::set(sql, FOUND, Some(&text).filter(|_| !all.is_empty()).map(String::as_str))
}

/// The conditions that hold.
pub(super) fn read(sql: &Connection) -> SqlResult<Vec<Condition>> {
    let text = settings::get(sql, FOUND)?.unwrap_or_else(|| "[]".to_owned());
    serde_json::from_str(&text).map_err(|_| rusqlite::Error::InvalidQuery)
}
