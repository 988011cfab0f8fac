//! `coldrise quarantine` and `release`: sets untrusted points aside.

use clap::Args;
use coldrise_block::Result;
use coldrise_hosting::signals::cancel_flag;
use coldrise_requests::{Quarantine, Release, Target};
use coldrise_session::PointChange;
use coldrise_store::{self as store, PointDocument};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::Report;
use crate::targets::{addresses, find_or_quarantined, names, points, quarantined};

/// Set untrusted restore points aside.
///
/// A quarantined point is not served and is never latest. Publishing it needs --force. Backups
/// do not build on it; prune keeps it without counting it. By its name it can still be shown,
/// compared, verified and restored. coldrise repair --quarantine sets aside every point that
/// stays damaged.
#[derive(Debug, Args)]
pub(crate) struct QuarantineArguments {
    #[command(flatten)]
    request: Quarantine,
}

/// Take restore points out of quarantine.
#[derive(Debug, Args)]
pub(crate) struct ReleaseArguments {
    #[command(flatten)]
    request: Release,
}

#[derive(Serialize)]
struct Changed {
    points: Vec<String>,
    is_quarantined: bool,
    elapsed_ms: u64,
}

pub(crate) fn quarantine(
    invocation: &Invocation,
    arguments: &QuarantineArguments,
) -> Result<Report> {
    change(invocation, &points(&arguments.request.addresses)?, Some(store::Quarantine::Chosen))
}

pub(crate) fn release(invocation: &Invocation, arguments: &ReleaseArguments) -> Result<Report> {
    let targets = points(&arguments.request.addresses)?;
    let repository = invocation.open()?;
    for point in find_or_quarantined(&repository, &targets)?
        .iter()
        .filter(|point| point.quarantine.is_none())
    {
        let quarantined = quarantined(&repository, &point.machine)?;
        let there = match quarantined.len() {
            0 => "no point of the machine is".to_owned(),
            _ => format!("in quarantine: {}", quarantined.join(", ")),
        };
        let PointDocument { machine, point, .. } = point;
        invocation.remark(&format!("{machine}/{point} is not in quarantine; {there}"));
    }
    drop(repository);
    change(invocation, &targets, None)
}

fn change(
    invocation: &Invocation,
    targets: &[Target],
    quarantine: Option<store::Quarantine>,
) -> Result<Report> {
    let points = invocation.access()?.change_points(&*cancel_flag()?, |repository| {
        let points = find_or_quarantined(repository, targets)?;
        let change = PointChange::Quarantine { points: names(&points), quarantine };
        Ok((points, change))
    })?;
    let changed = Changed {
        points: addresses(&points),
        is_quarantined: quarantine.is_some(),
        elapsed_ms: invocation.elapsed_ms(),
    };
    let what = if changed.is_quarantined { "quarantined" } else { "released" };
    let text = format!("{what}: {}", changed.points.join(", "));
    Ok(Report::done(&changed, text))
}
