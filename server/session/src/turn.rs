//! Work in the background that gives way.
//!
//! One process at a time writes the database. Who does so in the background holds
//! `background.turn` as well (flock, exclusive), taken first. Who finds the database
//! taken, and that lock too, holds `background.wanted` (shared) and waits; the one in the
//! background sees that and ends its turn. Like all locks they go with their process.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use rustix::fs::{flock, FlockOperation};

use crate::lock::open;

const TURN: &str = "background.turn";
const WANTED: &str = "background.wanted";
/// Who works in the background ends its turn within a second or so.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

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
    pub fn begin(repository: &Path) -> Result<Option<BackgroundTurn>> {
        let path = repository.join(TURN);
        let turn = open(&path)?;
        if !lock(&turn, &path, FlockOperation::NonBlockingLockExclusive)? {
            return Ok(None);
        }
        let turn = BackgroundTurn { repository: repository.to_owned(), _turn: turn };
        Ok((!turn.is_wanted()?).then_some(turn))
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
        let path = repository.join(WANTED);
        let wanted = open(&path)?;
        lock(&wanted, &path, FlockOperation::LockShared)?;
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
