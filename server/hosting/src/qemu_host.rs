//! A host that runs QEMU: this one, or one that is reached over SSH.

use coldrise_block::Result;
use coldrise_host::{Host, QemuFacts};
use coldrise_store::available_memory_bytes;

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

    /// Why guests do not run under KVM; `None` if they do.
    pub fn without_kvm(&self) -> Option<String> {
        self.facts.without_kvm.as_ref().map(|why| format!("{}{why}", self.prefix()))
    }

    /// Memory that can be allocated now without swapping, in bytes; `None` if the kernel does not report it.
    ///
    /// # Errors
    /// Errors of the connection.
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
