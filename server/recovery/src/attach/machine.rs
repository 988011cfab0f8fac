//! The machine that gets a disk, as text.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use coldrise_block::{Error, ErrorKind, Result};

/// A running machine.
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
