//! Block devices, and what their beginnings say.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Result};
use std::path::{Path, PathBuf};

use coldrise_files_protocol::Device;

use crate::signature::{Content, HEAD_BYTES, Signature, recognise, unique};
use crate::text;

/// Sizes in /sys are in sectors of this length.
const SECTOR_BYTES: u64 = 512;

/// The disks' kernel names by their numbers, which QEMU has as serial numbers.
pub(crate) fn disks() -> Result<BTreeMap<u64, String>> {
    let mut disks = BTreeMap::new();
    for disk in std::fs::read_dir("/sys/block")? {
        let disk = disk?;
        let Ok(serial) = std::fs::read_to_string(disk.path().join("serial")) else { continue };
        if let Ok(number) = serial.trim().parse() {
            disks.insert(number, disk.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(disks)
}

pub(crate) fn number_in(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The kernel's name of a mapped device.
pub(crate) fn node_of(mapped: &str) -> Option<String> {
    mapped_devices().into_iter().find(|(_, name)| name == mapped).map(|(node, _)| node)
}

/// The mapped devices: the kernel's name, and the name.
pub(crate) fn mapped_devices() -> Vec<(String, String)> {
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let all = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let mapped = all.filter(|device| device.path().join("dm").is_dir());
    let mut mapped: Vec<_> = mapped
        .map(|device| {
            let name = read(device.path().join("dm/name")).trim().to_owned();
            (device.file_name().to_string_lossy().into_owned(), name)
        })
        .collect();
    mapped.sort();
    mapped
}

/// A block device.
pub(crate) struct Block {
    /// The kernel's name; empty for a logical volume that is not active.
    pub(crate) node: String,
    pub(crate) disk: Option<u64>,
    pub(crate) partition: u64,
    pub(crate) volume: Vec<u8>,
    size_bytes: u64,
    pub(crate) content: Content,
    format: &'static str,
    label: Vec<u8>,
    /// The UUID of a physical volume or of a member of an array, equal only in its copies; else empty.
    pub(crate) unique: Vec<u8>,
    /// Why its volumes are missing.
    pub(crate) note: String,
}

impl Block {
    /// Reads a device's beginning.
    pub(crate) fn read(node: &str, disk: Option<u64>, partition: u64, volume: Vec<u8>) -> Block {
        let sectors = number_in(&Path::new("/sys/class/block").join(node).join("size"));
        let mut head = Vec::new();
        let read = File::open(Path::new("/dev").join(node))
            .and_then(|file| file.take(HEAD_BYTES as u64).read_to_end(&mut head));
        let size_bytes = sectors.unwrap_or_default().saturating_mul(SECTOR_BYTES);
        let unread = Block::unread(volume, size_bytes);
        let block = Block { node: node.to_owned(), disk, partition, ..unread };
        if let Err(error) = read {
            return Block { note: text(&error), ..block };
        }
        let Signature { format, content, label } = recognise(&head);
        Block { content, format, label, unique: unique(&head, content), ..block }
    }

    /// A volume of which nothing is known.
    pub(crate) fn unread(volume: Vec<u8>, size_bytes: u64) -> Block {
        Block {
            node: String::new(),
            disk: None,
            partition: 0,
            volume,
            size_bytes,
            content: Content::Unreadable(""),
            format: "unknown",
            label: Vec::new(),
            unique: Vec::new(),
            note: String::new(),
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        Path::new("/dev").join(&self.node)
    }

    pub(crate) fn is_readable(&self) -> bool {
        matches!(self.content, Content::Mountable(..) | Content::Ntfs)
    }

    pub(crate) fn described(&self, number: usize) -> Device {
        let note = match self.content {
            Content::Unreadable(why) if self.note.is_empty() => why,
            _ => self.note.as_str(),
        };
        Device {
            number: number as u64,
            disk: self.disk,
            partition: self.partition,
            volume: self.volume.clone(),
            format: self.format.to_owned(),
            label: self.label.clone(),
            size_bytes: self.size_bytes,
            is_readable: self.is_readable(),
            note: note.to_owned(),
        }
    }
}
