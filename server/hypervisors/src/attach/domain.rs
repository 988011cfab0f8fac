//! A disk attached to a running domain of libvirt, until the domain ends or it is detached.
//!
//! `attach-device --live` and `detach-disk --live` are single requests: if this process dies, libvirt has the disk or
//! has it not. The serial number says which one is ours, so any later process finds and detaches it.

use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use roxmltree::Document;

use super::{AttachedDisk, Device, check_name, mounted};
use crate::libvirt::{LiveDomain, PATIENCE, escaped, find_running};
use crate::virsh::Virsh;

/// Interval of looking whether the guest has released the disk.
const INTERVAL: Duration = Duration::from_millis(200);

/// A running domain.
#[derive(Clone, Debug)]
pub struct AttachDomain {
    virsh: Virsh,
    uuid: String,
}

impl AttachDomain {
    /// Finds it by name or UUID.
    pub(super) fn find(virsh: &Virsh, name: &str) -> Result<AttachDomain> {
        Ok(AttachDomain { virsh: virsh.clone(), uuid: find_running(virsh, name)? })
    }

    pub(super) fn virsh(&self) -> &Virsh {
        &self.virsh
    }

    fn xml(&self) -> Result<String> {
        self.virsh.run(&["dumpxml", &self.uuid], PATIENCE)
    }

    /// The group as which its QEMU runs, if it is not libvirt's own.
    pub(super) fn group(&self) -> Result<Option<u32>> {
        Ok(LiveDomain::parse(&self.xml()?)?.group)
    }

    /// Attaches a disk.
    pub(super) fn attach(&self, disk: &AttachedDisk<'_>) -> Result<()> {
        check_name(disk.name)?;
        let targets = targets(&self.xml()?)?;
        if targets.iter().any(|(_, serial)| serial == disk.name) {
            let text = format!("a disk {} is attached already", disk.name);
            return Err(Error::new(ErrorKind::AlreadyExists, text)
                .advise("choose another name with --as, or remove it with coldrise detach"));
        }
        let (bus, prefix) = match disk.device {
            Device::VirtioBlk => ("virtio", "vd"),
            Device::Scsi => ("scsi", "sd"),
        };
        let is_free = |name: &String| !targets.iter().any(|(target, _)| target == name);
        let mut names = ('a'..='z').rev().map(|letter| format!("{prefix}{letter}"));
        let target = names.find(is_free).ok_or_else(|| {
            Error::new(ErrorKind::ToolFailed, format!("the domain has no free name {prefix}a to z"))
        })?;
        let read_only = if disk.is_read_only { "<readonly/>" } else { "" };
        let xml = format!(
            "<disk type='network' device='disk'><driver name='qemu' type='raw'/><source protocol='nbd' name='{}'>\
             <host transport='unix' socket='{}'/></source><target dev='{target}' bus='{bus}'/>{read_only}\
             <serial>{}</serial></disk>",
            escaped(disk.export),
            escaped(&disk.socket.display().to_string()),
            disk.name
        );
        let words = ["attach-device", &self.uuid, "/dev/stdin", "--live"];
        self.virsh.run_with(&words, Some(&xml), PATIENCE).map(drop)
    }

    /// Whether it has a disk of this name.
    pub(super) fn is_attached(&self, name: &str) -> Result<bool> {
        Ok(targets(&self.xml()?)?.iter().any(|(_, serial)| serial == name))
    }

    /// Asks the guest agent whether the guest has mounted the disk.
    pub(super) fn check_unmounted(&self, name: &str) -> Result<()> {
        let words = ["qemu-agent-command", &self.uuid, r#"{"execute":"guest-get-fsinfo"}"#];
        let answer = self.virsh.run(&words, PATIENCE)?;
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap_or_default();
        mounted::check_unmounted(&answer["return"], name)
    }

    /// Detaches a disk, within `patience` for the guest to release it.
    ///
    /// # Errors
    /// `NotFound` if there is no such disk, `Busy` if the guest does not release it in time: it stays
    /// attached, but the guest may still release it later.
    pub(super) fn detach(&self, name: &str, patience: Duration) -> Result<()> {
        check_name(name)?;
        let target = || -> Result<Option<String>> {
            let all = targets(&self.xml()?)?;
            Ok(all.into_iter().find(|(_, serial)| serial == name).map(|(target, _)| target))
        };
        let Some(dev) = target()? else {
            let text = format!("no disk {name} of Coldrise is attached to this machine");
            return Err(Error::new(ErrorKind::NotFound, text));
        };
        // libvirt fails if the guest is slow, but has asked it. So the state decides.
        let asked = self.virsh.run(&["detach-disk", &self.uuid, &dev, "--live"], PATIENCE);
        let until = Instant::now() + patience;
        while target()?.is_some() {
            if Instant::now() >= until {
                asked?;
                let text = "the guest does not release the disk";
                return Err(Error::new(ErrorKind::Busy, text).advise(
                    "unmount it in the guest; a guest that is not running yet releases nothing",
                ));
            }
            std::thread::sleep(INTERVAL);
        }
        Ok(())
    }
}

/// The names of all disks, with the serial numbers of those behind an NBD socket.
fn targets(xml: &str) -> Result<Vec<(String, String)>> {
    let document = Document::parse(xml).map_err(|error| {
        Error::with_source(ErrorKind::ToolFailed, "libvirt's XML of the domain", error)
    })?;
    let disks = document.descendants().filter(|node| node.has_tag_name("disk"));
    let named = disks.filter_map(|disk| {
        let part = |name: &str| disk.children().find(|child| child.has_tag_name(name));
        let target = part("target")?.attribute("dev")?.to_owned();
        let is_nbd = part("source").is_some_and(|s| s.attribute("protocol") == Some("nbd"));
        let serial = part("serial").filter(|_| is_nbd).and_then(|serial| serial.text());
        Some((target, serial.unwrap_or_default().to_owned()))
    });
    Ok(named.collect())
}
