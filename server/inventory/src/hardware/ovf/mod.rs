//! Descriptors of virtual appliances (OVF, DSP0243), as VMware, VirtualBox and others write and read them.
//!
//! ```text
//!   text ── Envelope::parse ──▶ its machine, and its disks in the machine's order
//!   configuration of any kind ── VirtualSystem::of ──▶ the machine ── descriptor ──▶ text
//! ```
//!
//! Nothing here opens a file: a descriptor names files, and the caller decides which it opens.

mod read;
mod write;

use coldrise_block::Result;
use coldrise_store::{Configuration, LIBVIRT_XML, OVF, VMX};

use super::{DiskBus, Hardware, parse_xml};

pub use read::{Envelope, EnvelopeDisk};
pub(crate) use read::{hardware, name};
pub use write::{DescribedDisk, descriptor, escaped};

/// The network of a card whose network has no name, as VMware calls its first one.
const NETWORK: &str = "VM Network";
/// The card that all hypervisors have.
const CARD: &str = "E1000";
/// Maximum number of network cards of a machine that is written.
const MAX_CARDS: usize = 10;
/// The operating system in CIM's numbers and in VMware's word, if it is unknown: another one with 64 bits.
const OTHER_64_BIT: (u32, &str) = (102, "otherGuest64");

/// The controller of a machine's disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    /// IDE: at most 4 disks.
    Ide,
    /// AHCI.
    Sata,
    /// SCSI, of the kind that VMware names so.
    Scsi(&'static str),
}

impl Controller {
    /// The SCSI controller of this name, in OVF or in a .vmx.
    fn scsi(name: &str) -> Controller {
        Controller::Scsi(match name.to_ascii_lowercase().as_str() {
            "lsilogicsas" | "lsisas1068" => "lsilogicsas",
            "virtualscsi" | "pvscsi" => "VirtualSCSI",
            "buslogic" => "buslogic",
            _ => "lsilogic",
        })
    }
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkCard {
    /// The name of its network.
    pub network: String,
    /// Its model, such as `E1000`.
    pub model: String,
}

/// A machine as OVF describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualSystem {
    /// What people call it: from an OVF only.
    pub name: Option<String>,
    /// Processors, memory, firmware.
    pub hardware: Hardware,
    /// The controller of its disks.
    pub controller: Controller,
    /// Its operating system: CIM's number, and VMware's word.
    pub guest: (u32, String),
    /// Its network cards.
    pub cards: Vec<NetworkCard>,
}

impl VirtualSystem {
    /// The machine of a stored configuration, with defaults for what the configuration does not say.
    ///
    /// # Errors
    /// `InvalidInput` if it cannot be parsed or exceeds the limits.
    pub fn of(configuration: Option<&Configuration>) -> Result<VirtualSystem> {
        let hardware = Hardware::of(configuration)?;
        let format = configuration.map(|stored| stored.format.as_str());
        let text = configuration.map_or("", |stored| &stored.text);
        if format == Some(OVF) {
            return Ok(VirtualSystem { hardware, ..Envelope::machine(text)? });
        }
        let cards = match format {
            Some(LIBVIRT_XML) => libvirt_cards(text),
            Some(VMX) => vmx_cards(text),
            _ => 1,
        };
        let card = NetworkCard { network: NETWORK.to_owned(), model: CARD.to_owned() };
        // Every importer has AHCI; none but QEMU's own has virtio.
        let controller = match hardware.disk_bus {
            DiskBus::Ide => Controller::Ide,
            DiskBus::Virtio | DiskBus::Scsi | DiskBus::Sata => Controller::Sata,
        };
        let (id, word) = OTHER_64_BIT;
        Ok(VirtualSystem {
            name: None,
            hardware,
            controller: vmx_scsi(text).filter(|_| format == Some(VMX)).unwrap_or(controller),
            guest: (id, word.to_owned()),
            cards: vec![card; cards.min(MAX_CARDS)],
        })
    }
}

fn libvirt_cards(text: &str) -> usize {
    let Ok(document) = parse_xml(text) else { return 1 };
    let devices = document.root_element().children().find(|node| node.has_tag_name("devices"));
    devices.map_or(0, |node| node.children().filter(|n| n.has_tag_name("interface")).count())
}

/// The names and values of a .vmx; names in lower case.
fn vmx_lines(text: &str) -> impl Iterator<Item = (String, &str)> {
    let lines = text.lines().filter_map(|line| line.split_once('='));
    lines.map(|(name, value)| {
        (name.trim().to_ascii_lowercase(), value.trim().trim_matches('"').trim())
    })
}

fn vmx_cards(text: &str) -> usize {
    let is_card = |name: &str| name.starts_with("ethernet") && name.ends_with(".present");
    vmx_lines(text)
        .filter(|(name, value)| is_card(name) && value.eq_ignore_ascii_case("true"))
        .count()
}

/// The first SCSI controller of a .vmx.
fn vmx_scsi(text: &str) -> Option<Controller> {
    let found = vmx_lines(text).find(|(name, _)| name == "scsi0.virtualdev");
    found.map(|(_, model)| Controller::scsi(model))
}

#[cfg(test)]
mod tests;
