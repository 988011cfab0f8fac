//! Follows the repository: a thread that refreshes the inventory and tells what changed.

use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::Duration;

use coldrise_block::{Context, Result};

use crate::events::What;
use crate::housekeeping::Housekeeping;
use crate::service::SharedService;

/// Interval of looking; a look takes well under a millisecond if nothing changed.
const INTERVAL: Duration = Duration::from_secs(1);
/// The same while the repository is away.
const AWAY_INTERVAL: Duration = Duration::from_secs(5);
/// The start of the service waits this long for the first look. A large repository may take longer.
const FIRST_LOOK: Duration = Duration::from_secs(10);

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

/// Starts the thread, and waits for its first look, for some seconds at most. It ends with the service.
///
/// # Errors
/// Errors of starting a thread.
pub(crate) fn start(service: SharedService, wakes: mpsc::Receiver<()>) -> Result<JoinHandle<()>> {
    let (looked, first_look) = mpsc::sync_channel(1);
    let thread = std::thread::Builder::new()
        .name("inventory".to_owned())
        .spawn(move || follow(&service, &wakes, &looked))
        .context(|| "starting the thread that follows the repository")?;
    let _ = first_look.recv_timeout(FIRST_LOOK);
    Ok(thread)
}

fn follow(service: &SharedService, wakes: &mpsc::Receiver<()>, looked: &SyncSender<()>) {
    let mut last_error = None;
    let mut housekeeping = Housekeeping::default();
    while !*service.stop.borrow() {
        let interval = match refresh(service) {
            Ok(()) => {
                housekeeping.step(service);
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
        let _ = looked.try_send(());
        if let Err(RecvTimeoutError::Disconnected) = wakes.recv_timeout(interval) {
            return;
        }
    }
}

fn refresh(service: &SharedService) -> Result<()> {
    let changes = service.inventory()?.refresh()?;
    if changes.is_opened {
        // Reading the whole catalog took several times what the index takes.
        coldrise_store::return_free_memory();
    }
    for machine in changes.machines {
        service.events.send(What::Machine { machine: machine.to_string() });
    }
    for session in changes.sessions {
        service.events.send(What::Session { session });
    }
    Ok(())
}
