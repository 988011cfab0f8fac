//! Writes a descriptor that VMware, VirtualBox and virt-v2v read.
//!
//! Devices have their fields in alphabetical order, which the schema of OVF 1 demands, and the units and models that all
//! three know.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::{Controller, VirtualSystem};
use crate::hardware::Firmware;

/// ESXi 6.5 and Workstation 14, as in the descriptor of a VMDK; VirtualBox and virt-v2v accept any.
const HARDWARE: &str = "vmx-13";
const VMDK: &str = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized";
/// The SCSI unit that the controller itself uses.
const SCSI_CONTROLLER_UNIT: usize = 7;
/// Instance ids of the first controller and of the first device behind the controllers.
const FIRST_CONTROLLER: usize = 3;
const FIRST_DEVICE: usize = 100;

/// A disk of a descriptor, and its file.
#[derive(Clone, Debug)]
pub struct DescribedDisk {
    /// The name of the file.
    pub file: String,
    /// The length of the file.
    pub length_bytes: u64,
    /// The size of the disk.
    pub capacity_bytes: u64,
}

/// The descriptor of a machine with these disks. `id` names the machine for programs: letters, digits, `.`, `_`, `-`.
pub fn descriptor(system: &VirtualSystem, id: &str, disks: &[DescribedDisk]) -> String {
    let mut text = String::from(concat!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n",
        "<Envelope xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\" ",
        "xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\" ",
        "xmlns:rasd=\"http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData\" ",
        "xmlns:vmw=\"http://www.vmware.com/schema/ovf\" ",
        "xmlns:vssd=\"http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData\">\n",
        "  <References>\n",
    ));
    let numbered = || (1..).zip(disks);
    for (number, disk) in numbered() {
        let (file, length_bytes) = (escaped(&disk.file), disk.length_bytes);
        put(
            &mut text,
            4,
            &format!(
                "<File ovf:href=\"{file}\" ovf:id=\"file{number}\" ovf:size=\"{length_bytes}\"/>"
            ),
        );
    }
    text.push_str("  </References>\n  <DiskSection>\n    <Info>Virtual disks</Info>\n");
    for (number, disk) in numbered() {
        let capacity = format!(
            "ovf:capacity=\"{}\" ovf:capacityAllocationUnits=\"byte\"",
            disk.capacity_bytes
        );
        let rest = format!(
            "ovf:diskId=\"vmdisk{number}\" ovf:fileRef=\"file{number}\" ovf:format=\"{VMDK}\""
        );
        put(&mut text, 4, &format!("<Disk {capacity} {rest}/>"));
    }
    text.push_str("  </DiskSection>\n  <NetworkSection>\n    <Info>Networks</Info>\n");
    for network in system.cards.iter().map(|card| &card.network).collect::<BTreeSet<_>>() {
        put(&mut text, 4, &format!("<Network ovf:name=\"{}\"/>", escaped(network)));
    }
    let name = escaped(system.name.as_deref().unwrap_or(id));
    let (guest, word) = (system.guest.0, escaped(&system.guest.1));
    let word = if word.is_empty() { word } else { format!(" vmw:osType=\"{word}\"") };
    text.push_str("  </NetworkSection>\n");
    put(&mut text, 2, &format!("<VirtualSystem ovf:id=\"{}\">", escaped(id)));
    text.push_str("    <Info>A virtual machine</Info>\n");
    put(&mut text, 4, &format!("<Name>{name}</Name>"));
    put(&mut text, 4, &format!("<OperatingSystemSection ovf:id=\"{guest}\"{word}>"));
    text.push_str("      <Info>The operating system</Info>\n    </OperatingSystemSection>\n");
    text.push_str("    <VirtualHardwareSection>\n      <Info>Virtual hardware</Info>\n");
    put(
        &mut text,
        6,
        &format!(
            "<System><vssd:ElementName>Virtual Hardware Family</vssd:ElementName><vssd:InstanceID>0</vssd:InstanceID>\
             <vssd:VirtualSystemIdentifier>{name}</vssd:VirtualSystemIdentifier>\
             <vssd:VirtualSystemType>{HARDWARE}</vssd:VirtualSystemType></System>"
        ),
    );
    devices(&mut text, system, disks.len());
    if system.hardware.firmware == Firmware::Uefi {
        put(
            &mut text,
            6,
            "<vmw:Config ovf:required=\"false\" vmw:key=\"firmware\" vmw:value=\"efi\"/>",
        );
    }
    text.push_str("    </VirtualHardwareSection>\n  </VirtualSystem>\n</Envelope>\n");
    text
}

fn devices(text: &mut String, system: &VirtualSystem, disks: usize) {
    let cpus = system.hardware.cpus.to_string();
    let memory = system.hardware.memory_mib.to_string();
    item(
        text,
        &[
            ("AllocationUnits", "hertz * 10^6"),
            ("ElementName", &format!("{cpus} virtual CPU(s)")),
            ("InstanceID", "1"),
            ("ResourceType", "3"),
            ("VirtualQuantity", &cpus),
        ],
    );
    item(
        text,
        &[
            ("AllocationUnits", "byte * 2^20"),
            ("ElementName", &format!("{memory} MB of memory")),
            ("InstanceID", "2"),
            ("ResourceType", "4"),
            ("VirtualQuantity", &memory),
        ],
    );
    let places: Vec<Place> = places(system.controller).take(disks).collect();
    let mut controllers: Vec<(Controller, usize)> =
        places.iter().map(|p| (p.controller, p.bus)).collect();
    controllers.dedup();
    let id = |number: usize| (FIRST_CONTROLLER + number).to_string();
    for (number, (controller, bus)) in controllers.iter().enumerate() {
        let (kind, model, resource) = match controller {
            Controller::Ide => ("IDE", None, "5"),
            Controller::Sata => ("SATA", Some("vmware.sata.ahci"), "20"),
            Controller::Scsi(model) => ("SCSI", Some(*model), "6"),
        };
        let (bus, id, name) = (bus.to_string(), id(number), format!("{kind} Controller {bus}"));
        let mut fields =
            vec![("Address", bus.as_str()), ("ElementName", &name), ("InstanceID", &id)];
        fields.extend(model.map(|model| ("ResourceSubType", model)));
        fields.push(("ResourceType", resource));
        item(text, &fields);
    }
    for (number, place) in (1..).zip(&places) {
        let found = controllers.iter().position(|c| *c == (place.controller, place.bus));
        item(
            text,
            &[
                ("AddressOnParent", &place.unit.to_string()),
                ("ElementName", &format!("Hard Disk {number}")),
                ("HostResource", &format!("ovf:/disk/vmdisk{number}")),
                ("InstanceID", &(FIRST_DEVICE + number).to_string()),
                ("Parent", &id(found.unwrap_or(0))),
                ("ResourceType", "17"),
            ],
        );
    }
    for (number, card) in (1..).zip(&system.cards) {
        item(
            text,
            &[
                ("AddressOnParent", &(6 + number).to_string()),
                ("AutomaticAllocation", "true"),
                ("Connection", &escaped(&card.network)),
                ("ElementName", &format!("Network adapter {number}")),
                ("InstanceID", &(FIRST_DEVICE + disks + number).to_string()),
                ("ResourceSubType", &escaped(&card.model)),
                ("ResourceType", "10"),
            ],
        );
    }
}

/// The place of a disk.
struct Place {
    controller: Controller,
    bus: usize,
    unit: usize,
}

/// The places for disks on controllers of a kind; behind the last IDE disk on SATA.
fn places(controller: Controller) -> impl Iterator<Item = Place> {
    let of = |controller: Controller, buses: usize, units: usize| {
        (0..buses).flat_map(move |bus| {
            (0..units).map(move |unit| {
                let is_behind = controller != Controller::Sata && unit >= SCSI_CONTROLLER_UNIT;
                Place { controller, bus, unit: unit + usize::from(is_behind) }
            })
        })
    };
    let first = match controller {
        Controller::Ide => of(controller, 2, 2),
        Controller::Scsi(_) => of(controller, usize::MAX, 15),
        Controller::Sata => of(controller, 0, 0),
    };
    first.chain(of(Controller::Sata, usize::MAX, 30))
}

fn item(text: &mut String, fields: &[(&str, &str)]) {
    text.push_str("      <Item>\n");
    for (name, value) in fields {
        put(text, 8, &format!("<rasd:{name}>{value}</rasd:{name}>"));
    }
    text.push_str("      </Item>\n");
}

fn put(text: &mut String, indent: usize, line: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{:indent$}{line}", "");
}

/// Text for an element or an attribute of XML, without control characters.
pub fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars().filter(|c| !c.is_control()) {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '\'' => safe.push_str("&apos;"),
            '"' => safe.push_str("&quot;"),
            c => safe.push(c),
        }
    }
    safe
}
