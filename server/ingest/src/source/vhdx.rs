//! Checks of a VHDX before QEMU opens it, and its absent blocks.
//!
//! QEMU reads the content, but it does not report which blocks are absent, so it would
//! read an empty disk of 64 TiB as 64 TiB of zeroes. The block allocation table (BAT) has
//! this information and is read entry by entry here: nothing is kept in memory, and an
//! entry can only lead to the answer "absent".

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use coldrise_block::{
    Context, Error, ErrorKind, Extent, ExtentKind, MAX_DISK_SIZE_BYTES, Result, push_extent,
};

const SIGNATURE: &[u8] = b"vhdxfile";
const HEADER_OFFSETS: [u64; 2] = [64 << 10, 128 << 10];
const HEADER_BYTES: usize = 4096;
const REGION_TABLE_OFFSET: u64 = 192 << 10;
const TABLE_BYTES: usize = 64 << 10;
/// Entries of a region table and of a metadata table; the first follows the header.
const ENTRY_BYTES: usize = 32;
const REGION_ENTRIES_AT: usize = 16;
const METADATA_ENTRIES_AT: usize = 32;
const MAX_ENTRIES: usize = 2047;
/// "A reader that does not know this must refuse the file": bit of the flags of a region
/// and of a metadata item.
const REGION_IS_REQUIRED: u32 = 1 << 0;
const ITEM_IS_REQUIRED: u32 = 1 << 2;
/// Bit of the file parameters' flags.
const HAS_PARENT: u32 = 1 << 1;

const BAT: u128 = 0x2DC27766_F623_4200_9D64_115E9BFD4A08;
const METADATA: u128 = 0x8B7CA206_4790_4B9A_B8FE_575F050F886E;
const FILE_PARAMETERS: u128 = 0xCAA16737_FA36_4D43_B3B6_33F0AA44E76B;
const VIRTUAL_DISK_SIZE: u128 = 0x2FA54224_CD1B_4876_B211_5DBED83BF4B8;
const PAGE_83: u128 = 0xBECA12AB_B2E6_4523_93EF_C309E000C746;
const LOGICAL_SECTOR_SIZE: u128 = 0x8141BF1D_A96F_4709_BA47_F233A8FAAB5F;
const PHYSICAL_SECTOR_SIZE: u128 = 0xCDA348C7_445D_4471_9CC9_E9885251C556;
const PARENT_LOCATOR: u128 = 0xA8D35F2D_B30B_454D_ABF7_D3D84834AB0C;
const KNOWN_ITEMS: [u128; 6] = [
    FILE_PARAMETERS,
    VIRTUAL_DISK_SIZE,
    PAGE_83,
    LOGICAL_SECTOR_SIZE,
    PHYSICAL_SECTOR_SIZE,
    PARENT_LOCATOR,
];

const BLOCK_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=256 << 20;
/// Sectors covered by one sector bitmap block. After the blocks for this many sectors the
/// BAT has one entry for a bitmap.
const SECTORS_PER_BITMAP: u64 = 1 << 23;
/// A BAT entry: its state, and its offset in MiB.
const STATE_BITS: u64 = 7;
const OFFSET_SHIFT: u32 = 20;
/// BAT entries per read.
const ENTRIES_PER_READ: u64 = 4096;

/// The block table of a VHDX.
pub(super) struct VhdxMap {
    file: File,
    path: PathBuf,
    bat_offset: u64,
    block_bytes: u64,
    blocks_per_bitmap: u64,
    size_bytes: u64,
}

impl VhdxMap {
    /// Opens a VHDX. Refuses files that QEMU cannot read, with a suggestion.
    pub(super) fn open(path: &Path) -> Result<VhdxMap> {
        let reading = || format!("reading {}", path.display());
        let file = File::open(path).context(reading)?;
        let tables = Tables { file: &file, path };
        tables.check_headers()?;
        let (bat, metadata) = tables.regions()?;
        let table = tables.read::<TABLE_BYTES>(metadata.offset)?;
        if !table.starts_with(b"metadata") {
            return Err(tables.damaged("its metadata table is missing"));
        }
        let items = tables.items(table.as_slice())?;
        let item = |id| tables.item(&items, metadata.offset, id);
        let [block_bytes, flags] =
            words(item(FILE_PARAMETERS)?).map(u32::from_le_bytes).map(u64::from);
        if flags & u64::from(HAS_PARENT) != 0 || items.iter().any(|item| item.id == PARENT_LOCATOR)
        {
            return Err(tables.unsupported(
                "is a differencing VHDX: its parent cannot be followed. Merge the two (Hyper-V: \
                 Convert-VHD, or Merge-VHD on a copy) and back up the result",
            ));
        }
        let size_bytes = u64::from_le_bytes(item(VIRTUAL_DISK_SIZE)?);
        let [sector_bytes, _] = words(item(LOGICAL_SECTOR_SIZE)?);
        let sector_bytes = u64::from(u32::from_le_bytes(sector_bytes));
        if sector_bytes == 4096 {
            return Err(tables.unsupported(
                "has sectors of 4096 bytes, which QEMU does not read: attach it where that works \
                 (Windows, Hyper-V) and back up the disk from there, or convert it with \
                 Convert-VHD",
            ));
        }
        if !block_bytes.is_power_of_two()
            || !BLOCK_BYTES.contains(&block_bytes)
            || sector_bytes != 512
        {
            return Err(tables.damaged("its block or sector size is invalid"));
        }
        if size_bytes % sector_bytes != 0 {
            return Err(tables.damaged("its size is not a multiple of its sector size"));
        }
        if size_bytes > MAX_DISK_SIZE_BYTES {
            return Err(tables.unsupported(&format!(
                "is a disk of {size_bytes} bytes; the maximum is {MAX_DISK_SIZE_BYTES}"
            )));
        }
        let blocks_per_bitmap = SECTORS_PER_BITMAP * sector_bytes / block_bytes;
        let blocks = size_bytes.div_ceil(block_bytes);
        let entries = blocks + blocks.saturating_sub(1) / blocks_per_bitmap;
        if entries * 8 > bat.length_bytes {
            return Err(tables.damaged("its block table is too short for the disk"));
        }
        Ok(VhdxMap {
            path: path.to_path_buf(),
            bat_offset: bat.offset,
            block_bytes,
            blocks_per_bitmap,
            size_bytes,
            file,
        })
    }

    /// The content of the range, as in [`super::Source::extents`].
    pub(super) fn extents(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<Extent>> {
        let end = offset_bytes.saturating_add(length_bytes).min(self.size_bytes);
        let first = offset_bytes / self.block_bytes;
        let mut entries = vec![0; 8 * ENTRIES_PER_READ as usize];
        let last = end.saturating_sub(1) / self.block_bytes;
        let read = self.entry_index(last).saturating_sub(self.entry_index(first)) + 1;
        entries.truncate(8 * read.min(ENTRIES_PER_READ) as usize);
        let at = self.bat_offset.saturating_add(self.entry_index(first) * 8);
        self.file
            .read_exact_at(&mut entries, at)
            .context(|| format!("reading the block table of {}", self.path.display()))?;
        let mut extents = Vec::new();
        let (mut at, mut block) = (offset_bytes, first);
        while at < end {
            let index = (self.entry_index(block) - self.entry_index(first)) as usize;
            let Some(entry) = entries.get(index * 8..index * 8 + 8) else { break };
            let entry = u64::from_le_bytes(number(entry, 0));
            let kind = match entry & STATE_BITS {
                // Not present, undefined, zero, unmapped, and unmapped as of version 0.95:
                // QEMU reads all of them as zeroes.
                0..=3 | 5 => ExtentKind::Hole,
                // QEMU would read the headers as the block's content.
                _ if entry >> OFFSET_SHIFT == 0 => {
                    return Err(Error::new(
                        ErrorKind::Io,
                        format!(
                            "{} is damaged: its block {block} overlaps its headers",
                            self.path.display()
                        ),
                    ));
                }
                _ => ExtentKind::Stored,
            };
            let next = ((block + 1) * self.block_bytes).min(end);
            push_extent(&mut extents, Extent { offset_bytes: at, length_bytes: next - at, kind });
            (at, block) = (next, block + 1);
        }
        Ok(extents)
    }

    /// The index of a block's entry in the BAT; entries of bitmaps lie in between.
    fn entry_index(&self, block: u64) -> u64 {
        block + block / self.blocks_per_bitmap
    }

    /// The disk's size in bytes.
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }
}

/// A part of the file.
#[derive(Clone, Copy)]
struct Region {
    offset: u64,
    length_bytes: u64,
}

/// An item of the metadata: its offset from the table's start.
struct Item {
    id: u128,
    offset: u32,
}

/// The tables of one file while they are read.
struct Tables<'f> {
    file: &'f File,
    path: &'f Path,
}

impl Tables<'_> {
    fn damaged(&self, why: &str) -> Error {
        Error::new(
            ErrorKind::Io,
            format!("{} is damaged, truncated, or not a VHDX: {why}", self.path.display()),
        )
    }

    fn unsupported(&self, why: &str) -> Error {
        Error::new(ErrorKind::Unsupported, format!("{} {why}", self.path.display()))
    }

    fn read<const N: usize>(&self, offset: u64) -> Result<Box<[u8; N]>> {
        let mut bytes = Box::new([0; N]);
        if i64::try_from(offset).is_err() {
            return Err(self.damaged(&format!("it ends before byte {offset}")));
        }
        match self.file.read_exact_at(bytes.as_mut_slice(), offset) {
            Ok(()) => Ok(bytes),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(self.damaged(&format!("it ends before byte {offset}")))
            }
            Err(error) => Err(Error::io(format!("reading {}", self.path.display()), error)),
        }
    }

    /// Finds the current header and checks that its log is empty.
    fn check_headers(&self) -> Result<()> {
        if *self.read::<8>(0)? != SIGNATURE {
            return Err(self.damaged("it does not begin like a VHDX"));
        }
        let mut current: Option<Box<[u8; HEADER_BYTES]>> = None;
        let sequence = |header: &[u8; HEADER_BYTES]| u64::from_le_bytes(number(header, 8));
        for offset in HEADER_OFFSETS {
            let header = self.read::<HEADER_BYTES>(offset)?;
            let is_valid = header.starts_with(b"head")
                && u16::from_le_bytes(number(header.as_slice(), 66)) == 1
                && has_right_checksum(header.as_slice());
            let is_newer =
                current.as_ref().is_none_or(|current| sequence(&header) > sequence(current));
            if is_valid && is_newer {
                current = Some(header);
            }
        }
        let Some(current) = current else {
            return Err(self.damaged("neither of its headers is valid"));
        };
        if current[48..64].iter().any(|&byte| byte != 0) {
            return Err(self.unsupported(
                "was not closed cleanly: its log holds changes that are not in the disk yet. \
                 Attach and detach it once in Windows or Hyper-V, or repair a copy with qemu-img \
                 check -r all, and back up that",
            ));
        }
        Ok(())
    }

    /// The block allocation table and the metadata.
    fn regions(&self) -> Result<(Region, Region)> {
        let table = self.read::<TABLE_BYTES>(REGION_TABLE_OFFSET)?;
        if !table.starts_with(b"regi") || !has_right_checksum(table.as_slice()) {
            return Err(self.damaged("its region table is not valid"));
        }
        let count = u32::from_le_bytes(number(table.as_slice(), 8)) as usize;
        let (mut bat, mut metadata) = (None, None);
        for entry in self.entries(table.as_slice(), REGION_ENTRIES_AT, count)? {
            let region = Region {
                offset: u64::from_le_bytes(number(entry, 16)),
                length_bytes: u64::from(u32::from_le_bytes(number(entry, 24))),
            };
            let flags = u32::from_le_bytes(number(entry, 28));
            let place = match guid(entry) {
                BAT => &mut bat,
                METADATA => &mut metadata,
                _ if flags & REGION_IS_REQUIRED != 0 => {
                    return Err(self.unsupported(
                        "needs a reader that knows a newer kind of region: convert it with the \
                         program that wrote it",
                    ));
                }
                _ => continue,
            };
            if place.replace(region).is_some() {
                return Err(self.damaged("its region table names a region twice"));
            }
        }
        match (bat, metadata) {
            (Some(bat), Some(metadata)) => Ok((bat, metadata)),
            _ => Err(self.damaged("its region table lacks a region")),
        }
    }

    fn items(&self, table: &[u8]) -> Result<Vec<Item>> {
        let count = usize::from(u16::from_le_bytes(number(table, 10)));
        let mut items = Vec::new();
        for entry in self.entries(table, METADATA_ENTRIES_AT, count)? {
            let item = Item { id: guid(entry), offset: u32::from_le_bytes(number(entry, 16)) };
            if KNOWN_ITEMS.contains(&item.id) {
                items.push(item);
            } else if u32::from_le_bytes(number(entry, 24)) & ITEM_IS_REQUIRED != 0 {
                return Err(self.unsupported(
                    "needs a reader that knows a newer kind of metadata: convert it with the \
                     program that wrote it",
                ));
            }
        }
        Ok(items)
    }

    fn entries<'t>(
        &self,
        table: &'t [u8],
        first_at: usize,
        count: usize,
    ) -> Result<std::slice::ChunksExact<'t, u8>> {
        let end = first_at + count.min(MAX_ENTRIES) * ENTRY_BYTES;
        match table.get(first_at..end) {
            Some(entries) if count <= MAX_ENTRIES => Ok(entries.chunks_exact(ENTRY_BYTES)),
            _ => Err(self.damaged("a table has more entries than fit")),
        }
    }

    /// The first 8 bytes of an item; a shorter item is followed by other items' bytes.
    fn item(&self, items: &[Item], table_offset: u64, id: u128) -> Result<[u8; 8]> {
        let mut found = items.iter().filter(|item| item.id == id);
        match (found.next(), found.next()) {
            (Some(item), None) => {
                Ok(*self.read::<8>(table_offset.saturating_add(u64::from(item.offset)))?)
            }
            _ => Err(self.damaged("an item of its metadata is missing or occurs twice")),
        }
    }
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut number = [0; N];
    number.copy_from_slice(&bytes[at..at + N]);
    number
}

fn words(bytes: [u8; 8]) -> [[u8; 4]; 2] {
    [number(&bytes, 0), number(&bytes, 4)]
}

/// A GUID as written in text: the first three parts are little endian.
fn guid(entry: &[u8]) -> u128 {
    let first = u128::from(u32::from_le_bytes(number(entry, 0)));
    let second = u128::from(u16::from_le_bytes(number(entry, 4)));
    let third = u128::from(u16::from_le_bytes(number(entry, 6)));
    let rest = u128::from(u64::from_be_bytes(number(entry, 8)));
    first << 96 | second << 80 | third << 64 | rest
}

/// CRC-32C over all bytes, with its own four bytes (at 4) as zeroes.
fn has_right_checksum(bytes: &[u8]) -> bool {
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..4]), &[0; 4]);
    crc32c::crc32c_append(crc, &bytes[8..]) == u32::from_le_bytes(number(bytes, 4))
}
