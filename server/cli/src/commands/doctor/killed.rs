//! Leftovers of killed commands in machines and on disks of others, by the records of their runs.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use coldrise_block::{ErrorKind, Result};
use coldrise_hypervisors::attach::Machine;
use coldrise_runs::{Plan, RunId, RunRecord, RunsFolder, State};
use coldrise_store::Repository;
use serde_json::Value;

use super::{Findings, Status};
use crate::commands::attach::named_host;

const CHECK: &str = "killed commands";
/// The newest ended runs that are looked at.
const MAX_RUNS: usize = 1000;

/// Names disks that a killed `attach` has left in a machine, and, until a later one has completed, targets that a killed
/// `rollback` has left half written, and what a killed `backup` of a running machine has left.
pub(super) fn check(found: &mut Findings, repository: &Arc<Repository>) {
    // Without records nothing is known.
    let Ok(folder) = coldrise_runs::RunsFolder::required() else { return };
    let runs = match folder.list(MAX_RUNS) {
        Ok(list) => list.runs,
        Err(error) => return found.error(CHECK, &error),
    };
    let mut handled = HashSet::new();
    // The newest first.
    for run in runs.iter().filter(|run| is_of(run, repository.path())) {
        let Some(plan) = &run.plan else { continue };
        let left = match (plan.command.as_str(), run.state) {
            ("rollback", State::Ok) => {
                handled.extend(targets(note(&folder, run, "targets").as_ref()));
                continue;
            }
            ("backup", State::Ok) => {
                handled.extend(live_backup(plan));
                continue;
            }
            ("backup", State::Lost) => backed_up(plan, &mut handled).map(Ok),
            ("rollback", State::Lost | State::Cancelled | State::Failed) => {
                rolled_back(&folder, run, &mut handled).map(Ok)
            }
            ("attach", State::Running) => {
                handled.extend(note(&folder, run, "machine").map(|begun| place(&begun)));
                continue;
            }
            ("attach", State::Lost) => attached(repository, &folder, run, &mut handled),
            _ => continue,
        };
        match left {
            None => {}
            Some(Ok((message, advice))) => found.add(CHECK, Status::Warn, message, &advice),
            // The machine may be at fault, and not the repository.
            Some(Err(error)) => found.add(CHECK, Status::Warn, error.full_message(), ""),
        }
    }
}

fn is_of(run: &RunRecord, repository: &Path) -> bool {
    let place = run.plan.as_ref().and_then(|plan| plan.repository.as_deref());
    let same = |path: &str| match (Path::new(path).canonicalize(), repository.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    };
    place.is_some_and(same)
}

/// The note that a run wrote before it changed anything, by a field that only this note has.
fn note(folder: &RunsFolder, run: &RunRecord, field: &str) -> Option<Value> {
    let id: RunId = run.id.parse().ok()?;
    folder.first_progress(&id, field).ok()?
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

/// The targets of a rollback.
fn targets(begun: Option<&Value>) -> Vec<String> {
    let all = begun.and_then(|begun| begun["targets"].as_array());
    all.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn rolled_back(
    folder: &RunsFolder,
    run: &RunRecord,
    handled: &mut HashSet<String>,
) -> Option<(String, String)> {
    let begun = note(folder, run, "targets")?;
    let all = targets(Some(&begun)).into_iter();
    let open: Vec<String> = all.filter(|target| handled.insert(target.clone())).collect();
    if open.is_empty() {
        return None;
    }
    let address = text(&begun, "address");
    let message = format!(
        "a rollback to {address} has not ended: {} may have parts of two states",
        open.join(", ")
    );
    let advice = format!("coldrise rollback {address}, with the same targets: it writes the rest");
    Some((message, advice))
}

/// Names the backup of a running machine, which has jobs in its QEMU, and scratch files; `None` for one of images.
fn live_backup(plan: &Plan) -> Option<String> {
    let is_live = plan.arguments.iter().any(|word| word == "--from" || word.starts_with("--from="));
    plan.machine.as_deref().filter(|_| is_live).map(|machine| format!("backup of {machine}"))
}

fn backed_up(plan: &Plan, handled: &mut HashSet<String>) -> Option<(String, String)> {
    let machine = plan.machine.as_deref()?;
    handled.insert(live_backup(plan)?).then(|| {
        let message = format!(
            "a backup of {machine} was killed: its QEMU may still copy into scratch files, which take space"
        );
        (message, format!("coldrise backup {machine} --from …: the next backup removes them"))
    })
}

/// Names the place of an attached disk.
fn place(begun: &Value) -> String {
    format!("{} {}", text(begun, "machine"), text(begun, "name"))
}

fn attached(
    repository: &Arc<Repository>,
    folder: &RunsFolder,
    run: &RunRecord,
    handled: &mut HashSet<String>,
) -> Option<Result<(String, String)>> {
    let begun = note(folder, run, "machine")?;
    if !handled.insert(place(&begun)) {
        return None;
    }
    let (machine, name) = (text(&begun, "machine"), text(&begun, "name"));
    let (connect, address) = (begun["connect"].as_str(), text(&begun, "address"));
    let on = begun["host"].as_str();
    let asked = named_host(repository, on).and_then(|host| {
        let machine = machine.parse::<Machine>()?;
        machine.is_attached(&host, connect, name)
    });
    let is_there = match asked {
        // The machine has ended, and its disks with it.
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => {
            let what = format!("whether {machine} still has disk {name}, which nothing serves");
            return Some(Err(error.context(what)));
        }
        Ok(is_there) => is_there,
    };
    let message = format!("{machine} still has disk {name} ({address}), and nothing serves it");
    is_there.then(|| Ok((message, detach_command(machine, (connect, on), name))))
}

/// The command that removes it.
fn detach_command(
    machine: &str,
    (connect, on): (Option<&str>, Option<&str>),
    name: &str,
) -> String {
    let connect = connect.map(|uri| format!(" --connect {uri}")).unwrap_or_default();
    let on = on.map(|host| format!(" --on {host}")).unwrap_or_default();
    format!("coldrise detach {name} --from {machine}{on}{connect}")
}
