//! The word to systemd: ready, alive, what it does.
//!
//! With `WatchdogSec=` a thread of its own looks whether the runtime and the database answer, and only then
//! notifies systemd. If one hangs, systemd restarts the service; runs continue.

use std::sync::mpsc;
use std::time::Duration;

use coldrise_block::{Context, Result};
use sd_notify::NotifyState;
use tokio::runtime::Handle;

use crate::service::SharedService;

/// Interval without a watchdog: of the status alone.
const STATUS_INTERVAL: Duration = Duration::from_secs(10);

/// Starts the thread, if systemd started the service. It ends with the process.
///
/// # Errors
/// Errors of starting a thread.
pub(crate) fn start(service: SharedService, runtime: Handle) -> Result<()> {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return Ok(());
    }
    let mut limit_us = 0;
    let is_watched = sd_notify::watchdog_enabled(false, &mut limit_us);
    // A third: two looks may be late.
    let interval = if is_watched { Duration::from_micros(limit_us / 3) } else { STATUS_INTERVAL };
    std::thread::Builder::new()
        .name("watchdog".to_owned())
        .spawn(move || {
            loop {
                // A service that stops takes the time that TimeoutStopSec= gives.
                if *service.stop.borrow() || (answers(&service, &runtime) && is_watched) {
                    let _ = sd_notify::notify(false, &[NotifyState::Watchdog]);
                }
                let _ = sd_notify::notify(false, &[NotifyState::Status(&status(&service))]);
                std::thread::sleep(interval);
            }
        })
        .context(|| "starting the watchdog's thread")
        .map(drop)
}

/// Whether the runtime and the database answer. Waits for as long as they do not.
fn answers(service: &SharedService, runtime: &Handle) -> bool {
    let (sender, receiver) = mpsc::channel();
    runtime.spawn(async move {
        let _ = sender.send(());
    });
    receiver.recv().is_ok()
        && service.database.read(|sql| sql.query_row("SELECT 1", [], |_| Ok(()))).is_ok()
}

fn status(service: &SharedService) -> String {
    let figures = service.messenger.figures();
    format!("{} runs, {} failures, {} warnings", figures.running, figures.fail, figures.warn)
}

/// Says that the service is ready, reloads or stops. Without systemd it has no effect.
pub(crate) fn tell(state: &NotifyState<'_>) {
    let time = match state {
        NotifyState::Reloading => NotifyState::monotonic_usec_now().ok(),
        _ => None,
    };
    let _ = sd_notify::notify(
        false,
        &[Some(state.clone()), time].into_iter().flatten().collect::<Vec<_>>(),
    );
}
