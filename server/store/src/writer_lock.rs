//! The lock that keeps all but one process from writing a repository's database.

use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, HeldLock, Result};
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, futimens};

use crate::lock_holder::lock_holder;
use crate::repository_config::RepositoryConfig;

const LOCK_NAME: &str = "writer.lock";

/// The lock of the only writer.
pub(crate) type WriterLock = HeldLock;

/// Takes the lock of the repository in the folder `path`, which must still be there: deriving the key takes
/// up to a second, in which a file system can be unmounted. Nothing is created in what is left of it.
pub(crate) fn lock_for_writing(path: &Path) -> Result<WriterLock> {
    RepositoryConfig::read(path)?;
    lock(path)
}

fn lock(path: &Path) -> Result<WriterLock> {
    let name = path.join(LOCK_NAME);
    let what = || format!("locking {}", name.display());
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&name)
        .context(what)
        .map_err(advise_read_only)?;
    let Some(lock) = HeldLock::take(file).context(what)? else {
        return Err(Error::new(ErrorKind::Busy, busy(path, &name)));
    };
    // The lock file's modification time shows when the lock was taken. On a read-only file system
    // nothing is written.
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    let _ = futimens(lock.file(), &times);
    Ok(lock)
}

fn advise_read_only(error: Error) -> Error {
    if error.kind() != ErrorKind::ReadOnly {
        return error;
    }
    error.context("the repository is on a read-only file system").advise(
        "list, show, stats, doctor, verify, diff and restore work there, and so do serve and mount \
         with --read-only",
    )
}

/// Names the process that writes the repository, the time since when, and what to do.
fn busy(repository: &Path, lock: &Path) -> String {
    let process = lock_holder(lock).map(|process| format!("process {process}"));
    let changed = lock.metadata().and_then(|found| found.modified()).ok();
    let since = changed.and_then(|time| jiff::Timestamp::try_from(time).ok());
    let since = since.map(|time| format!("since {time:.0}"));
    let known: Vec<String> = process.into_iter().chain(since).collect();
    format!(
        "another process is writing the repository {} ({}): wait for it to end, or stop it",
        repository.display(),
        known.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_released_although_a_child_has_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let taken = lock(folder.path()).unwrap();
        let of_a_child = taken.file().try_clone().unwrap();
        assert_eq!(lock(folder.path()).err().unwrap().kind(), ErrorKind::Busy);
        drop(taken);
        lock(folder.path()).unwrap();
        drop(of_a_child);
    }
}
