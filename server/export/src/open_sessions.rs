//! The sessions that this process writes. Each is open once; all its exports share it.

use coldrise_block::{Disk, Error, ErrorKind, Result};
use coldrise_session::{ClientFiles, Session};
use coldrise_store::{DiskName, Repository, SessionName};
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Table of open sessions.
pub(crate) struct OpenSessions {
    repository: Arc<Repository>,
    slots: Mutex<HashMap<SessionName, Slot>>,
    settled: Condvar,
}

enum Slot {
    /// One thread opens or closes it; other threads wait.
    Changing,
    /// Open, with the number of holds on it.
    Open { session: Arc<Session>, poisoned: Arc<AtomicBool>, holds: usize },
    /// It had a defect. This process never closes it, because closing would vouch for its
    /// state in memory: it stays locked against other processes until this one ends, and
    /// its next opening recovers it from its log.
    Stopped,
}

impl OpenSessions {
    pub(crate) fn new(repository: &Arc<Repository>) -> Arc<OpenSessions> {
        Arc::new(OpenSessions {
            repository: Arc::clone(repository),
            slots: Mutex::new(HashMap::new()),
            settled: Condvar::new(),
        })
    }

    /// Opens the session, or shares it. `ErrorKind::Busy` when another process
    /// writes it, `ErrorKind::Internal` after a defect in it.
    pub(crate) fn hold(self: &Arc<Self>, name: &SessionName) -> Result<SessionHold> {
        let mut slots = self.slots.lock();
        loop {
            match slots.get_mut(name) {
                Some(Slot::Changing) => self.settled.wait(&mut slots),
                Some(Slot::Stopped) => return Err(stopped(name)),
                Some(Slot::Open { poisoned, .. }) if poisoned.load(Ordering::Relaxed) => {
                    return Err(stopped(name));
                }
                Some(Slot::Open { session, poisoned, holds }) => {
                    *holds += 1;
                    return Ok(SessionHold {
                        name: name.clone(),
                        session: Some(Arc::clone(session)),
                        poisoned: Arc::clone(poisoned),
                        table: Arc::clone(self),
                    });
                }
                None => break,
            }
        }
        slots.insert(name.clone(), Slot::Changing);
        drop(slots);

        let mut change = Change { table: self, name, becomes: None };
        let session = Session::open(&self.repository, name)?;
        let poisoned = Arc::new(AtomicBool::new(false));
        change.becomes = Some(Slot::Open {
            session: Arc::clone(&session),
            poisoned: Arc::clone(&poisoned),
            holds: 1,
        });
        drop(change);
        Ok(SessionHold {
            name: name.clone(),
            session: Some(session),
            poisoned,
            table: Arc::clone(self),
        })
    }

    /// The files of clients in a session that this process writes now.
    pub(crate) fn files(&self, name: &SessionName) -> Option<Arc<ClientFiles>> {
        match self.slots.lock().get(name) {
            Some(Slot::Open { session, .. }) => Some(Arc::clone(session.files())),
            _ => None,
        }
    }

    fn release(&self, name: &SessionName) {
        let mut slots = self.slots.lock();
        let Some(Slot::Open { holds, .. }) = slots.get_mut(name) else { return };
        *holds -= 1;
        if *holds > 0 {
            return;
        }
        let Some(Slot::Open { session, poisoned, .. }) = slots.insert(name.clone(), Slot::Changing)
        else {
            return;
        };
        drop(slots);

        let mut change = Change { table: self, name, becomes: None };
        if poisoned.load(Ordering::Relaxed) {
            std::mem::forget(session);
            change.becomes = Some(Slot::Stopped);
        } else {
            // Closing syncs, so it takes a while and happens outside the lock. It waits for
            // a seal in progress: the seal holds the session too, and the next opener must
            // find it closed.
            session.stop_listening();
            drop(session);
        }
    }
}

/// Ends `Slot::Changing` after every outcome, a panic included, so that no thread waits
/// forever.
struct Change<'a> {
    table: &'a OpenSessions,
    name: &'a SessionName,
    becomes: Option<Slot>,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut slots = self.table.slots.lock();
        match self.becomes.take() {
            Some(slot) => slots.insert(self.name.clone(), slot),
            None => slots.remove(self.name),
        };
        self.table.settled.notify_all();
    }
}

fn stopped(name: &SessionName) -> Error {
    Error::new(
        ErrorKind::Internal,
        format!(
            "session {name} stopped after a defect inside Coldrise; what was flushed is safe, \
             restart the front end to continue"
        ),
    )
}

/// One export's share in an open session.
pub(crate) struct SessionHold {
    name: SessionName,
    /// `None` only while it is dropped.
    session: Option<Arc<Session>>,
    poisoned: Arc<AtomicBool>,
    table: Arc<OpenSessions>,
}

impl SessionHold {
    /// One of the session's disks, for reading and writing. Drop it before the hold.
    pub(crate) fn disk(&self, name: &DiskName) -> Result<Arc<dyn Disk>> {
        match &self.session {
            Some(session) => session.disk(name),
            None => Err(stopped(&self.name)),
        }
    }

    /// The bytes that clients write into an image file around the disk; see
    /// [`Session::side_file`]. Drop it before the hold.
    pub(crate) fn side_file(
        &self,
        name: &str,
        size_bytes: u64,
        below: Arc<dyn Disk>,
    ) -> Result<Arc<dyn Disk>> {
        match &self.session {
            Some(session) => session.side_file(name, size_bytes, below),
            None => Err(stopped(&self.name)),
        }
    }

    /// The files of clients. Drop them before the hold.
    pub(crate) fn files(&self) -> Result<Arc<ClientFiles>> {
        match &self.session {
            Some(session) => Ok(Arc::clone(session.files())),
            None => Err(stopped(&self.name)),
        }
    }

    /// True once the session refuses writes: unflushed writes may be lost.
    pub(crate) fn has_stopped(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.has_stopped())
    }

    /// Makes the session refuse further writes and seals.
    pub(crate) fn stop(&self) {
        if let Some(session) = &self.session {
            session.stop();
        }
    }

    /// Set once any export of the session had a defect.
    pub(crate) fn poisoned(&self) -> &Arc<AtomicBool> {
        &self.poisoned
    }
}

impl Drop for SessionHold {
    fn drop(&mut self) {
        // Drop our share first: the table's share must be the last one at close.
        self.session = None;
        self.table.release(&self.name);
    }
}
