//! The folder of all runs, and safe access to the files of one.

use std::fs::{File, Permissions};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, HeldLock, Result};
use rustix::fs::{openat, AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::documents::{Outcome, Plan, RunRecord, State};
use crate::machine::machine_of;
use crate::{log, RunId};

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
    /// Entries that are no runs, and why. Names come from others and may hold any character.
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
        Ok(RunRecord { id: id.to_string(), state, plan, result, machine, progress, problems })
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

    /// The first progress in a run's log.
    ///
    /// # Errors
    /// `NotFound` if there is no such run.
    pub fn first_progress(&self, id: &RunId) -> Result<Option<Value>> {
        Ok(log::head(&self.open(id)?).into_iter().find_map(|line| line.progress))
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

/// The open folder of a run.
pub(crate) struct RunFiles(OwnedFd);

impl RunFiles {
    pub(crate) fn open(path: &Path) -> Result<RunFiles> {
        RunFiles::open_with(path, OFlags::NOFOLLOW)
    }

    /// Opens a folder that may be a symlink: the folder of all runs.
    pub(crate) fn open_any(path: &Path) -> Result<RunFiles> {
        RunFiles::open_with(path, OFlags::empty())
    }

    fn open_with(path: &Path, flags: OFlags) -> Result<RunFiles> {
        let flags = flags | OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let folder = openat(rustix::fs::CWD, path, flags, Mode::empty());
        let folder = folder.map_err(std::io::Error::from);
        folder.map(RunFiles).context(|| format!("opening {}", path.display()))
    }

    /// Opens a folder in this one. Does not follow symlinks.
    pub(crate) fn folder(&self, name: &str) -> std::io::Result<RunFiles> {
        let flags = OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(RunFiles(openat(&self.0, name, flags, Mode::empty())?))
    }

    /// Opens a regular file for reading. Does not wait for FIFOs or follow symlinks.
    pub(crate) fn file(&self, name: &str) -> Result<File> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::RDONLY | OFlags::CLOEXEC;
        let opened = openat(&self.0, name, flags, Mode::empty()).map(File::from);
        let opened = match opened {
            Err(Errno::LOOP) => return Err(no_file("a symbolic link")),
            opened => opened.map_err(std::io::Error::from).context(|| "opening it")?,
        };
        match opened.metadata().context(|| "reading it")?.is_file() {
            true => Ok(opened),
            false => Err(no_file("not a regular file")),
        }
    }

    pub(crate) fn document<T: DeserializeOwned>(&self, name: &str, max_bytes: u64) -> Result<T> {
        let mut text = Vec::new();
        let mut file = self.file(name)?.take(max_bytes + 1);
        file.read_to_end(&mut text).context(|| "reading it")?;
        if text.len() as u64 > max_bytes {
            return Err(no_file(&format!("longer than {max_bytes} bytes")));
        }
        serde_json::from_slice(&text)
            .map_err(|error| Error::with_source(ErrorKind::Corrupt, "it is damaged", error))
    }

    /// Whether a process holds the lock. A run whose lock file is missing is not locked.
    pub(crate) fn is_locked(&self) -> Result<bool> {
        let lock = match self.file("lock") {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            lock => lock?,
        };
        HeldLock::is_held(lock).context(|| "testing it")
    }

    /// Opens a file for writing at its end, and creates it if it is missing.
    pub(crate) fn append_to(&self, name: &str) -> std::io::Result<File> {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC;
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        Ok(File::from(openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)?))
    }

    /// Takes the lock. `None` if another process holds it.
    pub(crate) fn take_lock(&self) -> Result<Option<HeldLock>> {
        let lock = self.append_to("lock").context(|| "opening it")?;
        HeldLock::take(lock).context(|| "taking it")
    }

    /// Whether both are one folder.
    pub(crate) fn is_same(&self, other: &RunFiles) -> Result<bool> {
        let number = |run: &RunFiles| {
            let found = rustix::fs::fstat(&run.0).map_err(std::io::Error::from);
            found.map(|found| (found.st_dev, found.st_ino)).context(|| "reading a folder")
        };
        Ok(number(self)? == number(other)?)
    }

    /// A short path of the control socket, whatever the length of the folder's: addresses of
    /// sockets have at most 107 bytes. Valid while this is open.
    pub(crate) fn control_path(&self) -> PathBuf {
        self.own_path().join("control")
    }

    /// A path of the open folder itself, whatever its name is now. Valid while this is open.
    pub(crate) fn own_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }

    /// Lets only the owner connect.
    pub(crate) fn keep_control_private(&self) -> std::io::Result<()> {
        std::fs::set_permissions(self.control_path(), Permissions::from_mode(0o600))
    }

    /// Whether `control` is a socket, and no link to another one.
    pub(crate) fn has_control(&self) -> bool {
        rustix::fs::statat(&self.0, "control", AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Socket)
    }
}

impl AsFd for RunFiles {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<RunFiles> for OwnedFd {
    fn from(run: RunFiles) -> OwnedFd {
        run.0
    }
}

fn no_file(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("it is {what}"))
}
