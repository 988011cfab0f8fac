//! A directory for RocksDB's own log of one reader.
//!
//! It lies in `leases/` (or, where that is not writable, in the system's
//! directory for temporary files), is locked while the reader lives and removed
//! when it ends. What a killed reader left is removed by the next one.

use std::fs::File;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Result};
use rustix::fs::{flock, FlockOperation};

use crate::{hex, seal};

const PREFIX: &str = "rocksdb-";

/// The directory of one reader.
pub(crate) struct ReaderDirectory {
    path: PathBuf,
    /// Open for its lock.
    _locked: File,
}

impl ReaderDirectory {
    /// Makes a new one in `parent`.
    pub(crate) fn create(parent: &Path) -> Result<Self> {
        remove_abandoned(parent);
        Self::create_in(parent).or_else(|_| Self::create_in(&std::env::temp_dir()))
    }

    fn create_in(parent: &Path) -> Result<Self> {
        let mut suffix = [0; 8];
        seal::random(&mut suffix)?;
        let path = parent.join(format!("{PREFIX}{}", hex::encode(&suffix)));
        let what = || format!("making {}", path.display());
        std::fs::DirBuilder::new().mode(0o700).create(&path).context(what)?;
        let locked = File::open(&path).context(what)?;
        flock(&locked, FlockOperation::NonBlockingLockExclusive)
            .map_err(std::io::Error::from)
            .context(what)?;
        // Another reader may have taken it for abandoned before it was locked.
        path.symlink_metadata().context(what)?;
        Ok(ReaderDirectory { path, _locked: locked })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ReaderDirectory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "a reader's directory stays");
        }
    }
}

/// Removes directories that nobody has locked. One that was made this moment
/// and is not locked yet may go too: its maker then takes another place.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let is_ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if !is_ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let Ok(directory) = File::open(entry.path()) else { continue };
        if flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // A failure leaves it to the next reader.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
