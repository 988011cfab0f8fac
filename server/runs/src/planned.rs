//! Runs that are planned by one process and begun by another.
//!
//! ```text
//! RUNS/.ID.planned/      mode 0700, files 0600
//!   request.json         the command, in full; removed when the run begins
//!   lock                 held by the process that begins the run, or that gives it up
//!   output               stdout and stderr of a detached process
//! ```
//!
//! The folder appears whole and becomes the run's by a rename, under the lock. So a kill at any
//! moment leaves a planned run, which can be started again, or a run.

use coldrise_block::now_ms;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use coldrise_block::{
    Context, Error, ErrorKind, HeldLock, Result, create_private, path_exists, write_synced,
};
use serde::{Deserialize, Serialize};

use crate::documents::{Failure, Outcome, Plan, Who};
use crate::folder::{PLANNED_SUFFIX, RunsFolder, planned_id};
use crate::run_files::RunFiles;
use crate::written::{write_plan, write_result};
use crate::{RunId, history, redact_arguments};

/// Maximum size of request.json, in bytes.
pub(crate) const MAX_REQUEST_BYTES: u64 = 64 << 10;

/// A command that another process is to run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The arguments of `coldrise` in full, with --repo and --passphrase-file. Paths are absolute: the
    /// process starts in `/`. Without --json, whose lines only fill the file `output`.
    pub arguments: Vec<String>,
    /// The job that wants the run.
    #[serde(default)]
    pub job: Option<String>,
    /// The machine: for arguments that name a session, and for the record of a run that cannot begin.
    #[serde(default)]
    pub machine: Option<String>,
    /// Files and folders that are not a source, such as the state of the service.
    #[serde(default)]
    pub keep_out: Vec<String>,
    /// The user of the API who asked for it.
    #[serde(default)]
    pub requested_by: Option<String>,
    /// Number of this attempt of the job.
    #[serde(default)]
    pub attempt: u32,
}

impl RunsFolder {
    /// An id for a planned run of `command`, such as `serve nbd`. Ids of one process are unique;
    /// runs that are not planned use other numbers.
    pub fn new_id(&self, command: &str) -> RunId {
        RunId::planned(jiff::Timestamp::now(), command)
    }

    /// Plans a run. A run of that id that is planned already, or has begun, stays as it is. The
    /// request is durable when this returns; its name may be lost in a power cut, so plan again what
    /// was not started.
    ///
    /// # Errors
    /// `InvalidInput` if the request is too long, or if other users can write the folder; errors of
    /// the operating system.
    pub fn plan(&self, id: &RunId, request: &Request) -> Result<()> {
        self.make()?;
        let text = serde_json::to_vec(request)
            .map_err(|error| Error::with_source(ErrorKind::InvalidInput, "the request", error))?;
        if text.len() as u64 > MAX_REQUEST_BYTES {
            let text = format!("the command of run {id} is longer than {MAX_REQUEST_BYTES} bytes");
            return Err(Error::new(ErrorKind::InvalidInput, text)
                .advise("name fewer machines or disks in one run"));
        }
        let path = self.planned_path(id);
        if path_exists(&self.run_path(id))? || path_exists(&path)? {
            return Ok(());
        }
        let prepared = self.path().join(format!(".{}.new", self.new_id("plan")));
        let planned = std::fs::DirBuilder::new().mode(0o700).create(&prepared).and_then(|()| {
            create_private(&prepared.join("lock"))?;
            write_synced(&prepared.join("request.json"), &text)?;
            std::fs::rename(&prepared, &path)
        });
        planned.or_else(|error| {
            history::remove_files(&prepared);
            match error.kind() {
                // Another process was faster.
                std::io::ErrorKind::DirectoryNotEmpty => Ok(()),
                _ => Err(error).context(|| format!("planning run {id}")),
            }
        })
    }

    /// The runs that are planned and have not begun, the oldest first.
    ///
    /// # Errors
    /// Errors of reading the folder.
    pub fn planned(&self) -> Result<Vec<RunId>> {
        let mut ids: Vec<_> = self.names()?.iter().filter_map(|name| planned_id(name)).collect();
        ids.sort();
        Ok(ids)
    }

    /// Records a planned run as failed: its process could not be started. Returns false if a
    /// process has begun the run, or begins it now. With a `failure` of kind `interrupted`, the run is
    /// cancelled instead.
    ///
    /// # Errors
    /// `NotFound` if there is no such run; errors of the operating system.
    pub fn fail_planned(&self, id: &RunId, failure: Failure) -> Result<bool> {
        match self.take(id) {
            Ok(planned) => planned.fail(failure).map(|()| true),
            Err(error) if error.kind() == ErrorKind::Busy => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Takes a planned run: no other process can begin it any more.
    ///
    /// # Errors
    /// `Busy` if another process has it, `NotFound` if there is no such run.
    pub fn take(&self, id: &RunId) -> Result<Planned> {
        let path = self.planned_path(id);
        let begun = || Error::new(ErrorKind::Busy, format!("run {id} has begun already"));
        let missing = |error: Error| match (error.kind(), path_exists(&self.run_path(id))) {
            (ErrorKind::NotFound, Ok(true)) => begun(),
            (ErrorKind::NotFound, Ok(false)) => {
                let text = format!("there is no planned run {id} in {}", self.path().display());
                Error::new(ErrorKind::NotFound, text)
            }
            _ => error,
        };
        let files = RunFiles::open(&path).map_err(missing)?;
        let Some(lock) = files.take_lock().context(|| format!("the lock of run {id}"))? else {
            let text = format!("another process is starting run {id}");
            return Err(Error::new(ErrorKind::Busy, text));
        };
        // The lock may be free because the run has ended meanwhile.
        match RunFiles::open(&path).and_then(|now| now.is_same(&files)) {
            Ok(true) => {}
            Ok(false) => return Err(begun()),
            Err(error) => return Err(missing(error)),
        }
        Ok(Planned { id: id.clone(), path, run_path: self.run_path(id), files, lock })
    }

    /// The folder of a planned run.
    pub(crate) fn planned_path(&self, id: &RunId) -> PathBuf {
        self.path().join(format!(".{id}{PLANNED_SUFFIX}"))
    }
}

/// A planned run that this process has taken. Dropped, it is planned as before.
pub struct Planned {
    pub(crate) id: RunId,
    pub(crate) path: PathBuf,
    pub(crate) run_path: PathBuf,
    files: RunFiles,
    pub(crate) lock: HeldLock,
}

impl Planned {
    /// What to run.
    ///
    /// # Errors
    /// `Corrupt` if the request is damaged; errors of the operating system.
    pub fn request(&self) -> Result<Request> {
        self.files
            .document("request.json", MAX_REQUEST_BYTES)
            .map_err(|error| error.context(format!("the request of run {}", self.id)))
    }

    /// Records the run as failed; see [`RunsFolder::fail_planned`].
    ///
    /// # Errors
    /// Errors of the operating system: the run is still planned.
    pub fn fail(self, failure: Failure) -> Result<()> {
        let request = self.request().unwrap_or_default();
        let plan = Plan {
            command: self.id.word().to_owned(),
            arguments: redact_arguments(request.arguments),
            repository: None,
            machine: request.machine,
            point: None,
            who: Who::this_process(),
            started_at_ms: now_ms(),
            job: request.job,
            requested_by: request.requested_by,
            attempt: request.attempt,
        };
        let kind = ErrorKind::from_word(&failure.kind).unwrap_or(ErrorKind::Io);
        let message = format!("could not be started: {}", failure.message);
        let outcome = Outcome {
            run: Some(self.id.to_string()),
            exit_code: crate::exit_code(kind),
            error: Some(Failure { message, ..failure }),
            counts: None,
            ended_at_ms: now_ms(),
        };
        write_plan(&self.path, &plan).context(|| format!("recording run {}", self.id))?;
        write_result(&self.path, outcome)?;
        self.enter()
    }

    /// Makes it a run, and removes the request.
    pub(crate) fn enter(&self) -> Result<()> {
        std::fs::rename(&self.path, &self.run_path).map_err(|error| match error.kind() {
            std::io::ErrorKind::DirectoryNotEmpty => {
                // Planned again while it began.
                history::remove_files(&self.path);
                Error::new(ErrorKind::Busy, format!("run {} has begun already", self.id))
            }
            _ => Error::io(format!("beginning run {}", self.id), error),
        })?;
        let _ = std::fs::remove_file(self.run_path.join("request.json"));
        Ok(())
    }
}

/// Makes a run planned again: its process is about to become another program, which begins
/// it. The caller holds the lock.
pub(crate) fn plan_again(run: &Path, planned: &Path, request: &Request) -> std::io::Result<()> {
    write_synced(&run.join("request.json"), &serde_json::to_vec(request)?)?;
    std::fs::rename(run, planned)?;
    for name in ["plan.json", "log", "log.1"] {
        let _ = std::fs::remove_file(planned.join(name));
    }
    Ok(())
}
