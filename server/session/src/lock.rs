//! Advisory locks on files: they vanish with the process that held them.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::Repository;
use rustix::fs::{flock, FlockOperation};

use crate::control::Greeting;
use crate::place::Place;

/// A held lock.
pub(crate) struct FileLock {
    /// `None` where the file is not there and the file system is read-only: then nobody
    /// has the lock, and nothing can be changed under it.
    file: Option<File>,
}

impl Drop for FileLock {
    /// To close the file is not enough: a child that another thread starts at this moment
    /// has it, too, until it runs its own program.
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let _ = flock(file, FlockOperation::Unlock);
        }
    }
}

/// Whoever looks whether a session is served holds its lock for an instant; a
/// writer that meets such a look tries again for this long.
const PROBE_PATIENCE: Duration = Duration::from_millis(100);
/// Who opens, closes or seals a session is waited for this long.
pub(crate) const PASSING_PATIENCE: Duration = Duration::from_secs(10);
const PROBE_PAUSE: Duration = Duration::from_millis(2);

/// Opens the file of a lock, and makes it where it is not there.
///
/// # Errors
/// `ReadOnly` where it cannot be made; where it is there, reading it is enough.
pub(crate) fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    let opened = options.create(true).truncate(false).write(true).mode(0o600).open(path);
    let opened = opened.context(|| format!("opening {}", path.display()));
    match opened {
        Err(error) if error.kind() == ErrorKind::ReadOnly => File::open(path).map_err(|_| error),
        opened => opened,
    }
}

/// False while another process holds the lock.
fn try_lock(file: &File, path: &Path) -> Result<bool> {
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(errno) => {
                return Err(Error::io(format!("locking {}", path.display()), errno.into()))
            }
        }
    }
}

impl FileLock {
    /// Waits for the lock. Only for locks that are held for moments.
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

    /// Takes the lock of a session for writing it, or `None` when another process
    /// serves it, or does not finish what it does with it.
    pub(crate) fn take(place: &Place) -> Result<Option<FileLock>> {
        // Whoever serves it listens there; who does not is opening, closing or sealing it.
        FileLock::take_within(&place.lock(), || match place.control().exists() {
            true => PROBE_PATIENCE,
            false => PASSING_PATIENCE,
        })
    }

    fn take_within(path: &Path, patience: impl Fn() -> Duration) -> Result<Option<FileLock>> {
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

    /// The same lock; `None` where another process holds it for longer than `patience`.
    pub(crate) fn documents_within(
        repository: &Repository,
        patience: Duration,
    ) -> Result<Option<FileLock>> {
        FileLock::take_within(&repository.live_dir().join("lock"), || patience)
    }

    /// The id of the process that holds the lock, for messages; `None` where the kernel
    /// does not tell, as for a process of another container.
    pub(crate) fn holder(path: &Path) -> Option<u32> {
        let inode = std::fs::metadata(path).ok()?.ino().to_string();
        let locks = std::fs::read_to_string("/proc/locks").ok()?;
        // `1: FLOCK  ADVISORY  WRITE 4242 fd:00:131 0 EOF`
        locks.lines().find_map(|line| {
            let mut words = line.split_whitespace().skip(1);
            let is_held = words.next()? == "FLOCK" && words.nth(1)? == "WRITE";
            let process = words.next()?.parse().ok().filter(|process| *process > 0);
            let is_this = words.next()?.rsplit(':').next() == Some(inode.as_str());
            process.filter(|_| is_held && is_this)
        })
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
        let of_a_child = lock.file.as_ref().unwrap().try_clone().unwrap();
        assert!(FileLock::is_held(&path).unwrap());
        assert_eq!(FileLock::holder(&path), Some(std::process::id()));
        drop(lock);
        assert!(!FileLock::is_held(&path).unwrap());
        assert_eq!(FileLock::holder(&path), None);
        drop(of_a_child);
    }
}
