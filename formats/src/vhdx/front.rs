//! The first MiB of a VHDX: file identifier, headers, region tables
//! (MS-VHDX 2.2).

use super::{BAT_OFFSET_BYTES, LOG_BYTES, LOG_OFFSET_BYTES, METADATA_BYTES, METADATA_OFFSET_BYTES};
use crate::DiskShape;
use crate::fields::put;
use crate::identity::{Purpose, stored_guid};
use crate::layout::Builder;

/// 2.2: the offsets of the parts. The checksum of a part is at its byte 4.
const HEADER_OFFSETS_BYTES: [u64; 2] = [64 << 10, 128 << 10];
const REGION_TABLE_OFFSETS_BYTES: [u64; 2] = [192 << 10, 256 << 10];
const HEADER_BYTES: usize = 4 << 10;
const REGION_TABLE_BYTES: usize = 64 << 10;
const CHECKSUM_OFFSET: usize = 4;

const CREATOR: &str = "Coldrise";
/// 2.2.2: LogVersion must be 0, Version 1.
const VERSION: u16 = 1;

/// 2.2.3.2: the known regions, in printed order.
const BAT_REGION: [u8; 16] = 0x2DC27766_F623_4200_9D64_115E9BFD4A08_u128.to_be_bytes();
const METADATA_REGION: [u8; 16] = 0x8B7CA206_4790_4B9A_B8FE_575F050F886E_u128.to_be_bytes();
const REQUIRED: u32 = 1;

/// The file up to the end of the second region table's entries.
pub(super) fn front(builder: Builder, disk: &DiskShape, bat_bytes: u64) -> Builder {
    let mut builder = builder.bytes(file_identifier());
    for (sequence_number, offset) in (1..).zip(HEADER_OFFSETS_BYTES) {
        builder = builder.zeroes_to(offset).bytes(header(disk, sequence_number));
    }
    for offset in REGION_TABLE_OFFSETS_BYTES {
        builder = builder.zeroes_to(offset).bytes(region_table(bat_bytes));
    }
    builder
}

fn file_identifier() -> Vec<u8> {
    let mut identifier = b"vhdxfile".to_vec();
    identifier.extend(CREATOR.encode_utf16().flat_map(u16::to_le_bytes));
    identifier
}

/// Of two valid headers the one with the higher sequence number is current. The
/// log's GUID is 0: there is nothing to replay.
fn header(disk: &DiskShape, sequence_number: u64) -> Vec<u8> {
    let mut header = vec![0; HEADER_BYTES];
    put(&mut header, 0, b"head");
    put(&mut header, 8, sequence_number.to_le_bytes());
    put(&mut header, 16, disk.identity.guid(Purpose::VhdxFileWrite));
    put(&mut header, 32, disk.identity.guid(Purpose::VhdxDataWrite));
    put(&mut header, 66, VERSION.to_le_bytes());
    put(&mut header, 68, (LOG_BYTES as u32).to_le_bytes());
    put(&mut header, 72, LOG_OFFSET_BYTES.to_le_bytes());
    let sum = crc32c::crc32c(&header);
    put(&mut header, CHECKSUM_OFFSET, sum.to_le_bytes());
    header
}

fn region_table(bat_bytes: u64) -> Vec<u8> {
    let regions = [
        (BAT_REGION, BAT_OFFSET_BYTES, bat_bytes),
        (METADATA_REGION, METADATA_OFFSET_BYTES, METADATA_BYTES),
    ];
    let mut table = vec![0; REGION_TABLE_BYTES];
    put(&mut table, 0, b"regi");
    put(&mut table, 8, (regions.len() as u32).to_le_bytes());
    let mut at = 16;
    for (guid, offset_bytes, length_bytes) in regions {
        put(&mut table, at, stored_guid(guid));
        put(&mut table, at + 16, offset_bytes.to_le_bytes());
        // At most 9 MiB: see `MAX_BLOCKS`.
        put(&mut table, at + 24, (length_bytes as u32).to_le_bytes());
        put(&mut table, at + 28, REQUIRED.to_le_bytes());
        at += 32;
    }
    let sum = crc32c::crc32c(&table);
    put(&mut table, CHECKSUM_OFFSET, sum.to_le_bytes());
    // The checksum covers 64 KiB; the bytes after the entries are zeroes.
    table.truncate(at);
    table
}
