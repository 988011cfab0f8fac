//! `coldrise forget`: removes restore points.

use std::sync::Arc;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_requests::{Forget, Target, parse_target};
use coldrise_session::{IncomingPoint, IncomingRemoval, PointChange, Published};
use coldrise_store::{MachineName, MaxUnused, PointDocument, PointName};
use serde::Serialize;

use crate::gc_estimate::reclaimable_bytes;
use crate::invocation::Invocation;
use crate::report::Report;
use crate::targets::{addresses, find, names, take_incoming, take_lost};
use crate::units::{show_count, show_size};
use coldrise_hosting::signals::cancel_flag;

/// Remove restore points permanently.
///
/// All named points are removed at once, or none. A machine is removed with its last point. No
/// other point and no session depends on a removed point. A program that is reading one can
/// continue. coldrise gc frees the space. Published and protected points are refused.
///
/// Also removes an incomplete point, and the data that has arrived, if its copy from another site will not continue. --all includes such
/// points.
#[derive(Debug, Args)]
pub(crate) struct ForgetArguments {
    #[command(flatten)]
    request: Forget,

    /// Remove all restore points of the named machines.
    #[arg(long)]
    all: bool,

    /// Only show which points would be removed and about how much space a gc would then free.
    #[arg(long, short = 'n')]
    dry_run: bool,
}

impl ForgetArguments {
    /// Whole machines require `--all`; single points reject it.
    fn targets(&self) -> Result<Vec<Target>> {
        let refuse = |text: String| Err(Error::new(ErrorKind::InvalidInput, text));
        let targets = self.request.addresses.iter().map(|text| parse_target(text));
        let targets = targets.collect::<Result<Vec<_>>>()?;
        for target in &targets {
            match target {
                Target::Machine(machine) if !self.all => {
                    return refuse(format!(
                        "{machine} is a machine: give MACHINE/POINT, or --all to forget all of \
                         its restore points"
                    ));
                }
                Target::Point(machine, point) if self.all => {
                    return refuse(format!(
                        "{machine}/{point} is one restore point: with --all give MACHINE"
                    ));
                }
                Target::Machine(_) | Target::Point(..) => {}
            }
        }
        Ok(targets)
    }
}

#[derive(Serialize)]
struct Forgotten {
    is_dry_run: bool,
    points: Vec<String>,
    /// The space that a gc would then free, roughly; absent unless requested, and if
    /// unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    reclaimable_bytes: Option<u64>,
    elapsed_ms: u64,
}

impl Forgotten {
    /// Removed points of which only the marker survived.
    fn add_lost(&mut self, lost: &[(MachineName, PointName)]) {
        self.points.extend(lost.iter().map(|(machine, point)| format!("{machine}/{point}")));
    }

    /// Points of which only a part has arrived.
    fn add_incoming(&mut self, incoming: &[IncomingPoint]) {
        let address = |incoming: &IncomingPoint| {
            format!("{}/{}", incoming.partial.machine, incoming.partial.point)
        };
        self.points.extend(incoming.iter().map(address));
    }
}

pub(crate) fn run(invocation: &Invocation, arguments: &ForgetArguments) -> Result<Report> {
    let targets = arguments.targets()?;
    if arguments.dry_run { say(invocation, targets) } else { forget(invocation, &targets) }
}

fn forget(invocation: &Invocation, targets: &[Target]) -> Result<Report> {
    let (points, lost, incoming, repository) =
        invocation.access()?.change_points(&*cancel_flag()?, |repository| {
            let mut targets = targets.to_vec();
            let incoming =
                IncomingRemoval::begin(repository, take_incoming(repository, &mut targets)?)?;
            let lost = take_lost(repository, &mut targets)?;
            let points = find(repository, &targets)?;
            let change = PointChange::Remove { points: names(&points), lost: lost.clone() };
            Ok(((points, lost, incoming, Arc::clone(repository)), change))
        })?;
    incoming.commit(&repository)?;
    let count = (points.len() + lost.len() + incoming.points().len()) as u64;
    let text =
        format!("forgot {}; coldrise gc returns the space", show_count(count, "restore point"));
    let mut forgotten = forgotten(invocation, &points, false, None);
    forgotten.add_lost(&lost);
    forgotten.add_incoming(incoming.points());
    Ok(Report::done(&forgotten, text))
}

fn say(invocation: &Invocation, mut targets: Vec<Target>) -> Result<Report> {
    let cancel = cancel_flag()?;
    let repository = invocation.open()?;
    let incoming = take_incoming(&repository, &mut targets)?;
    let lost = take_lost(&repository, &mut targets)?;
    let points = find(&repository, &targets)?;
    let published = Published::read(&repository)?;
    incoming.iter().try_for_each(|incoming| published.check_unused(incoming))?;
    points.iter().try_for_each(|point| published.check_free(point))?;
    let gone = names(&points).into_iter().collect();
    let bytes = reclaimable_bytes(invocation, &repository, &gone, MaxUnused::default(), &cancel)?;
    let mut said = forgotten(invocation, &points, true, bytes);
    said.add_lost(&lost);
    said.add_incoming(&incoming);
    let space = bytes.map(|bytes| format!("about {}", show_size(bytes)));
    let text = format!(
        "would forget:\n  {}\n{}; coldrise gc would return {}",
        said.points.join("\n  "),
        show_count(said.points.len() as u64, "restore point"),
        space.unwrap_or_else(|| "the space".to_owned())
    );
    Ok(Report::answer(&said, text))
}

fn forgotten(
    invocation: &Invocation,
    points: &[PointDocument],
    is_dry_run: bool,
    reclaimable_bytes: Option<u64>,
) -> Forgotten {
    let elapsed_ms = invocation.elapsed_ms();
    Forgotten { is_dry_run, points: addresses(points), reclaimable_bytes, elapsed_ms }
}
