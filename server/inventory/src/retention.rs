//! The points that retention rules keep and remove, as `prune --dry-run` shows it.

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use clap::{ArgGroup, Args};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::{Catalog, PointVerdict, Published, judge};
use coldrise_store::{
    MachineName, MaxUnused, Period, PointName, Repository, RetentionRules, RetentionSpan,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::gc_estimate::estimate_gc;

/// The retention rules, as the options of `prune`. A point stays if at least one rule keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Serialize, Deserialize, ToSchema)]
#[command(group = ArgGroup::new("rules").required(true).multiple(true))]
#[serde(deny_unknown_fields)]
pub struct Retention {
    /// Keep the newest N points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    #[arg(long, value_name = "N", value_parser = parse_count, group = "rules")]
    pub keep_last: Option<NonZeroU32>,
    /// Keep the newest point of each of the newest N hours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    #[arg(long, value_name = "N", value_parser = parse_count, group = "rules")]
    pub keep_hourly: Option<NonZeroU32>,
    /// Keep the newest point of each of the newest N days.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    #[arg(long, value_name = "N", value_parser = parse_count, group = "rules")]
    pub keep_daily: Option<NonZeroU32>,
    /// Keep the newest point of each of the newest N weeks (ISO 8601: from Monday).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    #[arg(long, value_name = "N", value_parser = parse_count, group = "rules")]
    pub keep_weekly: Option<NonZeroU32>,
    /// Keep the newest point of each of the newest N months.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    #[arg(long, value_name = "N", value_parser = parse_count, group = "rules")]
    pub keep_monthly: Option<NonZeroU32>,
    /// Keep the newest point of each of the newest N years.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    #[arg(long, value_name = "N", value_parser = parse_count, group = "rules")]
    pub keep_yearly: Option<NonZeroU32>,
    /// Keep points that are less than this much older than the machine's newest: 36h, 7d, 2w, 3m
    /// (months) or 1y.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    #[arg(long, value_name = "DURATION", group = "rules")]
    pub keep_within: Option<RetentionSpan>,
}

/// A count of periods. A larger number than `u32` holds keeps as much as the largest one.
fn parse_count(text: &str) -> Result<NonZeroU32> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let count = if is_number { text.parse().unwrap_or(u32::MAX) } else { 0 };
    NonZeroU32::new(count).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidInput,
            "the number must be at least 1; coldrise forget MACHINE --all removes everything",
        )
    })
}

impl Retention {
    /// The rules. Without any, every point stays.
    pub fn rules(&self) -> RetentionRules {
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
}

/// The points that a prune keeps and removes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RetentionPlan {
    /// Nothing was removed.
    pub is_dry_run: bool,
    /// Number of points that stay.
    pub kept: u64,
    /// Number of points that go.
    pub forgotten: u64,
    /// Each machine.
    pub machines: Vec<PrunedMachine>,
    /// About the space that a gc would then free, in bytes; absent if unknown or not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaimable_bytes: Option<u64>,
    /// How long it took, in milliseconds.
    pub elapsed_ms: u64,
}

/// The points of one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PrunedMachine {
    /// The machine's name.
    pub machine: String,
    /// Number of points that stay.
    pub kept: u64,
    /// Number of points that go.
    pub forgotten: u64,
    /// Its points, oldest first.
    pub points: Vec<PrunedPoint>,
}

/// The decision about one point.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PrunedPoint {
    /// MACHINE/POINT.
    pub address: String,
    /// The point's name.
    pub point: String,
    /// Whether it stays.
    pub is_kept: bool,
    /// The reasons why it stays.
    pub reasons: Vec<String>,
}

impl PrunedMachine {
    /// The decisions about the points of one machine; there is at least one point.
    pub fn new(points: &[PointVerdict]) -> PrunedMachine {
        let kept = points.iter().filter(|point| point.is_kept()).count() as u64;
        PrunedMachine {
            machine: points.first().map_or_else(String::new, |p| p.document.machine.to_string()),
            kept,
            forgotten: points.len() as u64 - kept,
            points: points.iter().map(PrunedPoint::new).collect(),
        }
    }
}

impl PrunedPoint {
    fn new(point: &PointVerdict) -> PrunedPoint {
        let (machine, name) = point.address();
        PrunedPoint {
            address: format!("{machine}/{name}"),
            point: name.to_string(),
            is_kept: point.is_kept(),
            reasons: point.reasons.iter().map(ToString::to_string).collect(),
        }
    }
}

impl RetentionPlan {
    /// The plan of these decisions, without the space and the time.
    pub fn new(is_dry_run: bool, verdicts: &[Vec<PointVerdict>]) -> RetentionPlan {
        let machines: Vec<_> = verdicts.iter().map(|points| PrunedMachine::new(points)).collect();
        RetentionPlan {
            is_dry_run,
            kept: machines.iter().map(|machine| machine.kept).sum(),
            forgotten: machines.iter().map(|machine| machine.forgotten).sum(),
            machines,
            reclaimable_bytes: None,
            elapsed_ms: 0,
        }
    }

    /// Applies rules to the present points of these machines, or of all if none is named, and
    /// removes nothing. With `cancel` it also estimates the space that a gc would then free, which
    /// reads every chunk map.
    ///
    /// # Errors
    /// `NotFound` for an unknown machine, naming the existing ones; `Interrupted` once `cancel` is
    /// set; `Corrupt` if a document does not authenticate.
    pub fn preview(
        repository: &Arc<Repository>,
        rules: &RetentionRules,
        machines: &[MachineName],
        cancel: Option<&AtomicBool>,
    ) -> Result<RetentionPlan> {
        let started = Instant::now();
        let now_seconds = jiff::Timestamp::now().as_second();
        let now_seconds = u64::try_from(now_seconds).unwrap_or(0);
        let verdicts = retention_verdicts(repository, rules, machines, now_seconds)?;
        let mut plan = RetentionPlan::new(true, &verdicts);
        if let Some(cancel) = cancel {
            let gone: HashSet<_> = going(&verdicts);
            plan.reclaimable_bytes =
                match estimate_gc(repository, &gone, MaxUnused::default(), cancel) {
                    Err(error) if error.kind() == ErrorKind::Corrupt => None,
                    estimate => Some(estimate?.reclaimable_bytes),
                };
        }
        plan.elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Ok(plan)
    }
}

/// Decides about every point of these machines, or of all if none is named, without removing
/// anything. `now_seconds` is the clock, in seconds since 1970-01-01T00:00:00Z.
///
/// # Errors
/// `NotFound` for an unknown machine, naming the existing ones; `Corrupt` if a document does not
/// authenticate.
pub fn retention_verdicts(
    repository: &Arc<Repository>,
    rules: &RetentionRules,
    machines: &[MachineName],
    now_seconds: u64,
) -> Result<Vec<Vec<PointVerdict>>> {
    let published = Published::read(repository)?;
    let catalog = Catalog::new(repository);
    let machines = machines_or_all(&catalog, machines)?;
    let verdicts = machines.iter().map(|machine| {
        let points = catalog.points(machine)?;
        Ok(judge(rules, points, &published, now_seconds))
    });
    verdicts.collect()
}

/// The named machines, sorted and each once; all machines if none is named.
///
/// # Errors
/// `NotFound` for an unknown machine, naming the existing ones.
pub fn machines_or_all(catalog: &Catalog, named: &[MachineName]) -> Result<Vec<MachineName>> {
    if named.is_empty() {
        return catalog.machines();
    }
    named.iter().try_for_each(|machine| catalog.check_machine(machine))?;
    let mut machines = named.to_vec();
    machines.sort_unstable();
    machines.dedup();
    Ok(machines)
}

/// The points to remove.
pub fn going<'a, T: FromIterator<(MachineName, PointName)>>(
    verdicts: impl IntoIterator<Item = &'a Vec<PointVerdict>>,
) -> T {
    let points = verdicts.into_iter().flatten();
    points.filter(|point| !point.is_kept()).map(PointVerdict::address).collect()
}
