//! Jobs of kind protect-live: one run per machine is kept running.
//!
//! Each step of the dispatcher compares what runs with what the jobs say. A run that no enabled job wants as it is, is asked to
//! end; a machine without a run gets one. So nothing is forgotten over a restart, and a changed job reaches its runs.

use coldrise_block::Result;
use coldrise_replica::parse_link_name;
use coldrise_requests::{CommandLine, ProtectLive, Seal};
use coldrise_runs::State;
use rusqlite::{Connection, params};

use super::commands::{check_rate, expand, local_libvirt};
use super::job::{Job, JobKind};
use super::pattern::named;
use super::queue::{NewRun, Queue};
use super::rows::{self, QueueRow, RowState};
use super::schedule::Known;
use super::store::{self, StoredJob};
use crate::database::{Database, SqlResult};
use crate::invalid::invalid;

/// The source of machines that run from Coldrise.
const HERE: &str = "live";
/// The command of the runs that make restore points.
pub(super) const SEAL: &str = "seal";
pub(super) const DEFAULT_EVERY_SECONDS: u32 = 5;
const LEAST_DEFAULT_LIMIT_SECONDS: u32 = 60;
const DEFAULT_LIMIT_ROUNDS: u32 = 10;
/// A run that lived this long did not fail because of what the one before failed of.
const LIVED_MS: i64 = 10 * 60 * 1000;

impl Job {
    /// Whether it follows machines while they run elsewhere.
    pub(crate) fn protects_live(&self) -> bool {
        self.kind == JobKind::ProtectLive
    }

    /// Whether its machines run from Coldrise: their sessions are sent to another site.
    pub(crate) fn runs_here(&self) -> bool {
        self.from.as_deref() == Some(HERE)
    }

    /// The machines that it follows, by the names under which they are stored.
    pub(crate) fn followed(&self) -> Vec<String> {
        named(&self.machines, &[]).map(|(machine, _)| machine).collect()
    }

    /// The lag of a machine's session from which an alarm is raised, in seconds.
    pub(crate) fn lag_limit_s(&self) -> u32 {
        let rounds = self.every_seconds.unwrap_or(DEFAULT_EVERY_SECONDS) * DEFAULT_LIMIT_ROUNDS;
        self.lag_limit_seconds.unwrap_or(rounds.max(LEAST_DEFAULT_LIMIT_SECONDS))
    }

    pub(super) fn check_is_no_protect_live(&self) -> Result<()> {
        let only_here = [
            ("every_seconds", self.every_seconds),
            ("consistent_every_minutes", self.consistent_every_minutes),
            ("lag_limit_seconds", self.lag_limit_seconds),
        ];
        match only_here.iter().find(|(_, value)| value.is_some()) {
            Some((field, _)) => {
                Err(invalid(format!("{field}: only jobs of kind protect-live have it")))
            }
            None => Ok(()),
        }
    }

    pub(super) fn check_protect_live(&self) -> Result<()> {
        let refused = [
            ("window", self.window.is_some()),
            ("parallel", self.parallel.is_some()),
            ("retention", self.retention.is_some()),
            ("boot_check", self.boot_check.is_some()),
        ];
        if let Some((field, _)) = refused.iter().find(|(_, is_given)| *is_given) {
            return Err(invalid(format!("{field}: jobs of kind protect-live do not have it")));
        }
        let is_source = |from: &&String| {
            self.runs_here() || from.starts_with("libvirt") || from.starts_with("qmp:/")
        };
        let Some(from) = self.from.as_ref().filter(is_source) else {
            return Err(invalid(
                "from: write libvirt, qmp:/PATH such as qmp:/run/qemu/{machine}.qmp, or live for machines that run from Coldrise",
            ));
        };
        if self.machines.iter().any(|machine| machine.has_wildcards()) {
            return Err(invalid("machines: a job of kind protect-live names each machine"));
        }
        if let Some(to) = &self.to {
            parse_link_name(to)
                .map_err(|error| invalid(format!("to: {}", error.full_message())))?;
            check_rate(self.rate_bytes_per_second)?;
        }
        if self.runs_here() {
            return self.check_runs_here();
        }
        if self.hosts.len() > 1 {
            return Err(invalid("hosts: at most one for the kind protect-live"));
        }
        let is_consistent = self.consistent_every_minutes.is_some();
        match (from.starts_with("libvirt"), &self.agent) {
            (true, Some(_)) => {
                Err(invalid("agent: libvirt knows the agent's socket; leave it out"))
            }
            (false, agent) if agent.is_some() != is_consistent => Err(invalid(
                "agent, consistent_every_minutes: with qmp, consistent marks need the guest agent's socket: give both or neither",
            )),
            _ => self.check_backup(),
        }
    }
}

impl Job {
    fn check_runs_here(&self) -> Result<()> {
        if self.to.is_none() {
            return Err(invalid("to: name the link of the site that gets the time marks"));
        }
        let refused = [
            ("disks", !self.disks.is_empty()),
            ("hosts", !self.hosts.is_empty()),
            ("agent", self.agent.is_some()),
            ("push", self.push),
            ("every_seconds", self.every_seconds.is_some()),
            ("consistent_every_minutes", self.consistent_every_minutes.is_some()),
        ];
        match refused.iter().find(|(_, is_given)| *is_given) {
            Some((field, _)) => Err(invalid(format!("{field}: not with \"from\": \"live\""))),
            None => self.check_machines().map(drop),
        }
    }
}

/// The words of `coldrise protect-live` for the session of a machine that runs from Coldrise.
fn protect_session(job: &Job, session: &str) -> Vec<String> {
    let request = ProtectLive {
        machine: format!("live/{session}"),
        to: job.to.clone(),
        rate: job.rate_bytes_per_second.map(|rate| rate.to_string()),
        ..ProtectLive::default()
    };
    CommandLine::new(JobKind::ProtectLive.word()).with(&request).words()
}

/// The words of `coldrise protect-live`. `domain` is libvirt's name for the machine, or the machine's own.
pub(crate) fn protect_live(job: &Job, machine: &str, domain: &str) -> Vec<String> {
    let disks = job.disks_of(machine).iter();
    let request = ProtectLive {
        machine: domain.to_owned(),
        disks: disks
            .map(|(disk, from)| format!("{disk}={}", expand(from, machine, disk)))
            .collect(),
        from: job.from.as_deref().map(|from| expand(from, domain, "")),
        to: job.to.clone(),
        rate: job.rate_bytes_per_second.map(|rate| rate.to_string()),
        every: job.every_seconds.map(|seconds| format!("{seconds}s")),
        consistent_every: job.consistent_every_minutes.map(|minutes| format!("{minutes}m")),
        session: None,
        marks: None,
        on: job.hosts.first().cloned(),
        connect: local_libvirt(job),
        agent: job.agent.as_ref().map(|agent| expand(agent, machine, "")),
        push: job.push,
    };
    CommandLine::new(JobKind::ProtectLive.word()).with(&request).words()
}

/// The words of `coldrise seal`.
pub(super) fn seal(session: &str) -> Vec<String> {
    CommandLine::new(SEAL).with(&Seal { session: session.to_owned() }).words()
}

/// The runs that a job wants: one per machine; of those that run from Coldrise, one per machine that has a session.
fn wanted(job: &Job, requested_by: Option<&str>, known: &dyn Known) -> Result<Vec<NewRun>> {
    let sessions = if job.runs_here() { known.followed(job)? } else { Vec::new() };
    let words = |machine: &str, domain: &str| match job.runs_here() {
        false => Some(protect_live(job, machine, domain)),
        true => {
            let found = sessions.iter().find(|names| names.machine == machine)?;
            Some(protect_session(job, found.session.as_deref()?))
        }
    };
    let machines = named(&job.machines, &[]);
    let found = machines.filter_map(|(machine, domain)| {
        Some(NewRun {
            kind: job.kind.word().to_owned(),
            arguments: words(&machine, domain)?,
            machine: Some(machine),
            requested_by: requested_by.map(str::to_owned),
            job: Some(job.name.clone()),
        })
    });
    Ok(found.collect())
}

/// The run of a job for a machine, if one waits or works.
fn present(sql: &Connection, new: &QueueRow) -> SqlResult<Option<String>> {
    let found = "SELECT min(run) FROM queue
        WHERE state <> 'cancelled' AND job IS ?1 AND kind = ?2 AND machine IS ?3";
    sql.query_row(found, params![new.job, new.kind, new.machine], |row| row.get(0))
}

/// Notes that a user does not want a machine to be followed.
pub(super) fn leave_alone(sql: &Connection, row: &QueueRow) -> SqlResult<usize> {
    let noted = "INSERT OR IGNORE INTO unfollowed (job, machine) VALUES (?1, ?2)";
    sql.execute(noted, params![row.job, row.machine])
}

/// The opposite of [`leave_alone`].
pub(super) fn follow(sql: &Connection, row: &QueueRow) -> SqlResult<usize> {
    let released = "DELETE FROM unfollowed WHERE job = ?1 AND machine = ?2";
    sql.execute(released, params![row.job, row.machine])
}

fn is_left_alone(sql: &Connection, job: &str, machine: Option<&str>) -> SqlResult<bool> {
    let found = "SELECT EXISTS (SELECT 1 FROM unfollowed WHERE job = ?1 AND machine IS ?2)";
    sql.query_row(found, params![job, machine], |row| row.get(0))
}

/// The job is new, changed or gone: all its machines are followed again.
pub(super) fn forget_left_alone(sql: &Connection, job: &str) -> SqlResult<usize> {
    sql.execute("DELETE FROM unfollowed WHERE job = ?1", [job])
}

/// The attempt that a run which failed or was killed counts as, and whether the next one follows at once; `None` if a user
/// ended it.
pub(super) fn next_attempt(
    sql: &Connection,
    row: &QueueRow,
    job: &Job,
    state: State,
    now_ms: i64,
) -> SqlResult<Option<(u32, bool)>> {
    if is_left_alone(sql, &job.name, row.machine.as_deref())? {
        return Ok(None);
    }
    let has_lived = now_ms - row.due_ms >= LIVED_MS;
    let attempt = if has_lived { 1 } else { row.attempt };
    Ok(Some((attempt, state == State::Lost && attempt == 1)))
}

impl Database {
    /// Whether a user ended the run of a job for a machine: it is not followed until the job is started or changed.
    pub(crate) fn is_left_alone(&self, job: &str, machine: &str) -> Result<bool> {
        self.read(|sql| is_left_alone(sql, job, Some(machine)))
    }
}

impl QueueRow {
    /// Whether it follows a machine for a job.
    pub(super) fn is_kept(&self) -> bool {
        self.job.is_some() && self.kind == JobKind::ProtectLive.word()
    }
}

impl Queue {
    /// Ends runs that no job wants as they are, and queues those that are missing.
    ///
    /// # Errors
    /// Errors of the database and of `known`.
    pub(super) fn keep_running(
        &self,
        jobs: &[StoredJob],
        now_ms: i64,
        known: &dyn Known,
    ) -> Result<()> {
        let is_wanted = |stored: &&StoredJob| stored.job.enabled && stored.job.protects_live();
        let jobs = jobs.iter().filter(is_wanted);
        let jobs: Vec<_> =
            jobs.map(|s| Ok((s, wanted(&s.job, None, known)?))).collect::<Result<_>>()?;
        let rows = self.database.queue_rows()?;
        for row in rows.iter().filter(|row| row.is_kept() && row.state != RowState::Cancelled) {
            let is_this = |new: &NewRun| {
                (&new.job, &new.machine, &new.arguments) == (&row.job, &row.machine, &row.arguments)
            };
            if !jobs.iter().any(|(_, wanted)| wanted.iter().any(is_this)) {
                // One that has just ended is recorded with the next step.
                let _ = self.end(&row.id()?);
            }
        }
        let mut is_added = false;
        for (stored, wanted) in jobs {
            let is_missing = |new: &&NewRun| {
                !rows.iter().any(|row| {
                    row.is_kept()
                        && row.state != RowState::Cancelled
                        && (&row.job, &row.machine) == (&new.job, &new.machine)
                })
            };
            for new in wanted.iter().filter(is_missing) {
                let row = self.row(new.clone(), now_ms);
                is_added |= self.database.change(|sql| {
                    let is_as_before = store::find(sql, &stored.job.name)?.as_ref() == Some(stored);
                    let is_free = is_as_before
                        && present(sql, &row)?.is_none()
                        && !is_left_alone(sql, &stored.job.name, row.machine.as_deref())?;
                    if is_free {
                        rows::insert(sql, &row)?;
                    }
                    Ok(is_free)
                })?;
            }
        }
        if is_added {
            self.tell(None);
        }
        Ok(())
    }

    /// A job is started by hand: of its machines in `chosen`, those that no run follows are followed again, now. Returns these
    /// machines, and their runs.
    ///
    /// # Errors
    /// `InvalidInput` if the job is disabled; errors of the database.
    pub(super) fn follow_again(
        &self,
        job: &Job,
        requested_by: &str,
        is_chosen: &dyn Fn(&str) -> bool,
        now_ms: i64,
        known: &dyn Known,
    ) -> Result<Vec<(String, coldrise_runs::RunId)>> {
        if !job.enabled {
            return Err(invalid(format!("job {} is disabled: enable it", job.name)));
        }
        let mut found = Vec::new();
        for new in wanted(job, Some(requested_by), known)? {
            let machine = new.machine.clone().unwrap_or_default();
            if !is_chosen(&machine) {
                continue;
            }
            let row = self.row(new, now_ms);
            let run = self.database.change(|sql| {
                follow(sql, &row)?;
                let is_waiting = rows::bring_forward(sql, &row)?;
                let present = present(sql, &row)?;
                if present.is_none() {
                    rows::insert(sql, &row)?;
                    return Ok(Some(row.run.clone()));
                }
                Ok(present.filter(|_| is_waiting))
            })?;
            if let Some(run) = run {
                found.push((machine, run.parse()?));
            }
        }
        self.tell(Some(&job.name));
        Ok(found)
    }
}
