//! Where a machine's QEMU runs.
//!
//! ```text
//!   here       SCRATCH/nbd …                          sockets of this process and of the disks' server
//!              SCRATCH/machine/                       what QEMU may change: variables, TPM, pictures, packets
//!   elsewhere  SCRATCH/nbd …                          the same sockets, on this host
//!              SPACE/nbd … ─ SSH ─▶ SCRATCH/nbd …     where QEMU finds them
//!              SPACE/qemu/                            what QEMU may change
//! ```
//!
//! The folder SPACE ends with the connection.

use std::path::{Path, PathBuf};

use coldrise_block::{Context, Result};
use coldrise_host::ScratchSpace;

use crate::qemu_host::QemuHost;

/// The place of a machine's QEMU: its host, its folder there, and this process's sockets.
pub struct QemuPlace {
    pub(crate) qemu: QemuHost,
    /// The folder in which QEMU may change everything, on its host.
    pub(crate) folder: PathBuf,
    /// The folder of sockets, on this host.
    pub(crate) sockets: PathBuf,
    /// The private folder on another host.
    space: Option<ScratchSpace>,
}

impl QemuPlace {
    /// On this host, in existing folders.
    ///
    /// # Errors
    /// Those of [`QemuHost::here`].
    pub fn here(folder: PathBuf, sockets: &Path) -> Result<QemuPlace> {
        let (qemu, sockets) = (QemuHost::here()?, sockets.to_owned());
        Ok(QemuPlace { qemu, folder, sockets, space: None })
    }

    /// In a new folder on QEMU's host; `scratch` is a private folder on this one.
    ///
    /// # Errors
    /// Errors of the operating system and of the connection.
    pub(crate) fn make(qemu: &QemuHost, scratch: &Path) -> Result<QemuPlace> {
        let (folder, space) = match qemu.host.name() {
            None => {
                let folder = scratch.join("machine");
                std::fs::create_dir(&folder).context(|| "making a folder for the machine")?;
                (folder, None)
            }
            Some(_) => {
                qemu.host.remove_abandoned(None)?;
                let space = ScratchSpace::new(&qemu.host, None, None)?;
                (space.file("qemu"), Some(space))
            }
        };
        Ok(QemuPlace { qemu: qemu.clone(), folder, sockets: scratch.to_owned(), space })
    }

    /// The path at which QEMU reaches the socket `name` in the folder of sockets, which exists.
    ///
    /// # Errors
    /// Those of [`ScratchSpace::offer`].
    pub(crate) fn offer(&self, name: &str) -> Result<PathBuf> {
        let local = self.sockets.join(name);
        match &self.space {
            None => Ok(local),
            Some(space) => space.offer(&local, name),
        }
    }

    /// The private folder on another host; `None` on this one.
    pub(crate) fn space(&self) -> Option<&ScratchSpace> {
        self.space.as_ref()
    }
}
