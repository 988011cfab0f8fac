//! Work in the background that gives way.
//!
//! One process at a time writes the database. Who does so in the background holds
//! `background.turn` as well (flock, exclusive), taken first, and writes there what it
//! does. Who finds the database taken, and that lock too, holds `background.wanted`
//! (shared) and waits; the one in the background sees that and ends its turn. Like all
//! locks they go with their process.
//!
//! A gc makes a fold give way, and nobody in the background a gc: two gcs would else
//! make each other give way for ever.

use std::fs::File;
use std::io::ErrorKind::{QuotaExceeded, StorageFull};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::fs::{flock, FlockOperation};

use crate::lock::open;

const TURN: &str = "background.turn";
const WANTED: &str = "background.wanted";
/// Who works in the background ends its turn within a second or so.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often it looks whether somebody waits.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
const PAUSE: Duration = Duration::from_millis(20);

/// What is done in the background.
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

/// A turn of writing in the background, or the wish for one.
pub struct BackgroundTurn {
    repository: PathBuf,
    _turn: File,
}

impl BackgroundTurn {
    /// Begins a turn; to be taken before the repository is opened for writing, and let
    /// go after it is closed. `None` while somebody waits, or has a turn of this kind.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn begin(repository: &Path, work: BackgroundWork) -> Result<Option<BackgroundTurn>> {
        let path = repository.join(TURN);
        let turn = open(&path)?;
        if !lock(&turn, &path, FlockOperation::NonBlockingLockExclusive)? {
            return Ok(None);
        }
        let named = turn.set_len(0).and_then(|()| turn.write_all_at(work.name(), 0));
        match named {
            // It only tells others what is done: on a full drive that is what makes room.
            Err(error) if matches!(error.kind(), StorageFull | QuotaExceeded) => {}
            named => named.context(|| format!("writing {}", path.display()))?,
        }
        let turn = BackgroundTurn { repository: repository.to_owned(), _turn: turn };
        Ok((!turn.is_wanted()?).then_some(turn))
    }

    /// The same for a gc: it makes a fold give way, and waits for whatever else has a
    /// turn or wants to write.
    ///
    /// # Errors
    /// `Busy` where it waited in vain, for a minute; `Interrupted` once `cancel` is set.
    pub fn begin_gc(repository: &Path, cancel: &AtomicBool) -> Result<BackgroundTurn> {
        let started = Instant::now();
        loop {
            if let Some(turn) = BackgroundTurn::begin(repository, BackgroundWork::Gc)? {
                return Ok(turn);
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

    /// Does `work`; the flag that it is given is set as soon as somebody waits for this
    /// turn to end, or `end` is set.
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

    /// Whether somebody waits for this turn to end.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn is_wanted(&self) -> Result<bool> {
        let path = self.repository.join(WANTED);
        let file = open(&path)?;
        Ok(!lock(&file, &path, FlockOperation::NonBlockingLockExclusive)?)
    }
}

/// Ends the watch over a turn, also where its work panics.
struct Over<'a>(&'a AtomicBool, &'a Thread);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
        self.1.unpark();
    }
}

/// Opens a repository for writing with `open_writer`; where it is busy with work in the
/// background, that is asked to give way and waited for.
///
/// # Errors
/// Those of `open_writer`: `Busy` where somebody else writes it.
pub fn write_before_background<T>(
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
            // The turn may have ended just now.
            return open_writer();
        }
        let _wish = want(repository)?;
        while is_background(repository)? && started.elapsed() < PATIENCE {
            std::thread::sleep(PAUSE);
        }
        // Before the next turn can begin: who wants to begin one looks at this lock.
        match open_writer() {
            Err(error) if error.kind() == ErrorKind::Busy => {}
            opened => return opened,
        }
    }
}

/// Says that somebody wants to write, as long as what it returns lives.
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

/// False where another process holds it.
fn lock(file: &File, path: &Path, how: FlockOperation) -> Result<bool> {
    loop {
        match flock(file, how) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(errno) => {
                return Err(Error::io(format!("locking {}", path.display()), errno.into()))
            }
        }
    }
}
