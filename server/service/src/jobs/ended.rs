//! A run has ended: its row goes, its outcome is recorded, and its followers are queued.

use coldrise_block::{ErrorKind, Result};
use coldrise_runs::{BOOT_FAILED, BOOT_NOT_PROVEN, RunRecord, State, exit_code};
use coldrise_schedule::back_off;
use rusqlite::Transaction;

use super::commands;
use super::job::{BootCheckTime, Job, JobKind};
use super::pattern::MachineNames;
use super::protect_live;
use super::queue::{NewRun, Queue};
use super::rows::{self, QueueRow};
use super::store::{self, Outcome};
use crate::database::SqlResult;
use crate::verify_result::FoundDamage;

/// While another process keeps a run out, it is tried again after this time, and counts as failed
/// only after an hour.
const BUSY_INTERVAL_MS: i64 = 15_000;
const BUSY_PATIENCE_MS: i64 = 3_600_000;
/// A check is due a little before the day or week is over, or it would slip by a backup each time.
const DAY_MS: i64 = (24 - 4) * 3_600_000;
const WEEK_MS: i64 = (7 * 24 - 6) * 3_600_000;
/// The unit of the back-off, in seconds.
const BACK_OFF_UNIT_SECONDS: u64 = 60;
/// Maximum length of a message that is recorded, in characters.
const MAX_MESSAGE: usize = 500;

/// The effect of an end on the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    Success,
    /// Neither: cancelled, or a boot without proof.
    Nothing,
    /// A retry makes sense.
    Failure,
    /// A boot check has proved that the machine does not boot, or a verify has found damage: a repetition
    /// proves the same.
    ProvenFailure,
    /// Another process was in the way.
    Busy,
}

impl Meaning {
    fn of(run: &RunRecord) -> Meaning {
        let code = run.result.as_ref().map(|result| result.exit_code);
        let is = |meaning: u8| code == Some(meaning);
        match run.state {
            State::Ok => Meaning::Success,
            State::Cancelled | State::Running => Meaning::Nothing,
            State::Failed if FoundDamage::of(run).is_some() => Meaning::ProvenFailure,
            State::Failed if is(exit_code(ErrorKind::Busy)) => Meaning::Busy,
            State::Failed if is(BOOT_FAILED) => Meaning::ProvenFailure,
            State::Failed if is(BOOT_NOT_PROVEN) => Meaning::Nothing,
            State::Failed | State::Lost => Meaning::Failure,
        }
    }
}

impl Queue {
    /// Records the end of a row's run.
    ///
    /// # Errors
    /// Errors of the database; the row stays.
    pub(super) fn record_end(&self, row: &QueueRow, run: &RunRecord, now_ms: i64) -> Result<()> {
        let random = now_ms.unsigned_abs() as u32;
        self.database.change(|sql| {
            if !rows::remove(sql, &row.run)? {
                return Ok(());
            }
            let Some(job) = &row.job else { return Ok(()) };
            let Some(job) = store::find(sql, job)? else { return Ok(()) };
            self.record_outcome(sql, row, run, &job.job, now_ms, random)
        })?;
        self.tell(row.job.as_deref());
        Ok(())
    }

    fn record_outcome(
        &self,
        sql: &Transaction<'_>,
        row: &QueueRow,
        run: &RunRecord,
        job: &Job,
        now_ms: i64,
        random: u32,
    ) -> SqlResult<()> {
        let mut meaning = Meaning::of(run);
        let busy_since_ms = row.busy_since_ms.unwrap_or(now_ms);
        if meaning == Meaning::Busy {
            if now_ms - busy_since_ms < BUSY_PATIENCE_MS {
                let mut again = self.again(row, now_ms, now_ms + BUSY_INTERVAL_MS);
                again.busy_since_ms = Some(busy_since_ms);
                again.reason = Some(message(run));
                return rows::insert(sql, &again);
            }
            meaning = Meaning::Failure;
        }
        let before = store::find_outcome(sql, &job.name, &row.kind, row.machine.as_deref())?;
        let failures = before.as_ref().map_or(0, |outcome| outcome.failures);
        let is_failure = matches!(meaning, Meaning::Failure | Meaning::ProvenFailure);
        let outcome = Outcome {
            job: job.name.clone(),
            kind: row.kind.clone(),
            machine: row.machine.clone(),
            run: row.run.clone(),
            state: run.state.word().to_owned(),
            message: (run.state != State::Ok).then(|| message(run)),
            ended_ms: now_ms,
            last_success_ms: match meaning {
                Meaning::Success => Some(now_ms),
                _ => before.and_then(|outcome| outcome.last_success_ms),
            },
            failures: match meaning {
                Meaning::Success => 0,
                _ => failures.saturating_add(u32::from(is_failure)),
            },
        };
        store::put_outcome(sql, &outcome)?;
        let next = match row.is_kept() && job.protects_live() {
            true => protect_live::next_attempt(sql, row, job, run.state, now_ms)?,
            false => (row.attempt <= job.retries).then_some((row.attempt, false)),
        };
        if let Some((attempt, is_at_once)) =
            next.filter(|_| meaning == Meaning::Failure && job.enabled)
        {
            let wait = if is_at_once { 0 } else { back_off(attempt, random).as_secs() };
            let seconds = wait * u64::from(job.retry_seconds) / BACK_OFF_UNIT_SECONDS;
            let due_ms = now_ms.saturating_add_unsigned(seconds * 1000);
            let mut again = self.again(row, now_ms, due_ms);
            again.attempt = attempt.saturating_add(1);
            again.reason = Some(message(run));
            // A new occurrence that waits already is the retry.
            if !rows::bring_forward(sql, &again)? {
                rows::insert(sql, &again)?;
            }
        }
        if meaning == Meaning::Success && row.kind == JobKind::Backup.word() {
            self.queue_followers(sql, row, run, job, now_ms)?;
        }
        if meaning == Meaning::Success && row.kind == JobKind::Copy.word() && row.machine.is_none()
        {
            store::settle_failures(sql, &job.name, &row.kind)?;
        }
        Ok(())
    }

    fn again(&self, row: &QueueRow, now_ms: i64, due_ms: i64) -> QueueRow {
        let new = NewRun {
            kind: row.kind.clone(),
            machine: row.machine.clone(),
            arguments: row.arguments.clone(),
            requested_by: row.requested_by.clone(),
            job: row.job.clone(),
        };
        QueueRow { due_ms, attempt: row.attempt, ..self.row(new, now_ms) }
    }

    /// Queues the prune and the boot check after a backup.
    fn queue_followers(
        &self,
        sql: &Transaction<'_>,
        row: &QueueRow,
        run: &RunRecord,
        job: &Job,
        now_ms: i64,
    ) -> SqlResult<()> {
        let Some(machine) = row.machine.as_deref() else { return Ok(()) };
        let display_name = answer(run, "display_name").map(str::to_owned);
        let names = MachineNames { display_name, ..MachineNames::of(machine) };
        self.queue_copies(sql, &names, now_ms)?;
        let mut followers = Vec::new();
        if let Some(rules) = &job.retention {
            followers.push((JobKind::Prune, commands::prune(rules, &[&machine.to_owned()])));
        }
        if let Some(check) = &job.boot_check {
            let kind = JobKind::CheckBoot.word();
            let last = store::find_outcome(sql, &job.name, kind, Some(machine))?;
            // One that was cut off is none. One of the future is of before the clock was set back.
            let cut_off = [State::Lost.word(), State::Cancelled.word()];
            let last = last.filter(|outcome| !cut_off.contains(&outcome.state.as_str()));
            let is_older = |age_ms: i64| {
                last.as_ref().is_none_or(|last| !(0..age_ms).contains(&(now_ms - last.ended_ms)))
            };
            let is_due = match check.when {
                BootCheckTime::Never => false,
                BootCheckTime::Always => true,
                BootCheckTime::Daily => is_older(DAY_MS),
                BootCheckTime::Weekly => is_older(WEEK_MS),
            };
            if is_due {
                let words = commands::check_boot(Some(check), &address(run, machine));
                followers.push((JobKind::CheckBoot, words));
            }
        }
        for (kind, arguments) in followers {
            let new = NewRun {
                kind: kind.word().to_owned(),
                machine: Some(machine.to_owned()),
                arguments,
                requested_by: row.requested_by.clone(),
                job: row.job.clone(),
            };
            let follower = self.row(new, now_ms);
            if !rows::bring_forward(sql, &follower)? {
                rows::insert(sql, &follower)?;
            }
        }
        Ok(())
    }
}

/// A text of a run's own answer.
fn answer<'a>(run: &'a RunRecord, field: &str) -> Option<&'a str> {
    run.result.as_ref()?.counts.as_ref()?.get(field)?.as_str()
}

/// The address of the point that a backup made, by its own answer; else the latest.
fn address(run: &RunRecord, machine: &str) -> String {
    let made = answer(run, "address");
    let is_ours = |text: &&str| {
        text.strip_prefix(machine).is_some_and(|rest| rest.starts_with('/'))
            && text.parse::<coldrise_store::Address>().is_ok()
    };
    made.filter(is_ours).map_or_else(|| format!("{machine}/latest"), str::to_owned)
}

/// Why a run did not succeed.
fn message(run: &RunRecord) -> String {
    let error = run.result.as_ref().and_then(|result| result.error.as_ref());
    let text = if let Some(error) = error {
        error.message.clone()
    } else if let Some(failures) = copy_failures(run) {
        failures
    } else if let Some(damage) = FoundDamage::of(run) {
        format!("{}; {}", damage.summary, damage.details.replace('\n', "; "))
    } else if run.problems.is_empty() {
        run.state.word().to_owned()
    } else {
        run.problems.join("; ")
    };
    text.chars().take(MAX_MESSAGE).collect()
}

/// Why machines were not copied, by the answer of a copy.
pub(crate) fn copy_failures(run: &RunRecord) -> Option<String> {
    let plan = run.plan.as_ref().filter(|plan| plan.command == JobKind::Copy.word());
    let counts = plan.and(run.result.as_ref()).and_then(|result| result.counts.as_ref())?;
    let failure = |machine: &serde_json::Value| {
        let message = machine.get("error")?.get("message")?.as_str()?;
        Some(format!("{}: {message}", machine.get("machine")?.as_str()?))
    };
    let failures: Vec<String> =
        counts.get("machines")?.as_array()?.iter().filter_map(failure).collect();
    Some(failures.join("\n")).filter(|text| !text.is_empty())
}
