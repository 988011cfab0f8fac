//! Dynamic VHD ("Dynamic Disk Header Format", "Block Allocation Table and Data
//! Blocks").

use std::ops::Range;
use std::sync::Arc;

use super::footer::{DiskType, FOOTER_BYTES, footer};
use super::{SECTOR_BYTES, checksum};
use crate::fields::put;
use crate::layout::{Blocks, Builder, Present, Table, Width, Writes};
use crate::{DiskShape, Layout, Result};

const HEADER_BYTES: usize = 1024;
const TABLE_OFFSET_BYTES: u64 = (FOOTER_BYTES + HEADER_BYTES) as u64;
const VERSION: u32 = 0x0001_0000;
/// The specification's default, and the only size that every reader accepts.
const BLOCK_BYTES: u64 = 2 << 20;
const ABSENT: u64 = 0xffff_ffff;

/// A block's bitmap of 4096 sectors fills one sector. It is stored at the end
/// of 4 KiB, so that every block's data begins at a multiple of 4 KiB.
const LEAD_BYTES: usize = 4096;
const BITMAP_BYTES: usize = (BLOCK_BYTES / SECTOR_BYTES / 8) as usize;

const _: () = assert!(BITMAP_BYTES as u64 == SECTOR_BYTES);
/// Sector numbers of the largest VHD stay below the value that marks an absent
/// block.
const _: () = assert!(
    ((2040 << 30) / BLOCK_BYTES + 4) * (BLOCK_BYTES + LEAD_BYTES as u64) / SECTOR_BYTES < ABSENT
);

pub(crate) fn dynamic(
    disk: &DiskShape,
    stored: impl IntoIterator<Item = Range<u64>>,
) -> Result<Layout> {
    let present = Arc::new(Present::from_stored(disk.size_bytes, BLOCK_BYTES, stored)?);
    let entries = present.block_count();
    let table_bytes = (entries * Width::U32Be.bytes() as u64).next_multiple_of(SECTOR_BYTES);
    let first_block = (TABLE_OFFSET_BYTES + table_bytes).next_multiple_of(LEAD_BYTES as u64);

    let mut lead = vec![0; LEAD_BYTES];
    lead[LEAD_BYTES - BITMAP_BYTES..].fill(0xff);
    let blocks = Blocks {
        present: present.clone(),
        block_bytes: BLOCK_BYTES,
        lead,
        disk_bytes: disk.size_bytes,
    };
    let table = Table {
        width: Width::U32Be,
        present,
        first: (first_block + (LEAD_BYTES - BITMAP_BYTES) as u64) / SECTOR_BYTES,
        step: blocks.stride_bytes() / SECTOR_BYTES,
        absent: ABSENT,
        spacer_after: None,
    };
    let footer = footer(disk, DiskType::Dynamic);
    let mut front = footer.to_vec();
    front.extend_from_slice(&header(entries));
    let builder = Builder::read_only().bytes(front).table(table_bytes, table, Writes::Refused);
    Ok(builder.zeroes_to(first_block).blocks(blocks).bytes(footer.to_vec()).finish())
}

fn header(entries: u64) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    put(&mut header, 0, b"cxsparse");
    put(&mut header, 8, u64::MAX.to_be_bytes());
    put(&mut header, 16, TABLE_OFFSET_BYTES.to_be_bytes());
    put(&mut header, 24, VERSION.to_be_bytes());
    // 2040 GiB are 1,044,480 blocks.
    put(&mut header, 28, (entries as u32).to_be_bytes());
    put(&mut header, 32, (BLOCK_BYTES as u32).to_be_bytes());
    let sum = checksum(&header);
    put(&mut header, 36, sum);
    header
}
