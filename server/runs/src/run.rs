//! A run of this process.

use coldrise_block::now_ms;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coldrise_block::{
    Context, Error, ErrorKind, HeldLock, PeriodicThread, Result, remove_if_present,
};
use serde_json::{Value, json};

use crate::documents::{Failure, LogLine, Outcome, Plan};
use crate::folder::RunsFolder;
use crate::log::LogFile;
use crate::machine::MachineFiles;
use crate::planned::{Planned, Request, plan_again};
use crate::run_files::RunFiles;
use crate::written::{cut, write_plan, write_result};
use crate::{RunId, control, history, output, redact};

/// Least time between two progress lines, in milliseconds.
const PROGRESS_INTERVAL_MS: u64 = 1000;
/// Attempts to find a free id: the odds of one failure are 1 in 32,768 per run of that second.
const MAX_ATTEMPTS: u32 = 8;

type Warn = Box<dyn Fn(&str) + Send + Sync>;

/// The run of a command. If its folder cannot be made, all its methods do nothing. Dropped
/// without [`Run::finish`], the run is lost.
pub struct Run {
    id: Option<RunId>,
    shared: Arc<Shared>,
}

struct Shared {
    warn: Warn,
    has_warned: AtomicBool,
    started: std::time::Instant,
    /// Time since the start before which progress is not logged, in milliseconds.
    next_progress_ms: AtomicU64,
    is_cancelled: AtomicBool,
    open: Mutex<Option<Open>>,
    last_progress: Mutex<Option<Value>>,
}

/// The files that a run holds until it ends.
struct Open {
    path: PathBuf,
    log: LogFile,
    listener: Option<Arc<UnixListener>>,
    /// Of a planned run: where it was planned, and the request.
    planned: Option<(PathBuf, Request)>,
    _output: Option<PeriodicThread>,
    _lock: HeldLock,
}

impl Run {
    /// Makes the folder of a run and begins to answer at its control socket. `cancel` is called from
    /// another thread, once, when the run is cancelled. `warn` gets one sentence if the
    /// folder cannot be used.
    pub fn begin(
        folder: Option<&RunsFolder>,
        plan: &Plan,
        warn: impl Fn(&str) + Send + Sync + 'static,
        cancel: impl Fn() + Send + 'static,
    ) -> Run {
        let shared = Shared::new(warn);
        let Some(folder) = folder else { return Run { id: None, shared } };
        let made = folder.make().and_then(|()| {
            // A later run tries again.
            let _ = history::clean(folder, jiff::Timestamp::now());
            make(folder, plan)
        });
        match made {
            Ok((id, open)) => Run::answering(id, open, shared, cancel),
            Err(error) => {
                shared.warn(&error);
                Run { id: None, shared }
            }
        }
    }

    /// Begins a planned run.
    ///
    /// # Errors
    /// `Busy` if it has begun already; errors of the operating system: it is still planned, and
    /// the command must not run.
    pub fn begin_planned(
        planned: Planned,
        plan: &Plan,
        warn: impl Fn(&str) + Send + Sync + 'static,
        cancel: impl Fn() + Send + 'static,
    ) -> Result<Run> {
        let (id, open) = make_planned(planned, plan)?;
        Ok(Run::answering(id, open, Shared::new(warn), cancel))
    }

    fn answering(
        id: RunId,
        open: Open,
        shared: Arc<Shared>,
        cancel: impl Fn() + Send + 'static,
    ) -> Run {
        let path = open.path.clone();
        *shared.open() = Some(open);
        let served = listen(&path).and_then(|listener| {
            let listener = Arc::new(listener);
            if let Some(open) = shared.open().as_mut() {
                open.listener = Some(Arc::clone(&listener));
            }
            let answering = Arc::clone(&shared);
            let is_ended = {
                let shared = Arc::clone(&shared);
                move || shared.open().is_none()
            };
            let serve =
                move || control::serve(&listener, is_ended, |word| answering.answer(word, &cancel));
            let thread = std::thread::Builder::new().name("run control".to_owned());
            thread.spawn(serve).map(drop)
        });
        if let Err(error) = served.context(|| format!("making the control socket of {id}")) {
            shared.warn(&error);
        }
        Run { id: Some(id), shared }
    }

    /// The id; `None` if the run has no folder.
    pub fn id(&self) -> Option<&RunId> {
        self.id.as_ref()
    }

    /// Makes the folder of the machine that this run boots.
    ///
    /// # Errors
    /// `InvalidInput` if the run has no folder; errors of the operating system.
    pub fn machine_files(&self) -> Result<MachineFiles> {
        let path = self.shared.open().as_ref().map(|open| open.path.clone());
        let path = path.ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, "this run has no folder for the machine's sockets")
        })?;
        MachineFiles::new(&path)
    }

    /// Logs one line of text, without secrets of URIs. Longer text than 8 KiB is cut.
    pub fn log(&self, level: &str, text: &str) {
        if self.id.is_none() {
            return;
        }
        self.shared.append_text(level, redact(text));
    }

    /// Whether [`Run::progress`] would log now: callers need not compute what is dropped.
    pub fn is_progress_due(&self) -> bool {
        self.id.is_some()
            && self.shared.elapsed_ms() >= self.shared.next_progress_ms.load(Ordering::Relaxed)
    }

    /// Logs the state of the work: a new `phase` at once, else at most once per second; drops it otherwise.
    pub fn progress(&self, progress: Value) {
        let mut last = lock(&self.shared.last_progress);
        let is_new = last.as_ref().is_some_and(|last| last.get("phase") != progress.get("phase"));
        if self.id.is_none() || !is_new && !self.is_progress_due() {
            return;
        }
        let next_ms = self.shared.elapsed_ms().saturating_add(PROGRESS_INTERVAL_MS);
        self.shared.next_progress_ms.store(next_ms, Ordering::Relaxed);
        *last = Some(progress.clone());
        drop(last);
        let (level, progress) = ("progress".to_owned(), Some(progress));
        self.shared.append(&LogLine { at_ms: now_ms(), level, text: String::new(), progress });
    }

    /// Ends the run with its result. Only the first call counts. A power cut soon after may
    /// leave the run lost, never another result.
    pub fn finish(&self, exit_code: u8, error: Option<Failure>, counts: Option<Value>) {
        self.shared.finish(exit_code, error, counts);
    }

    /// Removes the run: this process is about to become another program, which begins its own. A
    /// planned run is planned again, and the program begins that.
    pub fn discard(&self) {
        let Some(open) = self.shared.close() else { return };
        let Some((planned, request)) = &open.planned else {
            history::remove_files(&open.path);
            return;
        };
        if let Err(error) = plan_again(&open.path, planned, request) {
            self.shared.warn(&Error::io("planning this run again", error));
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Shared {
    fn new(warn: impl Fn(&str) + Send + Sync + 'static) -> Arc<Shared> {
        Arc::new(Shared {
            warn: Box::new(warn),
            has_warned: AtomicBool::new(false),
            started: std::time::Instant::now(),
            next_progress_ms: AtomicU64::new(0),
            is_cancelled: AtomicBool::new(false),
            open: Mutex::new(None),
            last_progress: Mutex::new(None),
        })
    }

    fn open(&self) -> MutexGuard<'_, Option<Open>> {
        lock(&self.open)
    }

    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn warn(&self, error: &Error) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            let text = format!(
                "warning: the record of this run is not complete: {}",
                error.full_message()
            );
            (self.warn)(&text);
        }
    }

    fn append_text(&self, level: &str, text: String) {
        let (level, text) = (level.to_owned(), cut(text));
        self.append(&LogLine { at_ms: now_ms(), level, text, progress: None });
    }

    fn append(&self, line: &LogLine) {
        let written = match self.open().as_mut() {
            Some(open) => open.log.append(line),
            None => return,
        };
        if let Err(error) = written {
            self.warn(&Error::io("writing its log", error));
        }
    }

    fn answer(&self, word: &str, cancel: &impl Fn()) -> Value {
        match word {
            "status" => json!({
                "cancelled": self.is_cancelled.load(Ordering::Relaxed),
                "progress": *lock(&self.last_progress),
            }),
            "cancel" => {
                // A second Ctrl-C would end the process at once.
                if !self.is_cancelled.swap(true, Ordering::Relaxed) {
                    self.append_text("info", "cancelled from another process".to_owned());
                    cancel();
                }
                json!({ "cancelled": true })
            }
            _ => json!({ "error": "requests are: status, cancel" }),
        }
    }

    /// Takes what the run holds, and ends the control thread. The lock is free when the result
    /// of this is dropped.
    fn close(&self) -> Option<Open> {
        let open = self.open().take()?;
        if let Some(listener) = &open.listener {
            let _ = rustix::net::shutdown(&**listener, rustix::net::Shutdown::Both);
        }
        let _ = std::fs::remove_file(open.path.join("control"));
        Some(open)
    }

    fn finish(&self, exit_code: u8, error: Option<Failure>, counts: Option<Value>) {
        let Some(open) = self.close() else { return };
        let run = open.path.file_name().map(|name| name.to_string_lossy().into_owned());
        let outcome = Outcome { run, exit_code, error, counts, ended_at_ms: now_ms() };
        if let Err(error) = write_result(&open.path, outcome) {
            self.warn(&error);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prepares the folder under another name, and renames it when it is locked.
fn make(folder: &RunsFolder, plan: &Plan) -> Result<(RunId, Open)> {
    for _ in 0..MAX_ATTEMPTS {
        let id = RunId::new(jiff::Timestamp::now(), &plan.command);
        let prepared = folder.path().join(format!(".{id}.new"));
        let path = folder.run_path(&id);
        let made = std::fs::DirBuilder::new().mode(0o700).create(&prepared);
        match made.context(|| format!("creating {}", prepared.display())) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
            made => made?,
        }
        let begun = new_lock(&prepared).and_then(|lock| {
            let log = fill(&prepared, plan)?;
            std::fs::rename(&prepared, &path)?;
            Ok(Open::new(path, log, lock, None))
        });
        match begun {
            Ok(open) => return Ok((id, open)),
            Err(error) => {
                history::remove_files(&prepared);
                // The folder of another run is not empty.
                if error.kind() != std::io::ErrorKind::DirectoryNotEmpty {
                    return Err(error).context(|| format!("filling {}", prepared.display()));
                }
            }
        }
    }
    Err(Error::new(ErrorKind::AlreadyExists, "too many runs began in this second"))
}

/// Fills the folder of a planned run, and makes it a run.
fn make_planned(planned: Planned, plan: &Plan) -> Result<(RunId, Open)> {
    let request = planned.request()?;
    // Left by a process that was killed after it had filled the folder.
    remove_if_present(&planned.path.join("log"))?;
    let log = fill(&planned.path, plan);
    let log = log.context(|| format!("filling {}", planned.path.display()))?;
    planned.enter()?;
    let again = Some((planned.path, request));
    Ok((planned.id, Open::new(planned.run_path, log, planned.lock, again)))
}

impl Open {
    fn new(
        path: PathBuf,
        mut log: LogFile,
        lock: HeldLock,
        planned: Option<(PathBuf, Request)>,
    ) -> Open {
        log.moved_to(&path);
        let output = planned.as_ref().and_then(|_| output::bound(&path));
        Open { path, log, listener: None, planned, _output: output, _lock: lock }
    }
}

fn new_lock(path: &Path) -> std::io::Result<HeldLock> {
    let mut options = std::fs::OpenOptions::new();
    let lock = options.write(true).create_new(true).mode(0o600).open(path.join("lock"))?;
    HeldLock::take(lock)?.ok_or_else(|| std::io::ErrorKind::WouldBlock.into())
}

fn fill(path: &Path, plan: &Plan) -> std::io::Result<LogFile> {
    write_plan(path, plan)?;
    LogFile::create(path)
}

fn listen(path: &Path) -> std::io::Result<UnixListener> {
    let files = RunFiles::open(path).map_err(std::io::Error::other)?;
    let listener = UnixListener::bind(files.control_path())?;
    files.keep_control_private()?;
    Ok(listener)
}
