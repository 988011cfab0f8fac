//! `coldrise run`: begins a planned run and becomes its command.

use clap::{ArgMatches, Args};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_runs::{Failure, Planned, Request, RunId};

use crate::arguments::{Arguments, GlobalOptions};
use crate::{parse_arguments, run_record};

/// Commands that are not runs of their own, but may be planned.
const SHORT_COMMANDS: [&str; 11] = [
    "host",
    "publish",
    "seal",
    "unpublish",
    "forget",
    "protect",
    "unprotect",
    "quarantine",
    "release",
    "detach",
    // The machine that reads file systems for the service.
    "files",
];

/// Run a command that the service has planned.
///
/// The service starts this command by itself, as the unit coldrise-run@ID.service or as a process of
/// its own. The plan is the folder .ID.planned among the runs (see coldrise runs). It names the
/// command with all its options; the exit code is that command's.
///
/// A plan is run once: if another process has begun it, the exit code is 11. Plans of commands
/// that are not runs are refused, and recorded as failed.
#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    /// The planned run.
    #[arg(value_name = "ID")]
    id: RunId,

    /// Leave the session of the process that has started this one, and its terminal.
    #[arg(long)]
    detach: bool,
}

/// A planned run that this process has taken, and its command.
pub(crate) struct PlannedCommand {
    pub(crate) planned: Planned,
    pub(crate) request: Request,
    pub(crate) arguments: Arguments,
    pub(crate) matches: ArgMatches,
}

/// Takes the planned run. If its command cannot be run, the run is recorded as failed.
///
/// # Errors
/// `Busy` if another process has the run, `NotFound` if it is not planned; `InvalidInput` if the
/// command is refused.
pub(crate) fn take(options: &GlobalOptions, arguments: &RunArguments) -> Result<PlannedCommand> {
    if *options != GlobalOptions::default() {
        let text = "coldrise run takes no global options: the plan has them";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    if arguments.detach {
        // Fails only if this process has its own session already.
        let _ = rustix::process::setsid();
    }
    let planned = coldrise_runs::RunsFolder::required()?.take(&arguments.id)?;
    match command(&planned) {
        Ok((request, arguments, matches)) => {
            Ok(PlannedCommand { planned, request, arguments, matches })
        }
        Err(error) => {
            let message = error.full_message();
            planned.fail(Failure { kind: error.kind().word().to_owned(), message })?;
            Err(error)
        }
    }
}

fn command(planned: &Planned) -> Result<(Request, Arguments, ArgMatches)> {
    let request = planned.request()?;
    let words = std::iter::once("coldrise").chain(request.arguments.iter().map(String::as_str));
    let (arguments, matches) = parse_arguments(words)
        .map_err(|refused| Error::new(ErrorKind::InvalidInput, refused.message()))?;
    let name = matches.subcommand_name().unwrap_or_default();
    if run_record::is_long(name) || SHORT_COMMANDS.contains(&name) {
        return Ok((request, arguments, matches));
    }
    Err(refuse(name))
}

/// The error of a plan whose command is not a run.
pub(crate) fn refuse(command: &str) -> Error {
    let text = format!("coldrise {command} cannot be planned: it is not a run");
    Error::new(ErrorKind::InvalidInput, text)
}
