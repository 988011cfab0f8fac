//! The EFI system partitions of a disk, from its GPT or MBR. The disk is hostile: all sizes are bounded.

use coldrise_block::{Disk, Result};

/// Maximum number of partitions that are looked at, and of those returned.
const MAX_GPT_ENTRIES: u32 = 256;
const MAX_SYSTEM_PARTITIONS: usize = 4;
/// The type of an EFI system partition, C12A7328-F81F-11D2-BA4B-00A0C93EC93B, as stored.
const GPT_TYPE: [u8; 16] = [
    0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b,
];
const MBR_TYPE: u8 = 0xef;

/// A partition as a UEFI device path names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Partition {
    /// From 1.
    pub(super) number: u32,
    pub(super) start_block: u64,
    pub(super) blocks: u64,
    /// 512 or 4096.
    pub(super) block_bytes: u64,
    pub(super) id: PartitionId,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PartitionId {
    /// Its GUID, as stored.
    Gpt([u8; 16]),
    /// The signature of its disk.
    Mbr(u32),
}

impl Partition {
    pub(super) fn start_bytes(&self) -> Option<u64> {
        self.start_block.checked_mul(self.block_bytes)
    }
}

/// The EFI system partitions of a disk.
///
/// # Errors
/// Those of reading the disk.
pub(super) fn system_partitions(disk: &dyn Disk) -> Result<Vec<Partition>> {
    for block_bytes in [512, 4096] {
        if let Some(found) = gpt(disk, block_bytes)? {
            return Ok(found);
        }
    }
    mbr(disk)
}

/// `None` without a GPT of this block size.
fn gpt(disk: &dyn Disk, block_bytes: u64) -> Result<Option<Vec<Partition>>> {
    let mut header = [0_u8; 92];
    if disk.size_bytes() < 2 * block_bytes {
        return Ok(None);
    }
    disk.read_at(&mut header, block_bytes)?;
    if header.get(..8) != Some(b"EFI PART") {
        return Ok(None);
    }
    let entries_block = u64_at(&header, 72);
    let count = u32_at(&header, 80).min(MAX_GPT_ENTRIES);
    let entry_bytes = u64::from(u32_at(&header, 84));
    let mut found = Vec::new();
    if !(128..=4096).contains(&entry_bytes) {
        return Ok(Some(found));
    }
    for number in 1..=count {
        let offset = entries_block
            .checked_mul(block_bytes)
            .and_then(|start| start.checked_add(u64::from(number - 1) * entry_bytes));
        let Some(offset) = offset.filter(|o| o.saturating_add(128) <= disk.size_bytes()) else {
            break;
        };
        let mut entry = [0_u8; 128];
        disk.read_at(&mut entry, offset)?;
        let (first, last) = (u64_at(&entry, 32), u64_at(&entry, 40));
        if entry.get(..16) != Some(&GPT_TYPE)
            || last < first
            || found.len() >= MAX_SYSTEM_PARTITIONS
        {
            continue;
        }
        let mut id = [0_u8; 16];
        id.copy_from_slice(entry.get(16..32).unwrap_or(&[0; 16]));
        let (start_block, blocks) = (first, (last - first).saturating_add(1));
        let id = PartitionId::Gpt(id);
        found.push(Partition { number, start_block, blocks, block_bytes, id });
    }
    Ok(Some(found))
}

fn mbr(disk: &dyn Disk) -> Result<Vec<Partition>> {
    let mut record = [0_u8; 512];
    if disk.size_bytes() < 512 {
        return Ok(Vec::new());
    }
    disk.read_at(&mut record, 0)?;
    if record.get(510..) != Some(&[0x55, 0xaa]) {
        return Ok(Vec::new());
    }
    let signature = u32_at(&record, 440);
    let entries = record.get(446..510).unwrap_or_default().chunks_exact(16);
    let system = (1..).zip(entries).filter(|(_, entry)| entry.get(4) == Some(&MBR_TYPE));
    Ok(system
        .map(|(number, entry)| Partition {
            number,
            start_block: u64::from(u32_at(entry, 8)),
            blocks: u64::from(u32_at(entry, 12)),
            block_bytes: 512,
            id: PartitionId::Mbr(signature),
        })
        .collect())
}

/// Zero beyond the end.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |b| u16::from_le_bytes(*b))
}

/// Zero beyond the end.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |b| u32::from_le_bytes(*b))
}

/// Zero beyond the end.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |b| u64::from_le_bytes(*b))
}
