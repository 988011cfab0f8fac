//! Follows what happens in served sessions: tells clients, and keeps the last minutes.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use coldrise_inventory::{ActivityTotals, ActivityWatch};
use parking_lot::Mutex;

use crate::api::events::has_clients;
use crate::events::What;
use crate::service::Service;

/// Interval of the samples and events of one session.
const INTERVAL: Duration = Duration::from_secs(2);
/// Samples are kept this long, in milliseconds.
const KEPT_MS: u64 = 15 * 60 * 1000;
/// Maximum number of samples of one session: if the clock was set back, none is old for a while.
const MAX_SAMPLES: usize = 451;

/// The samples of the last 15 minutes, by session: about 80 KB of each.
#[derive(Default)]
pub(crate) struct ActivityHistory(Mutex<HashMap<String, VecDeque<ActivityTotals>>>);

impl ActivityHistory {
    fn add(&self, totals: &ActivityTotals) {
        let mut sessions = self.0.lock();
        let oldest = totals.sampled_at_ms.saturating_sub(KEPT_MS);
        sessions.entry(totals.session.clone()).or_default().push_back(totals.clone());
        sessions.retain(|_, samples| {
            let old = samples.iter().take_while(|sample| sample.sampled_at_ms < oldest).count();
            samples.drain(..old.max(samples.len().saturating_sub(MAX_SAMPLES)));
            !samples.is_empty()
        });
    }

    /// The samples of a session, the oldest first. While nothing happens there are none.
    pub(crate) fn of(&self, session: &str) -> Vec<ActivityTotals> {
        self.0.lock().get(session).into_iter().flatten().cloned().collect()
    }
}

/// Asks the servers of all sessions until the service stops.
pub(crate) fn run(service: &Service) {
    let mut watch = ActivityWatch::default();
    let mut had_clients = false;
    while !*service.stop.borrow() {
        std::thread::sleep(INTERVAL);
        // The first event for a new client shows all served sessions.
        if has_clients() && !had_clients {
            watch = ActivityWatch::default();
        }
        had_clients = has_clients();
        // While the repository is away there is nothing to send; another thread reports that.
        let changed = service.inventory().and_then(|inventory| inventory.activity(&mut watch));
        for totals in changed.unwrap_or_default() {
            service.history.add(&totals);
            service.events.send_passing(What::Activity(totals));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(session: &str, sampled_at_ms: u64) -> ActivityTotals {
        ActivityTotals {
            session: session.into(),
            machine: "web01".into(),
            opened_at_ms: 0,
            sampled_at_ms,
            reads: 0,
            read_bytes: 0,
            writes: 0,
            written_bytes: 0,
            flushes: 0,
            failed: 0,
            from_backup_bytes: 0,
            from_cache_bytes: 0,
            from_captured_bytes: 0,
            zero_bytes: 0,
        }
    }

    #[test]
    fn samples_of_15_minutes_are_kept() {
        let history = ActivityHistory::default();
        history.add(&totals("old", 1000));
        for number in 0..1000 {
            history.add(&totals("trial", number * 2000));
        }
        let kept = history.of("trial");
        assert_eq!(kept.len(), MAX_SAMPLES);
        assert_eq!((kept[0].sampled_at_ms, kept[450].sampled_at_ms), (1_098_000, 1_998_000));
        assert!(history.of("old").is_empty() && history.of("none").is_empty());
        // The clock is set back by an hour.
        for number in 0..MAX_SAMPLES as u64 {
            history.add(&totals("trial", number));
        }
        assert_eq!(history.of("trial").len(), MAX_SAMPLES);
    }
}
