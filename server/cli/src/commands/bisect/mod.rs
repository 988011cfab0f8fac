//! `coldrise bisect`: finds the last good point of a machine by booting some.

mod boots;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::keep_files_private;
use coldrise_session::{Catalog, check_offered};
use coldrise_store::{
    BootCheckDocument, BootVerdict, MachineName, PointDocument, PointSelector, Repository,
};
use serde::Serialize;

use crate::boot_goal::{GoalOptions, qemu_host};
use crate::hardware::isolated_hardware;
use crate::hardware::{Hardware, HardwareOptions};
use crate::invocation::Invocation;
use crate::report::{Report, print_line};
use crate::units::{show_count, show_duration};
use boots::Boots;
use coldrise_hosting::QemuHost;
use coldrise_hosting::boot_check::{Answer, Outcome, Search};
use coldrise_hosting::boot_check::{BootStage, check_memory, needed_bytes};
use coldrise_hosting::signals::ChildSignals;

/// Maximum number of machines at once.
const MAX_PARALLEL: usize = 16;

/// Find the last restore point of a machine that boots.
///
/// Boots points as check-boot does, several at once, and halves the range with each round: 20
/// points need at most 5 rounds with one machine at a time. A point is good if it reaches the stage
/// of --until, and bad if something proves that it fails. A point that is not proven is skipped,
/// and a neighbour is booted in its place. Each boot stores its result with the point. Stored
/// results count, too, so an interrupted search continues where it ended.
///
/// A point that boots counts as good even if an older one does not. The exit code is 0 if a good
/// point and the first bad one after it are found, and 14 if nothing good or nothing bad is found.
#[derive(Debug, Args)]
pub(crate) struct BisectArguments {
    /// The machine.
    #[arg(value_name = "MACHINE")]
    machine: MachineName,

    /// A point that is known to be good: older ones are left out.
    #[arg(long, value_name = "POINT", value_parser = PointSelector::parse)]
    good: Option<PointSelector>,

    /// A point that is known to be bad: newer ones are left out.
    #[arg(long, value_name = "POINT", value_parser = PointSelector::parse)]
    bad: Option<PointSelector>,

    /// Number of machines that boot at once. Default: as many as the processors and the memory allow.
    #[arg(long, value_name = "NUMBER")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=MAX_PARALLEL as i64))]
    parallel: Option<u16>,

    /// The host that runs the machines (coldrise host add), instead of this one.
    #[arg(long, value_name = "HOST")]
    on: Option<String>,

    /// Boot points even if they have a stored result. Implied by --check and --check-port.
    #[arg(long)]
    again: bool,

    #[command(flatten)]
    goal: GoalOptions,

    #[command(flatten)]
    hardware: HardwareOptions,
}

#[derive(Serialize)]
struct Bisected {
    machine: String,
    until: &'static str,
    last_good: Option<String>,
    first_bad: Option<String>,
    /// Points in between that proved nothing.
    unproven: Vec<String>,
    points: usize,
    rounds: usize,
    boots: usize,
    parallel: usize,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &BisectArguments) -> Result<Report> {
    // The screen and the packets of the machine lie in a folder for temporary files.
    keep_files_private();
    let until = arguments.goal.until()?;
    let mut signals = ChildSignals::catch()?;
    let repository = &invocation.open()?;
    let points = range(repository, arguments)?;
    let qemu = &qemu_host(repository, arguments.on.as_deref())?;
    let mut machines = Vec::with_capacity(points.len());
    for point in &points {
        machines.push((point, isolated_hardware(invocation, &arguments.hardware, point, qemu)?));
    }
    let largest = machines.iter().map(|(_, hardware)| *hardware).max_by_key(needed_bytes);
    let parallel = parallel(arguments, qemu, &largest.unwrap_or_default())?;
    if let Some(why) = qemu.without_kvm() {
        invocation.remark(&format!("without KVM the machines are slow: {why}"));
    }
    let mut search = known(repository, arguments, &points, until);
    let goal = &arguments.goal;
    let boots = Boots { invocation, repository, qemu, machines: &machines, goal };
    let (mut rounds, mut booted) = (0, 0);
    loop {
        let unasked = search.unasked();
        let next = search.next(parallel);
        if next.is_empty() {
            break;
        }
        rounds += 1;
        booted += next.len();
        tell_round(invocation, rounds, unasked, &next, &points);
        for (point, answer) in boots.round(&next, until, &mut signals)? {
            search.enter(point, answer);
        }
    }
    let outcome = search.outcome();
    let address = |point: &usize| {
        points.get(*point).map(|point| format!("{}/{}", point.machine, point.point))
    };
    let bisected = Bisected {
        machine: arguments.machine.to_string(),
        until: until.word(),
        last_good: outcome.last_good.as_ref().and_then(address),
        first_bad: outcome.first_bad.as_ref().and_then(address),
        unproven: outcome.unproven.iter().filter_map(address).collect(),
        points: points.len(),
        rounds,
        boots: booted,
        parallel,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let mut report = Report::answer(&bisected, text(invocation, &bisected));
    if let Outcome { last_good: None, .. } | Outcome { first_bad: None, .. } = outcome {
        report.exit_code = coldrise_runs::BOOT_NOT_PROVEN;
    }
    Ok(report)
}

/// The points from --good to --bad, oldest first, without quarantined ones.
fn range(
    repository: &std::sync::Arc<Repository>,
    arguments: &BisectArguments,
) -> Result<Vec<PointDocument>> {
    let catalog = Catalog::new(repository);
    let machine = &arguments.machine;
    let end = |selector: &Option<PointSelector>| {
        let point = selector
            .as_ref()
            .map(|selector| catalog.point(machine, selector).and_then(check_offered));
        point.transpose().map(|point| point.map(|point| point.point))
    };
    let (good, bad) = (end(&arguments.good)?, end(&arguments.bad)?);
    if let (Some(good), Some(bad)) = (&good, &bad) {
        if good >= bad {
            let text = format!("--good {good} is not older than --bad {bad}");
            let error = Error::new(ErrorKind::InvalidInput, text);
            return Err(error.advise("a search needs a good point, and a bad one after it"));
        }
    }
    catalog.check_machine(machine)?;
    let mut points = catalog.points(machine)?;
    points.sort_by(|one, other| one.point.cmp(&other.point));
    points.retain(|point| {
        good.as_ref().is_none_or(|good| point.point >= *good)
            && bad.as_ref().is_none_or(|bad| point.point <= *bad)
    });
    let points: Vec<_> = points.into_iter().filter_map(|point| check_offered(point).ok()).collect();
    if points.is_empty() {
        let text = format!("{machine} has no points that can be booted");
        return Err(Error::new(ErrorKind::NotFound, text).advise("coldrise list shows its points"));
    }
    Ok(points)
}

/// As many machines as the host carries.
fn parallel(arguments: &BisectArguments, qemu: &QemuHost, hardware: &Hardware) -> Result<usize> {
    if let Some(parallel) = arguments.parallel {
        check_memory(qemu, hardware, u64::from(parallel))?;
        return Ok(usize::from(parallel));
    }
    check_memory(qemu, hardware, 1)?;
    let fitting = qemu.available_bytes()?.map_or(1, |bytes| bytes / needed_bytes(hardware));
    let fitting = usize::try_from(fitting).unwrap_or(usize::MAX);
    Ok(qemu.processors().min(fitting).clamp(1, MAX_PARALLEL))
}

/// A search that begins with what is known: the given ends, and stored results.
fn known(
    repository: &Repository,
    arguments: &BisectArguments,
    points: &[PointDocument],
    until: BootStage,
) -> Search {
    let mut search = Search::new(points.len());
    if !arguments.again && !arguments.goal.has_own_check() {
        for (i, point) in points.iter().enumerate() {
            let stored = repository.boot_check(&point.machine, &point.point).ok().flatten();
            let answer = stored.map(|(check, _)| judge(&check, until));
            // Another boot may prove more.
            if let Some(answer) = answer.filter(|answer| *answer != Answer::Unproven) {
                search.enter(i, answer);
            }
        }
    }
    if arguments.good.is_some() {
        search.enter(0, Answer::Good);
    }
    if arguments.bad.is_some() {
        // A stored success does not outweigh the user's word.
        search.enter(points.len() - 1, Answer::Bad);
    }
    search
}

/// A result in terms of the search. It may come from a check with another goal.
fn judge(check: &BootCheckDocument, until: BootStage) -> Answer {
    if coldrise_hosting::boot_check::highest_stage(check) >= Some(until) {
        Answer::Good
    } else if check.verdict == BootVerdict::Failed {
        Answer::Bad
    } else {
        Answer::Unproven
    }
}

fn tell_round(
    invocation: &Invocation,
    round: usize,
    unasked: usize,
    next: &[usize],
    points: &[PointDocument],
) {
    let names: Vec<_> =
        next.iter().filter_map(|i| points.get(*i)).map(|point| point.point.to_string()).collect();
    let left = show_count(unasked as u64, "point");
    invocation.remark(&format!("round {round}, {left} left: {}", names.join(", ")));
    if invocation.is_json() {
        let event = serde_json::json!({
            "event": "progress", "phase": "bisecting", "round": round, "left": unasked,
            "booting": names,
        });
        print_line(&event.to_string());
    }
}

fn text(invocation: &Invocation, bisected: &Bisected) -> String {
    let Bisected { machine, until, .. } = bisected;
    let mut text = match (&bisected.last_good, &bisected.first_bad) {
        (Some(good), Some(bad)) => format!("last good   {good}\nfirst bad   {bad}"),
        (Some(good), None) => {
            format!("{machine}: nothing bad found: the newest good point is {good}")
        }
        (None, Some(bad)) => {
            format!("{machine}: nothing good found: the oldest bad point is {bad}")
        }
        (None, None) => format!("{machine}: no point is proven to be good or bad"),
    };
    if !bisected.unproven.is_empty() {
        text.push_str(&format!("\nunproven    {}", bisected.unproven.join(" ")));
    }
    let rounds = show_count(bisected.rounds as u64, "round");
    let boots = show_count(bisected.boots as u64, "boot");
    let elapsed = show_duration(invocation.elapsed());
    text.push_str(&format!("\nstage {until}, {rounds}, {boots} ({elapsed})"));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use coldrise_store::ReachedStage;

    #[test]
    fn results_for_other_goals_count_where_they_prove_something() {
        for (verdict, stage, expected) in [
            (BootVerdict::Ok, "login", Answer::Good),
            (BootVerdict::Ok, "kernel", Answer::Unproven),
            (BootVerdict::NotProven, "login", Answer::Good),
            (BootVerdict::NotProven, "userspace", Answer::Unproven),
            // Its service failed, which was not asked for here.
            (BootVerdict::Failed, "login", Answer::Good),
            (BootVerdict::Failed, "kernel", Answer::Bad),
        ] {
            let stage =
                ReachedStage { stage: stage.to_owned(), after_ms: 0, evidence: String::new() };
            let check = BootCheckDocument {
                checked_at_ms: 0,
                verdict,
                until: "login".to_owned(),
                stages: vec![stage],
                failure: None,
                note: None,
                is_worse: false,
                usual_stage: None,
                screen_text: None,
                serial_tail: Vec::new(),
            };
            assert_eq!(judge(&check, BootStage::Login), expected, "{check:?}");
        }
    }
}
