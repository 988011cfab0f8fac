//! `coldrise runs`: the long commands of this host, running and ended.

use std::time::Duration;

use clap::{Args, Subcommand};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_runs::{LogLine, RunId, RunRecord, RunsFolder, State};
use serde::Serialize;
use serde_json::{Value, json};

use crate::invocation::Invocation;
use crate::report::{Report, print_line, table};
use crate::units::is_printable;
use crate::units::{show_duration, show_moment};

/// Number of ended runs that are listed without --all.
pub(crate) const MAX_LISTED: usize = 20;
/// Number of log lines that `show` prints.
pub(crate) const MAX_LINES: usize = 20;

/// List the long commands of this host, running ones first, then the newest.
///
/// Every backup, restore, verify, repair, prune, gc, fold, boot, mount and serve is a run, except
/// with --dry-run. Its state is running, ok, failed, cancelled, or lost: a lost run ended without
/// a result, because it was killed or the host went down.
///
/// Runs are folders in /var/lib/coldrise/runs, for users other than root in
/// ~/.local/state/coldrise/runs. COLDRISE_RUNS names another folder; with the value none no
/// runs are recorded. The newest 1000 runs and those of the last 90 days are kept.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct RunsArguments {
    /// List all recorded runs, not only the running and the newest 20.
    #[arg(long)]
    pub(crate) all: bool,

    #[command(subcommand)]
    pub(crate) action: Option<Action>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Action {
    /// Show a run: its command, its result and the last lines of its log.
    Show {
        /// The run, as coldrise runs lists it.
        #[arg(value_name = "ID")]
        id: RunId,

        /// Print the whole log, and new lines until the run ends.
        #[arg(long, short)]
        follow: bool,
    },
    /// Cancel a running command, as Ctrl-C does, and wait until it has ended.
    ///
    /// The exit code is 3 if it has not ended in time; it is still cancelled then.
    Cancel {
        /// The run, as coldrise runs lists it.
        #[arg(value_name = "ID")]
        id: RunId,

        /// Time to wait for its end.
        #[arg(long, value_name = "SECONDS", default_value_t = 30)]
        wait: u64,
    },
}

#[derive(Serialize)]
struct Listing {
    runs: Vec<RunRecord>,
    /// Number of ended runs that are not listed.
    hidden: usize,
    unknown: Vec<UnknownEntry>,
}

/// An entry of the folder that is not a run.
#[derive(Serialize)]
struct UnknownEntry {
    name: String,
    problem: String,
}

pub(crate) fn run(invocation: &Invocation, arguments: &RunsArguments) -> Result<Report> {
    let folder = coldrise_runs::RunsFolder::required()?;
    match &arguments.action {
        None => list(invocation, &folder, arguments.all),
        Some(Action::Show { id, follow }) => show(invocation, &folder, id, *follow),
        Some(Action::Cancel { id, wait }) => cancel(&folder, id, Duration::from_secs(*wait)),
    }
}

fn list(invocation: &Invocation, folder: &RunsFolder, is_all: bool) -> Result<Report> {
    let found = folder.list(if is_all { usize::MAX } else { MAX_LISTED })?;
    let unknown = found.unknown.into_iter().map(|(name, problem)| UnknownEntry { name, problem });
    let listing = Listing { runs: found.runs, hidden: found.hidden, unknown: unknown.collect() };
    for UnknownEntry { name, problem } in &listing.unknown {
        // Quoted: a name can hold any character.
        let text = printable(problem);
        invocation.remark(&format!("warning: {name:?} in {}: {text}", folder.path().display()));
    }
    for run in &listing.runs {
        for problem in run.problems.iter().filter(|problem| !problem.starts_with("lost: ")) {
            invocation.remark(&format!("warning: run {}: {}", run.id, printable(problem)));
        }
    }
    let mut text = match listing.runs.len() {
        0 => format!("no runs in {}", folder.path().display()),
        _ => table_of(&listing.runs),
    };
    if listing.hidden > 0 {
        text.push_str(&format!("{} older runs: coldrise runs --all\n", listing.hidden));
    }
    Ok(Report::answer(&listing, text))
}

/// Runs, a line each.
pub(crate) fn table_of(runs: &[RunRecord]) -> String {
    let rows: Vec<Vec<String>> = runs.iter().map(row).collect();
    table(&["ID", "STATE", "MACHINE", "STARTED", ">TOOK", "LAST PROGRESS"], &rows)
}

fn row(run: &RunRecord) -> Vec<String> {
    let plan = run.plan.as_ref();
    let machine = plan.and_then(|plan| plan.machine.as_deref()).unwrap_or("-");
    vec![
        run.id.clone(),
        run.state.word().to_owned(),
        printable(machine),
        plan.map_or_else(|| "unknown".to_owned(), |plan| show_moment(plan.started_at_ms)),
        took(run).unwrap_or_else(|| "-".to_owned()),
        match (run.state, &run.progress) {
            (State::Ok, _) | (_, None) => String::new(),
            (_, Some(progress)) => show_progress(progress),
        },
    ]
}

/// How long a run took, or has taken until now; `None` if unknown.
fn took(run: &RunRecord) -> Option<String> {
    let started_ms = run.plan.as_ref()?.started_at_ms;
    let ended_ms = match run.state {
        State::Running => coldrise_block::now_ms(),
        _ => run.ended_at_ms?,
    };
    Some(show_duration(Duration::from_millis(ended_ms.saturating_sub(started_ms))))
}

/// The progress object of `--json`, in short.
fn show_progress(progress: &Value) -> String {
    let number = |name: &str| progress.get(name).and_then(Value::as_u64).unwrap_or(0);
    let word = |name: &str| progress.get(name).and_then(Value::as_str).unwrap_or_default();
    let done = u128::from(number("done_bytes")) * 100 / u128::from(number("total_bytes").max(1));
    printable(&format!("{} {} {done} %", word("phase"), word("disk")))
}

/// Text of a file without control characters, which could command a terminal.
fn printable(text: &str) -> String {
    text.chars().take(1000).map(|c| if is_printable(c) { c } else { '\u{fffd}' }).collect()
}

fn show(
    invocation: &Invocation,
    folder: &RunsFolder,
    id: &RunId,
    is_followed: bool,
) -> Result<Report> {
    // First: an unknown run is an error before any output.
    folder.read(id)?;
    if is_followed {
        for line in folder.follow(id)? {
            let line = line?;
            let object = || json!({ "event": "log", "line": line }).to_string();
            print_line(&if invocation.is_json() { object() } else { show_line(&line) });
        }
    }
    let run = folder.read(id)?;
    let lines = if is_followed { None } else { Some(folder.last_lines(id, MAX_LINES)?) };
    Ok(record_report(&run, lines.as_deref()))
}

/// The report of one run, with the last lines of its log if they were not printed before.
pub(crate) fn record_report(run: &RunRecord, lines: Option<&[LogLine]>) -> Report {
    let mut text = format!("{}: {}\n", run.id, run.state.word());
    let mut add =
        |name: &str, value: &str| text.push_str(&format!("  {name:<11}{}\n", printable(value)));
    if let Some(plan) = &run.plan {
        add("command", &format!("coldrise {}", plan.arguments.join(" ")));
        add("repository", plan.repository.as_deref().unwrap_or("-"));
        let user = plan.who.user.clone().unwrap_or_else(|| plan.who.uid.to_string());
        add(
            "started",
            &format!(
                "{} by {user} on {}, process {}",
                show_moment(plan.started_at_ms),
                plan.who.host,
                plan.who.pid
            ),
        );
        plan.job.iter().for_each(|job| add("job", &format!("{job}, attempt {}", plan.attempt)));
        plan.requested_by.iter().for_each(|user| add("asked by", user));
    }
    add("took", took(run).as_deref().unwrap_or("unknown"));
    if let Some(result) = &run.result {
        add("exit code", &result.exit_code.to_string());
        result.error.iter().for_each(|error| add("error", &error.message));
        result.counts.iter().for_each(|counts| add("result", &counts.to_string()));
    }
    run.problems.iter().for_each(|problem| add("problem", problem));
    for line in lines.unwrap_or_default() {
        text.push_str(&format!("  {}\n", show_line(line)));
    }
    let mut object = json!(run);
    if let (Value::Object(fields), Some(lines)) = (&mut object, lines) {
        fields.insert("log".to_owned(), json!(lines));
    }
    Report::answer(&object, text)
}

fn show_line(line: &LogLine) -> String {
    let what = line.progress.as_ref().map_or_else(|| printable(&line.text), show_progress);
    format!("{} {:<8} {what}", show_moment(line.at_ms), printable(&line.level))
}

fn cancel(folder: &RunsFolder, id: &RunId, patience: Duration) -> Result<Report> {
    folder.cancel(id)?;
    if !folder.wait(id, patience)? {
        let waited = show_duration(patience);
        let text = format!("run {id} is cancelled, but has not ended after {waited}");
        return Err(Error::new(ErrorKind::Incomplete, text)
            .advise(format!("wait longer: coldrise runs cancel {id}")));
    }
    let run = folder.read(id)?;
    let text = format!("run {id} has ended: {}", run.state.word());
    Ok(Report::done(&run, text))
}
