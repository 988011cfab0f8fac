//! What a file of the database holds, read past RocksDB: every entry, with its sequence
//! number. Of the format see [`super::super::table`], [`super::super::blocks`] and
//! [`super::super::internal_key`].

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Result};

use super::super::blocks::{checked, raw_entries, MAX_BLOCK_BYTES, TRAILER_BYTES};
use super::super::internal_key::{split, user_key, KIND_DELETION, KIND_VALUE, MAX_BYTES};
use super::super::table::{
    damaged, varint, without_restarts, Footer, Handle, IndexKind, Origin, TableProperties,
};
use super::super::{Family, FAMILIES};
use super::unknown_family;

/// A file of the database.
pub(in crate::rocks) struct Table {
    pub(super) path: PathBuf,
    pub(super) number: u64,
    pub(super) bytes: u64,
    /// In the order of [`FAMILIES`].
    pub(in crate::rocks) family: usize,
    /// First and last key, each with what follows it.
    pub(super) smallest: Vec<u8>,
    pub(super) largest: Vec<u8>,
    /// Of all entries of a file that was handed over.
    pub(super) sequence: Option<u64>,
    index: Handle,
    kind: IndexKind,
}

/// One version of a key.
pub(in crate::rocks) struct Entry<'a> {
    pub(in crate::rocks) key: &'a [u8],
    pub(in crate::rocks) sequence: u64,
    /// Where the value lies in the file, and its bytes; none for a deletion.
    pub(in crate::rocks) value: Option<Handle>,
}

impl Table {
    /// Opens a file that has been mended. `None` for one without entries.
    ///
    /// # Errors
    /// `Corrupt` where it is not one of ours; what the operating system says.
    pub(in crate::rocks) fn open(path: &Path) -> Result<Option<Table>> {
        let file = File::open(path).context(|| format!("reading {}", path.display()))?;
        let (footer, bytes) = Footer::read(&file, path)?;
        let (origin, properties) = Origin::read(path)?;
        let number = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok());
        let mut table = Table {
            path: path.to_owned(),
            number: number.ok_or_else(|| damaged(path))?,
            bytes,
            family: family_of(&origin, &properties).ok_or_else(|| unknown_family(path))?,
            smallest: Vec::new(),
            largest: Vec::new(),
            sequence: origin.sequence,
            index: footer.index,
            kind: properties.index,
        };
        let ends = (table.end(&file, |cuts| cuts.first()), table.end(&file, |cuts| cuts.last()));
        let (Some(first), Some(last)) = (ends.0?, ends.1?) else { return Ok(None) };
        let first = rows(&first).and_then(|rows| Some(rows.first()?.0.clone()));
        let last = rows(&last).and_then(|rows| Some(rows.last()?.0.clone()));
        (table.smallest, table.largest) = first.zip(last).ok_or_else(|| damaged(path))?;
        Ok(Some(table))
    }

    pub(super) fn first_key(&self) -> &[u8] {
        user_key(&self.smallest)
    }

    pub(super) fn last_key(&self) -> &[u8] {
        user_key(&self.largest)
    }

    /// The first and the last key, where they have a value and are not deleted.
    pub(in crate::rocks) fn values_at_ends(&self) -> Vec<&[u8]> {
        let ends = [&self.smallest, &self.largest].into_iter().filter_map(|end| split(end));
        ends.filter(|(_, _, kind)| *kind == KIND_VALUE).map(|(key, _, _)| key).collect()
    }

    pub(super) fn overlaps(&self, other: &Table) -> bool {
        self.family == other.family
            && self.first_key() <= other.last_key()
            && other.first_key() <= self.last_key()
    }

    /// The highest sequence number at its ends; others may be higher.
    pub(super) fn sequence_at_ends(&self) -> u64 {
        let of = |key: &[u8]| split(key).map_or(0, |(_, sequence, _)| sequence);
        self.sequence.unwrap_or_else(|| of(&self.smallest).max(of(&self.largest)))
    }

    /// Calls `entry` with all there is, in the order of the keys. Blocks of chunks of which
    /// `is_wanted` says no may be left out: it is asked with a key that is not behind their
    /// first one, and one that is not before their last.
    ///
    /// # Errors
    /// `Corrupt` at the first thing that is not as it was written; what the operating
    /// system says; what `entry` says.
    pub(in crate::rocks) fn read(
        &self,
        is_wanted: impl Fn(&[u8], &[u8]) -> bool,
        mut entry: impl FnMut(Entry<'_>) -> Result<()>,
    ) -> Result<()> {
        let file = File::open(&self.path).context(|| format!("reading {}", self.path.display()))?;
        let mut before = Vec::new();
        let top = self.block(&file, self.index)?;
        for (_, handle) in self.cuts(&top)? {
            let part = match self.kind {
                IndexKind::TwoLevel => self.block(&file, handle)?,
                IndexKind::Other => Vec::new(),
            };
            let places = match self.kind {
                IndexKind::TwoLevel => self.cuts(&part)?,
                IndexKind::Other => vec![(&[][..], handle)],
            };
            for (cut, place) in places {
                if self.kind == IndexKind::Other || is_wanted(&before, cut) {
                    self.read_data(&file, place, &mut entry)?;
                }
                before.clear();
                before.extend_from_slice(cut);
            }
        }
        Ok(())
    }

    fn read_data(
        &self,
        file: &File,
        place: Handle,
        entry: &mut impl FnMut(Entry<'_>) -> Result<()>,
    ) -> Result<()> {
        let block = self.block(file, place)?;
        for (key, value) in rows(&block).ok_or_else(|| damaged(&self.path))? {
            let (key, sequence, kind) = split(&key).ok_or_else(|| damaged(&self.path))?;
            let value = match kind {
                KIND_VALUE => Some((place.0 + value.0, value.1)),
                KIND_DELETION => None,
                _ => return Err(damaged(&self.path)),
            };
            entry(Entry { key, sequence: self.sequence.unwrap_or(sequence), value })?;
        }
        Ok(())
    }

    /// The first or the last block of data.
    fn end(
        &self,
        file: &File,
        choose: impl for<'a, 'b> Fn(&'b [(&'a [u8], Handle)]) -> Option<&'b (&'a [u8], Handle)>,
    ) -> Result<Option<Vec<u8>>> {
        let mut place = self.index;
        let levels = if self.kind == IndexKind::TwoLevel { 2 } else { 1 };
        for _ in 0..levels {
            let block = self.block(file, place)?;
            let Some((_, chosen)) = choose(&self.cuts(&block)?).copied() else { return Ok(None) };
            place = chosen;
        }
        self.block(file, place).map(Some)
    }

    fn cuts<'a>(&self, block: &'a [u8]) -> Result<Vec<(&'a [u8], Handle)>> {
        raw_entries(block).ok_or_else(|| damaged(&self.path))
    }

    fn block(&self, file: &File, (offset, bytes): Handle) -> Result<Vec<u8>> {
        let end = offset.saturating_add(bytes).saturating_add(TRAILER_BYTES as u64);
        if bytes > MAX_BLOCK_BYTES || end > self.bytes {
            return Err(damaged(&self.path));
        }
        let mut block = vec![0; bytes as usize + TRAILER_BYTES];
        let what = || format!("reading {}", self.path.display());
        file.read_exact_at(&mut block, offset).context(what)?;
        let length = checked(&block).ok_or_else(|| damaged(&self.path))?.len();
        block.truncate(length);
        Ok(block)
    }
}

fn family_of(origin: &Origin, properties: &TableProperties) -> Option<usize> {
    let wanted = origin.family_of_file()?;
    let is_of_chunks = properties.index == IndexKind::TwoLevel;
    let position = FAMILIES.iter().position(|(family, _)| *family == wanted);
    position.filter(|_| is_of_chunks == (wanted == Family::Chunks))
}

/// Keys of a block of data, and where in it the values lie.
pub(in crate::rocks) fn rows(block: &[u8]) -> Option<Vec<(Vec<u8>, Handle)>> {
    let whole = without_restarts(block)?;
    let (mut rest, mut key, mut rows) = (whole, Vec::new(), Vec::new());
    while !rest.is_empty() {
        let mut length = || usize::try_from(varint(&mut rest)?).ok();
        let (shared, unshared, value_bytes) = (length()?, length()?, length()?);
        if shared > key.len() || shared.saturating_add(unshared) > MAX_BYTES {
            return None;
        }
        let (own, after) = rest.split_at_checked(unshared)?;
        key.truncate(shared);
        key.extend_from_slice(own);
        let start = whole.len() - after.len();
        rest = after.get(value_bytes..)?;
        rows.push((key.clone(), (start as u64, value_bytes as u64)));
    }
    Some(rows)
}
