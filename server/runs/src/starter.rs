//! Starts planned runs as processes that outlive this one.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use coldrise_block::{Context, Error, ErrorKind, Result};

use crate::RunId;
use crate::documents::Failure;
use crate::folder::RunsFolder;
use crate::run_files::RunFiles;

/// Exists while systemd is the init process.
const SYSTEMD: &str = "/run/systemd/system";
/// The process that systemd has started for a unit.
const UNIT_PROCESS: &str = "SYSTEMD_EXEC_PID";
/// The environment of a detached process. It has no secrets, but for the keys of buckets. The last two are folders for sockets.
const ENVIRONMENT: [&str; 5] = ["PATH", "HOME", "LANG", "RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"];
/// How the variables begin that lead to buckets.
const BUCKETS: &str = "AWS_";
/// Maximum length of a tool's message in an error, in characters.
const MAX_MESSAGE: usize = 1000;

/// How planned runs become processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Starter {
    /// As a unit `coldrise-run@ID.service` of the system's systemd. Its folder of runs and its user
    /// stand in the unit.
    Systemd,
    /// As a process of its own session, by this program.
    Detached(PathBuf),
}

impl Starter {
    /// Units if systemd has started this process as one, else detached processes of the program
    /// `coldrise` beside this one.
    pub fn detect() -> Starter {
        let is_unit =
            std::env::var(UNIT_PROCESS).is_ok_and(|id| id == std::process::id().to_string());
        match is_unit && Path::new(SYSTEMD).is_dir() {
            true => Starter::Systemd,
            false => Starter::detached(None),
        }
    }

    /// Detached processes of `program`, by default `coldrise` beside this program.
    pub fn detached(program: Option<PathBuf>) -> Starter {
        let beside = || std::env::current_exe().ok().map(|own| own.with_file_name("coldrise"));
        Starter::Detached(program.or_else(beside).unwrap_or_else(|| PathBuf::from("coldrise")))
    }

    /// Starts a planned run and does not wait for its begin. To start a run twice is harmless.
    ///
    /// A detached process that ends before it has begun the run leaves a failed run. A unit
    /// does not: the caller gives up runs that stay planned ([`RunsFolder::fail_planned`]).
    ///
    /// # Errors
    /// `NotFound` if the run is not planned any more; `ToolFailed` if the process cannot be started:
    /// the run is still planned.
    pub fn start(&self, folder: &RunsFolder, id: &RunId) -> Result<()> {
        match self {
            Starter::Systemd => start_unit(id),
            Starter::Detached(program) => start_detached(program, folder, id),
        }
    }
}

fn start_unit(id: &RunId) -> Result<()> {
    let unit = format!("coldrise-run@{id}.service");
    let mut command = Command::new("systemctl");
    command.args(["start", "--no-block", "--no-ask-password", "--", &unit]).stdin(Stdio::null());
    let done = command.output().map_err(|error| failed("starting systemctl", error))?;
    if done.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&done.stderr);
    let text: String = text.trim().chars().take(MAX_MESSAGE).collect();
    Err(Error::new(ErrorKind::ToolFailed, format!("systemctl did not start {unit}: {text}"))
        .advise(format!("look at it: systemctl status {unit}")))
}

fn start_detached(program: &Path, folder: &RunsFolder, id: &RunId) -> Result<()> {
    // Messages of a panic or of the loader stand nowhere else.
    let output = RunFiles::open(&folder.planned_path(id))?.append_to("output");
    let output = output.and_then(|output| Ok((output.try_clone()?, output)));
    let (output, errors) = output.context(|| format!("the output file of run {id}"))?;
    let runs = std::path::absolute(folder.path())
        .context(|| format!("finding {}", folder.path().display()))?;
    let kept = std::env::vars_os().filter(|(name, _)| {
        let name = name.to_string_lossy();
        ENVIRONMENT.contains(&&*name) || name.starts_with(BUCKETS)
    });
    let mut command = Command::new(program);
    command.args(["run", "--detach", id.as_str()]).current_dir("/");
    command.env_clear().envs(kept).env("COLDRISE_RUNS", runs);
    command.stdin(Stdio::null()).stdout(output).stderr(errors);
    let child = command
        .spawn()
        .map_err(|error| failed(format!("starting {}", program.display()), error))?;
    let (folder, id) = (folder.clone(), id.clone());
    let thread = std::thread::Builder::new().name("run reaper".to_owned()).stack_size(128 << 10);
    // Without the thread, the process remains a zombie until this one ends.
    let _ = thread.spawn(move || reap(child, &folder, &id));
    Ok(())
}

fn failed(what: impl Into<String>, error: std::io::Error) -> Error {
    Error::with_source(ErrorKind::ToolFailed, what, error)
}

/// Waits for the end of the process. A run that it has not begun would be planned forever.
fn reap(mut child: Child, folder: &RunsFolder, id: &RunId) {
    let ended = match child.wait() {
        Ok(status) => format!("its process ended at once: {status}"),
        Err(error) => format!("its process is unknown: {error}"),
    };
    let failure = Failure { kind: ErrorKind::ToolFailed.word().to_owned(), message: ended };
    // An error is the usual case: the run has begun, and is not a planned one.
    let _ = folder.fail_planned(id, failure);
}
