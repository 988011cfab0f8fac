//! The metadata region of a VHDX: a table of items and the items
//! (MS-VHDX 2.6).

use crate::DiskShape;
use crate::fields::put;
use crate::identity::{Purpose, stored_guid};
use crate::layout::Builder;

/// 2.6.1: the table takes the first 64 KiB of the region.
const TABLE_BYTES: usize = 64 << 10;
const ENTRY_BYTES: usize = 32;

/// 2.6.2: the items, in printed order.
const FILE_PARAMETERS: u128 = 0xCAA16737_FA36_4D43_B3B6_33F0AA44E76B;
const VIRTUAL_DISK_SIZE: u128 = 0x2FA54224_CD1B_4876_B211_5DBED83BF4B8;
const PAGE_83_DATA: u128 = 0xBECA12AB_B2E6_4523_93EF_C309E000C746;
const LOGICAL_SECTOR_SIZE: u128 = 0x8141BF1D_A96F_4709_BA47_F233A8FAAB5F;
const PHYSICAL_SECTOR_SIZE: u128 = 0xCDA348C7_445D_4471_9CC9_E9885251C556;

/// 2.6.1.2: flags of an entry.
const IS_VIRTUAL_DISK: u32 = 2;
const IS_REQUIRED: u32 = 4;

/// Whether a writer may free blocks (2.6.2.1, LeaveBlockAllocated).
#[derive(Clone, Copy)]
pub(super) enum Allocation {
    Dynamic = 0,
    Fixed = 1,
}

/// The physical sector size that a disk of 512-byte sectors reports: 512e.
const PHYSICAL_SECTOR_BYTES: u32 = 4096;

pub(super) fn metadata(
    builder: Builder,
    disk: &DiskShape,
    block_bytes: u64,
    allocation: Allocation,
) -> Builder {
    let parameters = block_bytes | (allocation as u64) << 32;
    let page_83 = disk.identity.guid(Purpose::VhdxPage83);
    let logical = disk.sector_size.bytes() as u32;
    let items: [(u128, u32, &[u8]); 5] = [
        (FILE_PARAMETERS, IS_REQUIRED, &parameters.to_le_bytes()),
        (VIRTUAL_DISK_SIZE, IS_REQUIRED | IS_VIRTUAL_DISK, &disk.shown_bytes().to_le_bytes()),
        (PAGE_83_DATA, IS_REQUIRED | IS_VIRTUAL_DISK, &page_83),
        (LOGICAL_SECTOR_SIZE, IS_REQUIRED | IS_VIRTUAL_DISK, &logical.to_le_bytes()),
        (PHYSICAL_SECTOR_SIZE, IS_REQUIRED | IS_VIRTUAL_DISK, &PHYSICAL_SECTOR_BYTES.to_le_bytes()),
    ];

    let mut region = vec![0; ENTRY_BYTES * (1 + items.len())];
    put(&mut region, 0, b"metadata");
    put(&mut region, 10, (items.len() as u16).to_le_bytes());
    let mut values = Vec::new();
    for (entry, (guid, flags, value)) in (1..).zip(items) {
        let at = entry * ENTRY_BYTES;
        put(&mut region, at, stored_guid(guid.to_be_bytes()));
        put(&mut region, at + 16, ((TABLE_BYTES + values.len()) as u32).to_le_bytes());
        put(&mut region, at + 20, (value.len() as u32).to_le_bytes());
        put(&mut region, at + 24, flags.to_le_bytes());
        values.extend_from_slice(value);
    }
    let values_at = builder.at() + TABLE_BYTES as u64;
    builder.bytes(region).zeroes_to(values_at).bytes(values)
}
