//! `coldrise`: back up virtual machines and boot them instantly.
//!
//! ```text
//! arguments ─▶ Invocation (repository, output, clock) ─▶ commands::… ─▶ Report ─▶ stdout
//!                                                                  └─▶ Error ─▶ stderr, exit code
//! ```
//!
//! A command makes no decisions about disks or points: it reads arguments, calls the
//! crates that make them, and reports the result as one [`report::Report`]: text, or
//! with `--json` one object on the last line of stdout.
#![forbid(unsafe_code)]

mod arguments;
mod boot_goal;
mod commands;
mod gc_estimate;
mod hardware;
mod incoming;
mod invocation;
mod progress;
mod remote;
mod report;
mod run_record;
mod since;
mod targets;
mod units;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind as ClapErrorKind};
use clap::{ArgMatches, CommandFactory, FromArgMatches};
use coldrise_block::{Error, ErrorKind};
use coldrise_hosting::signals;
use coldrise_runs::process_run;

use arguments::{Arguments, Command};
use invocation::Invocation;
use report::{print_error, print_line};

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let (mut arguments, mut matches) = match parse_arguments(&words) {
        Ok(parsed) => parsed,
        Err(refused) => return refused.answer(&words),
    };
    let mut planned = None;
    if let Command::Run(run) = &arguments.command {
        match commands::run::take(&arguments.global, run) {
            Err(error) => return answer_error(arguments.global.json, &error),
            Ok(taken) => {
                (arguments, matches) = (taken.arguments, taken.matches);
                planned = Some((taken.planned, taken.request));
            }
        }
    }
    keep_secrets_out_of_core_dumps();
    coldrise_store::raise_descriptor_limit();
    let is_json = arguments.global.json;
    let invocation = Invocation::new(arguments.global);
    let is_remote = invocation.is_remote();
    match planned {
        // The service records it.
        None if is_remote => {}
        None => run_record::begin(&invocation, &matches),
        Some((planned, request)) => {
            let begun = run_record::begin_planned(&invocation, &matches, planned, request);
            if let Err(error) = begun {
                return answer_error(is_json, &error);
            }
        }
    }
    let done =
        signals::answer_signals(move || answer_interrupted(is_json)).and_then(
            |()| match is_remote {
                true => remote::run(&invocation, &arguments.command, &matches),
                false => commands::run(&invocation, arguments.command),
            },
        );
    signals::answer_alone();
    let done = done.and_then(|report| report.print(&invocation).map(|()| report));
    match done {
        Ok(report) => {
            process_run::finish(report.exit_code, report.object());
            ExitCode::from(report.exit_code)
        }
        Err(error) => {
            // First: the run's log gets the message, too.
            let code = answer_error(is_json, &error);
            process_run::finish_failed(&error);
            code
        }
    }
}

fn answer_error(is_json: bool, error: &Error) -> ExitCode {
    print_error(is_json, error.kind(), &error.full_message());
    ExitCode::from(coldrise_runs::exit_code(error.kind()))
}

/// Parses a command line, whose first word is the program.
fn parse_arguments<T: Into<OsString> + Clone>(
    words: impl IntoIterator<Item = T>,
) -> Result<(Arguments, ArgMatches), RefusedArguments> {
    let matches = Arguments::command().try_get_matches_from(words).map_err(RefusedArguments)?;
    let arguments = Arguments::from_arg_matches(&matches).map_err(RefusedArguments)?;
    Ok((arguments, matches))
}

/// The answer of a command that a signal ends before it watches for signals.
fn answer_interrupted(is_json: bool) {
    let error = Error::new(
        ErrorKind::Interrupted,
        "interrupted: the command may have taken effect; coldrise list and coldrise sessions show it",
    );
    process_run::finish_failed(&error);
    print_error(is_json, error.kind(), &error.full_message());
}

/// This program and the front ends that it starts hold keys and plaintext in memory. If
/// the system refuses, the program continues.
fn keep_secrets_out_of_core_dumps() {
    use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
    // Inherited by children.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    // A core pattern that is a program ignores the limit.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}

/// Why the arguments are not a valid command.
struct RefusedArguments(clap::Error);

impl RefusedArguments {
    fn message(&self) -> String {
        let error = &self.0;
        // One of our own parsers refused the value: its error is the message.
        if let (ClapErrorKind::ValueValidation, Some(reason)) =
            (error.kind(), std::error::Error::source(error))
        {
            let argument = match error.get(ContextKind::InvalidArg) {
                Some(ContextValue::String(name)) => format!("{name}: "),
                _ => String::new(),
            };
            let reason = reason
                .downcast_ref::<Error>()
                .map_or_else(|| reason.to_string(), |error| error.full_message());
            return format!("{argument}{reason}");
        }
        let text = error.render().to_string();
        text.trim_start_matches("error: ").trim_end().to_owned()
    }

    /// Prints help and version with exit code 0. Any other error exits with the code for wrong
    /// usage.
    fn answer(&self, words: &[OsString]) -> ExitCode {
        if matches!(self.0.kind(), ClapErrorKind::DisplayHelp | ClapErrorKind::DisplayVersion) {
            print_line(self.0.render().to_string().trim_end());
            return ExitCode::SUCCESS;
        }
        let is_json = words.iter().skip(1).any(|word| word == "--json");
        print_error(is_json, ErrorKind::InvalidInput, &self.message());
        ExitCode::from(coldrise_runs::exit_code(ErrorKind::InvalidInput))
    }
}
