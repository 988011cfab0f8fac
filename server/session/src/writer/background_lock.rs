//! The lock of background work, which yields to other writers.
//!
//! Only one process at a time can write the database. A background process also holds
//! `background.turn` (flock, exclusive). It takes this lock first and writes its kind of work into
//! the file. A process that finds both the database and this lock taken holds `background.wanted`
//! (flock, shared) and waits. The background process notices this and ends its work. All these
//! locks end with their process.
//!
//! A gc preempts a fold. Nothing in the background preempts a gc: two gcs would preempt each other
//! forever.

use std::fs::File;
use std::io::ErrorKind::{QuotaExceeded, StorageFull};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, HeldLock, Result};
use rustix::fs::{FlockOperation, flock};

use crate::locks::file_lock::open;

const TURN: &str = "background.turn";
const WANTED: &str = "background.wanted";
/// Longest wait. A background process normally ends its work within about a second.
const PATIENCE: Duration = Duration::from_secs(60);
/// Interval between two checks for a waiting process.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
const PAUSE: Duration = Duration::from_millis(20);

/// The kind of background work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackgroundWork {
    /// `fold --watch`.
    Fold,
    /// `gc`.
    Gc,
}

impl BackgroundWork {
    fn name(self) -> &'static [u8] {
        match self {
            BackgroundWork::Fold => b"fold",
            BackgroundWork::Gc => b"gc",
        }
    }
}

/// The lock of one process that writes in the background.
pub struct BackgroundLock {
    repository: PathBuf,
    _lock: HeldLock,
}

impl BackgroundLock {
    /// Takes the lock. Take it before you open the repository for writing, and release it after you
    /// close the repository. Returns `None` while another process holds it or waits to write.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn begin(repository: &Path, work: BackgroundWork) -> Result<Option<BackgroundLock>> {
        let path = repository.join(TURN);
        let taken =
            HeldLock::take(open(&path)?).context(|| format!("locking {}", path.display()))?;
        let Some(lock) = taken else { return Ok(None) };
        let file = lock.file();
        let named = file.set_len(0).and_then(|()| file.write_all_at(work.name(), 0));
        match named {
            // The content only informs other processes. If the drive is full, this work makes room.
            Err(error) if matches!(error.kind(), StorageFull | QuotaExceeded) => {}
            named => named.context(|| format!("writing {}", path.display()))?,
        }
        let lock = BackgroundLock { repository: repository.to_owned(), _lock: lock };
        Ok((!lock.is_wanted()?).then_some(lock))
    }

    /// Takes the lock for a gc. It preempts a fold, and waits for any other process that holds the
    /// lock or wants to write.
    ///
    /// # Errors
    /// `Busy` after a minute without success; `Interrupted` once `cancel` is set.
    pub fn begin_gc(repository: &Path, cancel: &AtomicBool) -> Result<BackgroundLock> {
        let started = Instant::now();
        loop {
            if let Some(lock) = BackgroundLock::begin(repository, BackgroundWork::Gc)? {
                return Ok(lock);
            }
            let wish = match std::fs::read(repository.join(TURN)) {
                Ok(work) if work == BackgroundWork::Fold.name() => Some(want(repository)?),
                _ => None,
            };
            loop {
                if cancel.load(Ordering::Relaxed) {
                    return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
                }
                if started.elapsed() >= PATIENCE {
                    let message = "another process works on the repository in the background: \
                                   wait for it to end, or stop it";
                    return Err(Error::new(ErrorKind::Busy, message));
                }
                std::thread::sleep(PAUSE);
                if !is_background(repository)? {
                    break;
                }
            }
            drop(wish);
        }
    }

    /// Runs `work`. The flag passed to `work` is set as soon as another process waits for the lock,
    /// or `end` is set.
    pub fn run<T>(&self, end: &AtomicBool, work: impl FnOnce(&AtomicBool) -> T) -> T {
        let (cancel, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                while !is_over.load(Ordering::SeqCst) {
                    if end.load(Ordering::Relaxed) || self.is_wanted().unwrap_or(true) {
                        cancel.store(true, Ordering::Relaxed);
                    }
                    std::thread::park_timeout(LOOK_INTERVAL);
                }
            });
            let _over = Over(&is_over, watch.thread());
            work(&cancel)
        })
    }

    /// True if another process waits for this lock.
    ///
    /// # Errors
    /// The operating system's error.
    pub(crate) fn is_wanted(&self) -> Result<bool> {
        let path = self.repository.join(WANTED);
        let file = open(&path)?;
        Ok(!lock(&file, &path, FlockOperation::NonBlockingLockExclusive)?)
    }
}

/// Ends the watch over the lock, even if the work panics.
struct Over<'a>(&'a AtomicBool, &'a Thread);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
        self.1.unpark();
    }
}

/// Opens a repository for writing with `open_writer`. If background work keeps it busy, asks that
/// work to yield and waits.
///
/// # Errors
/// The errors of `open_writer`: `Busy` if another process writes the repository.
pub(crate) fn write_before_background<T>(
    repository: &Path,
    mut open_writer: impl FnMut() -> Result<T>,
) -> Result<T> {
    let started = Instant::now();
    loop {
        match open_writer() {
            Err(error) if error.kind() == ErrorKind::Busy => {}
            opened => return opened,
        }
        if !is_background(repository)? || started.elapsed() >= PATIENCE {
            // The background work may have ended just now.
            return open_writer();
        }
        let _wish = want(repository)?;
        while is_background(repository)? && started.elapsed() < PATIENCE {
            std::thread::sleep(PAUSE);
        }
        // Open before the next background work can begin: it checks this lock first.
        match open_writer() {
            Err(error) if error.kind() == ErrorKind::Busy => {}
            opened => return opened,
        }
    }
}

/// Announces a waiting writer until the returned file is dropped.
fn want(repository: &Path) -> Result<File> {
    let path = repository.join(WANTED);
    let wanted = open(&path)?;
    lock(&wanted, &path, FlockOperation::LockShared)?;
    Ok(wanted)
}

fn is_background(repository: &Path) -> Result<bool> {
    let path = repository.join(TURN);
    match File::open(&path) {
        Ok(file) => Ok(!lock(&file, &path, FlockOperation::NonBlockingLockShared)?),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::io(format!("opening {}", path.display()), error)),
    }
}

/// Returns false if another process holds the lock.
fn lock(file: &File, path: &Path, how: FlockOperation) -> Result<bool> {
    loop {
        match flock(file, how) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(errno) => {
                return Err(Error::io(format!("locking {}", path.display()), errno.into()));
            }
        }
    }
}
