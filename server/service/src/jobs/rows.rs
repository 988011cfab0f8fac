//! The rows of the queue.

use coldrise_block::{ErrorKind, Result};
use coldrise_runs::{Request, RunId};
use rusqlite::{Connection, Row, params};
use serde::Serialize;

use crate::database::{Database, SqlResult};

/// The state of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RowState {
    /// It waits for its time, or for other runs.
    Waiting,
    /// Its process is being started.
    Starting,
    /// Its process was started.
    Started,
    /// It was cancelled before it started, and is about to be recorded so.
    Cancelled,
}

impl RowState {
    fn word(self) -> &'static str {
        match self {
            RowState::Waiting => "waiting",
            RowState::Starting => "starting",
            RowState::Started => "started",
            RowState::Cancelled => "cancelled",
        }
    }

    /// Whether the run may have a process.
    pub(super) fn is_active(self) -> bool {
        matches!(self, RowState::Starting | RowState::Started)
    }
}

/// A run of the queue.
#[derive(Clone, Debug, PartialEq, Serialize, utoipa::ToSchema)]
pub(crate) struct QueueRow {
    /// The run's id.
    pub(crate) run: String,
    /// The command's word, such as `backup`.
    pub(crate) kind: String,
    pub(crate) machine: Option<String>,
    pub(crate) job: Option<String>,
    /// The command's words after the global options.
    #[serde(skip)]
    pub(crate) arguments: Vec<String>,
    pub(crate) requested_by: Option<String>,
    /// 1 for the first attempt of a job; 0 without a job.
    pub(crate) attempt: u32,
    /// When it may start, in milliseconds since 1970.
    pub(crate) due_ms: i64,
    /// When it was added, in milliseconds since 1970.
    pub(crate) created_ms: i64,
    pub(crate) state: RowState,
    /// Why it waits.
    pub(crate) reason: Option<String>,
    /// Since when another process has kept its attempts out, in milliseconds since 1970.
    pub(crate) busy_since_ms: Option<i64>,
}

impl QueueRow {
    /// The run's id.
    ///
    /// # Errors
    /// `InvalidInput` if the database is damaged.
    pub(super) fn id(&self) -> Result<RunId> {
        self.run.parse()
    }

    /// The request to its process. `global` are the global options.
    pub(super) fn request(&self, global: &[String], keep_out: &[String]) -> Request {
        Request {
            arguments: global.iter().chain(&self.arguments).cloned().collect(),
            keep_out: keep_out.to_vec(),
            machine: self.machine.clone(),
            job: self.job.clone(),
            requested_by: self.requested_by.clone(),
            attempt: self.attempt,
        }
    }

    fn of(row: &Row<'_>) -> SqlResult<QueueRow> {
        let state: String = row.get("state")?;
        let states =
            [RowState::Waiting, RowState::Starting, RowState::Started, RowState::Cancelled];
        let state = states.into_iter().find(|known| known.word() == state);
        let arguments: String = row.get("arguments")?;
        Ok(QueueRow {
            run: row.get("run")?,
            kind: row.get("kind")?,
            machine: row.get("machine")?,
            job: row.get("job")?,
            arguments: serde_json::from_str(&arguments)
                .map_err(|_| rusqlite::Error::InvalidQuery)?,
            requested_by: row.get("requested_by")?,
            attempt: row.get("attempt")?,
            due_ms: row.get("due_ms")?,
            created_ms: row.get("created_ms")?,
            state: state.ok_or(rusqlite::Error::InvalidQuery)?,
            reason: row.get("reason")?,
            busy_since_ms: row.get("busy_since_ms")?,
        })
    }
}

/// Adds a row.
pub(super) fn insert(sql: &Connection, row: &QueueRow) -> SqlResult<()> {
    let arguments = serde_json::to_string(&row.arguments);
    sql.prepare_cached(
        "INSERT INTO queue (run, kind, machine, job, arguments, requested_by, attempt, due_ms,
         created_ms, state, reason, busy_since_ms)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
    )?
    .execute(params![
        row.run,
        row.kind,
        row.machine,
        row.job,
        arguments.map_err(|_| rusqlite::Error::InvalidQuery)?,
        row.requested_by,
        row.attempt,
        row.due_ms,
        row.created_ms,
        row.state.word(),
        row.reason,
        row.busy_since_ms
    ])?;
    Ok(())
}

/// Removes a row. Returns whether it was there.
pub(super) fn remove(sql: &Connection, run: &str) -> SqlResult<bool> {
    Ok(sql.execute("DELETE FROM queue WHERE run = ?1", [run])? > 0)
}

/// A waiting row of the job for the same machine and kind becomes due. Returns whether there is one.
pub(super) fn bring_forward(sql: &Connection, row: &QueueRow) -> SqlResult<bool> {
    let changed = sql.prepare_cached(
        "UPDATE queue SET due_ms = min(due_ms, ?4)
         WHERE state = 'waiting' AND job IS ?1 AND kind = ?2 AND machine IS ?3",
    )?;
    let mut changed = changed;
    Ok(changed.execute(params![row.job, row.kind, row.machine, row.due_ms])? > 0)
}

/// Marks the waiting rows of a job as cancelled: it was disabled or deleted.
pub(super) fn cancel_job(sql: &Connection, job: &str) -> SqlResult<usize> {
    sql.execute("UPDATE queue SET state = 'cancelled' WHERE state = 'waiting' AND job = ?1", [job])
}

impl Database {
    /// All rows in their order.
    pub(crate) fn queue_rows(&self) -> Result<Vec<QueueRow>> {
        self.read(|sql| {
            let mut found =
                sql.prepare_cached("SELECT * FROM queue ORDER BY due_ms, created_ms, rowid")?;
            let found = found.query_map([], QueueRow::of)?;
            found.collect()
        })
    }

    /// Moves a row from one state to another. Returns whether it was in the first.
    pub(super) fn move_row(&self, run: &str, from: RowState, to: RowState) -> Result<bool> {
        self.change(|sql| {
            let moved = "UPDATE queue SET state = ?3, reason = NULL WHERE run = ?1 AND state = ?2";
            Ok(sql.execute(moved, params![run, from.word(), to.word()])? > 0)
        })
    }

    /// Puts a row whose run could not be planned back among those that wait.
    pub(super) fn put_back(&self, run: &str, due_ms: i64, reason: &str) -> Result<()> {
        self.change(|sql| {
            sql.execute(
                "UPDATE queue SET state = 'waiting', due_ms = ?2, reason = ?3 WHERE run = ?1",
                params![run, due_ms, reason],
            )
        })?;
        Ok(())
    }

    /// Notes why rows wait.
    pub(super) fn note_reasons(&self, reasons: &[(String, String)]) -> Result<()> {
        self.change(|sql| {
            for (run, reason) in reasons {
                sql.execute(
                    "UPDATE queue SET reason = ?2 WHERE run = ?1 AND state = 'waiting'",
                    params![run, reason],
                )?;
            }
            Ok(())
        })
    }
}

/// Whether an error means that a run is not there.
pub(super) fn is_missing<T>(read: &Result<T>) -> bool {
    matches!(read, Err(error) if error.kind() == ErrorKind::NotFound)
}
