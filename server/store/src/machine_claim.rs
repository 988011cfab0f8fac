//! Allows only one backup at a time of each machine.
//!
//! A backup builds on the machine's latest point, its name is the time, and a bitmap counts from
//! the last one, so two at once would conflict. Each holds `leases/backup-HASH` (flock) from before
//! it reads the catalog until its point is stored, whichever process is the writer. HASH is keyed,
//! so the file name reveals no machine.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::fs::{flock, FlockOperation};

use crate::{hex, MachineName, Repository};

/// A machine that is being backed up, as long as this lives.
pub struct MachineClaim {
    path: PathBuf,
    file: File,
}

impl Repository {
    /// Claims a machine for one backup.
    ///
    /// # Errors
    /// `Busy` while another backup has it.
    pub fn claim_machine(&self, machine: &MachineName) -> Result<MachineClaim> {
        let hash = self.derive_key("backup of a machine", machine.as_str().as_bytes());
        let path = self.leases_dir().join(format!("backup-{}", hex::encode(&hash[..16])));
        let what = || format!("locking {}", path.display());
        loop {
            let mut options = File::options();
            options.write(true).create(true).truncate(false).mode(0o600);
            let file = options.open(&path).context(what)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(Error::new(
                        ErrorKind::Busy,
                        format!(
                            "another backup of {machine} is running: wait for it to end, or stop it"
                        ),
                    ))
                }
                Err(errno) => return Err(std::io::Error::from(errno)).context(what),
            }
            // The previous holder may have just removed the file.
            let is_there = match path.metadata() {
                Ok(found) => found.ino() == file.metadata().context(what)?.ino(),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
                Err(error) => return Err(error).context(what),
            };
            if is_there {
                return Ok(MachineClaim { path, file });
            }
        }
    }
}

impl Drop for MachineClaim {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        // Closing the file is not enough: a child process may have it open too.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}
