//! A lock between the opening of a writer and the catch-up of a reader.
//!
//! A writer begins another manifest when it opens the database. A reader may not catch up meanwhile
//! (see `reader.rs`). The lock is a `flock` of the database's directory, which a reader may take
//! without write access and which ends with its process. A writer that did not get it opens the
//! database nevertheless, a reader opens it again instead.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// How long to wait for the lock. A catch-up takes less than a millisecond, or as long as opening the
/// database; a process can be stopped meanwhile.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// How often to try.
const INTERVAL: Duration = Duration::from_millis(1);

/// Waits until no reader catches up and no other writer opens the database. Held until dropped.
pub(super) fn lock_for_opening(database: &Path) -> Option<File> {
    lock(database, FlockOperation::NonBlockingLockExclusive)
}

/// Waits until no writer opens the database. `None` if one does for longer.
pub(super) fn lock_for_catch_up(database: &Path) -> Option<File> {
    lock(database, FlockOperation::NonBlockingLockShared)
}

fn lock(database: &Path, how: FlockOperation) -> Option<File> {
    let file = File::open(database).ok()?;
    let until = Instant::now() + PATIENCE;
    loop {
        match flock(&file, how) {
            Ok(()) => return Some(file),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < until => {
                std::thread::sleep(INTERVAL);
            }
            Err(Errno::WOULDBLOCK | Errno::INTR) => return None,
            // A file system without such locks.
            Err(_) => return Some(file),
        }
    }
}
