//! The machines to which disks are attached: a plain QEMU, or a domain of libvirt.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_host::Host;

use super::{AttachDomain, AttachedDisk, attach, check_unmounted, detach, is_attached};
use crate::virsh::Virsh;

/// Time for the guest to release the disk.
const PATIENCE: Duration = Duration::from_secs(20);

/// How users name a running machine: `qmp:SOCKET` or `libvirt:DOMAIN`.
#[derive(Clone, Debug)]
pub enum Machine {
    /// The monitor of its QEMU.
    Qemu(PathBuf),
    /// The name of a domain.
    Libvirt(String),
}

impl FromStr for Machine {
    type Err = Error;

    fn from_str(text: &str) -> Result<Machine> {
        match text.split_once(':') {
            Some(("qmp", path)) if !path.is_empty() => Ok(Machine::Qemu(PathBuf::from(path))),
            Some(("libvirt", name)) if !name.is_empty() => Ok(Machine::Libvirt(name.to_owned())),
            _ if text == "host" => Err(Error::new(
                ErrorKind::InvalidInput,
                "on this host every disk is a file: coldrise mount DIR, then \
                 DIR/MACHINE/POINT/DISK.raw",
            )),
            _ => Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "'{text}': write libvirt:DOMAIN, or qmp:SOCKET with the socket of QEMU's monitor (-qmp)"
                ),
            )),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Machine::Qemu(path) => write!(f, "qmp:{}", path.display()),
            Machine::Libvirt(name) => write!(f, "libvirt:{name}"),
        }
    }
}

impl Machine {
    /// The same in words that hold in any folder.
    ///
    /// # Errors
    /// Errors of finding the current folder.
    pub fn absolute(&self) -> Result<Machine> {
        Ok(match self {
            Machine::Qemu(path) => {
                Machine::Qemu(std::path::absolute(path).context(|| "finding the monitor")?)
            }
            Machine::Libvirt(_) => self.clone(),
        })
    }

    /// Whether the machine has a disk of ours.
    ///
    /// # Errors
    /// `NotFound` if it does not run; those of its monitor or of libvirt.
    pub fn is_attached(&self, host: &Host, connect: Option<&str>, name: &str) -> Result<bool> {
        match self {
            Machine::Qemu(monitor) => is_attached(monitor, name),
            Machine::Libvirt(domain) => {
                AttachDomain::find(&Virsh::on(host.clone(), connect)?, domain)?.is_attached(name)
            }
        }
    }
}

/// A machine that is there.
pub enum AttachMachine {
    /// By the monitor of its QEMU.
    Qemu {
        /// The monitor.
        monitor: PathBuf,
        /// The socket of the guest agent.
        agent: Option<PathBuf>,
    },
    /// By libvirt.
    Libvirt(AttachDomain),
}

impl AttachMachine {
    /// Finds a machine; a domain on that host.
    ///
    /// # Errors
    /// `InvalidInput` for options of the other kind; `NotFound` if a domain does not run.
    pub fn find(
        host: &Host,
        address: &Machine,
        connect: Option<&str>,
        agent: Option<&Path>,
    ) -> Result<AttachMachine> {
        match address {
            Machine::Qemu(_) if connect.is_some() => {
                Err(Error::new(ErrorKind::InvalidInput, "--connect is for libvirt:DOMAIN"))
            }
            Machine::Qemu(_) if host.name().is_some() => {
                Err(Error::new(ErrorKind::InvalidInput, "--on is for libvirt:DOMAIN"))
            }
            Machine::Qemu(monitor) => Ok(AttachMachine::Qemu {
                monitor: monitor.clone(),
                agent: agent.map(Path::to_owned),
            }),
            Machine::Libvirt(_) if agent.is_some() => Err(Error::new(
                ErrorKind::InvalidInput,
                "--agent: libvirt knows the agent's socket; leave it out",
            )),
            Machine::Libvirt(name) => {
                let virsh = Virsh::on(host.clone(), connect)?;
                AttachDomain::find(&virsh, name).map(AttachMachine::Libvirt)
            }
        }
    }

    /// Whether it runs on this host.
    pub fn is_here(&self) -> bool {
        match self {
            AttachMachine::Qemu { .. } => true,
            AttachMachine::Libvirt(domain) => domain.virsh().host().name().is_none(),
        }
    }

    /// Lets its QEMU reach the socket `local` of this host, on which `group` was given rights; returns the socket's path for it.
    ///
    /// # Errors
    /// Those of [`Host::offer`].
    pub fn offer(&self, local: &Path, name: &Path, group: Option<u32>) -> Result<PathBuf> {
        let AttachMachine::Libvirt(domain) = self else { return Ok(local.to_owned()) };
        if self.is_here() {
            return Ok(local.to_owned());
        }
        let (virsh, host) = (domain.virsh(), domain.virsh().host());
        let there = host.socket_path(name)?;
        // Another user gives it to a group of its own, by name.
        let is_root = host.facts()?.is_root;
        let owner = group.filter(|_| is_root).map(|group| format!("0:{group}"));
        host.offer(local, &there, virsh.uri(), owner.as_deref())?;
        Ok(there)
    }

    /// The group as which its QEMU runs, if that is known and not libvirt's own.
    ///
    /// # Errors
    /// `ToolFailed` if libvirt does not answer.
    pub fn group(&self) -> Result<Option<u32>> {
        match self {
            AttachMachine::Qemu { .. } => Ok(None),
            AttachMachine::Libvirt(domain) => domain.group(),
        }
    }

    /// Attaches a disk.
    ///
    /// # Errors
    /// `AlreadyExists` if a disk of this name is attached; `ToolFailed` with the hypervisor's reason.
    pub fn attach(&self, disk: &AttachedDisk<'_>) -> Result<()> {
        match self {
            AttachMachine::Qemu { monitor, .. } => attach(monitor, disk),
            AttachMachine::Libvirt(domain) => domain.attach(disk),
        }
    }

    /// Detaches a disk. Unless `force`, the guest agent is asked first, where there is one.
    ///
    /// # Errors
    /// `NotFound` if there is no such disk; `Busy` if the guest has mounted it, or does not release it in time.
    pub fn detach(&self, name: &str, force: bool, warn: &dyn Fn(&str)) -> Result<()> {
        let asked = match self {
            _ if force => Ok(()),
            AttachMachine::Qemu { agent: None, .. } => Ok(()),
            AttachMachine::Qemu { agent: Some(agent), .. } => check_unmounted(agent, name),
            AttachMachine::Libvirt(domain) => domain.check_unmounted(name),
        };
        match asked {
            Err(error) if error.kind() == ErrorKind::Busy => return Err(error),
            Err(error) => warn(&format!(
                "warning: whether the guest has mounted the disk is unknown: {}",
                error.full_message()
            )),
            Ok(()) => {}
        }
        match self {
            AttachMachine::Qemu { monitor, .. } => detach(monitor, name, PATIENCE),
            AttachMachine::Libvirt(domain) => domain.detach(name, PATIENCE),
        }
    }
}
