//! A host that runs QEMU: this one, or one that is reached over SSH.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::{Host, QemuFacts, QEMU};
use coldrise_inventory::{Firmware, Hardware};
use coldrise_store::available_memory_bytes;

use crate::{qemu, uefi};

/// A host that runs QEMU.
#[derive(Clone, Debug)]
pub struct QemuHost {
    pub(crate) host: Host,
    pub(crate) facts: QemuFacts,
}

impl QemuHost {
    /// Looks at the host.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn of(host: Host) -> Result<QemuHost> {
        let facts = host.qemu_facts()?;
        Ok(QemuHost { host, facts })
    }

    /// This host.
    ///
    /// # Errors
    /// None here; see [`QemuHost::of`].
    pub fn here() -> Result<QemuHost> {
        QemuHost::of(Host::here())
    }

    /// The beginning of messages about another host.
    pub(crate) fn prefix(&self) -> String {
        self.host.name().map_or_else(String::new, |name| format!("host {name}: "))
    }

    /// Checks the requirements before anything is published or started.
    ///
    /// # Errors
    /// `Unsupported` for more disks than the bus takes and if UEFI is not installed,
    /// `ToolFailed` if QEMU is not installed.
    pub fn check(&self, hardware: &Hardware, disks: usize) -> Result<()> {
        qemu::check_bus(hardware.disk_bus, disks)?;
        if hardware.firmware == Firmware::Uefi {
            uefi::plain(&self.host)?;
        }
        if self.facts.program.is_none() {
            let prefix = self.prefix();
            let text =
                format!("{prefix}{QEMU} is not installed (Debian: apt install qemu-system-x86)");
            return Err(Error::new(ErrorKind::ToolFailed, text));
        }
        Ok(())
    }

    /// Why guests do not run under KVM; `None` if they do.
    pub fn without_kvm(&self) -> Option<String> {
        self.facts.without_kvm.as_ref().map(|why| format!("{}{why}", self.prefix()))
    }

    /// Memory that can be allocated now without swapping, in bytes.
    pub fn available_bytes(&self) -> Result<Option<u64>> {
        match self.host.name() {
            None => Ok(available_memory_bytes()),
            Some(_) => Ok(self.host.qemu_facts()?.available_bytes),
        }
    }

    /// Its number of processors.
    pub fn processors(&self) -> usize {
        self.facts.processors
    }
}
