//! Advisory locks on files. They end with the process that held them.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::Repository;
use rustix::fs::{FlockOperation, flock};

use crate::paths::SessionPaths;

/// A held lock.
pub(crate) struct FileLock {
    /// `None` if the file does not exist and the file system is read-only: then no process has the
    /// lock, and nothing under it can change.
    file: Option<File>,
}

impl Drop for FileLock {
    /// Unlocks explicitly. Closing the file is not enough: a child process that another thread
    /// starts at this moment also has it, until it executes its own program.
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let _ = flock(file, FlockOperation::Unlock);
        }
    }
}

/// Retry time of a writer. A process that checks whether a session is served holds the session's
/// lock briefly.
pub(crate) const PROBE_PATIENCE: Duration = Duration::from_millis(100);
/// Longest wait for a process that opens, closes or seals a session.
pub(crate) const PASSING_PATIENCE: Duration = Duration::from_secs(10);
const PROBE_PAUSE: Duration = Duration::from_millis(2);

/// Opens the file of a lock, and creates it if necessary.
///
/// # Errors
/// `ReadOnly` if it cannot be created. For an existing file, read access is enough.
pub(crate) fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    let opened = options.create(true).truncate(false).write(true).mode(0o600).open(path);
    let opened = opened.context(|| format!("opening {}", path.display()));
    match opened {
        Err(error) if error.kind() == ErrorKind::ReadOnly => File::open(path).map_err(|_| error),
        opened => opened,
    }
}

/// Returns false while another process holds the lock.
fn try_lock(file: &File, path: &Path) -> Result<bool> {
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(errno) => {
                return Err(Error::io(format!("locking {}", path.display()), errno.into()));
            }
        }
    }
}

impl FileLock {
    /// Waits for the lock. Use it only for locks that are held briefly.
    pub(crate) fn wait(path: &Path) -> Result<FileLock> {
        let file = match open(path) {
            Err(error) if error.kind() == ErrorKind::ReadOnly => {
                return Ok(FileLock { file: None });
            }
            opened => opened?,
        };
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Ok(()) => return Ok(FileLock { file: Some(file) }),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    let context = format!("locking {}", path.display());
                    return Err(Error::io(context, errno.into()));
                }
            }
        }
    }

    /// Takes the lock; `None` while another process holds it.
    pub(crate) fn try_take(path: &Path) -> Result<Option<FileLock>> {
        let file = open(path)?;
        Ok(try_lock(&file, path)?.then_some(FileLock { file: Some(file) }))
    }

    /// Takes the lock of a session to write it. Returns `None` if another process serves the
    /// session, or does not finish its work with it.
    pub(crate) fn take(place: &SessionPaths) -> Result<Option<FileLock>> {
        // A serving process listens there. Any other holder is opening, closing or sealing the
        // session.
        FileLock::take_within(&place.lock(), || {
            if place.control().exists() { PROBE_PATIENCE } else { PASSING_PATIENCE }
        })
    }

    /// Tries to take the lock for `patience`; `None` if another process holds it for longer.
    pub(crate) fn take_within(
        path: &Path,
        patience: impl Fn() -> Duration,
    ) -> Result<Option<FileLock>> {
        let file = open(path)?;
        let start = Instant::now();
        while !try_lock(&file, path)? {
            if start.elapsed() >= patience() {
                return Ok(None);
            }
            std::thread::sleep(PROBE_PAUSE);
        }
        Ok(Some(FileLock { file: Some(file) }))
    }

    /// Takes the lock of a file that exists; `None` if it does not, or if another process holds it.
    pub(crate) fn of_existing(path: &Path) -> Result<Option<FileLock>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            opened => opened.context(|| format!("opening {}", path.display()))?,
        };
        FileLock::of_file(file, path)
    }

    /// Takes the lock of an open file; `None` if another process holds it.
    pub(crate) fn of_file(file: File, path: &Path) -> Result<Option<FileLock>> {
        Ok(try_lock(&file, path)?.then_some(FileLock { file: Some(file) }))
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

    /// The lock under which documents change and names are assigned.
    pub(crate) fn documents(repository: &Repository) -> Result<FileLock> {
        FileLock::wait(&repository.live_dir().join("lock"))
    }

    /// Like [`FileLock::documents`]; `None` if another process holds the lock for longer than
    /// `patience`.
    pub(crate) fn documents_within(
        repository: &Repository,
        patience: Duration,
    ) -> Result<Option<FileLock>> {
        FileLock::take_within(&repository.live_dir().join("lock"), || patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use coldrise_store::lock_holder;

    #[test]
    fn a_lock_is_released_although_a_child_has_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = FileLock::wait(&path).unwrap();
        let of_a_child = lock.file.as_ref().unwrap().try_clone().unwrap();
        assert!(FileLock::is_held(&path).unwrap());
        assert_eq!(lock_holder(&path), Some(std::process::id()));
        drop(lock);
        assert!(!FileLock::is_held(&path).unwrap());
        assert_eq!(lock_holder(&path), None);
        drop(of_a_child);
    }
}
