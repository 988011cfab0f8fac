//! The virtual hardware to boot a machine, from its stored configuration.
//!
//! Reads only memory, processors, firmware and the disks' bus from a foreign configuration.
//! Never opens files that it names.

use clap::ValueEnum;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{COLDRISE_JSON, Configuration, LIBVIRT_XML, OVF, VMX};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub(crate) mod ovf;

/// Maximum number of processors.
const MAX_CPUS: u32 = 255;
/// Minimum memory, in MiB.
const MIN_MEMORY_MIB: u64 = 16;
/// Maximum memory, in MiB: 16 TiB.
const MAX_MEMORY_MIB: u64 = 16 << 20;
/// Maximum number of elements and attributes in an XML configuration.
const MAX_XML_NODES: u32 = 100_000;
/// What QEMU needs beside the machine's memory, in bytes.
pub const QEMU_BYTES: u64 = 128 << 20;

/// What it means for a machine that had a TPM.
pub const LOST_TPM: &str = "the machine's TPM is not in the backup: its keys cannot unlock BitLocker or LUKS disks, so \
                            have the recovery key ready";

/// Whether the machine of a stored configuration has a TPM. False for a broken configuration.
pub fn has_tpm(configuration: &Configuration) -> bool {
    let text = &configuration.text;
    match configuration.format.as_str() {
        LIBVIRT_XML => {
            parse_xml(text).is_ok_and(|xml| xml.descendants().any(|node| node.has_tag_name("tpm")))
        }
        VMX => text.lines().filter_map(|line| line.split_once('=')).any(|(name, value)| {
            name.trim().eq_ignore_ascii_case("vtpm.present")
                && value.trim().trim_matches('"').eq_ignore_ascii_case("true")
        }),
        _ => false,
    }
}

/// The machine's firmware.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Firmware {
    /// A BIOS.
    Bios,
    /// UEFI, without Secure Boot.
    Uefi,
}

/// The bus of the machine's disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DiskBus {
    /// virtio block devices: fast, needs drivers.
    Virtio,
    /// A virtio SCSI controller.
    Scsi,
    /// An AHCI controller: every system supports it.
    Sata,
    /// An IDE controller: at most 4 disks.
    Ide,
}

/// The machine's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, ValueEnum)]
#[serde(rename_all = "lowercase")]
#[schema(as = HardwareNetwork)]
pub enum Network {
    /// Access to the outside through this host's connections; no incoming
    /// connections.
    User,
    /// A network card without a connection to any network: only DHCP is answered. Many systems start
    /// faster with it than with none.
    Isolated,
    /// No network.
    None,
}

/// The hardware of a booted machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Hardware {
    /// Processors.
    pub cpus: u32,
    /// Memory, in MiB.
    pub memory_mib: u64,
    /// The firmware.
    pub firmware: Firmware,
    /// The bus of the disks.
    pub disk_bus: DiskBus,
    /// The network.
    pub network: Network,
}

impl Default for Hardware {
    /// Hardware that most systems boot with. There is no network: a machine restored
    /// to the past must not talk to the present without being asked.
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

/// Coldrise's own description. Missing fields are as in [`Hardware::default`];
/// unknown fields are ignored.
#[derive(Deserialize)]
struct Description {
    cpus: Option<u32>,
    memory_mib: Option<u64>,
    firmware: Option<Firmware>,
    disk_bus: Option<DiskBus>,
    network: Option<Network>,
}

impl Hardware {
    /// The hardware of a stored configuration; the default if there is none or its
    /// kind is unknown.
    ///
    /// # Errors
    /// `InvalidInput` if it cannot be parsed or exceeds the limits.
    pub fn of(configuration: Option<&Configuration>) -> Result<Hardware> {
        let Some(configuration) = configuration else { return Ok(Hardware::default()) };
        let text = &configuration.text;
        let hardware = match configuration.format.as_str() {
            COLDRISE_JSON => from_json(text),
            LIBVIRT_XML => from_libvirt(text),
            VMX => from_vmx(text),
            OVF => ovf::hardware(text),
            _ => Ok(Hardware::default()),
        };
        hardware.and_then(Hardware::check).map_err(|error| {
            error.context(format!("the stored configuration ({})", configuration.format))
        })
    }

    /// Checks the bounds.
    ///
    /// # Errors
    /// `InvalidInput`; the message names the limit.
    pub fn check(self) -> Result<Hardware> {
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
        Error::with_source(ErrorKind::InvalidInput, "it does not describe a machine", error)
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

/// Parses a foreign configuration. A document type is refused, and with it all entities but the five of XML.
pub(crate) fn parse_xml(
    text: &str,
) -> std::result::Result<roxmltree::Document<'_>, roxmltree::Error> {
    let options = roxmltree::ParsingOptions { nodes_limit: MAX_XML_NODES, ..Default::default() };
    roxmltree::Document::parse_with_options(text, options)
}

fn from_libvirt(text: &str) -> Result<Hardware> {
    let document = parse_xml(text).map_err(|error| {
        Error::with_source(ErrorKind::InvalidInput, "it is not well-formed XML", error)
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
        hardware.cpus = text.parse().map_err(|_| invalid("its <vcpu> is not a number"))?;
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
    let number: u64 = text.parse().map_err(|_| invalid("its <memory> is not a number"))?;
    let bytes =
        number.checked_mul(unit_bytes).ok_or_else(|| invalid("its <memory> is too large"))?;
    Ok(bytes.div_ceil(1 << 20))
}

/// Parses a .vmx: lines `name = "value"`, names in any case.
fn from_vmx(text: &str) -> Result<Hardware> {
    // VMware's default is one processor.
    let mut hardware = Hardware { cpus: 1, ..Hardware::default() };
    let mut present = Vec::new();
    let mut without_disk = Vec::new();
    for line in text.lines() {
        let Some((name, value)) = line.split_once('=') else { continue };
        let name = name.trim().to_ascii_lowercase();
        let value = value.trim().trim_matches('"').trim();
        match name.as_str() {
            "numvcpus" => {
                hardware.cpus =
                    value.parse().map_err(|_| invalid("its numvcpus is not a number"))?;
            }
            "memsize" => {
                hardware.memory_mib =
                    value.parse().map_err(|_| invalid("its memsize is not a number"))?;
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
    // The guest may have only drivers for VMware's controllers; all systems support
    // AHCI.
    hardware.disk_bus = if has_only_ide { DiskBus::Ide } else { DiskBus::Sata };
    Ok(hardware)
}

#[cfg(test)]
#[path = "hardware_tests.rs"]
mod tests;
