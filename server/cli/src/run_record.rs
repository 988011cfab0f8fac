//! Begins the record of this process as a run: long commands have a folder, see `coldrise_runs`.

use std::io::Write;
use std::path::Path;

use clap::ArgMatches;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_requests::parse_backup_machine;
use coldrise_runs::{Plan, Planned, Request, Run, RunsFolder, Who, process_run, redact_arguments};
use tracing_subscriber::fmt::MakeWriter;

use crate::invocation::Invocation;
use crate::report::print_on_stderr;
use coldrise_hosting::signals;

/// The commands that are runs; so are all kinds of `serve`.
const LONG_COMMANDS: [&str; 19] = [
    "backup",
    "protect-live",
    "copy",
    "restore",
    "rollback",
    "attach",
    "attest",
    "verify",
    "repair",
    "prune",
    "gc",
    "fold",
    "boot",
    "move",
    "recover",
    "check-boot",
    "bisect",
    "mount",
    "serve",
];

/// Whether a command is a run.
pub(crate) fn is_long(command: &str) -> bool {
    LONG_COMMANDS.contains(&command)
}

/// Begins the record if the command is a long one and changes or reads more than lists.
/// Reports problems as a warning and continues.
pub(crate) fn begin(invocation: &Invocation, matches: &ArgMatches) {
    let Some((name, arguments)) = matches.subcommand() else { return };
    let is_dry = arguments.try_get_one::<bool>("dry_run").ok().flatten() == Some(&true);
    if !is_long(name) || is_dry {
        return;
    }
    let Some(folder) = RunsFolder::from_environment() else { return };
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    let plan = plan(invocation, name, arguments, words.collect());
    process_run::set(Run::begin(Some(&folder), &plan, warn(invocation), cancel));
}

/// Begins the record of a planned run.
///
/// # Errors
/// The errors of [`Run::begin_planned`].
pub(crate) fn begin_planned(
    invocation: &Invocation,
    matches: &ArgMatches,
    planned: Planned,
    request: Request,
) -> Result<()> {
    coldrise_ingest::keep_out(request.keep_out.iter().map(Path::new));
    let (name, arguments) = matches.subcommand().unwrap_or(("", matches));
    let named = plan(invocation, name, arguments, request.arguments);
    let plan = Plan {
        // Such as of an unpublish, whose arguments name a session.
        machine: named.machine.clone().or(request.machine),
        job: request.job,
        requested_by: request.requested_by,
        attempt: request.attempt,
        ..named
    };
    process_run::set(Run::begin_planned(planned, &plan, warn(invocation), cancel)?);
    Ok(())
}

fn plan(invocation: &Invocation, name: &str, arguments: &ArgMatches, words: Vec<String>) -> Plan {
    let command = match arguments.subcommand_name() {
        Some(kind) => format!("{name} {kind}"),
        None => name.to_owned(),
    };
    let (machine, point) = subject(arguments);
    let repository = invocation.repository_path().and_then(|path| {
        std::path::absolute(path).map_err(|error| Error::io("finding the repository", error))
    });
    Plan {
        command,
        arguments: redact_arguments(words),
        repository: repository.ok().map(|path| path.to_string_lossy().into_owned()),
        machine,
        point,
        who: Who::this_process(),
        started_at_ms: coldrise_block::now_ms(),
        job: None,
        requested_by: None,
        attempt: 0,
    }
}

fn warn(invocation: &Invocation) -> impl Fn(&str) + Send + Sync + 'static + use<> {
    let is_quiet = invocation.is_quiet();
    move |text| {
        if !is_quiet {
            print_on_stderr(text);
        }
    }
}

/// Machine and point of the command, from its argument MACHINE or ADDRESS.
fn subject(arguments: &ArgMatches) -> (Option<String>, Option<String>) {
    let word = |name: &str| {
        let mut words = arguments.try_get_raw(name).ok().flatten()?;
        let only = words.next().map(|word| word.to_string_lossy().into_owned());
        // Of several machines none is the subject.
        only.filter(|_| words.next().is_none())
    };
    let named = ["machine", "machines", "address"].into_iter().find_map(word).unwrap_or_default();
    let mut parts = named.splitn(3, '/').filter(|part| !part.is_empty()).map(str::to_owned);
    match parts.next() {
        Some(live) if live == "live" => (None, None),
        machine => (machine.map(machine_name), parts.next()),
    }
}

/// The name under which a machine is stored, of a name that `backup` takes.
fn machine_name(given: String) -> String {
    parse_backup_machine(&given).map_or(given, |(machine, _)| machine.into())
}

/// Ends this process as Ctrl-C does.
fn cancel() {
    if !signals::are_caught() {
        // The signal ends the process before the command has done anything.
        let error = Error::new(ErrorKind::Interrupted, "cancelled before it started");
        process_run::finish_failed(&error);
    }
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::INT);
}

/// Where log lines of the program go: to stderr and into the run's log.
pub(crate) struct LogLines;

/// Writes one log line.
pub(crate) struct LogLineWriter(tracing::Level);

impl<'a> MakeWriter<'a> for LogLines {
    type Writer = LogLineWriter;

    fn make_writer(&'a self) -> LogLineWriter {
        LogLineWriter(tracing::Level::INFO)
    }

    fn make_writer_for(&'a self, event: &tracing::Metadata<'_>) -> LogLineWriter {
        LogLineWriter(*event.level())
    }
}

impl Write for LogLineWriter {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        std::io::stderr().lock().write_all(line)?;
        let text = String::from_utf8_lossy(line);
        let level = self.0.as_str();
        let text = text.trim();
        process_run::log(
            &level.to_ascii_lowercase(),
            text.strip_prefix(level).unwrap_or(text).trim_start(),
        );
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
