//! A domain by its XML: the live one, or the one that it starts with.

use std::path::PathBuf;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use roxmltree::{Document, Node, ParsingOptions};

use super::PATIENCE;
use crate::virsh::Virsh;

/// Maximum number of elements and attributes.
const MAX_NODES: u32 = 100_000;
/// Kinds of sources that libvirt can back up.
const KINDS: [&str; 4] = ["block", "file", "network", "volume"];

/// The domain.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LiveDomain {
    /// The disks that the machine can write.
    pub writable: Vec<WritableDisk>,
    /// The targets of all other disks and drives.
    pub others: Vec<String>,
    /// The group as which its QEMU runs; `None`: as libvirt's own.
    pub group: Option<u32>,
    has_iothreads: bool,
}

/// A disk that a machine can write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WritableDisk {
    /// Its target in libvirt, such as `vda`.
    pub target: String,
    /// The format of its image.
    pub format: String,
    /// The image's file or block device on this host; `None` for all else, such as a part of a file, an encrypted
    /// image or a place on the network.
    pub file: Option<PathBuf>,
    /// The pool and the volume, if libvirt's storage has the image.
    pub volume: Option<(String, String)>,
}

impl LiveDomain {
    /// Reads the answer of `virsh dumpxml`.
    ///
    /// # Errors
    /// `ToolFailed` if it is not a domain.
    pub fn parse(text: &str) -> Result<LiveDomain> {
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
        let is_plain = |source: &Node<'_, '_>| {
            ["slices", "encryption"].iter().all(|name| child(*source, name).is_none())
                && child(disk, "encryption").is_none()
        };
        let source = child(disk, "source").filter(is_plain);
        let file = source.and_then(|s| s.attribute("file").or_else(|| s.attribute("dev")));
        let volume = source.and_then(|s| Some((s.attribute("pool")?, s.attribute("volume")?)));
        self.has_iothreads |= has_iothread(disk);
        self.writable.push(WritableDisk {
            target: name.to_owned(),
            format: format.unwrap_or("raw").to_owned(),
            file: file.map(PathBuf::from),
            volume: volume.map(|(pool, volume)| (pool.to_owned(), volume.to_owned())),
        });
    }

    /// Whether a writable disk or a controller has an iothread.
    pub fn has_iothreads(&self) -> bool {
        self.has_iothreads
    }

    /// Whether this target is a writable disk.
    pub fn is_writable(&self, target: &str) -> bool {
        self.writable.iter().any(|disk| disk.target == target)
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

/// The UUIDs and names of domains. The UUID is safe in later calls: virsh takes a name of digits for a
/// number.
///
/// # Errors
/// `ToolFailed` if libvirt does not answer.
pub fn domains(virsh: &Virsh, is_all: bool, patience: Duration) -> Result<Vec<(String, String)>> {
    listed(virsh, if is_all { &["--all"] } else { &[] }, patience)
}

fn listed(virsh: &Virsh, more: &[&str], patience: Duration) -> Result<Vec<(String, String)>> {
    let answer = virsh.run(&[&["list", "--name", "--uuid"], more].concat(), patience)?;
    let lines = answer.lines().filter_map(|line| line.trim().split_once(' '));
    Ok(lines.map(|(uuid, name)| (uuid.to_owned(), name.trim().to_owned())).collect())
}

/// Whether a domain with another UUID, running or not, has this name.
///
/// # Errors
/// `ToolFailed` if libvirt does not answer.
pub fn is_named_by_another(virsh: &Virsh, uuid: &str, name: &str) -> Result<bool> {
    let all = listed(virsh, &["--all"], PATIENCE)?;
    Ok(all.iter().any(|(other, its_name)| its_name == name && other != uuid))
}

/// The names of all domains, within `patience`.
///
/// # Errors
/// `ToolFailed` if libvirt does not answer.
pub fn all_domains(virsh: &Virsh, patience: Duration) -> Result<Vec<String>> {
    Ok(listed(virsh, &["--all"], patience)?.into_iter().map(|(_, name)| name).collect())
}

/// The UUID of a running domain.
///
/// # Errors
/// `NotFound` if there is none or it is off, with advice; `ToolFailed` if libvirt does not answer.
pub fn find_running(virsh: &Virsh, wanted: &str) -> Result<String> {
    match find_domain(virsh, wanted)? {
        (uuid, true) => Ok(uuid),
        (_, false) => {
            let text = format!("domain {wanted} is off");
            Err(Error::new(ErrorKind::NotFound, text).advise("start it"))
        }
    }
}

/// The UUID of a domain, and whether it runs.
///
/// # Errors
/// `NotFound` if there is none, with advice; `ToolFailed` if libvirt does not answer.
pub fn find_domain(virsh: &Virsh, wanted: &str) -> Result<(String, bool)> {
    let is_wanted = |(uuid, name): &&(String, String)| uuid == wanted || name == wanted;
    let running = listed(virsh, &[], PATIENCE)?;
    if let Some((uuid, _)) = running.iter().find(is_wanted) {
        return Ok((uuid.clone(), true));
    }
    let all = listed(virsh, &["--all"], PATIENCE)?;
    let Some((uuid, _)) = all.iter().find(is_wanted) else {
        let known: Vec<&str> = all.iter().map(|(_, name)| name.as_str()).take(20).collect();
        let text = format!("libvirt ({}) has no domain {wanted}", virsh.uri());
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        let advice = format!("it has: {known}; write libvirt:DOMAIN");
        return Err(Error::new(ErrorKind::NotFound, text).advise(advice));
    };
    Ok((uuid.clone(), false))
}

#[cfg(test)]
mod tests {
    use super::LiveDomain;

    const DISK: &str = "<disk type='file' device='disk'><driver type='qcow2'/><source file='/a'/><target dev='vda'/></disk>";

    fn parse(devices: &str) -> LiveDomain {
        let label = "<seclabel model='dac'><label>+64055:+108</label></seclabel><seclabel model='selinux'/>";
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
        let [disk] = &live.writable[..] else { panic!("{live:?}") };
        assert_eq!((&*disk.target, &*disk.format), ("vda", "qcow2"));
        assert_eq!(disk.file.as_deref(), Some(std::path::Path::new("/a")));
        assert_eq!(live.others, ["hda", "sda", "vdb", "vdc"]);
        assert_eq!((live.group, live.has_iothreads()), (Some(108), false));
    }

    #[test]
    fn only_plain_local_images_are_files() {
        let disk = |source: &str| parse(&DISK.replace("<source file='/a'/>", source)).writable;
        for source in [
            "<source file='/a'><slices/></source>",
            "<source file='/a'><encryption format='luks'/></source>",
            "<source protocol='rbd' name='/a'/>",
        ] {
            assert_eq!(disk(source)[0].file, None, "{source}");
        }
        let stored = disk("<source pool='p' volume='v'/>");
        assert_eq!(stored[0].volume, Some(("p".to_owned(), "v".to_owned())));
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
