//! `coldrised`: the service that protects a site by itself.
//!
//! ```text
//!  HTTPS port, Unix socket ─▶ listener ─▶ api ─┬─▶ web         the page's files, without login
//!                                              ├─▶ access      who may do what; audit
//!                                              ├─▶ Inventory   machines, points, sessions (read only)
//!                                              ├─▶ jobs        schedules, queue ─▶ runs (processes)
//!                                              └─▶ events ◀─── watch of the runs folder
//!                        notifications ◀── events: mail, webhooks, metrics
//! ```
//!
//! The service is never the parent of a run in life or death: runs are processes of their own with
//! a folder each (`coldrise_runs`). The folder is the truth, the database ([`database`]) the
//! index. A kill of this process at any time disturbs no run; the next start finds them again.
//!
//! Threads: HTTP runs on tokio's workers. Everything that touches the database, the repository or
//! the runs folder blocks, and runs on tokio's blocking threads or on a thread of its own.
#![forbid(unsafe_code)]

mod access;
mod activity_watch;
mod api;
mod arguments;
mod clock;
mod copies;
mod database;
mod events;
mod files_machines;
mod folders;
mod growth;
mod housekeeping;
mod hypervisors;
mod invalid;
mod inventory_watch;
mod jobs;
mod listener;
mod log_lines;
mod metrics;
mod notifications;
mod pattern;
mod run_watch;
mod searched;
mod service;
mod supervision;
mod verify_result;
mod web;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use coldrise_block::{Context, ErrorKind, Result};

use arguments::{Action, Arguments};

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            let code = if error.use_stderr() {
                coldrise_runs::exit_code(ErrorKind::InvalidInput)
            } else {
                0
            };
            return ExitCode::from(code);
        }
    };
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("coldrised: {}", error.full_message());
            ExitCode::from(coldrise_runs::exit_code(error.kind()))
        }
    }
}

fn run(arguments: Arguments) -> Result<()> {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    match arguments.action {
        None => service::run(&arguments.options),
        Some(Action::SetupLink { force }) => access::setup::print_link(&arguments.options, force),
        Some(Action::Openapi) => {
            println!("{}", api::openapi_text());
            Ok(())
        }
        Some(Action::Man { directory }) => {
            let page = clap_mangen::Man::new(Arguments::command()).section("8");
            page.generate_to(&directory)
                .map(drop)
                .context(|| format!("writing the man page to {}", directory.display()))
        }
    }
}
