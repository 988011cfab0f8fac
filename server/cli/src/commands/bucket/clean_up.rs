//! `coldrise bucket forget` and `coldrise bucket prune`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_bucket::{BucketRepository, CompactReport};
use coldrise_inventory::{Retention, RetentionPlan, going};
use coldrise_requests::{Target, parse_target};
use coldrise_session::{Published, judge};
use coldrise_store::{MachineName, PointDocument, PointName};
use serde::Serialize;

use super::{find, open_for, parse_url, tell_damaged};
use crate::commands::prune::plan_text;
use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::{show_count, show_size};

/// Remove restore points from a bucket, and free the space that no other point needs.
#[derive(Debug, Args)]
pub(crate) struct ForgetArguments {
    /// The bucket: s3://BUCKET/PREFIX.
    #[arg(value_name = "BUCKET", value_parser = parse_url)]
    bucket: String,

    /// Restore points.
    #[arg(value_name = "MACHINE/POINT", required_unless_present = "damaged", value_parser = parse_target)]
    points: Vec<Target>,

    /// Remove the points that can no longer be read, and the data that only they may have needed.
    #[arg(long)]
    damaged: bool,
}

/// Remove restore points from a bucket by rules, as coldrise prune does, and free the space that no other point needs.
///
/// Refused while a copy to the bucket is running, and for 15 minutes after one was killed.
#[derive(Debug, Args)]
pub(crate) struct PruneArguments {
    /// The bucket: s3://BUCKET/PREFIX.
    #[arg(value_name = "BUCKET", value_parser = parse_url)]
    bucket: String,

    /// Prune only these machines. Default: all machines.
    #[arg(value_name = "MACHINE")]
    machines: Vec<MachineName>,

    #[command(flatten)]
    rules: Retention,

    /// Only show which points would be removed.
    #[arg(long, short = 'n')]
    dry_run: bool,
}

#[derive(Serialize)]
struct Forgotten {
    bucket: String,
    points: Vec<String>,
    damaged_points: u64,
    tidied: CompactReport,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct Pruned {
    bucket: String,
    #[serde(flatten)]
    plan: RetentionPlan,
    /// The objects of points that cannot be read: nothing is removed then.
    damaged: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tidied: Option<CompactReport>,
}

pub(super) fn forget(
    invocation: &Invocation,
    arguments: &ForgetArguments,
    cancel: &Arc<AtomicBool>,
) -> Result<Report> {
    let bucket = open_for(invocation, &arguments.bucket, cancel)?;
    let points = arguments.points.iter().map(|target| match target {
        Target::Point(machine, point) => find(&bucket, machine, point),
        Target::Machine(machine) => {
            let text = format!("{machine} is a machine: give MACHINE/POINT");
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
    });
    let points = points.collect::<Result<Vec<_>>>()?;
    let damaged_points = match arguments.damaged {
        true => bucket.remove_damaged_points()?,
        false => 0,
    };
    let is_last = !points.is_empty() || damaged_points > 0;
    let tidied = remove(&bucket, &points, is_last)?;
    let forgotten = Forgotten {
        bucket: arguments.bucket.clone(),
        points: points.iter().map(|point| format!("{}/{}", point.machine, point.point)).collect(),
        damaged_points,
        tidied,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let points = show_count(forgotten.points.len() as u64 + damaged_points, "restore point");
    Ok(Report::done(&forgotten, format!("forgot {points}; {}", tidied_text(&tidied))))
}

pub(super) fn prune(
    invocation: &Invocation,
    arguments: &PruneArguments,
    cancel: &Arc<AtomicBool>,
) -> Result<Report> {
    let bucket = open_for(invocation, &arguments.bucket, cancel)?;
    let now_seconds = u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or(0);
    let there = bucket.machines()?;
    if let Some(unknown) = arguments.machines.iter().find(|machine| !there.contains(machine)) {
        let text = format!("{}: there is no machine {unknown}", bucket.place());
        return Err(Error::new(ErrorKind::NotFound, text)
            .advise("coldrise bucket list shows what is there"));
    }
    let machines = match arguments.machines.is_empty() {
        true => &there,
        false => &arguments.machines,
    };
    let (rules, published) = (arguments.rules.rules(), Published::default());
    let judge = |machine| Ok(judge(&rules, bucket.points(machine)?, &published, now_seconds));
    let judged = machines.iter().map(judge).collect::<Result<Vec<_>>>()?;
    let tidied = match arguments.dry_run {
        true => None,
        false => {
            let going: Vec<(MachineName, PointName)> = going(&judged);
            let points = judged.iter().flatten().map(|verdict| &verdict.document);
            let is_going = |point: &&PointDocument| {
                going.contains(&(point.machine.clone(), point.point.clone()))
            };
            let points: Vec<_> = points.filter(is_going).cloned().collect();
            Some(remove(&bucket, &points, false)?)
        }
    };
    let mut plan = RetentionPlan::new(arguments.dry_run, &judged);
    plan.elapsed_ms = invocation.elapsed_ms();
    let points = show_count(plan.forgotten, "restore point");
    let end = match &tidied {
        None => format!("would forget {points}\n"),
        Some(tidied) => format!("forgot {points}; {}\n", tidied_text(tidied)),
    };
    let text = match plan_text(&plan, now_seconds) {
        Some(text) => text + &end,
        None => format!("no restore points: coldrise copy --to makes them\n{end}"),
    };
    let damaged: Vec<String> = bucket.damaged_points().into_keys().collect();
    let text = text + &tell_damaged(&bucket);
    let is_damaged = !damaged.is_empty();
    let pruned = Pruned { bucket: arguments.bucket.clone(), plan, damaged, tidied };
    let mut report = match arguments.dry_run {
        true => Report::answer(&pruned, text),
        false => Report::done(&pruned, text),
    };
    if is_damaged {
        report.exit_code = coldrise_runs::exit_code(ErrorKind::Corrupt);
    }
    Ok(report)
}

/// Removes points, and what no other one needs; `is_meant`: all points may be gone then.
fn remove(
    bucket: &BucketRepository,
    points: &[PointDocument],
    is_meant: bool,
) -> Result<CompactReport> {
    points.iter().try_for_each(|point| bucket.remove_point(point))?;
    bucket.compact(is_meant).map_err(|error| match points.is_empty() {
        true => error,
        false => error.context("the points are forgotten, but their space is not returned"),
    })
}

fn tidied_text(tidied: &CompactReport) -> String {
    format!(
        "returned {} in {}, {} are there",
        show_size(tidied.returned_bytes),
        show_count(tidied.removed_packs + tidied.rewritten_packs, "pack"),
        show_size(tidied.size_bytes)
    )
}
