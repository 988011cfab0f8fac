//! `coldrise prune`: the rules of retention, applied.

use std::num::NonZeroU32;
use std::sync::Arc;

use clap::{ArgGroup, Args};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::{judge, Catalog, Judged, PointRemoval, Published};
use coldrise_store::{
    MachineName, MaxUnused, Period, PointName, Repository, RetentionRules, RetentionSpan,
};
use serde::Serialize;

use super::gc::{self, Collected};
use crate::invocation::Invocation;
use crate::reclaimable::reclaimable;
use crate::report::{table, Report};
use crate::signals::cancel_flag;
use crate::units::{show_age, show_count, show_size};

/// Remove restore points by rules.
///
/// A point stays if at least one rule keeps it. Each rule goes through a machine's points from
/// newest to oldest, in UTC. It keeps the newest point of each period, for the newest N periods
/// that contain points; empty periods do not count. Protected and published points always stay,
/// and so does a machine's newest backup. Points dated in the future also stay; rules do not
/// count them. docs/retention.md has examples.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("rules").required(true).multiple(true))]
#[command(group = ArgGroup::new("space").multiple(true))]
#[command(
    override_usage = "coldrise prune [OPTIONS] --keep-last <N>|--keep-daily <N>|… [MACHINE]..."
)]
pub(crate) struct PruneArguments {
    /// Prune only these machines. Default: all machines. The rules apply to each machine
    /// separately.
    #[arg(value_name = "MACHINE")]
    machines: Vec<MachineName>,

    /// Keep the newest N points.
    #[arg(long, value_name = "N", value_parser = parse_count, group = "rules")]
    keep_last: Option<NonZeroU32>,

    /// Keep the newest point of each of the newest N hours.
    #[arg(long, value_name = "N", value_parser = parse_count, group = "rules")]
    keep_hourly: Option<NonZeroU32>,

    /// Keep the newest point of each of the newest N days.
    #[arg(long, value_name = "N", value_parser = parse_count, group = "rules")]
    keep_daily: Option<NonZeroU32>,

    /// Keep the newest point of each of the newest N weeks (ISO 8601: from Monday).
    #[arg(long, value_name = "N", value_parser = parse_count, group = "rules")]
    keep_weekly: Option<NonZeroU32>,

    /// Keep the newest point of each of the newest N months.
    #[arg(long, value_name = "N", value_parser = parse_count, group = "rules")]
    keep_monthly: Option<NonZeroU32>,

    /// Keep the newest point of each of the newest N years.
    #[arg(long, value_name = "N", value_parser = parse_count, group = "rules")]
    keep_yearly: Option<NonZeroU32>,

    /// Keep points that are less than this much older than the machine's newest: 36h, 7d, 2w,
    /// 3m (months) or 1y.
    #[arg(long, value_name = "DURATION", group = "rules")]
    keep_within: Option<RetentionSpan>,

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

/// Nothing is pruned down to nothing.
fn parse_count(text: &str) -> Result<NonZeroU32> {
    text.parse().map_err(|_| {
        Error::new(
            ErrorKind::InvalidInput,
            "a number from 1 on is needed; coldrise forget MACHINE --all removes everything",
        )
    })
}

impl PruneArguments {
    fn rules(&self) -> RetentionRules {
        let periods = [
            (Period::Hourly, self.keep_hourly),
            (Period::Daily, self.keep_daily),
            (Period::Weekly, self.keep_weekly),
            (Period::Monthly, self.keep_monthly),
            (Period::Yearly, self.keep_yearly),
        ];
        RetentionRules {
            last: self.keep_last,
            within: self.keep_within,
            periods: periods.into_iter().filter_map(|(p, count)| Some((p, count?))).collect(),
        }
    }

    /// The machines that are meant.
    fn machines(&self, repository: &Arc<Repository>) -> Result<Vec<MachineName>> {
        let catalog = Catalog::new(repository);
        if self.machines.is_empty() {
            return catalog.machines();
        }
        for machine in &self.machines {
            // Says which machines there are where this one is not.
            catalog.check_machine(machine)?;
        }
        let mut machines = self.machines.clone();
        machines.sort_unstable();
        machines.dedup();
        Ok(machines)
    }
}

#[derive(Serialize)]
struct Pruned {
    is_dry_run: bool,
    kept: u64,
    forgotten: u64,
    machines: Vec<PrunedMachine>,
    /// About the space that a gc would then free; absent if unknown, and with --gc.
    #[serde(skip_serializing_if = "Option::is_none")]
    reclaimable_bytes: Option<u64>,
    /// What the gc did, with --gc.
    #[serde(skip_serializing_if = "Option::is_none")]
    gc: Option<Collected>,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct PrunedMachine {
    machine: String,
    kept: u64,
    forgotten: u64,
    points: Vec<PrunedPoint>,
}

#[derive(Serialize)]
struct PrunedPoint {
    address: String,
    point: String,
    is_kept: bool,
    /// Why it stays.
    reasons: Vec<String>,
    #[serde(skip)]
    age: String,
}

pub(crate) fn run(invocation: &Invocation, arguments: &PruneArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let now_seconds = u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or(0);
    let (repository, judged) = match arguments.dry_run {
        true => plan(invocation, arguments, now_seconds)?,
        false => forget(invocation, arguments, now_seconds)?,
    };
    let is_collecting = arguments.gc && !arguments.dry_run;
    let max_unused = arguments.max_unused.unwrap_or_default();
    let reclaimable_bytes = match is_collecting {
        true => None,
        false => match reclaimable(invocation, &repository, &going(&judged), max_unused, &cancel) {
            // What had to be forgotten is.
            Err(error) if !arguments.dry_run => {
                invocation
                    .remark(&format!("what gc returns is not known: {}", error.full_message()));
                None
            }
            told => told?.map(|space| space.reclaimable_bytes),
        },
    };
    // It is the writer's, where there was one, and a gc is a writer of its own.
    drop(repository);
    let gc = is_collecting.then(|| gc::collect(invocation, max_unused)).transpose();
    let gc = gc.map_err(|error| error.context("the points are forgotten, but not their space"))?;
    let machines: Vec<PrunedMachine> =
        judged.iter().map(|points| PrunedMachine::new(points, now_seconds)).collect();
    let pruned = Pruned {
        is_dry_run: arguments.dry_run,
        kept: machines.iter().map(|machine| machine.kept).sum(),
        forgotten: machines.iter().map(|machine| machine.forgotten).sum(),
        machines,
        reclaimable_bytes,
        gc,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = text(&pruned);
    Ok(match arguments.dry_run {
        true => Report::answer(&pruned, text),
        false => Report::done(&pruned, text),
    })
}

/// Per machine what becomes of its points.
type Decision = (Arc<Repository>, Vec<Vec<Judged>>);

/// Decides, and does nothing.
fn plan(invocation: &Invocation, arguments: &PruneArguments, now_seconds: u64) -> Result<Decision> {
    let repository = invocation.open()?;
    let rules = arguments.rules();
    let published = Published::read(&repository)?;
    let catalog = Catalog::new(&repository);
    let mut judged = Vec::new();
    for machine in arguments.machines(&repository)? {
        judged.push(judge(&rules, catalog.points(&machine)?, &published, now_seconds));
    }
    Ok((repository, judged))
}

/// Applies the rules and removes points; no point can be published in between.
fn forget(
    invocation: &Invocation,
    arguments: &PruneArguments,
    now_seconds: u64,
) -> Result<Decision> {
    let writer = invocation.open_for_writing()?;
    let repository = Arc::clone(writer.repository());
    let rules = arguments.rules();
    let machines = arguments.machines(&repository)?;
    let removal = PointRemoval::begin(&writer)?;
    let mut judged = Vec::new();
    for machine in machines {
        // Points sealed from here on wait in their sessions for the next prune.
        let points = repository.points(&machine)?;
        judged.push(judge(&rules, points, removal.published(), now_seconds));
    }
    removal.commit(&going::<Vec<_>>(&judged))?;
    Ok((repository, judged))
}

/// The points that go.
fn going<'a, T: FromIterator<(MachineName, PointName)>>(
    judged: impl IntoIterator<Item = &'a Vec<Judged>>,
) -> T {
    let points = judged.into_iter().flatten();
    points.filter(|point| !point.is_kept()).map(Judged::address).collect()
}

impl PrunedMachine {
    /// Of one machine's points; there is at least one.
    fn new(points: &[Judged], now_seconds: u64) -> PrunedMachine {
        let kept = points.iter().filter(|point| point.is_kept()).count() as u64;
        PrunedMachine {
            machine: points.first().map_or_else(String::new, |p| p.document.machine.to_string()),
            kept,
            forgotten: points.len() as u64 - kept,
            points: points.iter().map(|point| PrunedPoint::new(point, now_seconds)).collect(),
        }
    }
}

impl PrunedPoint {
    fn new(point: &Judged, now_seconds: u64) -> PrunedPoint {
        let (machine, name) = point.address();
        PrunedPoint {
            address: format!("{machine}/{name}"),
            point: name.to_string(),
            is_kept: point.is_kept(),
            reasons: point.reasons.iter().map(ToString::to_string).collect(),
            age: match now_seconds.checked_sub(name.unix_seconds()) {
                Some(seconds) => show_age(seconds),
                None => "-".to_owned(),
            },
        }
    }
}

fn text(pruned: &Pruned) -> String {
    let rows: Vec<Vec<String>> = pruned
        .machines
        .iter()
        .flat_map(|machine| &machine.points)
        .map(|point| {
            let what = if point.is_kept { "keep" } else { "forget" };
            vec![
                point.address.clone(),
                point.age.clone(),
                what.to_owned(),
                point.reasons.join(", "),
            ]
        })
        .collect();
    if rows.is_empty() {
        return "no restore points yet: make one with coldrise backup".to_owned();
    }
    let mut text = table(&["ADDRESS", ">AGE", "", "BECAUSE"], &rows);
    text.push('\n');
    for machine in &pruned.machines {
        text.push_str(&format!(
            "{}: {} kept, {} forgotten\n",
            machine.machine, machine.kept, machine.forgotten
        ));
    }
    let points = show_count(pruned.forgotten, "restore point");
    if let Some(gc) = &pruned.gc {
        text.push_str(&format!("forgot {points}; {}\n", gc.text()));
        return text;
    }
    let space = pruned.reclaimable_bytes.map(|bytes| format!(" about {}", show_size(bytes)));
    let space = space.unwrap_or_else(|| " the space".to_owned());
    text.push_str(&match pruned.is_dry_run {
        true => format!("would forget {points}; coldrise gc would then return{space}\n"),
        false => format!("forgot {points}; coldrise gc returns{space}\n"),
    });
    text
}
