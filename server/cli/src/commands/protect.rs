//! `coldrise protect` and `unprotect`: excludes points from forget and prune.

use clap::Args;
use coldrise_block::Result;
use coldrise_hosting::signals::cancel_flag;
use coldrise_requests::Protect;
use coldrise_session::PointChange;
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::Report;
use crate::targets::{addresses, find, names, points};

/// Protect restore points from forget and prune.
///
/// The protection lasts until coldrise unprotect. The rules of prune count a protected point
/// like any other.
#[derive(Debug, Args)]
pub(crate) struct ProtectArguments {
    #[command(flatten)]
    request: Protect,
}

/// Remove the protection of restore points.
#[derive(Debug, Args)]
pub(crate) struct UnprotectArguments {
    #[command(flatten)]
    request: Protect,
}

#[derive(Serialize)]
struct Changed {
    points: Vec<String>,
    is_protected: bool,
    elapsed_ms: u64,
}

pub(crate) fn protect(invocation: &Invocation, arguments: &ProtectArguments) -> Result<Report> {
    change(invocation, &arguments.request, true)
}

pub(crate) fn unprotect(invocation: &Invocation, arguments: &UnprotectArguments) -> Result<Report> {
    change(invocation, &arguments.request, false)
}

fn change(invocation: &Invocation, request: &Protect, is_protected: bool) -> Result<Report> {
    let targets = &points(&request.addresses)?;
    let points = invocation.access()?.change_points(&*cancel_flag()?, |repository| {
        let points = find(repository, targets)?;
        let change = PointChange::Protect { points: names(&points), is_protected };
        Ok((points, change))
    })?;
    let changed =
        Changed { points: addresses(&points), is_protected, elapsed_ms: invocation.elapsed_ms() };
    let what = if is_protected { "protected" } else { "no longer protected" };
    let text = format!("{what}: {}", changed.points.join(", "));
    Ok(Report::done(&changed, text))
}
