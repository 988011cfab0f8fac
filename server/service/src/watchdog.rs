//! Tells systemd that the service lives (WatchdogSec= of the unit).

use std::time::Duration;

const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);

/// Notifies systemd three times per period, from a task: if the threads of the tasks hang, systemd
/// starts the service again. Returns at once if nobody waits for it.
pub(crate) async fn notify() {
    let mut period_us = 0;
    if !sd_notify::watchdog_enabled(false, &mut period_us) {
        return;
    }
    let mut ticks =
        tokio::time::interval(Duration::from_micros(period_us / 3).max(SHORTEST_INTERVAL));
    loop {
        ticks.tick().await;
        // Errors: systemd is away; the next notification may arrive.
        let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Watchdog]);
    }
}
