//! `coldrise quarantine` and `release`: points that are set aside.

use clap::Args;
use coldrise_block::Result;
use coldrise_session::{enter_sealed_points, set_quarantine};
use coldrise_store::Quarantine;
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::Report;
use crate::targets::{addresses, find, names, parse_point, Target};

/// Set restore points aside that are not to be trusted.
///
/// A point in quarantine is not served, is no machine's latest and is published only with
/// --force. Backups are not built upon it, and prune keeps it without counting it. By its
/// name it can be shown, compared, verified and restored. coldrise repair --quarantine
/// does this with every point that stays damaged.
#[derive(Debug, Args)]
pub(crate) struct QuarantineArguments {
    /// The points.
    #[arg(value_name = "MACHINE/POINT", required = true, value_parser = parse_point)]
    points: Vec<Target>,
}

/// Take restore points out of quarantine.
#[derive(Debug, Args)]
pub(crate) struct ReleaseArguments {
    /// The points, by their own names: latest means none in quarantine.
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
    change(invocation, &arguments.points, None)
}

fn change(
    invocation: &Invocation,
    targets: &[Target],
    quarantine: Option<Quarantine>,
) -> Result<Report> {
    let writer = invocation.open_for_writing()?;
    let points = find(writer.repository(), targets)?;
    // One that was sealed just now still stands in its session's document.
    enter_sealed_points(&writer)?;
    set_quarantine(&writer, &names(&points), quarantine)?;
    let changed = Changed {
        points: addresses(&points),
        is_quarantined: quarantine.is_some(),
        elapsed_ms: invocation.elapsed_ms(),
    };
    let what = if changed.is_quarantined { "quarantined" } else { "released" };
    let text = format!("{what}: {}", changed.points.join(", "));
    Ok(Report::done(&changed, text))
}
