//! The initial .vmx in a session's folder, for hypervisors that read one.
//!
//! A stored .vmx is kept, except for the names of its disks. Without one, the file is
//! made from the known facts about the machine. Afterwards the file belongs to the
//! clients: they may rewrite it, and sealed points contain their version.

use std::fmt::Write;
use std::sync::Arc;

use coldrise_block::Result;
use coldrise_session::{
    CarriedFile, CarriedFiles, IncomingPoint, MAX_SMALL_BYTES, SessionDocument, publish_with_files,
};
use coldrise_store::{DiskName, PointDocument, PointOrigin, Repository, SessionName, VMX};

use coldrise_inventory::{DiskBus, Firmware, Hardware, Network};

/// Publishes a point as a session whose folder has a .vmx. The errors are those of
/// [`coldrise_session::publish`].
pub fn publish(
    repository: &Arc<Repository>,
    point: &PointDocument,
    name: Option<SessionName>,
) -> Result<SessionDocument> {
    publish_with_files(repository, point, name, |session, files| Ok(arrange(point, session, files)))
}

/// The same for a point that is still on its way here. The errors are those of
/// [`coldrise_session::publish_incoming`].
pub fn publish_incoming(
    repository: &Arc<Repository>,
    incoming: &IncomingPoint,
    name: Option<SessionName>,
) -> Result<SessionDocument> {
    let point = &incoming.point.document;
    coldrise_session::publish_incoming(repository, incoming, name, |session, files| {
        Ok(arrange(point, session, files))
    })
}

/// Adds a .vmx with the session's name to the point's files. If the point was sealed
/// from a session, that session's .vmx is the newest and gets the new name.
fn arrange(
    point: &PointDocument,
    session: &SessionDocument,
    mut carried: CarriedFiles,
) -> CarriedFiles {
    let path = format!("{}.vmx", session.name);
    if carried.find(&path).is_some() {
        return carried;
    }
    if let PointOrigin::Synthetic { session: before, .. } = &point.origin {
        let before = format!("{before}.vmx");
        let file = carried.files.iter_mut().find(|file| file.path == before);
        if let Some(file) = file.filter(|file| file.content.is_some()) {
            file.path = path;
            return carried;
        }
    }
    let content = Some(text(session).into_bytes());
    let modified_ms = session.created_at_ms;
    carried.files.push(CarriedFile { path, content, mode: 0o644, modified_ms });
    carried
}

/// The .vmx of a session.
fn text(session: &SessionDocument) -> String {
    let disks: Vec<_> = session.disks.iter().map(|disk| &disk.name).collect();
    let stored = session.configuration.as_ref().filter(|stored| stored.format == VMX);
    let kept = stored.map(|stored| with_disks(&stored.text, &disks));
    if let Some(text) = kept.filter(|text| text.len() as u64 <= MAX_SMALL_BYTES) {
        return text;
    }
    // An invalid configuration must not prevent publishing.
    let hardware = Hardware::of(session.configuration.as_ref()).unwrap_or_default();
    made(session.name.as_str(), &hardware, &disks)
}

/// Disks per controller, and controllers of each kind.
const SATA: (&str, usize, usize) = ("sata", 30, 4);
const SCSI: (&str, usize, usize) = ("scsi", 15, 4);
const IDE: (&str, usize, usize) = ("ide", 2, 2);
/// The SCSI unit that the controller itself uses.
const SCSI_CONTROLLER_UNIT: usize = 7;

/// The places for disks on controllers of a kind, in order.
fn places(
    (bus, units, controllers): (&'static str, usize, usize),
) -> impl Iterator<Item = DeviceAddress> {
    (0..controllers).flat_map(move |controller| {
        (0..units).map(move |unit| {
            let is_behind = bus == SCSI.0 && unit >= SCSI_CONTROLLER_UNIT;
            DeviceAddress { bus: bus.to_owned(), controller, unit: unit + usize::from(is_behind) }
        })
    })
}

/// The place of a disk, written as `scsi0:1`, in the machine's order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct DeviceAddress {
    bus: String,
    controller: usize,
    unit: usize,
}

impl DeviceAddress {
    fn parse(device: &str) -> Option<DeviceAddress> {
        let (controller, unit) = device.split_once(':')?;
        let digits = controller.find(|c: char| c.is_ascii_digit())?;
        let (bus, number) = controller.split_at(digits);
        let bus = bus.to_ascii_lowercase();
        let is_known = matches!(bus.as_str(), "scsi" | "sata" | "ide" | "nvme");
        let place =
            DeviceAddress { bus, controller: number.parse().ok()?, unit: unit.parse().ok()? };
        is_known.then_some(place)
    }
}

impl std::fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}:{}", self.bus, self.controller, self.unit)
    }
}

/// Parses a line `name = "value"`. The name is normalized for comparison.
fn parse_line(line: &str) -> Option<(String, &str)> {
    let (name, value) = line.split_once('=')?;
    Some((name.trim().to_ascii_lowercase(), value.trim().trim_matches('"').trim()))
}

/// The stored text with the names of the session's disks, assigned in the order of their
/// places. A place without a disk is marked as not present; a disk without a place gets
/// a new one.
fn with_disks(stored: &str, disks: &[&DiskName]) -> String {
    let mut attached: Vec<DeviceAddress> = stored
        .lines()
        .filter_map(parse_line)
        .filter(|(_, value)| value.to_ascii_lowercase().ends_with(".vmdk"))
        .filter_map(|(name, _)| name.strip_suffix(".filename").and_then(DeviceAddress::parse))
        .collect();
    attached.sort_unstable();
    attached.dedup();
    let mut text = String::with_capacity(stored.len() + 256);
    for line in stored.lines() {
        let place = parse_line(line).and_then(|(name, _)| {
            let (device, field) = name.split_once('.')?;
            let index = attached
                .iter()
                .position(|place| Some(place) == DeviceAddress::parse(device).as_ref());
            Some((index?, field.to_owned()))
        });
        // Writing to a String cannot fail.
        let _ = match place {
            Some((index, field)) if field == "filename" && index < disks.len() => {
                writeln!(text, "{}.fileName = \"{}.vmdk\"", attached[index], disks[index])
            }
            Some((index, field)) if field == "present" && index >= disks.len() => {
                writeln!(text, "{}.present = \"FALSE\"", attached[index])
            }
            _ => writeln!(text, "{line}"),
        };
    }
    let free = places(SATA).filter(|place| !attached.contains(place));
    let more = disks.iter().skip(attached.len()).zip(free);
    let mut has_controller = stored
        .lines()
        .filter_map(parse_line)
        .any(|(name, value)| name == "sata0.present" && value.eq_ignore_ascii_case("true"));
    for (disk, place) in more {
        if !has_controller || place.controller > 0 && place.unit == 0 {
            let _ = writeln!(text, "sata{}.present = \"TRUE\"", place.controller);
            has_controller = true;
        }
        attach(&mut text, &place, disk);
    }
    text
}

fn attach(text: &mut String, place: &DeviceAddress, disk: &DiskName) {
    let _ = writeln!(text, "{place}.present = \"TRUE\"");
    let _ = writeln!(text, "{place}.deviceType = \"{}-hardDisk\"", place.bus);
    let _ = writeln!(text, "{place}.fileName = \"{disk}.vmdk\"");
}

/// A .vmx from the known hardware only.
fn made(name: &str, hardware: &Hardware, disks: &[&DiskName]) -> String {
    let firmware = match hardware.firmware {
        Firmware::Bios => "bios",
        Firmware::Uefi => "efi",
    };
    let mut text = format!(
        "\
.encoding = \"UTF-8\"
config.version = \"8\"
virtualHW.version = \"13\"
displayName = \"{name}\"
guestOS = \"other-64\"
nvram = \"{name}.nvram\"
firmware = \"{firmware}\"
memSize = \"{}\"
numvcpus = \"{}\"
pciBridge0.present = \"TRUE\"
floppy0.present = \"FALSE\"
",
        hardware.memory_mib.next_multiple_of(4),
        hardware.cpus
    );
    for bridge in 4..8 {
        let _ = write!(
            text,
            "pciBridge{bridge}.present = \"TRUE\"\n\
             pciBridge{bridge}.virtualDev = \"pcieRootPort\"\n\
             pciBridge{bridge}.functions = \"8\"\n"
        );
    }
    // There is no virtio; all systems support AHCI.
    let kind = match hardware.disk_bus {
        DiskBus::Scsi => SCSI,
        DiskBus::Ide if disks.len() <= IDE.1 * IDE.2 => IDE,
        DiskBus::Ide | DiskBus::Sata | DiskBus::Virtio => SATA,
    };
    let mut controller = None;
    for (disk, place) in disks.iter().zip(places(kind)) {
        if controller.replace(place.controller) != Some(place.controller) && kind != IDE {
            let _ = writeln!(text, "{}{}.present = \"TRUE\"", place.bus, place.controller);
            if kind == SCSI {
                let _ = writeln!(text, "scsi{}.virtualDev = \"lsilogic\"", place.controller);
            }
        }
        attach(&mut text, &place, disk);
    }
    if hardware.network == Network::User {
        text.push_str(
            "ethernet0.present = \"TRUE\"\nethernet0.virtualDev = \"e1000e\"\n\
             ethernet0.networkName = \"VM Network\"\nethernet0.addressType = \"generated\"\n",
        );
    }
    text
}

#[cfg(test)]
#[path = "vmx_tests.rs"]
mod tests;
