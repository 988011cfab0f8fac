//! A directory for RocksDB's own log of one process.
//!
//! It is not on the repository's disk but in shared memory or in the system's
//! directory for temporary files. The reason: Debian's RocksDB is built with
//! assertions, and one of them ends the process when its log meets a full disk.
//! The directory is locked while the process lives and removed when it ends. The
//! next process removes the remains of a killed one.

use std::fs::File;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, flock, statvfs};
use rustix::io::Errno;

use crate::aead;
use coldrise_block::hex;

const PREFIX: &str = "coldrise-rocksdb-";
const SHARED_MEMORY: &str = "/dev/shm";
/// Reserved space: far more than the log of one open. Later RocksDB logs only
/// fatal errors.
const ROOM_BYTES: u64 = 1 << 20;
/// Names that are tried. Each is lost only to a process that begins in the same moment.
const ATTEMPTS: usize = 100;

/// The directory of one process.
pub struct LogDirectory {
    path: PathBuf,
    /// Open to hold the lock.
    _locked: File,
}

impl LogDirectory {
    /// Creates a directory.
    pub fn create() -> Result<Self> {
        let shared = Path::new(SHARED_MEMORY);
        let temporary = std::env::temp_dir();
        remove_abandoned(shared);
        Self::create_in(shared).or_else(|_| {
            remove_abandoned(&temporary);
            Self::create_in(&temporary)
        })
    }

    fn create_in(parent: &Path) -> Result<Self> {
        let what = || format!("making a directory in {}", parent.display());
        let found = statvfs(parent).map_err(std::io::Error::from).context(what)?;
        if found.f_bavail.saturating_mul(found.f_frsize) < ROOM_BYTES {
            let message = format!("no room in {}", parent.display());
            return Err(Error::new(ErrorKind::NoSpace, message));
        }
        for _ in 0..ATTEMPTS {
            if let Some(made) = Self::try_create_in(parent)? {
                return Ok(made);
            }
        }
        Err(Error::new(ErrorKind::Io, format!("{}: others removed it each time", what())))
    }

    /// `None` if another process took it for an abandoned one before it was locked.
    fn try_create_in(parent: &Path) -> Result<Option<Self>> {
        let mut suffix = [0; 8];
        aead::random(&mut suffix)?;
        let path = parent.join(format!("{PREFIX}{}", hex::encode(&suffix)));
        let what = || format!("making {}", path.display());
        std::fs::DirBuilder::new().mode(0o700).create(&path).context(what)?;
        let locked = match File::open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            opened => opened.context(what)?,
        };
        match flock(&locked, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Ok(None),
            taken => taken.map_err(std::io::Error::from).context(what)?,
        }
        match path.symlink_metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            there => there.context(what).map(|_| Some(LogDirectory { path, _locked: locked })),
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LogDirectory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "the directory of RocksDB's log stays");
        }
    }
}

/// Removes unlocked directories. This may include one that was just created and
/// is not locked yet; its creator then uses another name.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let is_ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if !is_ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let Ok(directory) = File::open(entry.path()) else { continue };
        if flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // After a failure the next process tries again.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_begin_together_all_have_a_directory() {
        let parent = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        remove_abandoned(parent.path());
                        let made = LogDirectory::create_in(parent.path()).unwrap();
                        assert!(made.path().is_dir());
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
