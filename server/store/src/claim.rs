//! Claims: work that one process at a time may do.
//!
//! A process holds `leases/NAME` (flock) while it works. The file is removed at the end; a killed process
//! leaves it unlocked, which is not a claim.
//!
//! `backup-HASH` allows one backup, or copy to this repository, at a time of each machine. A backup builds on the machine's latest
//! point, its name is the time, and a bitmap counts from the last one, so two at once would conflict.
//! The claim is held from before the catalog is read until the point is stored, whichever process is the
//! writer. HASH is keyed, so the file name reveals no machine.

use std::fs::{DirBuilder, File};
use std::io::ErrorKind::{AlreadyExists, NotFound};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, HeldLock, Result};

use crate::repository_config::LEASES_NAME;
use crate::{MachineName, Repository};
use coldrise_block::hex;

/// A claim, as long as this lives.
pub struct Claim {
    path: PathBuf,
    _lock: HeldLock,
}

impl Claim {
    /// Takes the claim `name` of the repository in the folder `repository`; `None` while another process
    /// has it. The file's name is not encrypted.
    ///
    /// # Errors
    /// `NoRepository` if it has gone; `ReadOnly` on a read-only file system, and other errors of the operating system.
    pub fn take(repository: &Path, name: &str) -> Result<Option<Claim>> {
        let path = Repository::leases_folder(repository)?.join(name);
        let what = || format!("locking {}", path.display());
        loop {
            let mut options = File::options();
            options.write(true).create(true).truncate(false).mode(0o600);
            let file = options.open(&path).context(what)?;
            let Some(lock) = HeldLock::take(file).context(what)? else { return Ok(None) };
            // The previous holder may have just removed the file.
            let is_there = match path.metadata() {
                Ok(found) => found.ino() == lock.file().metadata().context(what)?.ino(),
                Err(error) if error.kind() == NotFound => false,
                Err(error) => return Err(error).context(what),
            };
            if is_there {
                return Ok(Some(Claim { path, _lock: lock }));
            }
        }
    }
}

impl Drop for Claim {
    /// Before the lock is free.
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Repository {
    /// The folder of the leases and claims of the repository in the folder `repository`. Made if it is missing.
    ///
    /// # Errors
    /// `NoRepository` if that has gone since it was opened: nothing is made in its empty mount point. Errors of the operating system.
    pub fn leases_folder(repository: &Path) -> Result<PathBuf> {
        let folder = repository.join(LEASES_NAME);
        if !folder.exists() {
            Repository::check(repository)?;
            match DirBuilder::new().mode(0o700).create(&folder) {
                Err(error) if error.kind() == AlreadyExists => {}
                made => made.context(|| format!("creating {}", folder.display()))?,
            }
        }
        Ok(folder)
    }

    /// Claims a machine for one backup, or for one copy to this repository.
    ///
    /// # Errors
    /// `Busy` while another backup or copy has it.
    pub fn claim_machine(&self, machine: &MachineName) -> Result<Claim> {
        let hash = self.derive_key("backup of a machine", machine.as_str().as_bytes());
        let name = format!("backup-{}", hex::encode(&hash[..16]));
        Claim::take(self.path(), &name)?.ok_or_else(|| {
            let text = format!(
                "another backup or copy of {machine} is running: wait for it to end, or stop it"
            );
            Error::new(ErrorKind::Busy, text)
        })
    }
}

#[cfg(test)]
mod tests {
    use coldrise_block::ErrorKind;

    use super::Claim;

    #[test]
    fn a_mount_point_without_its_repository_stays_empty() {
        let folder = tempfile::tempdir().unwrap();
        let refused = Claim::take(folder.path(), "backup-1").err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::NoRepository);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
