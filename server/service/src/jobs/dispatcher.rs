//! The thread that queues due jobs, starts runs and records their ends.
//!
//! It sleeps until something is due, changes or ends, and at most for [`LONGEST_SLEEP`]: then it
//! also notices that the clock was set.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{ErrorKind, Result};
use coldrise_runs::{Failure, Starter, State};
use tokio::sync::watch;

use super::queue::Queue;
use super::rows::{QueueRow, RowState, is_missing};
use super::rules;
use super::schedule::Known;
use crate::clock::now_ms;

const LONGEST_SLEEP: Duration = Duration::from_secs(30);
const SHORTEST_SLEEP: Duration = Duration::from_millis(10);
/// Wait after an error, such as of a full drive.
const ERROR_SLEEP: Duration = Duration::from_secs(5);
/// A difference between the clocks that counts as a jump.
const JUMP_MS: i64 = 5_000;
/// A started process that has not begun its run after this time is started again, and given
/// up after the longer one.
const BEGIN_PATIENCE: Duration = Duration::from_secs(60);
const BEGIN_LIMIT: Duration = Duration::from_secs(300);
/// A run that cannot be planned (a full drive) is tried again after this time.
const PLAN_INTERVAL_MS: i64 = 30_000;

/// Both clocks at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clocks {
    /// The wall clock, in milliseconds since 1970.
    pub(super) wall_ms: i64,
    /// Never goes back.
    pub(super) steady: Instant,
}

impl Clocks {
    fn now() -> Clocks {
        Clocks { wall_ms: now_ms(), steady: Instant::now() }
    }

    /// Whether the wall clock was set since `before`.
    fn jumped_since(&self, before: Clocks) -> bool {
        let elapsed = self.steady.saturating_duration_since(before.steady).as_millis();
        let elapsed = i64::try_from(elapsed).unwrap_or(i64::MAX);
        (self.wall_ms.saturating_sub(before.wall_ms)).abs_diff(elapsed) > JUMP_MS.unsigned_abs()
    }
}

/// Starts runs.
pub(crate) struct Dispatcher {
    queue: Arc<Queue>,
    starter: Starter,
    known: Box<dyn Known + Send>,
    /// When the process of a run was started first and last.
    launched: HashMap<String, (Instant, Instant)>,
    last: Option<Clocks>,
}

impl Dispatcher {
    /// A dispatcher; [`Dispatcher::run`] does the work.
    pub(crate) fn new(
        queue: Arc<Queue>,
        starter: Starter,
        known: Box<dyn Known + Send>,
    ) -> Dispatcher {
        Dispatcher { queue, starter, known, launched: HashMap::new(), last: None }
    }

    /// Works until `stop` becomes true.
    pub(crate) fn run(mut self, stop: &watch::Receiver<bool>) {
        while !*stop.borrow() {
            let sleep = self.step(Clocks::now()).unwrap_or_else(|error| {
                tracing::error!("starting runs: {}", error.full_message());
                ERROR_SLEEP
            });
            self.queue.wait(sleep);
        }
    }

    /// Does what is due. Returns how long nothing will be.
    ///
    /// # Errors
    /// Errors of the database. Unfinished work stays due.
    pub(super) fn step(&mut self, now: Clocks) -> Result<Duration> {
        let was_set = self.last.is_some_and(|last| now.jumped_since(last));
        if was_set || self.last.is_none() {
            self.queue.follow_clock(now.wall_ms)?;
        }
        let rows = self.queue.database.queue_rows()?;
        for row in rows.iter().filter(|row| row.state != RowState::Waiting) {
            if let Err(error) = self.observe(row, now) {
                tracing::error!("run {}: {}", row.run, error.full_message());
            }
        }
        // Only now: the start of the service has been looked at.
        self.last = Some(now);
        // The error of one job must not hold the queue.
        let ticked = self.queue.tick(now.wall_ms, &*self.known);
        if was_set {
            // A reader of this line finds the due runs in the queue.
            tracing::warn!("the clock was set: the times of jobs were computed again");
        }
        self.start_runs(now)?;
        ticked?;
        let next = self.queue.next_time(now.wall_ms)?;
        Ok(next.map_or(LONGEST_SLEEP, |next| {
            let wait = u64::try_from(next.saturating_sub(now.wall_ms)).unwrap_or(0);
            Duration::from_millis(wait).clamp(SHORTEST_SLEEP, LONGEST_SLEEP)
        }))
    }

    fn start_runs(&mut self, now: Clocks) -> Result<()> {
        let queue = Arc::clone(&self.queue);
        let rows = queue.database.queue_rows()?;
        let limits = queue.limits(now.wall_ms)?;
        let choice = rules::choose(&rows, now.wall_ms, queue.parallel()?, &limits);
        let chosen = |run: &String| rows.iter().find(|row| row.run == *run);
        for row in choice.start.iter().filter_map(chosen) {
            // Cancelled meanwhile?
            if queue.database.move_row(&row.run, RowState::Waiting, RowState::Starting)? {
                self.launch(row, now)?;
            }
        }
        let is_news = |(run, reason): &(String, String)| {
            chosen(run).is_some_and(|row| row.reason.as_ref() != Some(reason))
        };
        let news: Vec<_> = choice.held.into_iter().filter(is_news).collect();
        if news.is_empty() { Ok(()) } else { queue.database.note_reasons(&news) }
    }

    /// Plans and starts a run whose row is `starting`. Harmless if that was done before.
    fn launch(&mut self, row: &QueueRow, now: Clocks) -> Result<()> {
        let (queue, id) = (&self.queue, row.id()?);
        let planned = queue
            .global()
            .and_then(|global| queue.runs.plan(&id, &row.request(global, &queue.keep_out)));
        if let Err(error) = planned {
            tracing::error!("planning run {id}: {}", error.full_message());
            let reason = format!("could not be planned: {}", error.full_message());
            return queue.database.put_back(&row.run, now.wall_ms + PLAN_INTERVAL_MS, &reason);
        }
        let first = self.launched.get(&row.run).map_or(now.steady, |(first, _)| *first);
        self.launched.insert(row.run.clone(), (first, now.steady));
        match self.starter.start(&queue.runs, &id) {
            Ok(()) => {}
            // It has begun already.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                tracing::error!("starting run {id}: {}", error.full_message());
                let kind = error.kind().word().to_owned();
                let failure = Failure { kind, message: error.full_message() };
                queue.runs.fail_planned(&id, failure)?;
                queue.wake();
            }
        }
        queue.database.move_row(&row.run, RowState::Starting, RowState::Started)?;
        Ok(())
    }

    /// Looks at the run of a row that was started or cancelled.
    fn observe(&mut self, row: &QueueRow, now: Clocks) -> Result<()> {
        let queue = Arc::clone(&self.queue);
        let id = row.id()?;
        if row.state == RowState::Cancelled {
            queue.record_cancelled(row)?;
        }
        let run = queue.runs.read(&id);
        if is_missing(&run) {
            return self.launch_again(row, now);
        }
        let run = run?;
        if run.state != State::Running {
            self.launched.remove(&row.run);
            return queue.record_end(row, &run, now.wall_ms);
        }
        if row.state == RowState::Starting {
            queue.database.move_row(&row.run, RowState::Starting, RowState::Started)?;
        }
        Ok(())
    }

    /// The run has not begun: its process is on its way, or was never started.
    fn launch_again(&mut self, row: &QueueRow, now: Clocks) -> Result<()> {
        let Some((first, last)) = self.launched.get(&row.run).copied() else {
            return self.launch(row, now);
        };
        let since = |then: Instant| now.steady.saturating_duration_since(then);
        if since(first) > BEGIN_LIMIT {
            let seconds = BEGIN_LIMIT.as_secs();
            let message = format!("its process did not begin within {seconds} seconds");
            let failure = Failure { kind: ErrorKind::ToolFailed.word().to_owned(), message };
            self.queue.runs.fail_planned(&row.id()?, failure)?;
            self.queue.wake();
            return Ok(());
        }
        if since(last) > BEGIN_PATIENCE { self.launch(row, now) } else { Ok(()) }
    }
}
