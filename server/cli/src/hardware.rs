//! What a machine needs to boot, taken from its stored configuration.
//!
//! Of a foreign configuration only memory, processors, firmware and the disks' bus
//! are looked at. No file that it names is ever opened.

use clap::ValueEnum;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::{COLDRISE_JSON, LIBVIRT_XML, VMX};
use coldrise_store::Configuration;
use serde::Deserialize;

/// Most processors that are given to a machine.
pub(crate) const MAX_CPUS: u32 = 255;
/// Least memory, in MiB.
const MIN_MEMORY_MIB: u64 = 16;
/// Most memory, in MiB: 16 TiB.
const MAX_MEMORY_MIB: u64 = 16 << 20;
/// Most elements and attributes of a configuration in XML.
const MAX_XML_NODES: u32 = 100_000;

/// How the machine starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Firmware {
    /// A BIOS.
    Bios,
    /// UEFI, without Secure Boot.
    Uefi,
}

/// How the machine sees its disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DiskBus {
    /// virtio block devices: fast, needs drivers.
    Virtio,
    /// A virtio SCSI controller.
    Scsi,
    /// An AHCI controller: every system knows it.
    Sata,
    /// An IDE controller: at most 4 disks.
    Ide,
}

/// What the machine is connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Network {
    /// The outside, by way of this host's own connections; nobody can connect to it.
    User,
    /// Nothing.
    None,
}

/// A machine as it is booted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hardware {
    pub(crate) cpus: u32,
    pub(crate) memory_mib: u64,
    pub(crate) firmware: Firmware,
    pub(crate) disk_bus: DiskBus,
    pub(crate) network: Network,
}

impl Default for Hardware {
    /// What most systems boot with. Without a network: a machine that wakes up in the
    /// past should not talk to the present unasked.
    fn default() -> Self {
        Hardware {
            cpus: 2,
            memory_mib: 2048,
            firmware: Firmware::Bios,
            disk_bus: DiskBus::Virtio,
            network: Network::None,
        }
    }
}

/// Coldrise's own description; what is left out is as in [`Hardware::default`], and
/// what is unknown is left alone.
#[derive(Deserialize)]
struct Description {
    cpus: Option<u32>,
    memory_mib: Option<u64>,
    firmware: Option<Firmware>,
    disk_bus: Option<DiskBus>,
    network: Option<Network>,
}

impl Hardware {
    /// What a stored configuration asks for; the default without one, and where it is
    /// of an unknown kind.
    ///
    /// # Errors
    /// `InvalidInput` where it cannot be understood or asks for the impossible.
    pub(crate) fn of(configuration: Option<&Configuration>) -> Result<Hardware> {
        let Some(configuration) = configuration else { return Ok(Hardware::default()) };
        let text = &configuration.text;
        let hardware = match configuration.format.as_str() {
            COLDRISE_JSON => from_json(text),
            LIBVIRT_XML => from_libvirt(text),
            VMX => from_vmx(text),
            _ => Ok(Hardware::default()),
        };
        hardware.and_then(Hardware::check).map_err(|error| {
            error.context(format!("the stored configuration ({})", configuration.format))
        })
    }

    /// Checks the bounds.
    ///
    /// # Errors
    /// `InvalidInput`, saying which.
    pub(crate) fn check(self) -> Result<Hardware> {
        if !(1..=MAX_CPUS).contains(&self.cpus) {
            return Err(invalid(format!("{} processors: use 1 to {MAX_CPUS}", self.cpus)));
        }
        if !(MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&self.memory_mib) {
            return Err(invalid(format!(
                "{} MiB of memory: use {MIN_MEMORY_MIB} MiB to 16 TiB",
                self.memory_mib
            )));
        }
        Ok(self)
    }
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

fn from_json(text: &str) -> Result<Hardware> {
    let described: Description = serde_json::from_str(text).map_err(|error| {
        Error::with_source(ErrorKind::InvalidInput, "it describes no machine", error)
    })?;
    let default = Hardware::default();
    Ok(Hardware {
        cpus: described.cpus.unwrap_or(default.cpus),
        memory_mib: described.memory_mib.unwrap_or(default.memory_mib),
        firmware: described.firmware.unwrap_or(default.firmware),
        disk_bus: described.disk_bus.unwrap_or(default.disk_bus),
        network: described.network.unwrap_or(default.network),
    })
}

fn from_libvirt(text: &str) -> Result<Hardware> {
    // A document type is refused, and with it every entity but the five of XML.
    let options = roxmltree::ParsingOptions { nodes_limit: MAX_XML_NODES, ..Default::default() };
    let document = roxmltree::Document::parse_with_options(text, options).map_err(|error| {
        Error::with_source(ErrorKind::InvalidInput, "it is no well-formed XML", error)
    })?;
    let domain = document.root_element();
    if !domain.has_tag_name("domain") {
        return Err(invalid("its root is not <domain>"));
    }
    let child = |parent: roxmltree::Node<'_, '_>, name: &str| {
        parent.children().find(|node| node.has_tag_name(name)).map(|node| node.id())
    };
    let find = |parent, name| child(parent, name).and_then(|id| document.get_node(id));
    let mut hardware = Hardware::default();
    if let Some(vcpu) = find(domain, "vcpu") {
        let text = vcpu.text().unwrap_or_default().trim();
        hardware.cpus = text.parse().map_err(|_| invalid("its <vcpu> is no number"))?;
    }
    if let Some(memory) = find(domain, "memory") {
        hardware.memory_mib = libvirt_memory_mib(
            memory.text().unwrap_or_default().trim(),
            memory.attribute("unit").unwrap_or("KiB"),
        )?;
    }
    if let Some(os) = find(domain, "os") {
        let by_attribute = os.attribute("firmware") == Some("efi");
        let by_loader = find(os, "loader").is_some_and(|l| l.attribute("type") == Some("pflash"));
        if by_attribute || by_loader {
            hardware.firmware = Firmware::Uefi;
        }
    }
    let first_disk = find(domain, "devices").and_then(|devices| {
        devices.children().find(|node| {
            node.has_tag_name("disk")
                && matches!(node.attribute("device"), None | Some("disk") | Some("lun"))
        })
    });
    let bus = first_disk.and_then(|disk| find(disk, "target")).and_then(|t| t.attribute("bus"));
    hardware.disk_bus = match bus {
        Some("scsi") => DiskBus::Scsi,
        Some("sata") | Some("usb") => DiskBus::Sata,
        Some("ide") => DiskBus::Ide,
        _ => DiskBus::Virtio,
    };
    Ok(hardware)
}

fn libvirt_memory_mib(text: &str, unit: &str) -> Result<u64> {
    let unit_bytes: u64 = match unit {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        _ => return Err(invalid("its <memory> has an unknown unit")),
    };
    let number: u64 = text.parse().map_err(|_| invalid("its <memory> is no number"))?;
    let bytes =
        number.checked_mul(unit_bytes).ok_or_else(|| invalid("its <memory> is too large"))?;
    Ok(bytes.div_ceil(1 << 20))
}

/// Reads a .vmx: lines `name = "value"`, names in any case.
fn from_vmx(text: &str) -> Result<Hardware> {
    // VMware takes one processor where the file says nothing.
    let mut hardware = Hardware { cpus: 1, ..Hardware::default() };
    let mut present = Vec::new();
    let mut without_disk = Vec::new();
    for line in text.lines() {
        let Some((name, value)) = line.split_once('=') else { continue };
        let name = name.trim().to_ascii_lowercase();
        let value = value.trim().trim_matches('"').trim();
        match name.as_str() {
            "numvcpus" => {
                hardware.cpus = value.parse().map_err(|_| invalid("its numvcpus is no number"))?;
            }
            "memsize" => {
                hardware.memory_mib =
                    value.parse().map_err(|_| invalid("its memsize is no number"))?;
            }
            "firmware" if value.eq_ignore_ascii_case("efi") => hardware.firmware = Firmware::Uefi,
            _ => {}
        }
        // scsi0:1.present, scsi0:1.deviceType
        let Some((device, field)) = name.split_once('.') else { continue };
        if !device.contains(':') {
            continue;
        }
        match field {
            "present" if value.eq_ignore_ascii_case("true") => present.push(device.to_owned()),
            "devicetype" if value.to_ascii_lowercase().contains("cdrom") => {
                without_disk.push(device.to_owned());
            }
            _ => {}
        }
    }
    let mut disks = present.iter().filter(|device| !without_disk.contains(device));
    let has_only_ide = disks.clone().count() > 0 && disks.all(|device| device.starts_with("ide"));
    // Drivers for VMware's own controllers are no help here; AHCI all systems have.
    hardware.disk_bus = if has_only_ide { DiskBus::Ide } else { DiskBus::Sata };
    Ok(hardware)
}

#[cfg(test)]
#[path = "hardware_tests.rs"]
mod tests;
