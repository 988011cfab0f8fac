//! Reads a descriptor.

use std::collections::BTreeMap;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::MAX_DISKS;
use roxmltree::{Document, Node};

use super::{CARD, Controller, MAX_CARDS, NETWORK, NetworkCard, OTHER_64_BIT, VirtualSystem};
use crate::hardware::{DiskBus, Firmware, Hardware, parse_xml};

/// CIM's numbers of resources.
mod resource {
    pub(super) const PROCESSOR: &str = "3";
    pub(super) const MEMORY: &str = "4";
    pub(super) const IDE: &str = "5";
    pub(super) const SCSI: &str = "6";
    pub(super) const NETWORK_CARD: &str = "10";
    pub(super) const DISK: &str = "17";
    pub(super) const OTHER_STORAGE: &str = "20";
}

/// Longest model of a network card that is kept, in bytes.
const MAX_MODEL_BYTES: usize = 32;

/// A descriptor's machine and its disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The machine.
    pub system: VirtualSystem,
    /// Its disks, in the order in which the machine has them.
    pub disks: Vec<EnvelopeDisk>,
    /// Disks that no machine has.
    pub unattached: Vec<String>,
}

/// A disk's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvelopeDisk {
    /// The disk's id in the descriptor.
    pub id: String,
    /// The file, as the descriptor refers to it: a plain name, perhaps with percent signs.
    pub href: String,
    /// The file's length, if the descriptor states it.
    pub length_bytes: Option<u64>,
    /// The disk's size, if the descriptor states it.
    pub capacity: Option<StatedCapacity>,
}

/// The size of a disk, in the unit that its writer chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatedCapacity {
    /// The size in bytes.
    pub size_bytes: u64,
    /// The unit in bytes, at least 1.
    pub unit_bytes: u64,
}

impl Envelope {
    /// Parses a descriptor and checks its disks.
    ///
    /// # Errors
    /// `InvalidInput` for other text; `Unsupported` for several machines, for disks that are empty,
    /// compressed, in pieces, no VMDK or outside of the descriptor's folder.
    pub fn parse(text: &str) -> Result<Envelope> {
        let document = envelope(text)?;
        let machine = only_machine(&document)?;
        let mut described = described_disks(document.root_element())?;
        let mut disks: Vec<EnvelopeDisk> = Vec::new();
        for item in items(machine).filter(|item| is(*item, resource::DISK)) {
            let Some(host) = field(item, "HostResource") else { continue };
            let path = host.strip_prefix("ovf:").unwrap_or(host);
            let id = path.strip_prefix("/disk/").unwrap_or(path);
            let disk = described.remove(id).ok_or_else(|| {
                invalid(format!(
                    "its machine has the disk '{}', which it does not describe, or twice",
                    shown(id)
                ))
            })?;
            let disk = disk.check()?;
            if disks.iter().any(|other| other.href == disk.href) {
                return Err(invalid(format!("two disks have the file '{}'", shown(&disk.href))));
            }
            disks.push(disk);
        }
        if disks.is_empty() {
            return Err(unsupported("its machine has no disk"));
        }
        let unattached = described.into_keys().map(shown).collect();
        Ok(Envelope { system: system(machine)?, disks, unattached })
    }

    /// The machine alone.
    pub(super) fn machine(text: &str) -> Result<VirtualSystem> {
        system(only_machine(&envelope(text)?)?)
    }
}

/// The hardware of a descriptor's machine.
pub(crate) fn hardware(text: &str) -> Result<Hardware> {
    Envelope::machine(text).map(|system| system.hardware)
}

/// The name of a descriptor's machine.
pub(crate) fn name(text: &str) -> Option<String> {
    Envelope::machine(text).ok()?.name
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

fn unsupported(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, text)
}

/// Foreign text for a message.
fn shown(text: impl AsRef<str>) -> String {
    text.as_ref().escape_debug().take(100).collect()
}

fn envelope(text: &str) -> Result<Document<'_>> {
    let document = parse_xml(text).map_err(|error| {
        Error::with_source(ErrorKind::InvalidInput, "it is not well-formed XML", error)
    })?;
    match document.root_element().has_tag_name("Envelope") {
        true => Ok(document),
        false => Err(invalid("its root is not <Envelope>")),
    }
}

/// An attribute in any name space.
fn attribute<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    let found = node.attributes().find(|attribute| attribute.name() == name)?;
    Some(found.value().trim()).filter(|value| !value.is_empty())
}

fn child<'a, 'd>(node: Node<'a, 'd>, name: &str) -> Option<Node<'a, 'd>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn field<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    child(node, name)?.text().map(str::trim).filter(|text| !text.is_empty())
}

fn only_machine<'a, 'd>(document: &'a Document<'d>) -> Result<Node<'a, 'd>> {
    let mut machines = document.descendants().filter(|node| node.has_tag_name("VirtualSystem"));
    match (machines.next(), machines.count()) {
        (Some(machine), 0) => Ok(machine),
        (None, _) => Err(invalid("it describes no machine")),
        (_, more) => Err(unsupported(format!(
            "it describes {} machines: export each of them by itself",
            more + 1
        ))),
    }
}

/// The devices of a machine's first hardware section.
fn items<'a, 'd>(machine: Node<'a, 'd>) -> impl Iterator<Item = Node<'a, 'd>> {
    let section = child(machine, "VirtualHardwareSection");
    let is_item = |n: &Node<'_, '_>| {
        ["Item", "StorageItem", "EthernetPortItem"].iter().any(|t| n.has_tag_name(*t))
    };
    section.into_iter().flat_map(move |section| section.children().filter(is_item))
}

fn is(item: Node<'_, '_>, resource_type: &str) -> bool {
    field(item, "ResourceType") == Some(resource_type)
}

/// A disk of the disk section, not yet checked: a machine may not have it.
struct DescribedDisk<'a, 'd> {
    id: &'a str,
    node: Node<'a, 'd>,
    file: Option<Node<'a, 'd>>,
    refers_to: Option<&'a str>,
}

fn described_disks<'a, 'd>(
    envelope: Node<'a, 'd>,
) -> Result<BTreeMap<&'a str, DescribedDisk<'a, 'd>>> {
    let mut files = BTreeMap::new();
    let references = child(envelope, "References").into_iter().flat_map(|node| node.children());
    for file in references.filter(|node| node.has_tag_name("File")) {
        let id = attribute(file, "id").ok_or_else(|| invalid("a <File> has no id"))?;
        if files.insert(id, file).is_some() {
            return Err(invalid(format!("two files have the id '{}'", shown(id))));
        }
    }
    let mut disks = BTreeMap::new();
    let section = child(envelope, "DiskSection").into_iter().flat_map(|node| node.children());
    for node in section.filter(|node| node.has_tag_name("Disk")) {
        let id = attribute(node, "diskId").ok_or_else(|| invalid("a <Disk> has no diskId"))?;
        let refers_to = attribute(node, "fileRef");
        let file = refers_to.and_then(|id| files.get(id).copied());
        if disks.insert(id, DescribedDisk { id, node, file, refers_to }).is_some() {
            return Err(invalid(format!("two disks have the id '{}'", shown(id))));
        }
    }
    Ok(disks)
}

impl DescribedDisk<'_, '_> {
    fn check(&self) -> Result<EnvelopeDisk> {
        let id = shown(self.id);
        let refused = |why: String| Err(unsupported(format!("disk '{id}' {why}")));
        let file = match (self.refers_to, self.file) {
            (_, Some(file)) => file,
            (Some(file), None) => {
                let text = format!(
                    "disk '{id}' is in the file '{}', which is not among its references",
                    shown(file)
                );
                return Err(invalid(text));
            }
            (None, None) => {
                return refused(
                    "has no file, so it has no content: detach it and export the machine again"
                        .into(),
                );
            }
        };
        if attribute(self.node, "parentRef").is_some() {
            return refused(
                "is a snapshot: consolidate the snapshots and export the machine again".into(),
            );
        }
        let format = attribute(self.node, "format").unwrap_or_default();
        if !format.to_ascii_lowercase().contains("vmdk") {
            return refused(format!("has the format '{}': only VMDK is read", shown(format)));
        }
        let href = attribute(file, "href").ok_or_else(|| invalid("a <File> has no href"))?;
        let file_name = shown(href);
        if href.contains(['/', '\\', ':', '\0']) || href == "." || href == ".." {
            return refused(format!(
                "is at '{file_name}': only files beside the descriptor are read"
            ));
        }
        match attribute(file, "compression") {
            None | Some("identity") => {}
            Some(method) => {
                return refused(format!(
                    "is in '{file_name}', compressed as a whole ({}): unpack it, or export without compression",
                    shown(method)
                ));
            }
        }
        if attribute(file, "chunkSize").is_some() {
            return refused(format!("is in pieces of '{file_name}': export without chunks"));
        }
        let length_bytes = attribute(file, "size").map(str::parse).transpose();
        let length_bytes = length_bytes
            .map_err(|_| invalid(format!("the size of the file '{file_name}' is not a number")))?;
        let capacity = self.capacity().map_err(|error| error.context(format!("disk '{id}'")))?;
        Ok(EnvelopeDisk { id, href: href.to_owned(), length_bytes, capacity })
    }

    fn capacity(&self) -> Result<Option<StatedCapacity>> {
        let Some(count) = attribute(self.node, "capacity") else { return Ok(None) };
        let unit = attribute(self.node, "capacityAllocationUnits").unwrap_or("byte");
        let unit_bytes = unit_bytes(unit)?;
        let size_bytes = count.parse::<u64>().ok().and_then(|count| count.checked_mul(unit_bytes));
        let size_bytes = size_bytes
            .ok_or_else(|| invalid(format!("its capacity '{}' is not a size", shown(count))))?;
        Ok(Some(StatedCapacity { size_bytes, unit_bytes }))
    }
}

fn system(machine: Node<'_, '_>) -> Result<VirtualSystem> {
    let section = child(machine, "VirtualHardwareSection");
    let identifier = section
        .and_then(|section| child(section, "System"))
        .and_then(|system| field(system, "VirtualSystemIdentifier"));
    let name = field(machine, "Name").or(identifier).or(attribute(machine, "id"));
    let number = |resource: &str, what: &str| match items(machine).find(|item| is(*item, resource))
    {
        None => Ok(None),
        Some(item) => {
            let quantity = field(item, "VirtualQuantity").unwrap_or_default().parse::<u64>();
            let quantity = quantity.map_err(|_| invalid(format!("its {what} is not a number")))?;
            Ok(Some((quantity, field(item, "AllocationUnits"))))
        }
    };
    let default = Hardware::default();
    let cpus = match number(resource::PROCESSOR, "number of processors")? {
        Some((cpus, _)) => u32::try_from(cpus).unwrap_or(u32::MAX),
        None => 1,
    };
    let memory_mib = match number(resource::MEMORY, "memory")? {
        Some((quantity, unit)) => quantity
            .checked_mul(unit_bytes(unit.unwrap_or("MegaBytes"))?)
            .ok_or_else(|| invalid("its memory is too large"))?
            .div_ceil(1 << 20),
        None => default.memory_mib,
    };
    let (controller, disk_bus) = controller(machine);
    let hardware = Hardware { cpus, memory_mib, firmware: firmware(machine), disk_bus, ..default };
    let system = child(machine, "OperatingSystemSection");
    let (other, word) = OTHER_64_BIT;
    let id = system.and_then(|node| attribute(node, "id")?.parse().ok());
    let guest = match (id, system.and_then(|node| attribute(node, "osType"))) {
        (Some(id), Some(word)) => (id, word.to_owned()),
        (None, Some(word)) => (other, word.to_owned()),
        // Importers that know VMware's words only must not contradict the number.
        (Some(id), None) => (id, String::new()),
        (None, None) => (other, word.to_owned()),
    };
    Ok(VirtualSystem {
        name: name.map(str::to_owned),
        hardware,
        controller,
        guest,
        cards: cards(machine),
    })
}

/// "Programmatic units" such as `byte * 2^20`, and the words of older descriptors.
fn unit_bytes(unit: &str) -> Result<u64> {
    let plain: String = unit.to_ascii_lowercase().split_whitespace().collect();
    let power = |text: &str| {
        let (base, exponent) = text.strip_prefix("byte*")?.split_once('^')?;
        base.parse::<u64>().ok()?.checked_pow(exponent.parse().ok()?).filter(|bytes| *bytes > 0)
    };
    Ok(match plain.as_str() {
        "byte" | "bytes" => 1,
        "kilobytes" | "kb" => 1 << 10,
        "megabytes" | "mb" => 1 << 20,
        "gigabytes" | "gb" => 1 << 30,
        other => {
            power(other).ok_or_else(|| invalid(format!("'{}' is an unknown unit", shown(unit))))?
        }
    })
}

/// VMware and others: `vmw:Config` in the hardware. VirtualBox: `Firmware` in its own section.
fn firmware(machine: Node<'_, '_>) -> Firmware {
    let is_efi = machine.descendants().any(|node| {
        let is_config = node.has_tag_name("Config") || node.has_tag_name("ExtraConfig");
        let value = match () {
            () if is_config && attribute(node, "key") == Some("firmware") => {
                attribute(node, "value")
            }
            () if node.has_tag_name("Firmware") => attribute(node, "type"),
            () => None,
        };
        value.is_some_and(|value| value.to_ascii_lowercase().starts_with("efi"))
    });
    if is_efi { Firmware::Uefi } else { Firmware::Bios }
}

/// The controller of the first disk, and the bus on which a machine boots from all disks.
fn controller(machine: Node<'_, '_>) -> (Controller, DiskBus) {
    let disks = || items(machine).filter(|item| is(*item, resource::DISK));
    let parent = |disk| {
        let id = field(disk, "Parent")?;
        items(machine).find(|item| field(*item, "InstanceID") == Some(id))
    };
    let parents: Vec<_> = disks().take(MAX_DISKS).filter_map(parent).collect();
    let model = |item| field(item, "ResourceSubType").unwrap_or_default();
    let has_only_ide = !parents.is_empty() && parents.iter().all(|item| is(*item, resource::IDE));
    match parents.first() {
        Some(_) if has_only_ide => (Controller::Ide, DiskBus::Ide),
        Some(item) if is(*item, resource::IDE) => (Controller::Ide, DiskBus::Sata),
        Some(item) if is(*item, resource::SCSI) => (Controller::scsi(model(*item)), DiskBus::Sata),
        Some(item)
            if is(*item, resource::OTHER_STORAGE)
                && model(*item).eq_ignore_ascii_case("VirtioSCSI") =>
        {
            (Controller::Sata, DiskBus::Scsi)
        }
        // The guest may have drivers only for VMware's controllers; all systems support AHCI.
        _ => (Controller::Sata, DiskBus::Sata),
    }
}

fn cards(machine: Node<'_, '_>) -> Vec<NetworkCard> {
    let cards = items(machine).filter(|item| is(*item, resource::NETWORK_CARD));

    let cards = cards.map(|item| {
        let model = field(item, "ResourceSubType").filter(|model| {
            model.len() <= MAX_MODEL_BYTES && model.bytes().all(|byte| byte.is_ascii_alphanumeric())
        });
        NetworkCard {
            network: field(item, "Connection").unwrap_or(NETWORK).to_owned(),
            model: model.unwrap_or(CARD).to_owned(),
        }
    });
    cards.take(MAX_CARDS).collect()
}
