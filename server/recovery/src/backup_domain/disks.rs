//! What the backup needs to know of a domain's live XML.

use coldrise_block::{Error, ErrorKind, Result, MAX_DISK_SIZE_BYTES};
use coldrise_store::{DiskName, MAX_DISKS};
use roxmltree::{Document, Node, ParsingOptions};

use crate::backup_source::DiskPick;
use crate::libvirt::PATIENCE;
use crate::virsh::Virsh;

/// Maximum number of elements and attributes.
const MAX_NODES: u32 = 100_000;
/// Kinds of sources that libvirt can back up.
const KINDS: [&str; 4] = ["block", "file", "network", "volume"];

/// A writable disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DomainDisk {
    pub(super) name: DiskName,
    /// Its name in libvirt, such as `vda`.
    pub(super) target: String,
    pub(super) size_bytes: u64,
    /// Whether libvirt can make checkpoints of it: qcow2 only.
    pub(super) keeps_checkpoints: bool,
}

/// The live domain.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct LiveDomain {
    writable: Vec<Target>,
    /// Disks and drives that are never backed up.
    others: Vec<String>,
    /// The user and the group as which QEMU runs; `None`: as libvirt's own.
    pub(super) group: Option<u32>,
    has_iothreads: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    name: String,
    format: String,
    /// For messages.
    source: String,
}

impl LiveDomain {
    /// # Errors
    /// `ToolFailed` if it is not a domain.
    pub(super) fn parse(text: &str) -> Result<LiveDomain> {
        let odd = |why: String| {
            Error::new(ErrorKind::ToolFailed, format!("libvirt's XML of the domain: {why}"))
        };
        let parsing = ParsingOptions { nodes_limit: MAX_NODES, ..ParsingOptions::default() };
        let document =
            Document::parse_with_options(text, parsing).map_err(|error| odd(error.to_string()))?;
        let domain = document.root_element();
        let devices = child(domain, "devices").ok_or_else(|| odd("there are no devices".into()))?;
        let mut live = LiveDomain { group: group(domain), ..LiveDomain::default() };
        for device in devices.children() {
            match device.tag_name().name() {
                "disk" => live.add(device),
                "controller" => live.has_iothreads |= has_iothread(device),
                _ => {}
            }
        }
        Ok(live)
    }

    fn add(&mut self, disk: Node<'_, '_>) {
        let Some(name) = child(disk, "target").and_then(|target| target.attribute("dev")) else {
            return;
        };
        // `lun` passes the guest's commands through: QEMU sees no writes.
        let is_disk = matches!(disk.attribute("device"), None | Some("disk"))
            && KINDS.contains(&disk.attribute("type").unwrap_or_default())
            && child(disk, "readonly").is_none()
            && child(disk, "source").is_some();
        if !is_disk {
            self.others.push(name.to_owned());
            return;
        }
        let format = child(disk, "driver").and_then(|driver| driver.attribute("type"));
        let source = child(disk, "source");
        let source = source.and_then(|s| s.attribute("file").or_else(|| s.attribute("dev")));
        self.has_iothreads |= has_iothread(disk);
        self.writable.push(Target {
            name: name.to_owned(),
            format: format.unwrap_or("raw").to_owned(),
            source: source.unwrap_or("…").to_owned(),
        });
    }

    /// Whether a writable disk or a controller has an iothread.
    pub(super) fn has_iothreads(&self) -> bool {
        self.has_iothreads
    }

    /// The disks as `coldrise backup` takes them when the domain is off.
    pub(super) fn as_files(&self) -> String {
        let file = |disk: &Target| format!("{}={}:{}", disk.name, disk.format, disk.source);
        self.writable.iter().map(file).collect::<Vec<_>>().join(" ")
    }

    /// The disks to back up, all or the picked ones, and the targets of all others.
    ///
    /// # Errors
    /// `NotFound` if a picked disk or any disk is absent; `InvalidInput` if a disk needs a name.
    pub(super) fn choose(
        &self,
        virsh: &Virsh,
        uuid: &str,
        picks: &[DiskPick],
    ) -> Result<(Vec<DomainDisk>, Vec<String>)> {
        let mut chosen = Vec::new();
        for pick in picks {
            let found = self.writable.iter().find(|disk| disk.name == pick.device);
            let found = found.ok_or_else(|| {
                let known: Vec<&str> = self.writable.iter().map(|disk| &*disk.name).collect();
                let text = format!(
                    "the machine has no writable disk '{}'; it has: {}",
                    pick.device,
                    known.join(", ")
                );
                Error::new(ErrorKind::NotFound, text)
            })?;
            chosen.push((pick.disk.clone(), found));
        }
        if picks.is_empty() {
            for disk in &self.writable {
                chosen.push((DiskName::parse(&disk.name)?, disk));
            }
        }
        if chosen.is_empty() || chosen.len() > MAX_DISKS {
            let text =
                format!("the machine has {} writable disks; 1 to {MAX_DISKS} work", chosen.len());
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        let is_chosen = |target: &String| chosen.iter().any(|(_, disk)| disk.name == *target);
        let all = self.writable.iter().map(|disk| &disk.name).chain(&self.others);
        let others = all.filter(|target| !is_chosen(target)).cloned().collect();
        let disks = chosen.into_iter().map(|(name, disk)| {
            let size_bytes = size_bytes(virsh, uuid, &disk.name)?;
            let keeps_checkpoints = disk.format == "qcow2";
            Ok(DomainDisk { name, target: disk.name.clone(), size_bytes, keeps_checkpoints })
        });
        Ok((disks.collect::<Result<_>>()?, others))
    }

    /// Whether this target is a writable disk.
    pub(super) fn is_writable(&self, target: &str) -> bool {
        self.writable.iter().any(|disk| disk.name == target)
    }
}

/// The size of a disk as the guest sees it.
fn size_bytes(virsh: &Virsh, uuid: &str, target: &str) -> Result<u64> {
    let answer = virsh.run(&["domblkinfo", uuid, target], PATIENCE)?;
    let line = answer.lines().find_map(|line| line.strip_prefix("Capacity:"));
    match line.and_then(|number| number.trim().parse().ok()) {
        Some(size) if size > 0 && size <= MAX_DISK_SIZE_BYTES => Ok(size),
        _ => {
            let text = format!("libvirt does not tell the size of {target}, or it is out of range");
            Err(Error::new(ErrorKind::Unsupported, text))
        }
    }
}

fn has_iothread(device: Node<'_, '_>) -> bool {
    child(device, "driver").is_some_and(|driver| {
        driver.has_attribute("iothread") || child(driver, "iothreads").is_some()
    })
}

/// From a label such as `+64055:+64055`.
fn group(domain: Node<'_, '_>) -> Option<u32> {
    let is_dac = |node: &Node<'_, '_>| {
        node.has_tag_name("seclabel") && node.attribute("model") == Some("dac")
    };
    let label = domain.children().find(is_dac).and_then(|dac| child(dac, "label"))?.text()?;
    label.trim().rsplit(':').next()?.trim_start_matches('+').parse().ok()
}

fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name(name))
}

#[cfg(test)]
mod tests {
    use super::LiveDomain;

    const DISK: &str = "<disk type='file' device='disk'><driver type='qcow2'/><source file='/a'/><target dev='vda'/></disk>";

    fn parse(devices: &str) -> LiveDomain {
        let label =
            "<seclabel model='dac'><label>+64055:+108</label></seclabel><seclabel model='selinux'/>";
        LiveDomain::parse(&format!("<domain><devices>{devices}</devices>{label}</domain>")).unwrap()
    }

    #[test]
    fn only_writable_disks_count() {
        let live = parse(&format!(
            "{DISK}<disk type='file' device='cdrom'><target dev='hda'/></disk>\
             <disk type='block' device='lun'><source dev='/x'/><target dev='sda'/></disk>\
             <disk type='file'><source file='/x'/><target dev='vdb'/><readonly/></disk>\
             <disk type='vhostuser'><source path='/x'/><target dev='vdc'/></disk>"
        ));
        assert_eq!(live.as_files(), "vda=qcow2:/a");
        assert_eq!(live.others, ["hda", "sda", "vdb", "vdc"]);
        assert_eq!((live.group, live.has_iothreads()), (Some(108), false));
    }

    #[test]
    fn iothreads_of_disks_and_controllers_are_seen() {
        assert!(parse(&DISK.replace("type='qcow2'", "type='qcow2' iothread='1'")).has_iothreads());
        let mapped = "type='qcow2'><iothreads><iothread id='2'/></iothreads></driver>";
        assert!(parse(&DISK.replace("type='qcow2'/>", mapped)).has_iothreads());
        let controller = "<controller type='scsi'><driver iothread='3'/></controller>";
        assert!(parse(&format!("{DISK}{controller}")).has_iothreads());
        assert!(!parse(&format!("{DISK}<controller type='scsi'/>")).has_iothreads());
    }
}
