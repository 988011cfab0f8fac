//! The content of a device, from its first bytes. Only names and labels are taken from them here: the
//! kernel reads the rest.

use std::ops::Range;

use crate::bitlocker;

/// Bytes at the beginning of a device that are looked at.
pub(crate) const HEAD_BYTES: usize = 128 << 10;

/// A known content.
pub(crate) struct Signature {
    /// Its word for people.
    pub(crate) format: &'static str,
    pub(crate) content: Content,
    pub(crate) label: Vec<u8>,
}

/// The type of a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// The kernel's file system of that name, with its options.
    Mountable(&'static str, &'static str),
    /// Read by ntfs-3g.
    Ntfs,
    /// A physical volume of LVM, a member of an array, an encrypted container.
    Lvm,
    Array,
    Luks,
    BitLocker,
    /// Nothing to read, and why.
    Unreadable(&'static str),
}

/// The UUID of a physical volume of LVM or of a member of an array; only its copies share it.
pub(crate) fn unique(head: &[u8], content: Content) -> Vec<u8> {
    let part = |place: Option<usize>, bytes: Range<usize>| {
        let bytes = place.and_then(|at| head.get(at + bytes.start..at + bytes.end));
        bytes.unwrap_or_default().to_vec()
    };
    match content {
        Content::Lvm => {
            let is_label = |at: &usize| head.get(*at..).is_some_and(|s| s.starts_with(b"LABELONE"));
            part((0..4).map(|sector| sector * 512).find(is_label), 32..64)
        }
        Content::Array => {
            let is_member = |at: &usize| head.get(*at..).is_some_and(|s| s.starts_with(&ARRAY));
            part([0, 4096].into_iter().find(is_member), 168..184)
        }
        _ => Vec::new(),
    }
}

/// The first bytes of a superblock of Linux' arrays.
const ARRAY: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();
const ATTACH: &str = "not readable here: boot the point, or attach the disk to a machine that can";

/// Recognises the beginning of a device.
pub(crate) fn recognise(head: &[u8]) -> Signature {
    let at = |offset: usize, magic: &[u8]| {
        head.get(offset..).is_some_and(|bytes| bytes.starts_with(magic))
    };
    let label = |offset: usize, length: usize| {
        let bytes = head.get(offset..offset + length).unwrap_or_default();
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(length);
        bytes.get(..end).unwrap_or_default().trim_ascii_end().to_vec()
    };
    let found = |format, content, label| Signature { format, content, label };
    let other =
        |format, why| Signature { format, content: Content::Unreadable(why), label: Vec::new() };
    let kernel = Content::Mountable;
    let lvm =
        (0..4).any(|sector| at(sector * 512, b"LABELONE") && at(sector * 512 + 24, b"LVM2 001"));
    let array = [0, 4096].into_iter().any(|offset| at(offset, &ARRAY));
    if at(0, b"LUKS\xba\xbe") {
        // Only version 2 has a label.
        found("luks", Content::Luks, if at(6, b"\0\x02") { label(24, 48) } else { Vec::new() })
    } else if lvm {
        found("lvm", Content::Lvm, Vec::new())
    } else if array {
        found("md", Content::Array, Vec::new())
    } else if at(3, b"-FVE-FS-") || at(bitlocker::TO_GO_PLACE, &bitlocker::GUID) {
        found("bitlocker", Content::BitLocker, Vec::new())
    } else if at(0, b"XFSB") {
        found("xfs", kernel("xfs", "nouuid"), label(108, 12))
    } else if at(65536 + 64, b"_BHRfS_M") {
        found("btrfs", kernel("btrfs", ""), label(65536 + 299, 256))
    } else if at(3, b"NTFS    ") {
        found("ntfs", Content::Ntfs, Vec::new())
    } else if at(3, b"EXFAT   ") {
        found("exfat", kernel("exfat", ""), Vec::new())
    } else if at(0x52, b"FAT32   ") {
        found("vfat", kernel("vfat", "utf8"), label(0x47, 11))
    } else if at(0x36, b"FAT12   ") || at(0x36, b"FAT16   ") {
        found("vfat", kernel("vfat", "utf8"), label(0x2b, 11))
    } else if at(1024 + 56, b"\x53\xef") {
        found(ext_version(head), kernel("ext4", ""), label(1024 + 120, 16))
    } else if at(32769, b"CD001") {
        found("iso9660", kernel("iso9660", ""), label(32808, 32))
    } else if at(4086, b"SWAPSPACE2") || at(4086, b"SWAP-SPACE") {
        other("swap", "swap space")
    } else if at(3, b"ReFS") {
        other("refs", ATTACH)
    } else if head.iter().all(|byte| *byte == 0) {
        other("empty", "begins with zeroes")
    } else {
        other("unknown", ATTACH)
    }
}

fn ext_version(head: &[u8]) -> &'static str {
    let word = |offset: usize| head.get(offset).copied().unwrap_or_default();
    // Extents, then a journal.
    match (word(1024 + 96) & 0x40, word(1024 + 92) & 0x04) {
        (0, 0) => "ext2",
        (0, _) => "ext3",
        _ => "ext4",
    }
}
