//! Advisory locks on files: they vanish with the process that held them.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::Repository;
use rustix::fs::{flock, FlockOperation};

use crate::control::Greeting;
use crate::place::Place;

/// A held lock.
pub(crate) struct FileLock {
    file: File,
}

impl Drop for FileLock {
    /// To close the file is not enough: a child that another thread starts at this moment
    /// has it, too, until it runs its own program.
    fn drop(&mut self) {
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// Whoever looks whether a session is served holds its lock for an instant; a
/// writer that meets such a look tries again for this long.
const PROBE_PATIENCE: Duration = Duration::from_millis(100);
/// Who opens, closes or seals a session is waited for this long.
pub(crate) const PASSING_PATIENCE: Duration = Duration::from_secs(10);
const PROBE_PAUSE: Duration = Duration::from_millis(2);

pub(crate) fn open(path: &Path) -> Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .context(|| format!("opening {}", path.display()))
}

impl FileLock {
    /// Waits for the lock. Only for locks that are held for moments.
    pub(crate) fn wait(path: &Path) -> Result<FileLock> {
        let file = open(path)?;
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Ok(()) => return Ok(FileLock { file }),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    let context = format!("locking {}", path.display());
                    return Err(Error::io(context, errno.into()));
                }
            }
        }
    }

    /// Takes the lock of a session for writing it, or `None` when another process
    /// serves it, or does not finish what it does with it.
    pub(crate) fn take(place: &Place) -> Result<Option<FileLock>> {
        let path = place.lock();
        let file = open(&path)?;
        let start = Instant::now();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(FileLock { file })),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    // Whoever serves it listens there; who does not is opening,
                    // closing or sealing it.
                    let patience = match place.control().exists() {
                        true => PROBE_PATIENCE,
                        false => PASSING_PATIENCE,
                    };
                    if start.elapsed() >= patience {
                        return Ok(None);
                    }
                    std::thread::sleep(PROBE_PAUSE);
                }
                Err(errno) => {
                    let context = format!("locking {}", path.display());
                    return Err(Error::io(context, errno.into()));
                }
            }
        }
    }

    /// Takes the lock of a session for serving it, or `None` when another process goes on
    /// serving it. One that was killed is waited for: it holds the lock, and seems to
    /// listen, until the system has taken its memory apart.
    pub(crate) fn take_for_serving(place: &Place) -> Result<Option<FileLock>> {
        let start = Instant::now();
        let mut greeting = None;
        loop {
            if let Some(lock) = FileLock::take(place)? {
                return Ok(Some(lock));
            }
            if greeting.is_none() {
                greeting = Greeting::send(place, PROBE_PATIENCE)?;
            }
            match greeting.as_mut().and_then(Greeting::is_answered) {
                Some(true) => return Ok(None),
                Some(false) => greeting = None,
                None => {}
            }
            if start.elapsed() >= PASSING_PATIENCE {
                return Ok(None);
            }
        }
    }

    /// True while another process holds the lock.
    pub(crate) fn is_held(path: &Path) -> Result<bool> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(Error::io(format!("opening {}", path.display()), error)),
        };
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(false),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
            Err(errno) => Err(Error::new(
                ErrorKind::Io,
                format!("looking at the lock {}: {errno}", path.display()),
            )),
        }
    }

    /// The lock under which documents change and names are given.
    pub(crate) fn documents(repository: &Repository) -> Result<FileLock> {
        FileLock::wait(&repository.live_dir().join("lock"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_given_back_although_a_child_has_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = FileLock::wait(&path).unwrap();
        let of_a_child = lock.file.try_clone().unwrap();
        assert!(FileLock::is_held(&path).unwrap());
        drop(lock);
        assert!(!FileLock::is_held(&path).unwrap());
        drop(of_a_child);
    }
}
