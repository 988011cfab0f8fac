//! The run of this process.
//!
//! One process is one run, so the record is global: warnings and progress reach it from
//! everywhere. Without a run, all functions do nothing.

use std::sync::OnceLock;

use coldrise_block::{Error, ErrorKind, Result};
use serde_json::Value;

use crate::documents::Failure;
use crate::machine::MachineFiles;
use crate::run::Run;

static RUN: OnceLock<Run> = OnceLock::new();

/// Makes a run that of this process.
pub fn set(run: Run) {
    let _ = RUN.set(run);
}

/// Records the end of a command that has given its answer.
pub fn finish(exit_code: u8, answer: &str) {
    if let Some(run) = RUN.get() {
        run.finish(exit_code, None, serde_json::from_str(answer).ok());
    }
}

/// Records the end of a command that has failed.
pub fn finish_failed(error: &Error) {
    if let Some(run) = RUN.get() {
        let failure =
            Failure { kind: error.kind().word().to_owned(), message: error.full_message() };
        run.finish(crate::exit_code(error.kind()), Some(failure), None);
    }
}

/// Removes the record: the program restarts itself and begins a new one.
pub fn discard() {
    if let Some(run) = RUN.get() {
        run.discard();
    }
}

/// Makes the folder of the machine that this run boots.
///
/// # Errors
/// `InvalidInput` if this run has no folder; errors of the operating system.
pub fn machine_files() -> Result<MachineFiles> {
    RUN.get().map(Run::machine_files).unwrap_or_else(|| {
        let text = "the machine's sockets lie in the run's folder, and runs are turned off";
        Err(Error::new(ErrorKind::InvalidInput, text).advise("unset COLDRISE_RUNS"))
    })
}

/// Adds a line to the run's log.
pub fn log(level: &str, text: &str) {
    if let Some(run) = RUN.get() {
        run.log(level, text);
    }
}

/// Whether the next [`progress`] is recorded.
pub fn is_progress_due() -> bool {
    RUN.get().is_some_and(Run::is_progress_due)
}

/// Records progress, at most once per second.
pub fn progress(state: Value) {
    if let Some(run) = RUN.get() {
        run.progress(state);
    }
}
