//! Tells clients what happens in served sessions.

use std::time::Duration;

use coldrise_inventory::ActivityWatch;

use crate::api::events::has_clients;
use crate::events::What;
use crate::service::Service;

/// Interval of the events of one session.
const INTERVAL: Duration = Duration::from_secs(2);

/// Asks the servers of all sessions until the service stops, while a client listens.
pub(crate) fn run(service: &Service) {
    let mut watch = ActivityWatch::default();
    while !*service.stop.borrow() {
        std::thread::sleep(INTERVAL);
        if !has_clients() {
            // The first event for a new client shows all served sessions.
            watch = ActivityWatch::default();
            continue;
        }
        // While the repository is away there is nothing to tell; another thread says so.
        let changed = service.inventory().and_then(|inventory| inventory.activity(&mut watch));
        for totals in changed.unwrap_or_default() {
            service.events.send_passing(What::Activity(totals));
        }
    }
}
