//! A pack: one object with many values.
//!
//! ```text
//! offset      size  field                                              (little endian)
//!      0         8  "coldpack"
//!      8         4  version, 1
//!     12         4  a: length of the sizes
//!     16         4  b: length of the names
//!     20         a  sizes: an encrypted document, 4 bytes for each value: its length; 0 once it was removed
//! 20 + a         b  names: an encrypted document, 16 bytes for each value: its content's name; zeroes for a page
//! 20 + a + b        the values, one after the other
//! ```
//!
//! The number of a value is the pack's, shifted by 16 bits, and its place in the pack.

use std::ops::Range;

use coldrise_block::{Error, ErrorKind, Result};

use super::keys::{BucketKeys, NAME_BYTES, Name};

/// The number of a pack: random, from 1 to 2^47.
pub(super) type PackNumber = u64;
/// A pack is complete at this size of values. With a lower limit, the tests in this crate need less
/// data for several packs.
const FULL_BYTES: usize = if cfg!(test) { 2 << 20 } else { 16 << 20 };
const PLACE_BITS: u32 = 16;
/// Most values of a pack.
const MOST_VALUES: usize = 1 << PLACE_BITS;
const PACK_BITS: u32 = 47;
const MAGIC: &[u8; 8] = b"coldpack";
const VERSION: u32 = 1;
pub(super) const HEAD_BYTES: usize = 20;
/// No table of a pack is longer, in bytes.
const MOST_TABLE_BYTES: u64 = (MOST_VALUES * NAME_BYTES + 64) as u64;
/// No pack is longer, in bytes: the last value may begin just before it is full.
pub(super) const MOST_PACK_BYTES: u64 = 64 << 20;

/// The folder of packs.
pub(super) const FOLDER: &str = "packs/";

/// The name of a pack's object.
pub(super) fn object_name(pack: PackNumber) -> String {
    format!("{FOLDER}{pack:012x}")
}

/// The pack of an object with that name.
pub(super) fn number_of(name: &str) -> Option<PackNumber> {
    let text = name.strip_prefix(FOLDER)?;
    let number = u64::from_str_radix(text, 16).ok()?;
    (number != 0 && number >> PACK_BITS == 0 && object_name(number) == name).then_some(number)
}

/// A random number for a pack.
pub(super) fn random_number() -> Result<PackNumber> {
    let mut bytes = [0; 8];
    coldrise_store::random(&mut bytes)?;
    Ok((u64::from_le_bytes(bytes) >> (64 - PACK_BITS)).max(1))
}

/// The pack of a value, and its place there.
pub(super) fn parts_of(id: u64) -> (PackNumber, usize) {
    (id >> PLACE_BITS, (id % (1 << PLACE_BITS)) as usize)
}

/// The number of the value at a place in a pack.
pub(super) fn id_of(pack: PackNumber, place: usize) -> u64 {
    pack << PLACE_BITS | place as u64
}

/// A pack that is being filled.
pub(super) struct PackBuilder {
    pub(super) number: PackNumber,
    sizes: Vec<u32>,
    names: Vec<Name>,
    values: Vec<u8>,
}

/// A complete pack.
pub(super) struct Pack {
    pub(super) number: PackNumber,
    pub(super) names: Vec<Name>,
    pub(super) size_bytes: u64,
    pub(super) content: Vec<u8>,
}

impl PackBuilder {
    pub(super) fn new() -> Result<PackBuilder> {
        let (sizes, names, values) = Default::default();
        Ok(PackBuilder { number: random_number()?, sizes, names, values })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// Whether `count` more values have no place, or it is long enough.
    pub(super) fn is_full_for(&self, count: usize) -> bool {
        self.values.len() >= FULL_BYTES || self.sizes.len() + count > MOST_VALUES
    }

    /// The number of the value that is added next.
    pub(super) fn next_id(&self) -> u64 {
        id_of(self.number, self.sizes.len())
    }

    pub(super) fn add(&mut self, name: Name, value: &[u8]) {
        self.sizes.push(value.len() as u32);
        self.names.push(name);
        self.values.extend_from_slice(value);
    }

    pub(super) fn finish(self, keys: &BucketKeys) -> Result<Pack> {
        let content = assemble(keys, self.number, &self.sizes, &self.names, &self.values)?;
        let size_bytes = content.len() as u64;
        Ok(Pack { number: self.number, names: self.names, size_bytes, content })
    }
}

/// The content of a pack.
pub(super) fn assemble(
    keys: &BucketKeys,
    number: PackNumber,
    sizes: &[u32],
    names: &[Name],
    values: &[u8],
) -> Result<Vec<u8>> {
    let sizes: Vec<u8> = sizes.iter().flat_map(|size| size.to_le_bytes()).collect();
    let sizes = keys.encrypt(&sizes_purpose(number), &sizes)?;
    let names = keys.encrypt(&names_purpose(number), names.as_flattened())?;
    let mut content = Vec::with_capacity(HEAD_BYTES + sizes.len() + names.len() + values.len());
    content.extend_from_slice(MAGIC);
    content.extend_from_slice(&VERSION.to_le_bytes());
    content.extend_from_slice(&(sizes.len() as u32).to_le_bytes());
    content.extend_from_slice(&(names.len() as u32).to_le_bytes());
    content.extend_from_slice(&sizes);
    content.extend_from_slice(&names);
    content.extend_from_slice(values);
    Ok(content)
}

fn sizes_purpose(number: PackNumber) -> String {
    format!("pack sizes {number:012x}")
}

fn names_purpose(number: PackNumber) -> String {
    format!("pack names {number:012x}")
}

/// The header of a pack: the places of its parts, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) sizes: Range<u64>,
    pub(super) names: Range<u64>,
}

impl Head {
    /// # Errors
    /// `Corrupt`, without the pack's name.
    pub(super) fn parse(bytes: &[u8]) -> Result<Head> {
        let word = |at: usize| {
            let word = bytes.get(at..at + 4)?.try_into().ok()?;
            Some(u64::from(u32::from_le_bytes(word)))
        };
        let parsed = (|| {
            let is_known = bytes.starts_with(MAGIC) && word(8)? == u64::from(VERSION);
            let (sizes, names) = (word(12)?, word(16)?);
            let is_possible = sizes <= MOST_TABLE_BYTES && names <= MOST_TABLE_BYTES;
            (is_known && is_possible).then(|| {
                let begin = HEAD_BYTES as u64;
                let end = begin + sizes;
                Head { sizes: begin..end, names: end..end + names }
            })
        })();
        parsed.ok_or_else(|| damaged("its head has an unknown form"))
    }

    /// The end of the tables, in bytes.
    pub(super) fn end(&self) -> u64 {
        self.names.end
    }
}

pub(super) fn damaged(why: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the pack is damaged: {why}"))
}

/// Where the values of a pack lie.
pub(super) struct Table {
    /// The end of each value, in bytes from the beginning of the pack. The first value begins at `begin`.
    ends: Vec<u32>,
    begin: u32,
}

impl Table {
    /// From the encrypted sizes.
    ///
    /// # Errors
    /// `Corrupt`.
    pub(super) fn open(
        keys: &BucketKeys,
        number: PackNumber,
        head: &Head,
        sizes: &[u8],
    ) -> Result<Table> {
        let sizes = keys.decrypt(&sizes_purpose(number), sizes)?;
        if sizes.len() % 4 != 0 || sizes.len() / 4 > MOST_VALUES {
            return Err(damaged("its sizes have an unknown form"));
        }
        let begin = head.end() as u32;
        let mut at = begin;
        let ends = sizes.chunks_exact(4).map(|size| {
            let size = u32::from_le_bytes([size[0], size[1], size[2], size[3]]);
            at = at.checked_add(size).filter(|end| u64::from(*end) <= MOST_PACK_BYTES)?;
            Some(at)
        });
        let ends = ends.collect::<Option<Vec<_>>>();
        Ok(Table { ends: ends.ok_or_else(|| damaged("its values are too long"))?, begin })
    }

    pub(super) fn count(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of a value; `None` if it was removed, or was never there.
    pub(super) fn range(&self, place: usize) -> Option<Range<u64>> {
        let end = *self.ends.get(place)?;
        let start = match place.checked_sub(1) {
            Some(before) => self.ends[before],
            None => self.begin,
        };
        (start < end).then_some(u64::from(start)..u64::from(end))
    }
}

/// The tables at the beginning of a pack.
pub(super) struct Tables {
    pub(super) table: Table,
    /// One for each value; `None` if they are damaged. Nothing is lost with them: contents have the same names again.
    pub(super) names: Option<Vec<Name>>,
}

impl Tables {
    /// From the encrypted sizes and names.
    ///
    /// # Errors
    /// `Corrupt` if the sizes are damaged: then none of the values can be found.
    pub(super) fn open(
        keys: &BucketKeys,
        number: PackNumber,
        head: &Head,
        sizes: &[u8],
        names: &[u8],
    ) -> Result<Tables> {
        let table = Table::open(keys, number, head, sizes)?;
        let names = keys.decrypt(&names_purpose(number), names).ok();
        let names = names.filter(|names| names.len() == table.count() * NAME_BYTES);
        let name = |bytes: &[u8]| {
            let mut name = [0; NAME_BYTES];
            name.copy_from_slice(bytes);
            name
        };
        let names = names.map(|names| names.chunks_exact(NAME_BYTES).map(name).collect());
        Ok(Tables { table, names })
    }

    /// From the content of a pack.
    ///
    /// # Errors
    /// As for [`Tables::open`].
    pub(super) fn of(keys: &BucketKeys, number: PackNumber, content: &[u8]) -> Result<Tables> {
        let head = Head::parse(content)?;
        let part = |range: &Range<u64>| {
            content.get(range.start as usize..range.end as usize).unwrap_or_default()
        };
        Tables::open(keys, number, &head, part(&head.sizes), part(&head.names))
    }
}
