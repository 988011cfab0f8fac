//! Attaches a disk to a running QEMU, and detaches it, through its monitor.
//!
//! ```text
//!   attach: blockdev-add (NBD, our socket) ─▶ device_add ─▶ the guest sees a disk with a serial number
//!   detach: device_del ─▶ DEVICE_DELETED ─▶ blockdev-del
//! ```
//!
//! The node and the device are both called `coldrise-NAME`, so that a later program, or the same after a
//! crash, finds what is left: each step of a detach is taken if its subject is there. If the attaching
//! program dies between the two steps, the node is left without a device, which the guest does not notice;
//! detach removes it.

mod domain;
mod machine;
mod mounted;

use std::error::Error as _;
use std::io::ErrorKind as IoKind;
use std::path::Path;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_qmp::{GuestAgent, Monitor};
use serde_json::{Value, json};

pub use domain::AttachDomain;
pub use machine::{AttachMachine, Machine};

/// Maximum length of a name: QEMU's names of nodes have at most 31 characters, serial numbers 20.
pub const MAX_NAME_CHARS: usize = 20;
/// The beginning of our names in QEMU.
const PREFIX: &str = "coldrise-";
/// Time for one command of the monitor.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long QEMU waits for a server that went away before it fails the guest's requests.
const RECONNECT_DELAY_S: u32 = 60;

/// How the guest sees the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// A PCI device of virtio.
    VirtioBlk,
    /// A disk on the machine's first SCSI controller.
    Scsi,
}

/// A disk to attach.
#[derive(Clone, Debug)]
pub struct AttachedDisk<'a> {
    /// Its name in QEMU, and its serial number in the guest; see [`check_name`].
    pub name: &'a str,
    /// The socket of our NBD server.
    pub socket: &'a Path,
    /// Its export.
    pub export: &'a str,
    /// Whether the guest may not write.
    pub is_read_only: bool,
    /// How the guest sees it.
    pub device: Device,
}

/// Checks a name for an attached disk.
///
/// # Errors
/// `InvalidInput`; the message says what is allowed.
pub fn check_name(name: &str) -> Result<()> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_' || c == '.';
    if name.is_empty() || name.len() > MAX_NAME_CHARS || !name.chars().all(is_allowed) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "'{name}' cannot be the name of an attached disk: it has 1 to {MAX_NAME_CHARS} letters, \
                 digits, '-', '_' or '.'"
            ),
        ));
    }
    Ok(())
}

/// Attaches a disk. If the device is refused, the node is removed again.
fn attach(monitor: &Path, disk: &AttachedDisk<'_>) -> Result<()> {
    check_name(disk.name)?;
    let mut monitor = Monitor::connect(monitor, PATIENCE)?;
    let id = format!("{PREFIX}{}", disk.name);
    if has_node(&mut monitor, &id)? {
        let text = format!("a disk {} is attached already", disk.name);
        return Err(Error::new(ErrorKind::AlreadyExists, text)
            .advise("choose another name with --as, or remove it with coldrise detach"));
    }
    let node = json!({
        "driver": "nbd",
        "node-name": id,
        "read-only": disk.is_read_only,
        "server": { "type": "unix", "path": disk.socket },
        "export": disk.export,
        "reconnect-delay": RECONNECT_DELAY_S,
    });
    monitor.execute("blockdev-add", node, PATIENCE).map_err(|error| {
        error.advise(
            "QEMU opens a private socket: it must run as the same user as this command, or as root",
        )
    })?;
    let added =
        add_device(&mut monitor, &id, disk).and_then(|()| match has_node(&mut monitor, &id)? {
            true => Ok(()),
            false => {
                let text =
                    "the monitor agreed, but the machine does not have the disk: is this a QEMU?";
                Err(Error::new(ErrorKind::ToolFailed, text))
            }
        });
    if added.is_err() {
        let _ = monitor.execute("blockdev-del", json!({ "node-name": id }), PATIENCE);
    }
    added
}

fn add_device(monitor: &mut Monitor, id: &str, disk: &AttachedDisk<'_>) -> Result<()> {
    let driver = match disk.device {
        Device::VirtioBlk => "virtio-blk-pci",
        Device::Scsi => "scsi-hd",
    };
    let device = json!({ "driver": driver, "id": id, "drive": id, "serial": disk.name });
    let first = match monitor.execute("device_add", device.clone(), PATIENCE) {
        Err(error) if disk.device == Device::VirtioBlk => error,
        Err(error) => {
            return Err(error.advise("the machine needs a SCSI controller (virtio-scsi-pci)"));
        }
        Ok(_) => return Ok(()),
    };
    // Machines of type q35 take new devices on free root ports only.
    for port in root_ports(monitor)? {
        let mut device = device.clone();
        device["bus"] = port.into();
        // A port has this slot only; QEMU takes others, but the guest never sees them.
        device["addr"] = "0".into();
        if monitor.execute("device_add", device, PATIENCE).is_ok() {
            return Ok(());
        }
    }
    Err(first.advise(
        "a machine of type q35 needs a free pcie-root-port for each new disk; with a SCSI controller use \
         --device scsi",
    ))
}

/// The names of the machine's PCI root ports.
fn root_ports(monitor: &mut Monitor) -> Result<Vec<String>> {
    let found = devices(monitor)?;
    let ports = found.iter().filter(|device| device["type"] == "child<pcie-root-port>");
    Ok(ports.filter_map(|device| device["name"].as_str().map(str::to_owned)).collect())
}

/// The devices with names.
fn devices(monitor: &mut Monitor) -> Result<Vec<Value>> {
    let path = json!({ "path": "/machine/peripheral" });
    let found = monitor.execute("qom-list", path, PATIENCE)?;
    Ok(found.as_array().cloned().unwrap_or_default())
}

fn has_device(monitor: &mut Monitor, id: &str) -> Result<bool> {
    Ok(devices(monitor)?.iter().any(|device| device["name"] == id))
}

fn has_node(monitor: &mut Monitor, id: &str) -> Result<bool> {
    let nodes = monitor.execute("query-named-block-nodes", json!({ "flat": true }), PATIENCE)?;
    Ok(nodes.as_array().is_some_and(|nodes| nodes.iter().any(|node| node["node-name"] == id)))
}

/// Whether a QEMU has a disk of this name.
fn is_attached(monitor: &Path, name: &str) -> Result<bool> {
    let mut monitor = Monitor::connect(monitor, PATIENCE).map_err(|error| {
        let source = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
        match source.map(std::io::Error::kind) {
            // A killed QEMU leaves its socket.
            Some(IoKind::ConnectionRefused | IoKind::NotFound) => {
                Error::new(ErrorKind::NotFound, error.full_message())
            }
            _ => error,
        }
    })?;
    has_node(&mut monitor, &format!("{PREFIX}{name}"))
}

/// Detaches a disk, within `patience` for the guest to release it.
fn detach(monitor: &Path, name: &str, patience: Duration) -> Result<()> {
    check_name(name)?;
    let mut monitor = Monitor::connect(monitor, PATIENCE)?;
    let id = format!("{PREFIX}{name}");
    let (has_device, has_node) = (has_device(&mut monitor, &id)?, has_node(&mut monitor, &id)?);
    if !has_device && !has_node {
        let text = format!("no disk {name} of Coldrise is attached to this machine");
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    if has_device {
        remove_device(&mut monitor, &id, patience)?;
    }
    if has_node {
        remove_node(&mut monitor, &id)?;
    }
    Ok(())
}

/// Asks the guest agent at `socket` whether the guest has mounted the disk.
fn check_unmounted(socket: &Path, name: &str) -> Result<()> {
    mounted::check_unmounted(&GuestAgent::connect(socket)?.file_systems()?, name)
}

/// Removes a node whose device is gone. The device may hold it for moments more.
fn remove_node(monitor: &mut Monitor, id: &str) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        match monitor.execute("blockdev-del", json!({ "node-name": id }), PATIENCE) {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() >= until => return Err(error),
            Err(error) if !has_node(monitor, id)? => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn remove_device(monitor: &mut Monitor, id: &str, patience: Duration) -> Result<()> {
    let asked = monitor.execute("device_del", json!({ "id": id }), PATIENCE);
    let until = Instant::now() + patience;
    loop {
        // It is gone, whatever the answer was: an earlier request may still have been under way.
        if !has_device(monitor, id)? {
            return Ok(());
        }
        if let (Err(error), true) = (&asked, Instant::now() >= until) {
            return Err(Error::new(ErrorKind::ToolFailed, error.full_message()));
        }
        if Instant::now() >= until {
            let text = "the guest does not release the disk";
            return Err(Error::new(ErrorKind::Busy, text).advise(
                "unmount it in the guest; a guest that is not running yet releases nothing",
            ));
        }
        monitor.take_events();
        monitor.wait(
            until.saturating_duration_since(Instant::now()).min(Duration::from_millis(500)),
        )?;
    }
}
