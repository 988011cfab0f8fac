//! The properties of a database file, stored at its end.
//!
//! RocksDB keeps these properties of every file, but its C interface returns only their sum over a
//! family. The part of the format of block-based tables that leads to them (footer offsets count
//! from the end of the file; varints are LEB128):
//!
//! ```text
//! footer, 53 bytes:  checksum type (1), handle of the metaindex block, handle of the
//!                    index block, zeroes up to 41 bytes, version (4, little endian),
//!                    magic (8, little endian)
//! handle:            varint offset, varint length; 5 bytes follow the block
//! block:             entries, then 4 bytes per restart point, then their number (4)
//! entry:             varint shared, varint unshared, varint value length, the rest of
//!                    the key, the value
//! metaindex block:   "rocksdb.properties" to the handle of the properties block
//! properties block:  names to varints, or to text
//! ```
//!
//! This module does not verify the blocks' checksums. The properties only decide which files are
//! worth rewriting, never which entries are deleted. [`super::sst_reader`] reads the rest of a
//! file, with its checksums.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::{FAMILIES, Family};

pub(super) const FOOTER_BYTES: usize = 53;
const MAGIC: u64 = 0x88e2_41b7_85f4_cff7;
/// Both blocks are a few hundred bytes.
const MAX_BLOCK_BYTES: u64 = 1 << 20;
/// An upper bound for names. It bounds the memory for a damaged name that claims to share a long
/// prefix with its predecessor.
const MAX_NAME_BYTES: usize = 256;
/// Name in the metaindex block.
pub(super) const PROPERTIES: &[u8] = b"rocksdb.properties";

/// Bit in the last byte of a block, above the number of its restart points.
pub(crate) const HASH_INDEX_BIT: u8 = 0x80;

/// Numbers from the properties of one file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableProperties {
    /// Number of entries, including deletions.
    pub(crate) entries: u64,
    pub(crate) deletions: u64,
    /// Bytes of all values.
    pub(crate) value_bytes: u64,
    /// The kind of index.
    pub(super) index: IndexKind,
}

/// The kind of a file's index, according to its properties.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum IndexKind {
    /// A two-level index with user keys and full handles, as in the files of chunks.
    TwoLevel,
    #[default]
    Other,
}

impl TableProperties {
    /// Reads the properties from a file of the database.
    ///
    /// # Errors
    /// `NotFound` if the file was deleted meanwhile; `Corrupt`.
    pub(crate) fn read(path: &Path) -> Result<TableProperties> {
        let file = File::open(path).context(|| format!("reading {}", path.display()))?;
        let (footer, length) = Footer::read(&file, path)?;
        let (properties, _) = properties_block(&file, path, &footer, length)?;
        TableProperties::parse(&properties).ok_or_else(|| damaged(path))
    }

    pub(super) fn parse(block: &[u8]) -> Option<TableProperties> {
        let entries = entries(block)?;
        let number = |name: &[u8]| value(&entries, name).and_then(|mut bytes| varint(&mut bytes));
        Some(TableProperties {
            entries: number(b"rocksdb.num.entries")?,
            // All versions that write such files write it; it is absent without deletions.
            deletions: number(b"rocksdb.deleted.keys").unwrap_or(0),
            value_bytes: number(b"rocksdb.raw.value.size")?,
            index: match (
                value(&entries, b"rocksdb.block.based.table.index.type"),
                number(b"rocksdb.index.key.is.user.key"),
                number(b"rocksdb.index.value.is.delta.encoded"),
            ) {
                (Some([2, 0, 0, 0]), Some(1), Some(1)) => IndexKind::TwoLevel,
                _ => IndexKind::Other,
            },
        })
    }
}

/// The family of a file according to its properties, and the properties.
///
/// # Errors
/// As [`TableProperties::read`].
pub(crate) fn family_of(path: &Path) -> Result<(Family, TableProperties)> {
    let file = File::open(path).context(|| format!("reading {}", path.display()))?;
    let (footer, length) = Footer::read(&file, path)?;
    let (block, _) = properties_block(&file, path, &footer, length)?;
    let parsed = TableProperties::parse(&block).zip(family_in(&block));
    parsed.map(|(properties, family)| (family, properties)).ok_or_else(|| damaged(path))
}

fn family_in(block: &[u8]) -> Option<Family> {
    let entries = entries(block)?;
    if value(&entries, b"rocksdb.external_sst_file.version").is_some() {
        // Only files of chunks are written outside the database and ingested.
        return Some(Family::Chunks);
    }
    let name = value(&entries, b"rocksdb.column.family.name")?;
    let found = FAMILIES.iter().find(|(_, known)| known.to_bytes() == name);
    found.map(|(family, _)| *family)
}

/// The properties block and its position in the file.
fn properties_block(
    file: &File,
    path: &Path,
    footer: &Footer,
    length: u64,
) -> Result<(Vec<u8>, u64)> {
    let what = || format!("reading {}", path.display());
    let read = |Handle { offset, bytes }: Handle| -> Result<Vec<u8>> {
        let end = offset.checked_add(bytes);
        if bytes > MAX_BLOCK_BYTES || end.is_none_or(|end| end > length) {
            return Err(damaged(path));
        }
        let mut block = vec![0; bytes as usize];
        file.read_exact_at(&mut block, offset).context(what)?;
        Ok(block)
    };
    let metaindex = read(footer.metaindex)?;
    let properties = entries(&metaindex)
        .and_then(|entries| next_handle(&mut value(&entries, PROPERTIES)?))
        .ok_or_else(|| damaged(path))?;
    Ok((read(properties)?, properties.offset))
}

/// The position of damage in a file that would end the process inside RocksDB:
///
/// - A footer that leads to a block of any size: reading it would take that much memory.
/// - The byte that says that the properties block has a hash index. No such block has one, and
///   RocksDB, which reads this block without its checksum, asserts that there is one (Debian builds
///   it with assertions).
///
/// RocksDB reports all other faults of the file itself.
pub(crate) fn fatal_damage(path: &Path) -> Option<u64> {
    let file = File::open(path).ok()?;
    let (footer, length) = Footer::read(&file, path).ok()?;
    let end = length - FOOTER_BYTES as u64;
    let leads_out =
        |block: &Handle| block.offset.checked_add(block.bytes).is_none_or(|at| at > end);
    if [footer.metaindex, footer.index].iter().any(leads_out) {
        return Some(end);
    }
    let (block, offset) = properties_block(&file, path, &footer, length).ok()?;
    let is_set = block.last().is_some_and(|byte| byte & HASH_INDEX_BIT != 0);
    is_set.then(|| offset + block.len() as u64 - 1)
}

/// The position of that block's last byte.
#[cfg(test)]
pub(crate) fn properties_end(path: &Path) -> Option<u64> {
    let file = File::open(path).ok()?;
    let (footer, length) = Footer::read(&file, path).ok()?;
    let (block, offset) = properties_block(&file, path, &footer, length).ok()?;
    Some(offset + block.len() as u64 - 1)
}

pub(super) fn damaged(path: &Path) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!(
            "{} does not end as a file of the database does; run coldrise verify to see what it \
             affects",
            path.display()
        ),
    )
}

/// The position of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle {
    pub(super) offset: u64,
    /// Length in bytes, without the trailer.
    pub(super) bytes: u64,
}

/// The content of a footer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Footer {
    /// The kind of the blocks' checksums.
    pub(super) checksum: u8,
    pub(super) metaindex: Handle,
    pub(super) index: Handle,
    pub(super) version: u32,
}

impl Footer {
    pub(super) fn parse(bytes: &[u8]) -> Option<Footer> {
        let (rest, magic) = bytes.split_last_chunk::<8>()?;
        if u64::from_le_bytes(*magic) != MAGIC {
            return None;
        }
        let (rest, version) = rest.split_last_chunk::<4>()?;
        let (checksum, mut handles) = rest.split_first()?;
        Some(Footer {
            checksum: *checksum,
            metaindex: next_handle(&mut handles)?,
            index: next_handle(&mut handles)?,
            version: u32::from_le_bytes(*version),
        })
    }

    /// The footer of an open file and the file's length.
    pub(super) fn read(file: &File, path: &Path) -> Result<(Footer, u64)> {
        let what = || format!("reading {}", path.display());
        let length = file.metadata().context(what)?.len();
        let offset = length.checked_sub(FOOTER_BYTES as u64).ok_or_else(|| damaged(path))?;
        let mut bytes = [0; FOOTER_BYTES];
        file.read_exact_at(&mut bytes, offset).context(what)?;
        Ok((Footer::parse(&bytes).ok_or_else(|| damaged(path))?, length))
    }
}

/// Key and value.
pub(super) type Entry<'a> = (Vec<u8>, &'a [u8]);

fn value<'a>(entries: &[Entry<'a>], name: &[u8]) -> Option<&'a [u8]> {
    entries.iter().find(|(key, _)| key == name).map(|(_, value)| *value)
}

/// Takes a handle from the front.
pub(super) fn next_handle(bytes: &mut &[u8]) -> Option<Handle> {
    Some(Handle { offset: varint(bytes)?, bytes: varint(bytes)? })
}

/// The entries of a block of names.
pub(super) fn entries(block: &[u8]) -> Option<Vec<Entry<'_>>> {
    let mut rest = without_restarts(block)?;
    let mut entries: Vec<Entry<'_>> = Vec::new();
    while !rest.is_empty() {
        let mut length = || -> Option<usize> { varint(&mut rest)?.try_into().ok() };
        let (shared, unshared, value) = (length()?, length()?, length()?);
        let before = entries.last().map_or(&[][..], |(key, _)| &key[..]);
        if shared.checked_add(unshared)? > MAX_NAME_BYTES {
            return None;
        }
        let mut key = before.get(..shared)?.to_vec();
        key.extend_from_slice(rest.get(..unshared)?);
        let value_end = unshared.checked_add(value)?;
        entries.push((key, rest.get(unshared..value_end)?));
        rest = &rest[value_end..];
    }
    Some(entries)
}

/// Takes a varint from the front.
pub(super) fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// The stored entries of a block, without its restart points.
pub(super) fn without_restarts(block: &[u8]) -> Option<&[u8]> {
    let (rest, restarts) = block.split_last_chunk::<4>()?;
    let restarts = u32::from_le_bytes(*restarts) as usize;
    rest.get(..rest.len().checked_sub(restarts.checked_mul(4)?)?)
}
