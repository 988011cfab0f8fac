//! Tells clients and the queue what the runs do.
//!
//! A change reaches clients at once if a run began or ended; its progress is sent twice per second
//! at most.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use coldrise_block::Result;
use coldrise_runs::{RunId, RunRecord, State, Watch};

use crate::events::What;
use crate::service::Service;

/// Interval of the events of one run's progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// The longest wait: the thread notices the end of the service.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// Wait before the next attempt to watch.
const ERROR_WAIT: Duration = Duration::from_secs(5);

/// Runs that clients know.
#[derive(Default)]
struct Seen {
    /// The state and the time of the last event.
    sent: HashMap<RunId, (State, Instant)>,
    /// Runs with progress that was not sent.
    late: BTreeSet<RunId>,
    /// The first answer sends every run: those that ended before this time are not news. In
    /// milliseconds since 1970.
    since_ms: u64,
}

/// Watches until the service stops.
pub(crate) fn run(service: &Service) {
    let since_ms = u64::try_from(crate::clock::now_ms()).unwrap_or(0);
    let mut seen = Seen { since_ms, ..Seen::default() };
    while !*service.stop.borrow() {
        if let Err(error) = watch(service, &mut seen) {
            tracing::error!("watching runs: {}", error.full_message());
            std::thread::sleep(ERROR_WAIT);
            // Ends of runs may have been missed.
            service.queue.wake();
        }
    }
}

fn watch(service: &Service, seen: &mut Seen) -> Result<()> {
    let mut watch = Watch::new(&service.runs)?;
    while !*service.stop.borrow() {
        let wait = if seen.late.is_empty() { LONGEST_WAIT } else { seen.wait(Instant::now()) };
        let mut changed: BTreeSet<RunId> = watch.next(wait)?.into_iter().collect();
        changed.append(&mut seen.late);
        let mut is_changed = false;
        for id in changed {
            is_changed |= seen.tell(service, &id, Instant::now());
        }
        if is_changed {
            service.queue.wake();
            service.refresher.wake();
        }
    }
    Ok(())
}

impl Seen {
    fn wait(&self, now: Instant) -> Duration {
        let due = self.late.iter().filter_map(|id| self.sent.get(id)).map(|(_, at)| *at);
        let due = due.min().map_or(now, |at| at + PROGRESS_INTERVAL);
        due.saturating_duration_since(now).clamp(Duration::from_millis(1), LONGEST_WAIT)
    }

    /// Tells a run if there is news. Returns whether its state has changed.
    fn tell(&mut self, service: &Service, id: &RunId, now: Instant) -> bool {
        let before = self.sent.get(id).copied();
        let Ok(run) = service.runs.read(id) else {
            // Planned, or removed. A planned run that was abandoned becomes a run.
            self.sent.remove(id);
            return true;
        };
        let is_new_state = before.is_none_or(|(state, _)| state != run.state);
        let is_early = before.is_some_and(|(_, at)| now - at < PROGRESS_INTERVAL);
        if !is_new_state && is_early {
            self.late.insert(id.clone());
            return false;
        }
        let is_old = run.result.as_ref().is_none_or(|result| result.ended_at_ms < self.since_ms);
        if run.state == State::Running || (is_new_state && !(before.is_none() && is_old)) {
            service.events.send(event(&run));
        }
        self.sent.insert(id.clone(), (run.state, now));
        is_new_state
    }
}

fn event(run: &RunRecord) -> What {
    What::Run {
        id: run.id.clone(),
        state: run.state.word().to_owned(),
        machine: run.plan.as_ref().and_then(|plan| plan.machine.clone()),
        progress: run.progress.clone(),
    }
}
