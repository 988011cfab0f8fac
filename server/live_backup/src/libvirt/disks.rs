//! The disks of a domain that are backed up.

use std::path::PathBuf;

use coldrise_block::{Error, ErrorKind, MAX_DISK_SIZE_BYTES, Result};
use coldrise_hypervisors::libvirt::{LiveDomain, PATIENCE};
use coldrise_hypervisors::virsh::Virsh;
use coldrise_store::{DiskName, MAX_DISKS};

use crate::{DiskPick, Since};

/// A writable disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DomainDisk {
    pub(super) name: DiskName,
    /// Its name in libvirt, such as `vda`.
    pub(super) target: String,
    pub(super) size_bytes: u64,
    /// The format of its image.
    pub(super) format: String,
    /// The image's file or block device on this host, if it is one.
    pub(super) file: Option<PathBuf>,
}

impl DomainDisk {
    /// Whether there can be checkpoints of it.
    pub(super) fn keeps_checkpoints(&self) -> bool {
        self.format == "qcow2"
    }

    /// Why a disk is read completely, unless nothing else is to be expected.
    pub(super) fn full_read_remark(&self, since: &Since<'_>) -> Option<String> {
        if !self.keeps_checkpoints() {
            let text =
                format!("{}: only qcow2 images keep checkpoints: everything is read", self.name);
            return Some(text);
        }
        since.expected().map(|state| {
            format!("{}: no checkpoint counts from {state}: everything is read", self.name)
        })
    }
}

/// The disks to back up, all or the picked ones, and the targets of all others.
///
/// # Errors
/// `NotFound` if a picked disk or any disk is absent; `InvalidInput` if a disk needs a name.
pub(super) fn choose(
    live: &LiveDomain,
    virsh: &Virsh,
    uuid: &str,
    picks: &[DiskPick],
) -> Result<(Vec<DomainDisk>, Vec<String>)> {
    let mut chosen = Vec::new();
    for pick in picks {
        let found = live.writable.iter().find(|disk| disk.target == pick.device);
        let found = found.ok_or_else(|| {
            let known: Vec<&str> = live.writable.iter().map(|disk| &*disk.target).collect();
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
        for disk in &live.writable {
            chosen.push((DiskName::parse(&disk.target)?, disk));
        }
    }
    if chosen.is_empty() || chosen.len() > MAX_DISKS {
        let text =
            format!("the machine has {} writable disks; 1 to {MAX_DISKS} work", chosen.len());
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    let is_chosen = |target: &String| chosen.iter().any(|(_, disk)| disk.target == *target);
    let all = live.writable.iter().map(|disk| &disk.target).chain(&live.others);
    let others = all.filter(|target| !is_chosen(target)).cloned().collect();
    let sizes = sizes_bytes(virsh, uuid, chosen.iter().map(|(_, disk)| &*disk.target).collect())?;
    let disks = chosen.into_iter().zip(sizes).map(|((name, disk), size_bytes)| {
        let file = match (&disk.file, &disk.volume) {
            (None, Some((pool, volume))) => {
                let path = virsh.run(&["vol-path", "--pool", pool, volume], PATIENCE).ok();
                path.map(|path| PathBuf::from(path.trim()))
            }
            (file, _) => file.clone(),
        };
        let (target, format) = (disk.target.clone(), disk.format.clone());
        Ok(DomainDisk { name, target, size_bytes, format, file })
    });
    Ok((disks.collect::<Result<_>>()?, others))
}

/// The sizes of disks as the guest sees them.
fn sizes_bytes(virsh: &Virsh, uuid: &str, targets: Vec<&str>) -> Result<Vec<u64>> {
    let commands: Vec<[&str; 3]> = targets.iter().map(|disk| ["domblkinfo", uuid, disk]).collect();
    let commands: Vec<&[&str]> = commands.iter().map(|words| &words[..]).collect();
    let answers = virsh.ask(&commands, PATIENCE)?;
    let size = |(target, answer): (&str, Result<String>)| {
        let answer = answer?;
        let line = answer.lines().find_map(|line| line.strip_prefix("Capacity:"));
        match line.and_then(|number| number.trim().parse().ok()) {
            Some(size) if size > 0 && size <= MAX_DISK_SIZE_BYTES => Ok(size),
            _ => {
                let text =
                    format!("libvirt does not report the size of {target}, or it is out of range");
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    };
    targets.into_iter().zip(answers).map(size).collect()
}
