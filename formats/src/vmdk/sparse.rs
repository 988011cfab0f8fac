//! monolithicSparse: grains of 64 KiB, and two copies of the grain tables.

use std::ops::Range;
use std::sync::Arc;

use super::descriptor::{self, Extent};
use super::header::{DESCRIPTOR_OFFSET_SECTORS, DESCRIPTOR_SECTORS, Header, flags};
use super::{GRAIN_SECTORS, GRAIN_SIZE_BYTES, MAX_IMAGE_SECTORS, SECTOR_BYTES, sectors};
use super::{TABLE_ENTRIES, TABLE_SECTORS};
use crate::layout::{Blocks, Builder, Present, Table, Width, Writes};
use crate::{DiskShape, Error, Format, Layout, Names, Result};

const VERSION: u32 = 1;

pub(crate) fn sparse(
    names: &Names,
    disk: &DiskShape,
    stored: impl IntoIterator<Item = Range<u64>>,
) -> Result<Layout> {
    let present = Arc::new(Present::from_stored(disk.size_bytes, GRAIN_SIZE_BYTES, stored)?);
    // Every table is present, even without a grain: VMware allocates all of
    // them when it creates an extent, and its tools expect them.
    let tables = present.block_count().div_ceil(TABLE_ENTRIES);
    let directory_sectors = sectors(tables * Width::U32Le.bytes() as u64);
    let redundant = DESCRIPTOR_OFFSET_SECTORS + DESCRIPTOR_SECTORS;
    let directory = redundant + directory_sectors + tables * TABLE_SECTORS;
    let end = directory + directory_sectors + tables * TABLE_SECTORS;
    let overhead = end.next_multiple_of(GRAIN_SECTORS);

    let image_sectors = overhead + present.present_count() * GRAIN_SECTORS;
    if image_sectors > MAX_IMAGE_SECTORS {
        return Err(Error::ImageTooLarge {
            format: Format::VmdkSparse,
            image_bytes: image_sectors * SECTOR_BYTES,
            limit_bytes: MAX_IMAGE_SECTORS * SECTOR_BYTES,
        });
    }

    let header = Header {
        version: VERSION,
        flags: flags::LINE_BREAKS | flags::REDUNDANT,
        capacity: sectors(disk.shown_bytes()),
        redundant_directory: redundant,
        directory,
        overhead,
        compression: 0,
    };
    let text = descriptor::text(Extent::MonolithicSparse, names.image(), disk);
    let mut builder = Builder::read_only().bytes(header.with_descriptor(&text));
    for at in [redundant, directory] {
        let places = Table::full(Width::U32Le, tables, at + directory_sectors, TABLE_SECTORS);
        let grains = Table {
            width: Width::U32Le,
            present: present.clone(),
            first: overhead,
            step: GRAIN_SECTORS,
            absent: 0,
            spacer_after: None,
        };
        builder = builder.table(directory_sectors * SECTOR_BYTES, places, Writes::Refused).table(
            tables * TABLE_SECTORS * SECTOR_BYTES,
            grains,
            Writes::Refused,
        );
    }
    let blocks = Blocks {
        present,
        block_bytes: GRAIN_SIZE_BYTES,
        lead: Vec::new(),
        disk_bytes: disk.size_bytes,
    };
    Ok(builder.zeroes_to(overhead * SECTOR_BYTES).blocks(blocks).finish())
}
