//! The folder of all runs, and safe access to the files of one.

use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use serde_json::Value;

use crate::documents::{Outcome, Plan, RunRecord, State};
use crate::run_files::{RunFiles, machine_of, no_file};
use crate::{RunId, log};

/// The end of the name of a planned run's folder.
pub(crate) const PLANNED_SUFFIX: &str = ".planned";
const ENVIRONMENT: &str = "COLDRISE_RUNS";
/// The value of COLDRISE_RUNS that turns runs off.
const NONE: &str = "none";
const SYSTEM_FOLDER: &str = "/var/lib/coldrise/runs";

/// Maximum size of plan.json, in bytes. A longer one is not read.
pub(crate) const MAX_PLAN_BYTES: u64 = 64 << 10;
/// Maximum size of result.json, in bytes. A longer one is not read.
pub(crate) const MAX_RESULT_BYTES: u64 = 256 << 10;
/// Permission to write for anyone but the owner.
const WRITABLE_BY_OTHERS: u32 = 0o022;
const EXIT_INTERRUPTED: u8 = 130;

/// The folder that holds one folder per run.
#[derive(Clone, Debug)]
pub struct RunsFolder {
    path: PathBuf,
}

/// The runs of a folder.
#[derive(Debug, Default)]
pub struct RunList {
    /// Running ones first, then the newest first.
    pub runs: Vec<RunRecord>,
    /// Number of ended runs that were not read.
    pub hidden: usize,
    /// Entries that are not runs, and why. Names come from others and may hold any character.
    pub unknown: Vec<(String, String)>,
}

impl RunsFolder {
    /// The folder at `path`. It is created when the first run begins.
    pub fn at(path: impl Into<PathBuf>) -> RunsFolder {
        RunsFolder { path: path.into() }
    }

    /// The folder of runs.
    ///
    /// # Errors
    /// `InvalidInput` if runs are turned off.
    pub fn required() -> Result<RunsFolder> {
        RunsFolder::from_environment().ok_or_else(|| {
            let text = "runs are not recorded: COLDRISE_RUNS is none, or there is no home";
            Error::new(ErrorKind::InvalidInput, text)
        })
    }

    /// The folder that COLDRISE_RUNS names; else, for root, /var/lib/coldrise/runs, and for other
    /// users `coldrise/runs` in $XDG_STATE_HOME or ~/.local/state. `None` if COLDRISE_RUNS is
    /// `none`, or if there is no home.
    pub fn from_environment() -> Option<RunsFolder> {
        let variable = |name: &str| std::env::var_os(name).filter(|text| !text.is_empty());
        if let Some(path) = variable(ENVIRONMENT) {
            return (path != NONE).then(|| RunsFolder::at(path));
        }
        if rustix::process::geteuid().is_root() {
            return Some(RunsFolder::at(SYSTEM_FOLDER));
        }
        let state = variable("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        let home = || variable("HOME").map(|home| Path::new(&home).join(".local/state"));
        Some(RunsFolder::at(state.or_else(home)?.join("coldrise/runs")))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of one run.
    pub fn run_path(&self, id: &RunId) -> PathBuf {
        self.path.join(id.as_str())
    }

    /// Creates the folder with mode 0700 if it is not there.
    ///
    /// # Errors
    /// Errors of the operating system; `InvalidInput` if other users can write it.
    pub(crate) fn make(&self) -> Result<()> {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.path);
        made.context(|| format!("creating {}", self.path.display()))?;
        let found = std::fs::metadata(&self.path);
        let found = found.context(|| format!("reading {}", self.path.display()))?;
        let own = rustix::process::geteuid().as_raw();
        let is_ours = found.uid() == own || found.uid() == 0;
        if is_ours && found.mode() & WRITABLE_BY_OTHERS == 0 {
            return Ok(());
        }
        let text = format!("{}: other users can write this folder", self.path.display());
        Err(Error::new(ErrorKind::InvalidInput, text))
    }

    /// Reads all running runs and the newest ended ones, at most `max_ended`. Of the others only
    /// the locks are tested.
    ///
    /// # Errors
    /// Errors of reading the folder itself. A folder that does not exist has no runs.
    pub fn list(&self, max_ended: usize) -> Result<RunList> {
        let mut list = RunList::default();
        let mut ids = Vec::new();
        for name in self.names()? {
            match name.parse::<RunId>() {
                // Prepared, but not begun; or a leftover, which a later run removes.
                _ if name.starts_with('.') => {}
                Ok(id) => ids.push(id),
                Err(error) => list.unknown.push((name, error.full_message())),
            }
        }
        ids.sort();
        let mut ended = Vec::new();
        for id in ids.iter().rev() {
            let is_full = ended.len() >= max_ended;
            if is_full && !self.open(id).and_then(|run| run.is_locked()).unwrap_or(false) {
                list.hidden += 1;
                continue;
            }
            match self.read(id) {
                Ok(run) if run.state == State::Running => list.runs.push(run),
                Ok(_) if is_full => list.hidden += 1,
                Ok(run) => ended.push(run),
                // Removed meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => list.unknown.push((id.to_string(), error.full_message())),
            }
        }
        // Ids are exact to the second.
        let second = |run: &RunRecord| run.id.get(..16).map(str::to_owned);
        let started = |run: &RunRecord| run.plan.as_ref().map_or(0, |plan| plan.started_at_ms);
        for runs in [&mut list.runs, &mut ended] {
            runs.sort_by_key(|run| std::cmp::Reverse((second(run), started(run))));
        }
        list.runs.append(&mut ended);
        list.unknown.sort();
        Ok(list)
    }

    /// The names in the folder, in no order.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let entries = match std::fs::read_dir(&self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.context(|| format!("reading {}", self.path.display()))?,
        };
        let names =
            entries.map(|entry| entry.map(|e| e.file_name().to_string_lossy().into_owned()));
        names.collect::<std::io::Result<_>>().context(|| format!("reading {}", self.path.display()))
    }

    /// Reads the running runs of one command, such as `recover`. Damaged ones are left out.
    ///
    /// # Errors
    /// Errors of reading the folder.
    pub fn running(&self, command: &str) -> Result<Vec<RunRecord>> {
        let ids = self.names()?.into_iter().filter_map(|name| name.parse::<RunId>().ok());
        let runs = ids.filter(|id| id.word() == command).filter_map(|id| self.read(&id).ok());
        Ok(runs.filter(|run| run.state == State::Running).collect())
    }

    /// Reads one run. Damaged files are named in the record.
    ///
    /// # Errors
    /// `NotFound` if there is no such run; errors of the operating system.
    pub fn read(&self, id: &RunId) -> Result<RunRecord> {
        let run = self.open(id)?;
        // First: a run that ends meanwhile has written its result before it frees the lock.
        let lock = run.is_locked();
        let mut problems = Vec::new();
        let mut note =
            |name: &str, error: Error| problems.push(format!("{name}: {}", error.full_message()));
        let plan = run.document::<Plan>("plan.json", MAX_PLAN_BYTES);
        let plan = plan.map_err(|error| note("plan.json", error)).ok();
        let result = match run.document::<Outcome>("result.json", MAX_RESULT_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Ok(Outcome { run: Some(run), .. }) if run != id.as_str() => {
                note("result.json", no_file("that of another run"));
                None
            }
            result => result.map_err(|error| note("result.json", error)).ok(),
        };
        let is_locked = lock.unwrap_or_else(|error| {
            note("lock", error);
            false
        });
        let state = match &result {
            _ if is_locked => State::Running,
            Some(Outcome { exit_code: 0, .. }) => State::Ok,
            Some(Outcome { exit_code: EXIT_INTERRUPTED, .. }) => State::Cancelled,
            Some(_) => State::Failed,
            None => State::Lost,
        };
        if state == State::Lost {
            let boot_id =
                std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
            let is_old = plan.as_ref().is_some_and(|plan| plan.who.boot_id != boot_id.trim());
            let why =
                if is_old { "the host has been restarted since" } else { "its process is gone" };
            problems.push(format!("lost: {why}"));
        }
        let progress = log::tail(&run).into_iter().rev().find_map(|line| line.progress);
        let machine = machine_of(&run).filter(|_| state == State::Running);
        let ended = result.as_ref().filter(|_| state != State::Running);
        let ended_at_ms = ended.map(|result| result.ended_at_ms);
        let id = id.to_string();
        Ok(RunRecord { id, state, plan, result, ended_at_ms, machine, progress, problems })
    }

    /// The last lines of a run's log, at most `count`.
    ///
    /// # Errors
    /// `NotFound` if there is no such run.
    pub fn last_lines(&self, id: &RunId, count: usize) -> Result<Vec<crate::LogLine>> {
        let mut lines = log::tail(&self.open(id)?);
        lines.drain(..lines.len().saturating_sub(count));
        Ok(lines)
    }

    /// The first progress in a run's log that has this field.
    ///
    /// # Errors
    /// `NotFound` if there is no such run.
    pub fn first_progress(&self, id: &RunId, field: &str) -> Result<Option<Value>> {
        Ok(log::first_progress(&self.open(id)?, field))
    }

    /// Opens the folder of a run.
    pub(crate) fn open(&self, id: &RunId) -> Result<RunFiles> {
        RunFiles::open(&self.run_path(id)).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                let text = format!("there is no run {id} in {}", self.path.display());
                Error::new(ErrorKind::NotFound, text)
            }
            _ => error,
        })
    }
}

/// The id in the name of a planned run's folder.
pub(crate) fn planned_id(name: &str) -> Option<RunId> {
    name.strip_prefix('.')?.strip_suffix(PLANNED_SUFFIX)?.parse().ok()
}
