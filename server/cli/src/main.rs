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
mod beside_backups;
mod boot_check;
mod child;
mod commands;
mod compare;
mod confinement;
mod disk_server;
mod ganesha;
mod gc_estimate;
mod hardware;
mod invocation;
mod nbdkit;
mod netns;
mod progress;
mod qemu;
mod qemu_process;
mod report;
mod run_record;
mod signals;
mod since;
mod socket_access;
mod targets;
mod units;
mod vmx;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind as ClapErrorKind};
use clap::{CommandFactory, FromArgMatches};
use coldrise_block::{Error, ErrorKind};

use arguments::Arguments;
use invocation::Invocation;
use report::{print_error, print_line};

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let parsed = Arguments::command().try_get_matches_from(&words).and_then(|matches| {
        Arguments::from_arg_matches(&matches).map(|arguments| (arguments, matches))
    });
    let (arguments, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return refuse_arguments(&words, &error),
    };
    keep_secrets_out_of_core_dumps();
    coldrise_store::raise_descriptor_limit();
    let is_json = arguments.global.json;
    let invocation = Invocation::new(arguments.global);
    run_record::begin(&invocation, &matches);
    let done = signals::answer_signals(move || answer_interrupted(is_json))
        .and_then(|()| commands::run(&invocation, arguments.command));
    signals::answer_alone();
    let done = done.and_then(|report| report.print(&invocation).map(|()| report));
    match done {
        Ok(report) => {
            run_record::finish(report.exit_code, report.object());
            ExitCode::from(report.exit_code)
        }
        Err(error) => {
            run_record::finish_failed(&error);
            print_error(is_json, error.kind(), &error.full_message());
            ExitCode::from(error.kind().exit_code())
        }
    }
}

/// The answer of a command that a signal ends before it watches for signals.
fn answer_interrupted(is_json: bool) {
    let error = Error::new(
        ErrorKind::Interrupted,
        "interrupted: the command may have taken effect; coldrise list and coldrise sessions show it",
    );
    run_record::finish_failed(&error);
    print_error(is_json, error.kind(), &error.full_message());
}

/// This program and the front ends that it starts hold keys and plaintext in memory. If
/// the system refuses, the program continues.
fn keep_secrets_out_of_core_dumps() {
    use rustix::process::{set_dumpable_behavior, setrlimit, DumpableBehavior, Resource, Rlimit};
    // Inherited by children.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    // A core pattern that is a program ignores the limit.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}

/// Prints help and version with exit code 0. Any other argument error exits with the
/// code for wrong usage.
fn refuse_arguments(words: &[OsString], error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ClapErrorKind::DisplayHelp | ClapErrorKind::DisplayVersion) {
        print_line(error.render().to_string().trim_end());
        return ExitCode::SUCCESS;
    }
    let message = match (error.kind(), std::error::Error::source(error)) {
        // One of our own parsers refused the value: its error is the message.
        (ClapErrorKind::ValueValidation, Some(reason)) => {
            let argument = match error.get(ContextKind::InvalidArg) {
                Some(ContextValue::String(name)) => format!("{name}: "),
                _ => String::new(),
            };
            let reason = reason
                .downcast_ref::<Error>()
                .map_or_else(|| reason.to_string(), |error| error.full_message());
            format!("{argument}{reason}")
        }
        _ => {
            let text = error.render().to_string();
            text.trim_start_matches("error: ").trim_end().to_owned()
        }
    };
    let is_json = words.iter().skip(1).any(|word| word == "--json");
    print_error(is_json, ErrorKind::InvalidInput, &message);
    ExitCode::from(ErrorKind::InvalidInput.exit_code())
}
