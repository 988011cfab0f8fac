//! Due jobs become rows of the queue.
//!
//! The wall clock can jump. Times of jobs are stored, so a jump forwards makes missed jobs due, once
//! each, like a time in which the service did not run. After a jump backwards a stored time can lie
//! too far ahead: [`Queue::follow_clock`] then takes the next time from now. It does not if only one time lies
//! between them: that one has been done already, maybe seconds ago. So no time is done twice in a row,
//! and no job waits for longer than two of its intervals.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hypervisors::libvirt::all_domains;
use coldrise_hypervisors::virsh::Virsh;
use coldrise_runs::RunId;
use coldrise_schedule::{Calendar, Occurrences, occurrences};
use coldrise_store::{DisplayName, MachineName};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use rusqlite::params;

use super::commands::KnownBy;
use super::job::Job;
use super::pattern::MachineNames;
use super::protect_live::SEAL;
use super::queue::{NewRun, Queue};
use super::rows;
use super::rules::JobLimits;
use super::store::StoredJob;
use super::{commands, store};

/// The longest time that a retry waits: an hour, and a quarter.
const LONGEST_BACK_OFF_MS: i64 = 75 * 60 * 1000;

/// How long libvirt may take to list the domains: other jobs wait meanwhile.
const LIBVIRT_PATIENCE: Duration = Duration::from_secs(10);

/// Where the names of machines come from.
pub(crate) trait Known {
    /// The machines that have points.
    ///
    /// # Errors
    /// Errors of the repository.
    fn machines(&self) -> Result<Vec<MachineNames>>;

    /// The domains of a host of the repository, whether they run or not.
    ///
    /// # Errors
    /// `NotFound` if there is no such host; errors of the connection.
    fn domains_on(&self, host: &str) -> Result<Vec<String>>;

    /// The machines that a job of kind protect-live can concern, each with its session.
    ///
    /// # Errors
    /// Errors of the repository.
    fn followed(&self, job: &Job) -> Result<Vec<MachineNames>>;
}

/// Domains, each under the name of its machine. `stored` are the machines that have points;
/// domains that `is_elsewhere` have jobs of their own.
pub(super) fn machines_of_domains(
    domains: Vec<String>,
    stored: &[MachineNames],
    is_elsewhere: impl Fn(&str) -> bool,
) -> Vec<MachineNames> {
    let (own, others): (Vec<String>, Vec<String>) =
        domains.into_iter().partition(|domain| MachineName::parse(domain).is_ok());
    let mut machines: Vec<MachineNames> =
        own.iter().map(|domain| MachineNames::of(domain)).collect();
    let mut refused = Vec::new();
    for domain in others.into_iter().filter(|domain| !is_elsewhere(domain)) {
        let name = DisplayName::parse(&domain).ok().filter(|name| name.as_str() == domain);
        // It is a word of a command.
        let name = name.filter(|_| !domain.starts_with('-'));
        match name.and_then(|name| name.to_machine()) {
            Some(machine) if machines.iter().all(|names| names.machine != machine.as_str()) => {
                machines.push(MachineNames {
                    domain: Some(domain),
                    ..MachineNames::of(machine.as_str())
                });
            }
            _ => refused.push(domain.escape_debug().to_string()),
        }
    }
    for names in &mut machines {
        let known = stored.iter().find(|known| known.machine == names.machine);
        names.display_name = known.and_then(|known| known.display_name.clone());
    }
    if !refused.is_empty() {
        tracing::warn!(
            "no job backs up {}: such a name cannot address a machine, or addresses another one, and needs a job of its own, with \"from\": \"libvirt:DOMAIN\"",
            refused.join(", ")
        );
    }
    machines
}

/// The names of the domains of some hosts, each once. `unreachable` gets the hosts that do not answer.
fn domains_on<'a>(
    hosts: &'a [String],
    known: &dyn Known,
    unreachable: &mut Vec<&'a String>,
) -> Vec<String> {
    let mut found = BTreeSet::new();
    for host in hosts {
        match known.domains_on(host) {
            Ok(domains) => found.extend(domains),
            Err(error) => {
                tracing::warn!("{}", error.full_message());
                unreachable.push(host);
            }
        }
    }
    found.into_iter().collect()
}

/// Rounds up: a job must not be due before its time, or it would be due twice.
fn to_ms(time: Timestamp) -> i64 {
    time.as_microsecond().div_euclid(1000) + i64::from(time.as_microsecond().rem_euclid(1000) > 0)
}

/// The first time after `after_ms` at which any of the lines is due.
fn next_of(lines: &[Calendar], after_ms: i64) -> Option<i64> {
    let after = Timestamp::from_millisecond(after_ms).ok()?;
    lines.iter().filter_map(|line| line.next_after(after)).min().map(to_ms)
}

fn lines(job: &Job) -> Vec<Calendar> {
    job.schedule.iter().filter_map(|line| Calendar::parse(line).ok()).collect()
}

/// When a job is due next after `after_ms`; `None` if it is disabled or has no schedule.
pub(super) fn next_due_ms(job: &Job, after_ms: i64) -> Option<i64> {
    if job.enabled { next_of(&lines(job), after_ms) } else { None }
}

/// The next times of a schedule after `after_ms`, at most `count`.
///
/// # Errors
/// `InvalidInput` if a line is malformed.
pub(crate) fn preview(schedule: &[String], after_ms: i64, count: usize) -> Result<Vec<i64>> {
    let lines: Vec<Calendar> =
        schedule.iter().map(|line| Calendar::parse(line)).collect::<Result<_>>()?;
    let next = |last: &i64| next_of(&lines, *last);
    Ok(std::iter::successors(next_of(&lines, after_ms), next).take(count).collect())
}

/// How often a job is due from now on, between neighbours of `bounds_ms`, which ascend.
pub(crate) fn due_between(
    stored: &StoredJob,
    now_ms: i64,
    bounds_ms: &[i64],
) -> Vec<Option<Occurrences>> {
    // Without a next time, it is due at none. A run that is due already is about to be queued.
    let lines = stored.next_due_ms.map(|_| lines(&stored.job)).unwrap_or_default();
    let next_second_ms = stored.next_due_ms.unwrap_or(0).div_euclid(1000) * 1000;
    let from_ms = next_second_ms.max(now_ms + 1);
    let bounds_ms: Vec<i64> = bounds_ms.iter().map(|bound_ms| *bound_ms.max(&from_ms)).collect();
    occurrences(&lines, &bounds_ms, &TimeZone::system())
}

impl Queue {
    /// Brings times forward that lie too far ahead, of jobs and of retries: the clock may have been set
    /// back.
    ///
    /// # Errors
    /// Errors of the database.
    pub(super) fn follow_clock(&self, now_ms: i64) -> Result<()> {
        let jobs = self.database.jobs()?;
        self.database.change(|sql| {
            for StoredJob { job, next_due_ms: stored, .. } in &jobs {
                let next = next_due_ms(job, now_ms);
                let is_far = |stored: i64| {
                    let second = next.and_then(|next| next_due_ms(job, next));
                    second.is_some_and(|second| second < stored)
                };
                if stored.is_none_or(is_far) {
                    sql.execute(
                        "UPDATE jobs SET next_due_ms = ?2 WHERE name = ?1",
                        params![job.name, next],
                    )?;
                }
            }
            sql.execute(
                "UPDATE queue SET due_ms = ?1 WHERE state = 'waiting' AND due_ms > ?2",
                params![now_ms, now_ms + LONGEST_BACK_OFF_MS],
            )
        })?;
        Ok(())
    }

    /// Keeps the runs of jobs of kind protect-live running, and queues the runs of all jobs that are due. Of occurrences that were missed, one is made
    /// up for. `known` gives the names of the machines that have points.
    ///
    /// # Errors
    /// Errors of the database and of `known`. Jobs that are not queued yet stay due.
    pub(super) fn tick(&self, now_ms: i64, known: &dyn Known) -> Result<()> {
        let jobs = self.database.jobs()?;
        let is_due = |stored: &&StoredJob| stored.next_due_ms.is_some_and(|due| due <= now_ms);
        let mut failed = self.keep_running(&jobs, now_ms, known).err();
        for stored in jobs.iter().filter(is_due) {
            if let Err(error) = self.queue_occurrence(stored, now_ms, known) {
                tracing::error!("job {}: {}", stored.job.name, error.full_message());
                failed = Some(error);
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn queue_occurrence(&self, stored: &StoredJob, now_ms: i64, known: &dyn Known) -> Result<()> {
        let job = &stored.job;
        let found = self.rows_of(job, None, now_ms, known)?;
        let next_ms = next_due_ms(job, now_ms);
        self.database.change(|sql| {
            // Changed or removed meanwhile?
            if store::find(sql, &job.name)?.as_ref() != Some(stored) {
                return Ok(());
            }
            for row in &found {
                if !rows::bring_forward(sql, row)? {
                    rows::insert(sql, row)?;
                }
            }
            let moved = "UPDATE jobs SET next_due_ms = ?2 WHERE name = ?1";
            sql.execute(moved, params![job.name, next_ms])?;
            Ok(())
        })?;
        self.tell(Some(&job.name));
        Ok(())
    }

    fn rows_of(
        &self,
        job: &Job,
        requested_by: Option<&str>,
        now_ms: i64,
        known: &dyn Known,
    ) -> Result<Vec<rows::QueueRow>> {
        let mut unreachable = Vec::new();
        let known = match job.known_by() {
            KnownBy::Nobody => Vec::new(),
            KnownBy::Repository => known.machines()?,
            KnownBy::Sessions => known.followed(job)?,
            KnownBy::Libvirt => {
                let jobs = self.database.jobs()?;
                let is_elsewhere = |domain: &str| {
                    let named = format!("libvirt:{domain}");
                    jobs.iter().any(|other| other.job.from.as_deref() == Some(&*named))
                };
                let domains = match job.hosts.is_empty() {
                    true => all_domains(&Virsh::local(None)?, LIBVIRT_PATIENCE)?,
                    false => domains_on(&job.hosts, known, &mut unreachable),
                };
                machines_of_domains(domains, &known.machines().unwrap_or_default(), is_elsewhere)
            }
        };
        let runs = commands::runs_of(job, &known).into_iter();
        // A run that fails and says why: the host's machines are not backed up.
        let check =
            |host: &String| (None, vec!["host".to_owned(), "check".to_owned(), host.clone()]);
        Ok(runs
            .chain(unreachable.into_iter().map(check))
            .map(|(machine, arguments)| NewRun {
                kind: if job.protects_live() { SEAL } else { job.kind.word() }.to_owned(),
                machine,
                arguments,
                requested_by: requested_by.map(str::to_owned),
                job: Some(job.name.clone()),
            })
            .map(|new| self.row(new, now_ms))
            .collect())
    }

    /// Queues the runs of a job now, for the machines that `is_wanted` accepts. One of kind protect-live makes a restore
    /// point of each machine that is followed; the others are followed again.
    ///
    /// # Errors
    /// `NotFound` if there is no such job, or no machine for it; errors of the database and of
    /// `known`.
    pub(crate) fn start_job(
        &self,
        name: &str,
        requested_by: &str,
        is_wanted: &dyn Fn(&str) -> bool,
        known: &dyn Known,
    ) -> Result<Vec<RunId>> {
        let (job, now_ms) = (self.database.job(name)?.job, crate::clock::now_ms());
        let again = match job.protects_live() {
            true => self.follow_again(&job, requested_by, is_wanted, now_ms, known)?,
            false => Vec::new(),
        };
        let (again, mut runs): (Vec<String>, Vec<RunId>) = again.into_iter().unzip();
        let found = self.rows_of(&job, Some(requested_by), now_ms, known)?;
        let wanted = found
            .into_iter()
            .filter(|row| row.machine.as_deref().is_none_or(is_wanted))
            .filter(|row| row.machine.as_ref().is_none_or(|machine| !again.contains(machine)))
            .map(|row| NewRun {
                kind: row.kind,
                machine: row.machine,
                arguments: row.arguments,
                requested_by: row.requested_by,
                job: row.job,
            })
            .collect::<Vec<_>>();
        if wanted.is_empty() && !runs.is_empty() {
            return Ok(runs);
        }
        if wanted.is_empty() {
            let text = format!("job {name}: no machine of this job is chosen, or has points");
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        runs.extend(self.enqueue_all(wanted)?);
        Ok(runs)
    }

    /// When a job or a row is due next.
    ///
    /// # Errors
    /// Errors of the database.
    pub(super) fn next_time(&self, now_ms: i64) -> Result<Option<i64>> {
        self.database.read(|sql| {
            let next = "SELECT min(due) FROM (SELECT min(next_due_ms) AS due FROM jobs
                        UNION ALL SELECT min(due_ms) FROM queue
                        WHERE state = 'waiting' AND due_ms > ?1)";
            sql.query_row(next, [now_ms], |row| row.get(0))
        })
    }

    /// The limits of each job now.
    ///
    /// # Errors
    /// Errors of the database.
    pub(super) fn limits(&self, now_ms: i64) -> Result<HashMap<String, JobLimits>> {
        let now = Timestamp::from_millisecond(now_ms).unwrap_or(Timestamp::UNIX_EPOCH);
        let local = TimeZone::system().to_datetime(now);
        let limits = |job: &Job| JobLimits {
            parallel: job.parallel.or(job.limits_a_line().then_some(1)),
            // A window that no longer parses holds nothing.
            is_open: !matches!(job.window(), Ok(Some(window)) if !window.contains(local)),
        };
        let jobs = self.database.jobs()?;
        Ok(jobs.into_iter().map(|stored| (stored.job.name.clone(), limits(&stored.job))).collect())
    }
}
