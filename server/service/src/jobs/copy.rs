//! Jobs that copy: their words, and what starts them beside a schedule.
//!
//! Copies that follow points are started by what is: a machine with a point that is not there, and no run of the job that
//! waits or works. So none is forgotten over a restart, and a copy that failed for good is tried again later.

use std::path::Path;

use coldrise_block::Result;
use coldrise_replica::{CopyTarget, RateWindow, RateWindows, TargetCopies, parse_prefix};
use coldrise_requests::{CommandLine, CopyOptions};
use coldrise_runs::State;
use coldrise_store::MachineName;
use rusqlite::Connection;

use super::commands::{check_rate, check_source};
use super::job::{CopyFollows, Job, JobKind};
use super::pattern::{MachineNames, any_matches};
use super::queue::{NewRun, Queue};
use super::{rows, store};
use crate::database::SqlResult;
use crate::invalid::invalid;
use crate::pattern::check_list;

const TO: &str = "--to=";
/// How buckets begin.
const BUCKET: &str = "s3://";
const MAX_URL_BYTES: usize = 1024;
const MAX_RATE_WINDOWS: usize = 16;
const MAX_WINDOW_BYTES: usize = 200;
/// When all attempts have failed, or one was cancelled, the next one comes after this time.
const FAILED_MS: i64 = 15 * 60 * 1000;
/// A copy that succeeded and left a point behind is repeated after this time.
const AGAIN_MS: i64 = 10 * 1000;

impl Job {
    /// Where it copies to, as the state of copies names it.
    pub(crate) fn copy_target(&self) -> Option<String> {
        let to = self.to.as_ref().filter(|_| self.kind == JobKind::Copy)?;
        Some(match to.starts_with('/') {
            true => CopyTarget::directory(Path::new(to)).to_string(),
            false => to.clone(),
        })
    }

    pub(super) fn check_is_no_copy(&self) -> Result<()> {
        let only_copy = [
            ("to_passphrase_file", self.to_passphrase_file.is_some()),
            ("prefix", self.prefix.is_some()),
            ("last", self.last.is_some()),
            ("all", self.all),
            ("follows", self.follows.is_some()),
            ("rate_windows", !self.rate_windows.is_empty()),
            ("behind_limit_minutes", self.behind_limit_minutes.is_some()),
        ];
        if self.to.is_some() && !self.protects_live() {
            return Err(invalid("to: only jobs of kind copy or protect-live have it"));
        }
        match only_copy.iter().find(|(_, is_given)| *is_given) {
            Some((field, _)) => Err(invalid(format!("{field}: only jobs of kind copy have it"))),
            None => Ok(()),
        }
    }

    pub(super) fn check_copy(&self) -> Result<()> {
        check_list(&self.machines)?;
        check_rate(self.rate_bytes_per_second)?;
        let Some(to) = self.to.as_deref() else {
            return Err(invalid(
                "to: give the name of a link, the path of a repository, or a bucket",
            ));
        };
        let (is_path, is_bucket) = (to.starts_with('/'), to.starts_with(BUCKET));
        if is_path {
            check_source(&format!("raw:{to}")).map_err(|error| error.context("to"))?;
        } else if is_bucket {
            if to.chars().any(char::is_control) || to.len() > MAX_URL_BYTES {
                return Err(invalid("to: no URL of a bucket"));
            }
        } else {
            MachineName::parse(to).map_err(|_| {
                invalid("to: neither an absolute path, nor a bucket, nor the name of a link")
            })?;
        }
        match self.to_passphrase_file.as_deref() {
            Some(_) if !is_path && !is_bucket => {
                return Err(invalid(
                    "to_passphrase_file: the other site opens its repository itself",
                ));
            }
            Some(file) if !file.starts_with('/') => {
                return Err(invalid("to_passphrase_file: give an absolute path"));
            }
            _ => {}
        }
        if let Some(prefix) = &self.prefix {
            parse_prefix(prefix).map_err(|error| error.context("prefix"))?;
        }
        if self.last == Some(0) {
            return Err(invalid("last: 1 or more"));
        }
        let is_window = |window: &String| {
            window.len() <= MAX_WINDOW_BYTES && !window.chars().any(char::is_control)
        };
        if self.rate_windows.len() > MAX_RATE_WINDOWS || !self.rate_windows.iter().all(is_window) {
            let text =
                format!("rate_windows: at most {MAX_RATE_WINDOWS}, of {MAX_WINDOW_BYTES} bytes");
            return Err(invalid(text));
        }
        let windows = self.rate_windows.iter().map(|window| window.parse::<RateWindow>());
        // The rate outside of them does not matter: nothing is sent at none.
        windows
            .collect::<Result<_>>()
            .and_then(|windows| RateWindows::new(windows, None))
            .map_err(|error| error.context("rate_windows"))?;
        Ok(())
    }

    /// Whether it copies this machine by itself, for this reason.
    fn follows(&self, follows: CopyFollows, names: &MachineNames) -> bool {
        self.enabled
            && self.kind == JobKind::Copy
            && self.follows == Some(follows)
            && any_matches(&self.machines, names)
    }
}

/// The words of `coldrise copy`, for one machine or for all.
pub(super) fn words(job: &Job, machine: Option<&str>) -> Vec<String> {
    let options = CopyOptions {
        machines: machine.map(str::to_owned).into_iter().collect(),
        to: job.to.as_ref().map(Into::into),
        to_passphrase_file: job.to_passphrase_file.as_ref().map(Into::into),
        prefix: job.prefix.clone(),
        last: job.last,
        all: job.all,
        rate: job.rate_bytes_per_second.map(|rate| rate.to_string()),
        window: job.rate_windows.clone(),
    };
    CommandLine::new("copy").with(&options).words()
}

/// Where the run with these words copies to.
pub(super) fn target(words: &[String]) -> Option<&str> {
    words.iter().find_map(|word| word.strip_prefix(TO))
}

impl Queue {
    fn copy_run(&self, job: &Job, machine: &str, now_ms: i64) -> rows::QueueRow {
        let new = NewRun {
            kind: JobKind::Copy.word().to_owned(),
            machine: Some(machine.to_owned()),
            arguments: words(job, Some(machine)),
            requested_by: None,
            job: Some(job.name.clone()),
        };
        self.row(new, now_ms)
    }

    /// Queues the copies that follow a backup of the machine.
    pub(super) fn queue_copies(
        &self,
        sql: &Connection,
        names: &MachineNames,
        now_ms: i64,
    ) -> SqlResult<()> {
        for stored in store::all(sql)? {
            if stored.job.follows(CopyFollows::Backups, names) {
                let row = self.copy_run(&stored.job, &names.machine, now_ms);
                if !rows::bring_forward(sql, &row)? {
                    rows::insert(sql, &row)?;
                }
            }
        }
        Ok(())
    }

    /// Queues copies of the machines that have points which are not there, for the jobs that follow points. `known`
    /// are the machines that have points.
    ///
    /// # Errors
    /// Errors of the database.
    pub(crate) fn follow_points(
        &self,
        targets: &[TargetCopies],
        known: &[MachineNames],
        now_ms: i64,
    ) -> Result<()> {
        let mut due = Vec::new();
        for stored in self.database.jobs()? {
            let job = stored.job;
            let Some(name) = job.copy_target() else { continue };
            let target = targets.iter().find(|target| target.target == name);
            let is_followed = |names: &&MachineNames| job.follows(CopyFollows::Points, names);
            for MachineNames { machine, .. } in known.iter().filter(is_followed) {
                let far = format!("{}{machine}", job.prefix.as_deref().unwrap_or_default());
                let copies = target.and_then(|target| {
                    target.machines.iter().find(|found| found.far_machine == far)
                });
                // Without a record it was never copied. A copy that runs just now reaches the end.
                let is_behind = copies.is_none_or(|copies| {
                    copies.running.is_none() && copies.points_behind.is_some_and(|count| count > 0)
                });
                if is_behind {
                    due.push(self.copy_run(&job, machine, now_ms));
                }
            }
        }
        if due.is_empty() {
            return Ok(());
        }
        let is_added = self.database.change(|sql| {
            let mut is_added = false;
            for row in &due {
                if may_follow(sql, row, now_ms)? {
                    rows::insert(sql, row)?;
                    is_added = true;
                }
            }
            Ok(is_added)
        })?;
        if is_added {
            self.tell(None);
        }
        Ok(())
    }
}

/// Whether no run of its job, or of another one, for the machine or for all, is on its way there, and none has just ended.
fn may_follow(sql: &Connection, row: &rows::QueueRow, now_ms: i64) -> SqlResult<bool> {
    let on_its_way: bool = sql
        .prepare_cached(
            "SELECT EXISTS (SELECT 1 FROM queue WHERE kind = ?1 AND job IS ?2
             AND (machine IS ?3 OR machine IS NULL))",
        )?
        .query_row((&row.kind, &row.job, &row.machine), |found| found.get(0))?;
    if on_its_way {
        return Ok(false);
    }
    let job = row.job.as_deref().unwrap_or_default();
    let last = store::find_outcome(sql, job, &row.kind, row.machine.as_deref())?;
    Ok(last.is_none_or(|last| {
        let wait_ms = if last.state == State::Ok.word() { AGAIN_MS } else { FAILED_MS };
        // One of the future is of before the clock was set back.
        !(0..wait_ms).contains(&(now_ms - last.ended_ms))
    }))
}
