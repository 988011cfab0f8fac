//! The guest's file systems, frozen for the instant, and thawed in any case.
//!
//! A thread of its own freezes and thaws, so that a QEMU that does not answer cannot keep the guest
//! frozen: after [`FREEZE_LIMIT`] the thread thaws by itself. A process that is killed meanwhile leaves the
//! guest frozen; the next backup with the agent thaws it.

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_qmp::{FREEZE_LIMIT, GuestAgent};

/// A guest with frozen file systems. Dropping it thaws them.
pub(crate) struct FrozenGuest {
    release: Option<Sender<()>>,
    thread: Option<JoinHandle<Result<bool>>>,
}

/// Freezes the guest's file systems.
///
/// # Errors
/// If the agent does not freeze in time; then it got the command to thaw.
pub(crate) fn freeze(socket: &Path) -> Result<FrozenGuest> {
    let socket = socket.to_owned();
    FrozenGuest::hold(move || {
        let mut agent = GuestAgent::connect(&socket).and_then(GuestAgent::freeze)?;
        Ok(move || agent.thaw())
    })
}

impl FrozenGuest {
    /// Freezes in a thread of its own. `freeze` returns what thaws, which the thread calls when the
    /// guest is thawed or dropped, or after [`FREEZE_LIMIT`].
    ///
    /// # Errors
    /// Those of `freeze`.
    pub(crate) fn hold<T: FnOnce() -> Result<()>>(
        freeze: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<FrozenGuest> {
        let (frozen, is_frozen) = channel();
        let (release, released) = channel();
        let thread = std::thread::spawn(move || {
            let thaw = match freeze() {
                Ok(thaw) => thaw,
                Err(error) => {
                    let _ = frozen.send(Err(error));
                    return Ok(false);
                }
            };
            let _ = frozen.send(Ok(()));
            let is_in_time = released.recv_timeout(FREEZE_LIMIT) != Err(RecvTimeoutError::Timeout);
            thaw().map(|()| is_in_time)
        });
        let guest = FrozenGuest { release: Some(release), thread: Some(thread) };
        let ended = || Error::new(ErrorKind::Internal, "the thread of the guest agent ended");
        is_frozen.recv().map_err(|_| ended())??;
        Ok(guest)
    }

    /// Thaws. Returns whether the guest was frozen until now.
    ///
    /// # Errors
    /// If the agent does not answer: the guest may still be frozen.
    pub(crate) fn thaw(mut self) -> Result<bool> {
        self.end()
    }

    fn end(&mut self) -> Result<bool> {
        drop(self.release.take());
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(thawed)) => thawed,
            _ => Ok(false),
        }
    }
}

impl Drop for FrozenGuest {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!("{}", error.full_message());
        }
    }
}

/// Thaws what a killed backup left frozen. Returns whether it did.
///
/// # Errors
/// If the agent does not answer.
pub(crate) fn thaw_leftover(socket: &Path) -> Result<bool> {
    let mut agent = GuestAgent::connect(socket)?;
    if !agent.is_frozen()? {
        return Ok(false);
    }
    agent.thaw().map(|()| true)
}
