//! The queue, as all threads see it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_runs::{Failure, RunId, RunsFolder};
use parking_lot::{Condvar, Mutex};

use super::protect_live::{follow, leave_alone};
use super::rows::{self, QueueRow, RowState, is_missing};
use crate::arguments::Options;
use crate::clock::now_ms;
use crate::database::Database;
use crate::events::{Events, What};

/// Maximum number of rows: a client in a loop must not fill the drive.
const MAX_ROWS: usize = 20_000;
/// The setting of the number of runs at once, its default and its maximum.
const PARALLEL: &str = "parallel_runs";
const DEFAULT_PARALLEL: usize = 4;
pub(crate) const MAX_PARALLEL: usize = 64;

/// A run to be queued.
#[derive(Clone, Debug)]
pub(crate) struct NewRun {
    /// The command's word, such as `backup` or `serve nbd`.
    pub(crate) kind: String,
    pub(crate) machine: Option<String>,
    /// The command's words with its name, without --repo and the like. Paths are absolute.
    pub(crate) arguments: Vec<String>,
    /// The caller who asked for it.
    pub(crate) requested_by: Option<String>,
    pub(crate) job: Option<String>,
}

/// The queue. All runs that the service starts go through it.
pub(crate) struct Queue {
    pub(super) database: Database,
    pub(super) runs: RunsFolder,
    pub(super) events: Arc<Events>,
    /// The global options of each command; `None` if the service has no repository.
    global: Option<Vec<String>>,
    /// Files and folders that no run reads as a source.
    pub(super) keep_out: Vec<String>,
    is_changed: Mutex<bool>,
    changed: Condvar,
}

impl Queue {
    /// The queue of a service.
    ///
    /// # Errors
    /// `InvalidInput` for paths that are not UTF-8 text.
    pub(crate) fn new(options: &Options, database: Database, events: Arc<Events>) -> Result<Queue> {
        let global = options.repo.as_ref().map(|repository| -> Result<Vec<String>> {
            let mut words = vec!["--repo".to_owned(), absolute(repository)?];
            if let Some(file) = &options.passphrase_file {
                words.extend(["--passphrase-file".to_owned(), absolute(file)?]);
            }
            Ok(words)
        });
        Ok(Queue {
            database,
            runs: options.runs_folder(),
            events,
            global: global.transpose()?,
            keep_out: options.own_files().iter().map(|own| absolute(own)).collect::<Result<_>>()?,
            is_changed: Mutex::new(false),
            changed: Condvar::new(),
        })
    }

    /// The global options of each command.
    ///
    /// # Errors
    /// `NoRepository` if the service has none.
    pub(super) fn global(&self) -> Result<&[String]> {
        self.global.as_deref().ok_or_else(|| {
            Error::new(ErrorKind::NoRepository, "the service has no repository")
                .advise("start it with --repo DIR, or set COLDRISE_REPO in /etc/default/coldrise")
        })
    }

    /// Adds a run. When this returns, it survives a power cut; it starts as soon as it may.
    ///
    /// # Errors
    /// `NoRepository`; `Busy` if the queue is full; errors of the database.
    pub(crate) fn enqueue(&self, new: NewRun) -> Result<RunId> {
        let mut ids = self.enqueue_all(vec![new])?;
        ids.pop().ok_or_else(|| Error::new(ErrorKind::Internal, "no run was queued"))
    }

    /// Adds runs: all or none.
    ///
    /// # Errors
    /// As [`Queue::enqueue`].
    pub(crate) fn enqueue_all(&self, new: Vec<NewRun>) -> Result<Vec<RunId>> {
        self.global()?;
        let (now, mut ids) = (now_ms(), Vec::new());
        let added: Vec<QueueRow> = new.into_iter().map(|new| self.row(new, now)).collect();
        for row in &added {
            ids.push(row.id()?);
        }
        let is_added = self.database.change(|sql| {
            let count: usize = sql.query_row("SELECT count(*) FROM queue", [], |row| row.get(0))?;
            if count + added.len() > MAX_ROWS {
                return Ok(false);
            }
            added.iter().try_for_each(|row| rows::insert(sql, row))?;
            Ok(true)
        })?;
        if !is_added {
            let text = format!("the queue is full: {MAX_ROWS} runs wait");
            return Err(Error::new(ErrorKind::Busy, text).advise("cancel some: DELETE /queue/RUN"));
        }
        self.tell(added.first().and_then(|row| row.job.as_deref()));
        Ok(ids)
    }

    /// A row that waits, with a new id.
    pub(super) fn row(&self, new: NewRun, now_ms: i64) -> QueueRow {
        QueueRow {
            run: self.runs.new_id(&new.kind).to_string(),
            attempt: u32::from(new.job.is_some()),
            kind: new.kind,
            machine: new.machine,
            job: new.job,
            arguments: new.arguments,
            requested_by: new.requested_by,
            due_ms: now_ms,
            created_ms: now_ms,
            state: RowState::Waiting,
            reason: None,
            busy_since_ms: None,
        }
    }

    /// Cancels a run: one that waits is recorded as cancelled, one that runs is asked to end. A machine that it followed for a
    /// job is left alone until the job is started or changed.
    ///
    /// # Errors
    /// `NotFound` if there is no such run, or if it has ended.
    pub(crate) fn cancel(&self, id: &RunId) -> Result<()> {
        let rows = self.database.queue_rows()?;
        let Some(row) = rows.iter().find(|row| row.run == id.as_str() && row.is_kept()) else {
            return self.end(id);
        };
        // Before the end: the next step would start it again.
        self.database.change(|sql| leave_alone(sql, row))?;
        let ended = self.end(id);
        if ended.is_err() {
            self.database.change(|sql| follow(sql, row))?;
        }
        ended
    }

    /// The same, and a job may start it again.
    ///
    /// # Errors
    /// As [`Queue::cancel`].
    pub(super) fn end(&self, id: &RunId) -> Result<()> {
        if self.database.move_row(id.as_str(), RowState::Waiting, RowState::Cancelled)? {
            self.tell(None);
            return Ok(());
        }
        // Started, but not begun.
        let planned = self.runs.fail_planned(id, interrupted());
        if !matches!(planned, Ok(true)) {
            self.runs.cancel(id)?;
        }
        self.wake();
        Ok(())
    }

    /// Records a row as a cancelled run, which has not begun.
    ///
    /// # Errors
    /// Errors of the operating system; the row stays.
    pub(super) fn record_cancelled(&self, row: &QueueRow) -> Result<()> {
        let id = row.id()?;
        if is_missing(&self.runs.read(&id)) {
            self.runs.plan(&id, &row.request(self.global()?, &self.keep_out))?;
            self.runs.fail_planned(&id, interrupted())?;
        }
        Ok(())
    }

    /// Number of runs at once.
    ///
    /// # Errors
    /// Errors of the database.
    pub(crate) fn parallel(&self) -> Result<usize> {
        let stored = self.database.setting(PARALLEL)?;
        Ok(stored.and_then(|text| text.parse().ok()).unwrap_or(DEFAULT_PARALLEL))
    }

    /// Sets the number of runs at once.
    ///
    /// # Errors
    /// `InvalidInput` beyond 1 to 64.
    pub(crate) fn set_parallel(&self, count: usize) -> Result<()> {
        if count == 0 || count > MAX_PARALLEL {
            let text = format!("parallel: 1 to {MAX_PARALLEL}");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        self.database.set_setting(PARALLEL, &count.to_string())?;
        self.tell(None);
        Ok(())
    }

    /// The queue or a job has changed: wakes the dispatcher and tells clients.
    pub(crate) fn tell(&self, job: Option<&str>) {
        self.events.send(What::Job { job: job.unwrap_or_default().to_owned() });
        self.wake();
    }

    /// Wakes the dispatcher: a run has ended, or the queue has changed.
    pub(crate) fn wake(&self) {
        *self.is_changed.lock() = true;
        self.changed.notify_all();
    }

    /// Waits for a change, at most for `patience`.
    pub(super) fn wait(&self, patience: Duration) {
        let mut is_changed = self.is_changed.lock();
        if !*is_changed {
            self.changed.wait_for(&mut is_changed, patience);
        }
        *is_changed = false;
    }
}

fn interrupted() -> Failure {
    let message = "cancelled before its start".to_owned();
    Failure { kind: ErrorKind::Interrupted.word().to_owned(), message }
}

fn absolute(path: &Path) -> Result<String> {
    let absolute = std::path::absolute(path).context(|| format!("finding {}", path.display()))?;
    absolute.into_os_string().into_string().map_err(|_| {
        let text = format!("{}: the path is not UTF-8 text", path.display());
        Error::new(ErrorKind::InvalidInput, text)
    })
}
