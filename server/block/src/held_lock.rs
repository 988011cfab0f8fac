//! A flock(2) that is held.

use std::fs::File;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// A lock, free again when this is dropped.
pub struct HeldLock(File);

impl Drop for HeldLock {
    /// Closing the file is not enough: a child that another thread is starting also has it open
    /// until it runs its own program.
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl HeldLock {
    /// Takes the lock for this process alone. `None` if another one holds it.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn take(file: File) -> std::io::Result<Option<HeldLock>> {
        HeldLock::try_take(file, FlockOperation::NonBlockingLockExclusive)
    }

    /// Whether a process holds the lock for itself alone. Those that only test it do not disturb each
    /// other.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn is_held(file: File) -> std::io::Result<bool> {
        HeldLock::try_take(file, FlockOperation::NonBlockingLockShared).map(|lock| lock.is_none())
    }

    /// The file that is locked.
    pub fn file(&self) -> &File {
        &self.0
    }

    fn try_take(file: File, how: FlockOperation) -> std::io::Result<Option<HeldLock>> {
        loop {
            match flock(&file, how) {
                Ok(()) => return Ok(Some(HeldLock(file))),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}
