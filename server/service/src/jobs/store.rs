//! The tables of jobs and outcomes.

use coldrise_block::{Error, ErrorKind, Result};
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::Serialize;

use super::job::{Job, JobKind};
use super::pattern::{JobPattern, MachineNames, any_matches};
use super::protect_live::forget_left_alone;
use super::{rows, schedule};
use crate::database::{Database, SqlResult};

/// Maximum number of jobs.
const MAX_JOBS: usize = 1000;

/// A job as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredJob {
    pub(crate) job: Job,
    /// Milliseconds since 1970.
    pub(crate) created_ms: i64,
    pub(crate) next_due_ms: Option<i64>,
}

/// What became of a job's runs, per machine and kind of run.
#[derive(Clone, Debug, PartialEq, Serialize, utoipa::ToSchema)]
#[schema(as = JobOutcome)]
pub(crate) struct Outcome {
    #[serde(skip)]
    pub(crate) job: String,
    /// The command's word: the job's own, or that of a run that follows.
    pub(crate) kind: String,
    /// The machine; absent for runs that concern all.
    pub(crate) machine: Option<String>,
    /// The last run that ended.
    pub(crate) run: String,
    /// Its state: ok, failed, cancelled or lost.
    pub(crate) state: String,
    /// Its error, if it failed.
    pub(crate) message: Option<String>,
    /// When it ended, in milliseconds since 1970.
    pub(crate) ended_ms: i64,
    /// When a run last succeeded, in milliseconds since 1970.
    pub(crate) last_success_ms: Option<i64>,
    /// Number of failures since.
    pub(crate) failures: u32,
}

fn stored(row: &Row<'_>) -> SqlResult<StoredJob> {
    let document: String = row.get("document")?;
    Ok(StoredJob {
        job: serde_json::from_str(&document).map_err(|_| rusqlite::Error::InvalidQuery)?,
        created_ms: row.get("created_ms")?,
        next_due_ms: row.get("next_due_ms")?,
    })
}

fn outcome(row: &Row<'_>) -> SqlResult<Outcome> {
    let machine: String = row.get("machine")?;
    Ok(Outcome {
        job: row.get("job")?,
        kind: row.get("kind")?,
        machine: Some(machine).filter(|name| !name.is_empty()),
        run: row.get("run")?,
        state: row.get("state")?,
        message: row.get("message")?,
        ended_ms: row.get("ended_ms")?,
        last_success_ms: row.get("last_success_ms")?,
        failures: row.get("failures")?,
    })
}

/// One job.
pub(super) fn find(sql: &Connection, name: &str) -> SqlResult<Option<StoredJob>> {
    sql.query_row("SELECT * FROM jobs WHERE name = ?1", [name], stored).optional()
}

/// All jobs by name.
pub(super) fn all(sql: &Connection) -> SqlResult<Vec<StoredJob>> {
    let mut found = sql.prepare_cached("SELECT * FROM jobs ORDER BY name")?;
    let found = found.query_map([], stored)?;
    found.collect()
}

/// Everything of this kind has succeeded: earlier failures of single machines are over.
pub(super) fn settle_failures(sql: &Connection, job: &str, kind: &str) -> SqlResult<usize> {
    sql.execute("UPDATE outcomes SET failures = 0 WHERE job = ?1 AND kind = ?2", [job, kind])
}

/// The outcome of a job, kind and machine.
pub(super) fn find_outcome(
    sql: &Connection,
    job: &str,
    kind: &str,
    machine: Option<&str>,
) -> SqlResult<Option<Outcome>> {
    let found = "SELECT * FROM outcomes WHERE job = ?1 AND kind = ?2 AND machine = ?3";
    sql.query_row(found, params![job, kind, machine.unwrap_or_default()], outcome).optional()
}

/// Records an outcome in place of the one before.
pub(super) fn put_outcome(sql: &Connection, outcome: &Outcome) -> SqlResult<()> {
    sql.execute(
        "INSERT OR REPLACE INTO outcomes (job, kind, machine, run, state, message, ended_ms,
         last_success_ms, failures) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        params![
            outcome.job,
            outcome.kind,
            outcome.machine.as_deref().unwrap_or_default(),
            outcome.run,
            outcome.state,
            outcome.message,
            outcome.ended_ms,
            outcome.last_success_ms,
            outcome.failures
        ],
    )?;
    Ok(())
}

fn no_job(name: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no job {name}"))
}

impl Database {
    /// All jobs by name.
    pub(crate) fn jobs(&self) -> Result<Vec<StoredJob>> {
        self.read(all)
    }

    /// One job.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn job(&self, name: &str) -> Result<StoredJob> {
        self.read(|sql| find(sql, name))?.ok_or_else(|| no_job(name))
    }

    /// Adds a job.
    ///
    /// # Errors
    /// `InvalidInput`, `AlreadyExists`; `Busy` if there are too many.
    pub(crate) fn add_job(&self, job: &Job, now_ms: i64) -> Result<()> {
        job.check()?;
        let document = document(job)?;
        let next_ms = schedule::next_due_ms(job, now_ms);
        let (is_new, count) = self.change(|sql| {
            let count: usize = sql.query_row("SELECT count(*) FROM jobs", [], |row| row.get(0))?;
            if count >= MAX_JOBS {
                return Ok((true, count));
            }
            let added = sql.execute(
                "INSERT OR IGNORE INTO jobs (name, document, created_ms, next_due_ms)
                 VALUES (?1, ?2, ?3, ?4)",
                params![job.name, document, now_ms, next_ms],
            )?;
            Ok((added > 0, count))
        })?;
        if count >= MAX_JOBS {
            return Err(Error::new(ErrorKind::Busy, format!("there are {MAX_JOBS} jobs already"))
                .advise("put machines with the same schedule into one job"));
        }
        match is_new {
            true => Ok(()),
            false => {
                let text = format!("there is a job {} already", job.name);
                Err(Error::new(ErrorKind::AlreadyExists, text))
            }
        }
    }

    /// Replaces a job. Its next time counts from now; if it is disabled, its waiting runs are
    /// cancelled.
    ///
    /// # Errors
    /// `InvalidInput`, `NotFound`.
    pub(crate) fn replace_job(&self, job: &Job, now_ms: i64) -> Result<()> {
        job.check()?;
        let document = document(job)?;
        let next_ms = schedule::next_due_ms(job, now_ms);
        let changed = self.change(|sql| {
            if !job.enabled {
                rows::cancel_job(sql, &job.name)?;
            }
            forget_left_alone(sql, &job.name)?;
            sql.execute(
                "UPDATE jobs SET document = ?2, next_due_ms = ?3 WHERE name = ?1",
                params![job.name, document, next_ms],
            )
        })?;
        if changed == 0 { Err(no_job(&job.name)) } else { Ok(()) }
    }

    /// Removes a job and its outcomes, and cancels its waiting runs. Runs that were started continue, but for those
    /// that follow a machine, and the history of runs stays.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn remove_job(&self, name: &str) -> Result<()> {
        let removed = self.change(|sql| {
            rows::cancel_job(sql, name)?;
            forget_left_alone(sql, name)?;
            sql.execute("DELETE FROM outcomes WHERE job = ?1", [name])?;
            sql.execute("DELETE FROM jobs WHERE name = ?1", [name])
        })?;
        if removed == 0 { Err(no_job(name)) } else { Ok(()) }
    }

    /// The outcomes of a job, or of all.
    pub(crate) fn outcomes(&self, job: Option<&str>) -> Result<Vec<Outcome>> {
        self.read(|sql| {
            let mut found = sql.prepare_cached(
                "SELECT * FROM outcomes WHERE ?1 IS NULL OR job = ?1 ORDER BY job, machine, kind",
            )?;
            let found = found.query_map([job], outcome)?;
            found.collect()
        })
    }
}

impl Job {
    /// Whether this job backs up a machine by itself.
    pub(crate) fn covers(&self, names: &MachineNames) -> bool {
        self.enabled
            && matches!(self.kind, JobKind::Backup | JobKind::ProtectLive)
            && (any_matches(&self.machines, names) || self.stores(&names.machine))
    }

    /// Whether it names a domain that is stored under this name.
    fn stores(&self, machine: &str) -> bool {
        let mut names = self.machines.iter().filter_map(JobPattern::stored_as);
        names.any(|name| name.as_str() == machine)
    }
}

fn document(job: &Job) -> Result<String> {
    serde_json::to_string(job)
        .map_err(|error| Error::with_source(ErrorKind::Internal, "the job's document", error))
}
