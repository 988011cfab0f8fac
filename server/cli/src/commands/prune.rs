//! `coldrise prune`: applies the rules of retention.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::{ArgGroup, Args};
use coldrise_block::Result;
use coldrise_inventory::{PrunedPoint, RetentionPlan, going, machines_or_all, retention_verdicts};
use coldrise_requests::Prune;
use coldrise_session::{
    Catalog, PointChange, PointRemoval, PointVerdict, change_through_backup, judge,
};
use coldrise_store::{MachineName, MaxUnused, PointName, Repository, RepositoryWriter};
use serde::Serialize;

use super::gc::{self, Collected};
use crate::gc_estimate::{reclaimable_bytes, unknown_space};
use crate::invocation::Invocation;
use crate::report::{Report, table};
use crate::units::{show_age, show_count, show_size};
use coldrise_hosting::signals::cancel_flag;

/// Remove restore points by rules.
///
/// A point stays if at least one rule keeps it. Each rule goes through a machine's points from
/// newest to oldest, in UTC. It keeps the newest point of each period, for the newest N periods
/// that contain points; empty periods do not count. Protected and published points always stay,
/// and so does a machine's newest backup. Points dated in the future also stay; rules do not
/// count them. docs/retention.md has examples.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("space").multiple(true))]
#[command(
    override_usage = "coldrise prune [OPTIONS] --keep-last <N>|--keep-daily <N>|… [MACHINE]..."
)]
pub(crate) struct PruneArguments {
    #[command(flatten)]
    request: Prune,

    /// Only show which points would be removed and about how much space a gc would then free.
    /// Works during a backup.
    #[arg(long, short = 'n', group = "space")]
    dry_run: bool,

    /// Run a gc afterwards, as coldrise gc does.
    #[arg(long, group = "space")]
    gc: bool,

    /// As for coldrise gc; applies to --gc and to the estimate of --dry-run.
    #[arg(long, value_name = "PERCENT", requires = "space")]
    max_unused: Option<MaxUnused>,
}

impl PruneArguments {
    fn machines(&self) -> Result<Vec<MachineName>> {
        self.request.machines.iter().flatten().map(|name| MachineName::parse(name)).collect()
    }
}

#[derive(Serialize)]
struct Pruned {
    #[serde(flatten)]
    plan: RetentionPlan,
    /// The result of the gc, with --gc.
    #[serde(skip_serializing_if = "Option::is_none")]
    gc: Option<Collected>,
}

pub(crate) fn run(invocation: &Invocation, arguments: &PruneArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let now_seconds = u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or(0);
    let (repository, judged) = if arguments.dry_run {
        let repository = invocation.open()?;
        let (rules, machines) = (arguments.request.rules.rules(), &arguments.machines()?);
        let judged = retention_verdicts(&repository, &rules, machines, now_seconds)?;
        (repository, judged)
    } else {
        forget(invocation, arguments, now_seconds, &cancel)?
    };
    let is_collecting = arguments.gc && !arguments.dry_run;
    let max_unused = arguments.max_unused.unwrap_or_default();
    let reclaimed = if is_collecting {
        None
    } else {
        match reclaimable_bytes(invocation, &repository, &going(&judged), max_unused, &cancel) {
            // The points to forget are gone.
            Err(error) if !arguments.dry_run => {
                invocation.remark(&unknown_space(&error.full_message()));
                None
            }
            estimate => estimate?,
        }
    };
    // A gc opens the repository for writing itself.
    drop(repository);
    let gc = is_collecting.then(|| gc::collect(invocation, max_unused)).transpose();
    let gc = gc
        .map_err(|error| error.context("the points are forgotten, but their space is not freed"))?;
    let mut plan = RetentionPlan::new(arguments.dry_run, &judged);
    plan.reclaimable_bytes = reclaimed;
    plan.elapsed_ms = invocation.elapsed_ms();
    let pruned = Pruned { plan, gc };
    let text = text(&pruned, now_seconds);
    Ok(if arguments.dry_run { Report::answer(&pruned, text) } else { Report::done(&pruned, text) })
}

/// Each machine with the decisions about its points.
type Decision = (Arc<Repository>, Vec<Vec<PointVerdict>>);

/// Applies the rules and removes points; no point can be published in between. During a backup,
/// its process removes them: a point that was published meanwhile is an error, and all stay.
fn forget(
    invocation: &Invocation,
    arguments: &PruneArguments,
    now_seconds: u64,
    cancel: &AtomicBool,
) -> Result<Decision> {
    let alone = |writer: RepositoryWriter| {
        let repository = Arc::clone(writer.repository());
        let rules = arguments.request.rules.rules();
        let machines = machines_or_all(&Catalog::new(&repository), &arguments.machines()?)?;
        let removal = PointRemoval::begin(&writer)?;
        let mut judged = Vec::new();
        for machine in machines {
            // Points sealed from here on wait in their sessions for the next prune.
            let points = repository.points(&machine)?;
            judged.push(judge(&rules, points, removal.published(), now_seconds));
        }
        removal.commit(&going::<Vec<_>>(&judged))?;
        Ok((repository, judged))
    };
    invocation.access()?.write_beside_backups(alone, |repository| {
        let (rules, machines) = (arguments.request.rules.rules(), &arguments.machines()?);
        let judged = retention_verdicts(repository, &rules, machines, now_seconds)?;
        let change = PointChange::Remove { points: going(&judged), lost: Vec::new() };
        let is_done = change_through_backup(repository, &change, cancel)?;
        Ok(is_done.then(|| (Arc::clone(repository), judged)))
    })
}

/// The age of a point, from the time in its name.
fn age(point: &PrunedPoint, now_seconds: u64) -> String {
    let name = PointName::parse(&point.point).ok();
    let seconds = name.and_then(|name| now_seconds.checked_sub(name.unix_seconds()));
    seconds.map_or_else(|| "-".to_owned(), show_age)
}

/// The fate of each point; `None` if there is none.
pub(crate) fn plan_text(plan: &RetentionPlan, now_seconds: u64) -> Option<String> {
    let rows: Vec<Vec<String>> = plan
        .machines
        .iter()
        .flat_map(|machine| &machine.points)
        .map(|point| {
            let what = if point.is_kept { "keep" } else { "forget" };
            vec![
                point.address.clone(),
                age(point, now_seconds),
                what.to_owned(),
                point.reasons.join(", "),
            ]
        })
        .collect();
    if rows.is_empty() {
        return None;
    }
    let mut text = table(&["ADDRESS", ">AGE", "", "BECAUSE"], &rows);
    text.push('\n');
    for machine in &plan.machines {
        text.push_str(&format!(
            "{}: {} kept, {} forgotten\n",
            machine.machine, machine.kept, machine.forgotten
        ));
    }
    Some(text)
}

fn text(pruned: &Pruned, now_seconds: u64) -> String {
    let plan = &pruned.plan;
    let Some(mut text) = plan_text(plan, now_seconds) else {
        return "no restore points yet: make one with coldrise backup".to_owned();
    };
    let points = show_count(plan.forgotten, "restore point");
    if let Some(gc) = &pruned.gc {
        text.push_str(&format!("forgot {points}; {}\n", gc.text()));
        return text;
    }
    let space = plan.reclaimable_bytes.map(|bytes| format!(" about {}", show_size(bytes)));
    let space = space.unwrap_or_else(|| " the space".to_owned());
    text.push_str(&if plan.is_dry_run {
        format!("would forget {points}; coldrise gc would then return{space}\n")
    } else {
        format!("forgot {points}; coldrise gc returns{space}\n")
    });
    text
}
