//! `coldrise quarantine` and `release`: sets untrusted points aside.

use clap::Args;
use coldrise_block::Result;
use coldrise_hosting::signals::cancel_flag;
use coldrise_session::PointChange;
use coldrise_store::{PointDocument, Quarantine};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::Report;
use crate::targets::{addresses, find_or_quarantined, names, parse_point, quarantined, Target};

/// Set untrusted restore points aside.
///
/// A quarantined point is not served and is never latest. Publishing it needs --force. Backups
/// do not build on it; prune keeps it without counting it. By its name it can still be shown,
/// compared, verified and restored. coldrise repair --quarantine sets aside every point that
/// stays damaged.
#[derive(Debug, Args)]
pub(crate) struct QuarantineArguments {
    /// The restore points. Here latest counts quarantined points too, so that quarantine, release
    /// and a repeated command mean the same point.
    #[arg(value_name = "MACHINE/POINT", required = true, value_parser = parse_point)]
    points: Vec<Target>,
}

/// Take restore points out of quarantine.
#[derive(Debug, Args)]
pub(crate) struct ReleaseArguments {
    /// The restore points, with the same address as for quarantine: here latest includes
    /// quarantined points.
    #[arg(value_name = "MACHINE/POINT", required = true, value_parser = parse_point)]
    points: Vec<Target>,
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
    change(invocation, &arguments.points, Some(Quarantine::Chosen))
}

pub(crate) fn release(invocation: &Invocation, arguments: &ReleaseArguments) -> Result<Report> {
    let repository = invocation.open()?;
    for point in find_or_quarantined(&repository, &arguments.points)?
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
    change(invocation, &arguments.points, None)
}

fn change(
    invocation: &Invocation,
    targets: &[Target],
    quarantine: Option<Quarantine>,
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
