//! Which runs may start beside which (docs/concurrency.md). Pure computation.

use std::collections::HashMap;

use super::copy;
use super::rows::{QueueRow, RowState};

/// How a command gets along with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// Beside backups of other machines.
    Backup,
    /// One per machine.
    BootCheck,
    /// One at a time. A backup's process does its work where `beside_backups`.
    Writer { beside_backups: bool },
    /// One per target and machine, beside everything else. A copy over a slow line takes days: copies take no other run's
    /// place.
    Copy,
    /// Beside everything.
    Reader,
    /// Recoveries, and runs that follow a machine: they start at once, and do not count.
    Recovery,
}

impl Class {
    fn of(kind: &str) -> Class {
        match kind {
            // A rollback stores the present state first, and its target must not be read meanwhile.
            "backup" | "rollback" => Class::Backup,
            "copy" => Class::Copy,
            "check-boot" | "bisect" => Class::BootCheck,
            "gc" | "prune" | "forget" => Class::Writer { beside_backups: true },
            "fold" | "repair" | "protect" | "unprotect" | "quarantine" | "release" => {
                Class::Writer { beside_backups: false }
            }
            "boot" | "mount" | "publish" | "restore" | "seal" | "unpublish" | "recover"
            | "move" | "attach" | "detach" | "files" | "protect-live" => Class::Recovery,
            _ if kind.starts_with("serve") => Class::Recovery,
            _ => Class::Reader,
        }
    }
}

impl Class {
    /// Among which runs it is counted: copies among copies. `None`: it is not.
    fn place(self) -> Option<bool> {
        match self {
            Class::Recovery => None,
            class => Some(class == Class::Copy),
        }
    }
}

/// The limits of a job.
#[derive(Clone, Copy, Debug)]
pub(super) struct JobLimits {
    pub(super) parallel: Option<u32>,
    /// Now is inside its window.
    pub(super) is_open: bool,
}

/// The runs that can be started now.
#[derive(Debug, Default)]
pub(super) struct Choice {
    /// The runs to start, in their order.
    pub(super) start: Vec<String>,
    /// The due runs that wait, and why.
    pub(super) held: Vec<(String, String)>,
}

/// Chooses from the rows, which are in their order. A run that waits for another one is not overtaken
/// by a later run that would keep it waiting.
pub(super) fn choose(
    rows: &[QueueRow],
    now_ms: i64,
    max_runs: usize,
    jobs: &HashMap<String, JobLimits>,
) -> Choice {
    let mut choice = Choice::default();
    let mut active: Vec<&QueueRow> = rows.iter().filter(|row| row.state.is_active()).collect();
    let mut ahead: Vec<&QueueRow> = Vec::new();
    for row in rows.iter().filter(|row| row.state == RowState::Waiting && row.due_ms <= now_ms) {
        let job = row.job.as_ref().and_then(|job| jobs.get(job));
        // A person's start is not held by the window.
        if row.requested_by.is_none() && job.is_some_and(|job| !job.is_open) {
            choice.held.push((row.run.clone(), "waits for the window of its job".to_owned()));
            continue;
        }
        if let Some(other) = active.iter().chain(&ahead).find(|other| conflict(row, other)) {
            choice.held.push((row.run.clone(), format!("waits for run {}", other.run)));
            ahead.push(row);
            continue;
        }
        let of_job = active.iter().filter(|other| other.job == row.job && other.kind == row.kind);
        if let Some(limit) = job.and_then(|job| job.parallel) {
            if of_job.count() >= limit as usize {
                let reason = format!("waits for another run of its job: {limit} at once");
                choice.held.push((row.run.clone(), reason));
                continue;
            }
        }
        let class = Class::of(&row.kind);
        let takes_place = |other: &&&QueueRow| Class::of(&other.kind).place() == class.place();
        if class.place().is_some() && active.iter().filter(takes_place).count() >= max_runs {
            let reason = format!("waits for another run to end: {max_runs} at once");
            choice.held.push((row.run.clone(), reason));
            continue;
        }
        choice.start.push(row.run.clone());
        active.push(row);
    }
    choice
}

/// Whether two runs cannot be active at once.
fn conflict(one: &QueueRow, other: &QueueRow) -> bool {
    let is_same_machine = one.machine.is_some() && one.machine == other.machine;
    match (Class::of(&one.kind), Class::of(&other.kind)) {
        (Class::Backup, Class::Backup) | (Class::BootCheck, Class::BootCheck) => is_same_machine,
        // One without a machine copies all.
        (Class::Copy, Class::Copy) => {
            let is_of_all = one.machine.is_none() || other.machine.is_none();
            copy::target(&one.arguments) == copy::target(&other.arguments)
                && (is_same_machine || is_of_all)
        }
        (Class::Writer { .. }, Class::Writer { .. }) => true,
        (Class::Writer { beside_backups }, Class::Backup)
        | (Class::Backup, Class::Writer { beside_backups }) => !beside_backups,
        _ => false,
    }
}
