//! Follows the repository: a thread that refreshes the inventory and tells what changed.

use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::Duration;

use coldrise_block::{Context, Result};

use crate::events::What;
use crate::service::SharedService;

/// Interval of looking; a look takes well under a millisecond if nothing changed.
const INTERVAL: Duration = Duration::from_secs(1);
/// The same while the repository is away.
const AWAY_INTERVAL: Duration = Duration::from_secs(5);

/// Asks for a look at once, such as after the end of a run.
#[derive(Clone)]
pub(crate) struct Refresher(SyncSender<()>);

impl Refresher {
    /// Looks soon. Several requests are one look.
    pub(crate) fn wake(&self) {
        // Full: a look is due already.
        let _ = self.0.try_send(());
    }
}

/// The channel of a [`Refresher`].
pub(crate) fn channel() -> (Refresher, mpsc::Receiver<()>) {
    let (sender, receiver) = mpsc::sync_channel(1);
    (Refresher(sender), receiver)
}

/// Starts the thread. It ends with the service.
///
/// # Errors
/// Errors of starting a thread.
pub(crate) fn start(service: SharedService, wakes: mpsc::Receiver<()>) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name("inventory".to_owned())
        .spawn(move || follow(&service, &wakes))
        .context(|| "starting the thread that follows the repository")
}

fn follow(service: &SharedService, wakes: &mpsc::Receiver<()>) {
    let mut last_error = None;
    while !*service.stop.borrow() {
        let interval = match refresh(service) {
            Ok(()) => {
                if last_error.take().is_some() {
                    tracing::info!("the repository is back");
                    service.events.send(What::Settings);
                }
                INTERVAL
            }
            Err(error) => {
                let text = error.full_message();
                if last_error.as_ref() != Some(&text) {
                    tracing::error!("the repository: {text}");
                    last_error = Some(text);
                }
                AWAY_INTERVAL
            }
        };
        if let Err(RecvTimeoutError::Disconnected) = wakes.recv_timeout(interval) {
            return;
        }
    }
}

fn refresh(service: &SharedService) -> Result<()> {
    let changes = service.inventory()?.refresh()?;
    for machine in changes.machines {
        service.events.send(What::Machine { machine: machine.to_string() });
    }
    for session in changes.sessions {
        service.events.send(What::Session { session });
    }
    Ok(())
}
