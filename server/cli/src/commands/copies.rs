//! `coldrise copies`: where copies are, and how far behind.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_replica::{
    CopyRecords, CopyState, CopyTarget, MachineCopies, StatusReader, TargetCopies,
};
use coldrise_store::MachineName;
use serde::Serialize;

use super::bucket;
use crate::invocation::Invocation;
use crate::report::{Report, table};
use crate::units::{now_ms, show_age, show_count, show_duration, show_size};

/// Show where copies of this repository's points are, and how far behind they are.
///
/// For each link, directory and bucket to which points were copied: the points that are missing there and the bytes that a copy
/// of them has to read, the age of the newest point there, the rates of a running copy, and why the last one failed.
/// It compares what the last copy saw there with the points that are here now, and makes no network request.
#[derive(Debug, Args)]
pub(crate) struct CopiesArguments {
    /// Only this link, directory or bucket.
    #[arg(value_name = "DIR|LINK|BUCKET")]
    target: Option<PathBuf>,

    /// Delete the records of copies to this target. A directory is then not shown until points are copied there again.
    /// The copies themselves stay.
    #[arg(long, requires = "target")]
    forget: bool,
}

#[derive(Serialize)]
struct Copies {
    targets: Vec<TargetCopies>,
}

pub(crate) fn run(invocation: &Invocation, arguments: &CopiesArguments) -> Result<Report> {
    let repository = invocation.open_for_disks()?;
    let all = StatusReader::default().targets(&repository)?;
    let Some(wanted) = &arguments.target else {
        let text = match all.is_empty() {
            true => "no copies: coldrise copy --to makes them".to_owned(),
            false => text(&all),
        };
        return Ok(Report::answer(&Copies { targets: all }, text));
    };
    let place = match bucket::url_of(wanted) {
        Some(url) => CopyTarget::Bucket(url),
        None => CopyTarget::directory(wanted),
    };
    let is_link = |found: &TargetCopies| {
        found.is_link && wanted.to_str().is_some_and(|name| name == found.target)
    };
    let is_place = |found: &TargetCopies| !found.is_link && place.to_string() == found.target;
    let found = all.iter().find(|found| is_link(found));
    let found = found.or_else(|| all.iter().find(|found| is_place(found)));
    let Some(found) = found else {
        let known: Vec<&str> = all.iter().map(|found| found.target.as_str()).collect();
        let text = match known.is_empty() {
            true => format!("nothing was copied to {}, or anywhere else", wanted.display()),
            false => format!(
                "nothing was copied to {}; there are copies in: {}",
                wanted.display(),
                known.join(", ")
            ),
        };
        return Err(Error::new(ErrorKind::NotFound, text));
    };
    if !arguments.forget {
        let targets = vec![found.clone()];
        let text = text(&targets);
        return Ok(Report::answer(&Copies { targets }, text));
    }
    let target = match found.is_link {
        true => CopyTarget::Link(MachineName::parse(&found.target)?),
        false => place,
    };
    CopyRecords::of(&repository).forget(&target)?;
    let text = format!("deleted the records of copies to {target}; the copies themselves stay");
    Ok(Report::done(&serde_json::json!({ "target": target.to_string() }), text))
}

fn text(targets: &[TargetCopies]) -> String {
    let now_ms = now_ms();
    let texts: Vec<String> = targets.iter().map(|target| target_text(target, now_ms)).collect();
    texts.join("\n\n")
}

fn target_text(target: &TargetCopies, now_ms: u64) -> String {
    let mut text = format!("{}: {}", target.target, sentence(target, now_ms));
    if let Some(failure) = &target.failure {
        text.push_str(&format!("\n  {}", failure.message));
    }
    let rows: Vec<Vec<String>> = target.machines.iter().map(|one| row(one, now_ms)).collect();
    if !rows.is_empty() {
        text.push('\n');
        let names = ["MACHINE", "STATE", "BEHIND", ">LAST CUT", ">COPIED", ">THERE", ">SENT"];
        text.push_str(&table(&names, &rows));
    }
    for machine in &target.machines {
        if let Some(failure) = &machine.failure {
            text.push_str(&format!("\n{}: {}", machine.machine, failure.message));
        }
    }
    text
}

/// The state of a target in words, such as for doctor.
pub(super) fn sentence(target: &TargetCopies, now_ms: u64) -> String {
    let mut text = match target.state {
        CopyState::Current => "up to date".to_owned(),
        CopyState::Never => "no copy is on record".to_owned(),
        CopyState::Unknown => "unknown".to_owned(),
        CopyState::Failing => "the last copy failed".to_owned(),
        CopyState::Behind => "behind".to_owned(),
        CopyState::Copying => {
            let mut rate = vec![format!("{}/s", show_size(target.bytes_per_second.unwrap_or(0)))];
            rate.extend(target.sent_bytes_per_second.map(|b| format!("{}/s sent", show_size(b))));
            let left = target.remaining_ms.map(Duration::from_millis);
            rate.extend(left.map(|left| format!("about {} left", show_duration(left))));
            format!("copying, {}", rate.join(", "))
        }
    };
    if target.points_behind != Some(0) && !target.machines.is_empty() {
        let behind = behind(target.points_behind, target.bytes_behind, target.is_exact);
        text.push_str(&format!("; behind by {behind}"));
        if let Some(since_ms) = target.behind_since_ms {
            text.push_str(&format!(", for {}", age(since_ms, now_ms)));
        }
    }
    if let Some(cut_ms) = target.last_cut_ms {
        text.push_str(&format!("; last cut {} old", age(cut_ms, now_ms)));
    }
    text
}

/// The time from `from_ms` to now, in words.
pub(super) fn age(from_ms: u64, now_ms: u64) -> String {
    show_age(now_ms.saturating_sub(from_ms) / 1000)
}

fn behind(points: Option<u64>, bytes: Option<u64>, is_exact: bool) -> String {
    let Some(points) = points else { return "an unknown number of points".to_owned() };
    let points = show_count(points, "point");
    match bytes {
        Some(bytes) if is_exact => format!("{points}, {}", show_size(bytes)),
        Some(bytes) => format!("{points}, up to {}", show_size(bytes)),
        None => points,
    }
}

fn row(machine: &MachineCopies, now_ms: u64) -> Vec<String> {
    let name = match machine.machine == machine.far_machine {
        true => machine.machine.clone(),
        false => format!("{} as {}", machine.machine, machine.far_machine),
    };
    let sent_bytes = machine.total.line.map(|line| line.sent_bytes);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    vec![
        name,
        match machine.state {
            CopyState::Current => "up to date".to_owned(),
            state => state.word().to_owned(),
        },
        match machine.points_behind {
            Some(0) => "-".to_owned(),
            points => behind(points, machine.bytes_behind, machine.is_exact),
        },
        or_dash(machine.last_cut.as_ref().map(|cut| age(cut.created_at_ms, now_ms))),
        or_dash(machine.succeeded_at_ms.map(|at_ms| format!("{} ago", age(at_ms, now_ms)))),
        machine.points_there.to_string(),
        or_dash(sent_bytes.map(show_size)),
    ]
}
