//! Damage inside of files of the database: found without opening it, and put right, or
//! left out, in a copy that takes the file's place.
//!
//! RocksDB can neither skip a damaged block when it compacts a file (that fails, and with
//! it everything that is written afterwards) nor give up a file of level 0. So the file
//! is made readable for it:
//!
//! - One bit that flipped is found by its block's checksum, tried bit by bit. That it was
//!   the right one is certain only where what is in the block authenticates, as all values
//!   do.
//! - Where a part of the index cannot be put right, or the end of the file, the blocks are
//!   looked for and both are made anew: see [`super::salvage`].
//! - What cannot be put right goes from the index: the file has no such block any more.
//!   Its keys are missing then, or what an older file says of them shows: whoever mends
//!   has to look for what is missing.
//! - A filter that cannot be put right goes: it only saves reading.
//! - The length stays, which the database knows.
//!
//! A crash leaves the copy beside the file, which the next writer removes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, ErrorKind, Result};
use twox_hash::XxHash3_64;

use super::blocks::{checked, raw_entries, TRAILER_BYTES};
use super::blocks::{CHECKSUM_XXH3, MAX_BLOCK_BYTES, VERSION};
use super::rebuild::remove_beside;
use super::salvage::salvage;
use super::table::{damaged, next_handle, put_varint, Footer, Handle, IndexKind, FOOTER_BYTES};
use super::table::{entries, Origin, TableProperties, PROPERTIES};
use super::Family;

/// The copy on its way.
pub(super) const COPY_ENDING: &str = "mended";
/// Longer blocks are not tried bit by bit: chunks of 32 KiB take half a second.
const MAX_TRIED_BYTES: usize = 36 << 10;
/// What the names of filters begin with.
const FILTER: &[u8] = b"fullfilter.";
/// In a file with more damaged blocks than this it is no bit that flipped.
const MAX_TRIED_BLOCKS: u64 = 64;

/// What of a file is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All of it.
    Everything,
    /// Of a file of chunks only what leads to them.
    NoChunks,
}

/// What became of the damage in one file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mended {
    /// Blocks in which a flipped bit was put right.
    pub(crate) corrected: u64,
    /// Blocks that are left out.
    pub(crate) lost: u64,
}

impl Mended {
    pub(crate) fn is_sound(&self) -> bool {
        *self == Mended::default()
    }
}

/// Whether a file can be read: all of it, as its checksums say. The answer is false also
/// where only RocksDB can tell.
///
/// # Errors
/// `NotFound` where it was deleted meanwhile; what the operating system says.
pub(crate) fn is_sound(path: &Path) -> Result<bool> {
    match Mending::new(path, false).and_then(|mut mending| {
        mending.whole(Extent::Everything)?;
        Ok(mending.done.is_sound())
    }) {
        Err(error) if error.kind() == ErrorKind::Corrupt => Ok(false),
        done => done,
    }
}

/// Puts right or leaves out what is damaged in a file. Durable on return. `before_loss` is
/// called before anything changes where something is left out.
///
/// # Errors
/// `Corrupt` where its end is lost, and with it where everything is; what the operating
/// system says, which may be that the drive fails: then nothing has changed.
pub(crate) fn mend(
    path: &Path,
    extent: Extent,
    before_loss: impl FnOnce() -> Result<()>,
) -> Result<Mended> {
    let mut mending = Mending::new(path, true)?;
    mending.whole(extent)?;
    if mending.is_index_lost {
        mending.find_blocks()?;
    }
    if mending.done.lost > 0 {
        before_loss()?;
    }
    if !mending.done.is_sound() {
        mending.write()?;
        tracing::info!(path = %path.display(), done = ?mending.done, "damage was mended");
    }
    Ok(mending.done)
}

/// Makes a file in `path` of what is left of one that has lost its end, if anything of it can
/// be read: of which family and with which keys at its ends that was; and its sequence numbers.
/// Durable on return.
///
/// # Errors
/// What the operating system says.
pub(super) fn mend_end(
    remains: &Path,
    path: &Path,
    family: Family,
    ends: (&[u8], &[u8]),
) -> Result<Option<(Mended, (u64, u64))>> {
    let mut content =
        std::fs::read(remains).context(|| format!("reading {}", remains.display()))?;
    let Some(found) = salvage(&content, family, Some(ends)) else { return Ok(None) };
    let Some(properties) = found.properties(family) else { return Ok(None) };
    content.truncate(found.end);
    for (offset, bytes) in &found.patches {
        let offset = *offset as usize;
        content[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    content.extend(found.new_end(family, &properties).whole());
    put_in_place(path, |copy| {
        std::fs::write(copy, &content)?;
        File::open(copy)?.sync_all()
    })?;
    let remains = remains.display();
    tracing::info!(%remains, path = %path.display(), done = ?found.done, "a file got a new end");
    Ok(Some((found.done, found.sequences())))
}

/// Removes copies that an interrupted mending left, and a database beside.
pub(crate) fn remove_unfinished(database: &Path) -> Result<()> {
    remove_beside(database)?;
    for path in files_ending(database, COPY_ENDING)? {
        std::fs::remove_file(&path).context(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}

/// The files of a database, those included that nothing refers to any more.
pub(crate) fn table_files(database: &Path) -> Result<Vec<PathBuf>> {
    files_ending(database, "sst")
}

pub(super) fn files_ending(folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let what = || format!("reading {}", folder.display());
    let mut found = Vec::new();
    let entries = match std::fs::read_dir(folder) {
        // Of a database that is being made.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        entries => entries.context(what)?,
    };
    for entry in entries {
        let path = entry.context(what)?.path();
        if path.extension().is_some_and(|extension| extension == ending) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

struct Mending<'a> {
    path: &'a Path,
    file: File,
    length: u64,
    /// Whether flipped bits are looked for.
    is_correcting: bool,
    /// The block of them.
    properties: Vec<u8>,
    /// Not all of it leads anywhere.
    is_index_lost: bool,
    done: Mended,
    /// What stands in the copy instead.
    patches: Vec<(u64, Vec<u8>)>,
}

impl<'a> Mending<'a> {
    fn new(path: &'a Path, is_correcting: bool) -> Result<Self> {
        let what = || format!("reading {}", path.display());
        let file = File::open(path).context(what)?;
        let length = file.metadata().context(what)?.len();
        let (done, patches) = (Mended::default(), Vec::new());
        let (properties, is_index_lost) = (Vec::new(), false);
        Ok(Mending { path, file, length, is_correcting, properties, is_index_lost, done, patches })
    }

    fn whole(&mut self, extent: Extent) -> Result<()> {
        let damaged = || damaged(self.path);
        let stored = self.footer()?;
        let metaindex = self.block(stored.metaindex)?.ok_or_else(damaged)?;
        let metaindex = entries(&metaindex).ok_or_else(damaged)?;
        let (mut properties, mut kept) = (None, Vec::with_capacity(metaindex.len()));
        let mut taken = vec![stored.metaindex];
        for (name, value) in &metaindex {
            let handle = next_handle(&mut &value[..]).ok_or_else(damaged)?;
            taken.push(handle);
            match self.block(handle)? {
                Some(block) if name == PROPERTIES => {
                    properties = TableProperties::parse(&block);
                    self.properties = block;
                }
                Some(_) => {}
                // A file can be read without its filter.
                None if name.starts_with(FILTER) => {
                    self.done.corrected += 1;
                    continue;
                }
                // Without its properties it is refused.
                None => return Err(damaged()),
            }
            kept.push((&name[..], *value));
        }
        let properties = properties.ok_or_else(damaged)?;
        // Nothing else tells where the index is, which may have to be written there.
        if !self.fits(stored.index) || taken.iter().any(|other| overlap(stored.index, *other)) {
            return Err(damaged());
        }
        let mut footer = stored;
        if kept.len() < metaindex.len() {
            footer.metaindex = self.put_block(stored.metaindex, kept.iter().map(name_row));
        }
        let is_of_chunks = properties.index == IndexKind::TwoLevel;
        let has_data = extent == Extent::Everything || !is_of_chunks;
        if let Some(index) = self.index(stored.index, is_of_chunks, has_data)? {
            footer.index = index;
        }
        if footer != stored {
            self.patches.push((self.length - FOOTER_BYTES as u64, footer.bytes()));
        }
        Ok(())
    }

    /// The footer, which has no checksum: right is what leads to a sound metaindex.
    fn footer(&mut self) -> Result<Footer> {
        let offset =
            self.length.checked_sub(FOOTER_BYTES as u64).ok_or_else(|| damaged(self.path))?;
        let mut bytes = [0; FOOTER_BYTES];
        let what = || format!("reading {}", self.path.display());
        self.file.read_exact_at(&mut bytes, offset).context(what)?;
        let stored = Footer::parse(&bytes).filter(Footer::is_ours);
        if let Some(footer) = stored {
            if self.sound(footer.metaindex)?.is_some() && self.sound(footer.index)?.is_some() {
                return Ok(footer);
            }
        }
        if self.is_correcting {
            for bit in 0..FOOTER_BYTES * 8 {
                bytes[bit / 8] ^= 1 << (bit % 8);
                let tried = Footer::parse(&bytes).filter(Footer::is_ours);
                if let Some(footer) = tried {
                    if self.sound(footer.metaindex)?.is_some()
                        && self.sound(footer.index)?.is_some()
                    {
                        self.done.corrected += 1;
                        self.patches.push((offset, bytes.to_vec()));
                        return Ok(footer);
                    }
                }
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
        stored.ok_or_else(|| damaged(self.path))
    }

    /// Looks at the index and what it leads to. Where it has to be another one, where that
    /// is.
    fn index(
        &mut self,
        place: Handle,
        is_of_parts: bool,
        has_data: bool,
    ) -> Result<Option<Handle>> {
        let Some(block) = self.block(place)? else {
            self.done.lost += 1;
            self.is_index_lost = true;
            return Ok(Some(self.put_block(place, std::iter::empty())));
        };
        let found = raw_entries(&block).ok_or_else(|| damaged(self.path))?;
        let mut kept = Vec::with_capacity(found.len());
        let mut is_changed = false;
        for (cut, handle) in found {
            let is_there = if is_of_parts && !self.fits(handle) {
                self.done.lost += 1;
                self.is_index_lost = true;
                None
            } else if is_of_parts {
                let changed = self.index(handle, false, has_data)?;
                is_changed |= changed.is_some();
                let handle = changed.unwrap_or(handle);
                // An index that leads nowhere stays at the top alone.
                (handle.1 > EMPTY_INDEX_BYTES).then_some(handle)
            } else if !has_data || self.block(handle)?.is_some() {
                Some(handle)
            } else {
                self.done.lost += 1;
                None
            };
            is_changed |= is_there.is_none();
            kept.extend(is_there.map(|handle| (cut, handle)));
        }
        Ok(is_changed.then(|| self.put_block(place, kept.iter().map(index_row))))
    }

    /// Instead of leaving out what the index has lost. Where the blocks are not found it stays
    /// at that.
    fn find_blocks(&mut self) -> Result<()> {
        let what = || format!("reading {}", self.path.display());
        let family = Origin::parse(&self.properties).and_then(|origin| origin.family_of_file());
        let Some(family) = family else { return Ok(()) };
        let content = std::fs::read(self.path).context(what)?;
        let Some(mut found) = salvage(&content, family, None) else { return Ok(()) };
        let had = TableProperties::parse(&self.properties).map_or(0, |had| had.entries);
        if found.entries() > had {
            // Not all of them are this file's.
            return Ok(());
        }
        if found.entries() < had && found.done.lost == 0 {
            // The last block, where nothing tells that there was one.
            found.done.lost = 1;
        }
        let end = found.new_end(family, &self.properties).filling(content.len() - found.end);
        if let Some(end) = end {
            found.patches.push((found.end as u64, end));
            (self.done, self.patches) = (found.done, found.patches);
        }
        Ok(())
    }

    /// Puts another block of names or of an index where one was; it is not longer.
    fn put_block(
        &mut self,
        (offset, bytes): Handle,
        rows: impl Iterator<Item = Vec<u8>>,
    ) -> Handle {
        let mut block = block_of(rows);
        let new = (offset, block.len() as u64);
        let trailer = trailer(&block);
        block.extend_from_slice(&trailer);
        block.resize(block.len().max(bytes as usize + TRAILER_BYTES), 0);
        self.patches.push((offset, block));
        new
    }

    /// A block, without what follows it, as it is or as it was before a bit flipped; none
    /// where it cannot be read.
    fn block(&mut self, handle: Handle) -> Result<Option<Vec<u8>>> {
        let Some(mut stored) = self.read(handle)? else { return Ok(None) };
        if checked(&stored).is_none() {
            if !self.is_correcting
                || self.done.lost > MAX_TRIED_BLOCKS
                || !has_corrected(&mut stored)
            {
                return Ok(None);
            }
            self.done.corrected += 1;
            self.patches.push((handle.0, stored.clone()));
        }
        stored.truncate(stored.len() - TRAILER_BYTES);
        Ok(Some(stored))
    }

    fn sound(&self, handle: Handle) -> Result<Option<Vec<u8>>> {
        Ok(self.read(handle)?.filter(|stored| checked(stored).is_some()))
    }

    /// Whether a block can be there.
    fn fits(&self, (offset, bytes): Handle) -> bool {
        let tail = (TRAILER_BYTES + FOOTER_BYTES) as u64;
        let end = offset.checked_add(bytes).and_then(|end| end.checked_add(tail));
        bytes <= MAX_BLOCK_BYTES && end.is_some_and(|end| end <= self.length)
    }

    fn read(&self, handle: Handle) -> Result<Option<Vec<u8>>> {
        if !self.fits(handle) {
            return Ok(None);
        }
        let (offset, bytes) = handle;
        let mut stored = vec![0; bytes as usize + TRAILER_BYTES];
        let what = || format!("reading {}", self.path.display());
        self.file.read_exact_at(&mut stored, offset).context(what)?;
        Ok(Some(stored))
    }

    fn write(&self) -> Result<()> {
        put_in_place(self.path, |copy| self.write_copy(copy))
    }

    fn write_copy(&self, copy: &Path) -> std::io::Result<()> {
        std::fs::copy(self.path, copy)?;
        let file = File::options().write(true).open(copy)?;
        for (offset, bytes) in &self.patches {
            file.write_all_at(bytes, *offset)?;
        }
        file.sync_all()
    }
}

/// Puts what `write` makes, and syncs, in the place of a file. Durable on return.
fn put_in_place(path: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let copy = path.with_extension(COPY_ENDING);
    let renamed = write(&copy).and_then(|()| std::fs::rename(&copy, path));
    if renamed.is_err() {
        // It may take space that is needed.
        let _ = std::fs::remove_file(&copy);
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    renamed
        .and_then(|()| File::open(folder)?.sync_all())
        .context(|| format!("mending {}", path.display()))
}

/// An index without entries: one restart point and their number.
const EMPTY_INDEX_BYTES: u64 = 8;

/// A block with a restart point at each entry.
pub(super) fn block_of(rows: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let (mut block, mut restarts) = (Vec::new(), Vec::new());
    for row in rows {
        restarts.extend_from_slice(&(block.len() as u32).to_le_bytes());
        block.extend_from_slice(&row);
    }
    if restarts.is_empty() {
        restarts.extend_from_slice(&[0; 4]);
    }
    let count = restarts.len() as u32 / 4;
    block.extend_from_slice(&restarts);
    block.extend_from_slice(&count.to_le_bytes());
    block
}

fn overlap((start, bytes): Handle, (other, other_bytes): Handle) -> bool {
    let end =
        |start: u64, bytes: u64| start.saturating_add(bytes).saturating_add(TRAILER_BYTES as u64);
    start < end(other, other_bytes) && other < end(start, bytes)
}

/// An entry of an index block.
pub(super) fn index_row((cut, (offset, bytes)): &(&[u8], Handle)) -> Vec<u8> {
    let mut row = Vec::new();
    put_varint(&mut row, 0);
    put_varint(&mut row, cut.len() as u64);
    row.extend_from_slice(cut);
    put_varint(&mut row, *offset);
    put_varint(&mut row, *bytes);
    row
}

/// An entry of a block of names.
pub(super) fn name_row((name, value): &(&[u8], &[u8])) -> Vec<u8> {
    let mut row = Vec::new();
    put_varint(&mut row, 0);
    put_varint(&mut row, name.len() as u64);
    put_varint(&mut row, value.len() as u64);
    row.extend_from_slice(name);
    row.extend_from_slice(value);
    row
}

impl Footer {
    /// Of a file of ours.
    pub(super) fn new(metaindex: Handle, index: Handle) -> Footer {
        Footer { checksum: CHECKSUM_XXH3, metaindex, index, version: VERSION }
    }

    fn is_ours(&self) -> bool {
        (self.checksum, self.version) == (CHECKSUM_XXH3, VERSION)
    }
}

pub(super) fn trailer(block: &[u8]) -> [u8; TRAILER_BYTES] {
    let mut trailer = [0; TRAILER_BYTES];
    trailer[1..].copy_from_slice(&(XxHash3_64::oneshot(block) as u32).to_le_bytes());
    trailer
}

/// Looks for the one bit that flipped in a block or in what follows it, and puts it right.
pub(super) fn has_corrected(stored: &mut [u8]) -> bool {
    let Some((block, stored_trailer)) = stored.split_last_chunk_mut::<TRAILER_BYTES>() else {
        return false;
    };
    let right = trailer(block);
    let differing = |trailer: &[u8; TRAILER_BYTES]| -> u32 {
        let pairs = right.iter().zip(trailer);
        pairs.map(|(right, stored)| (right ^ stored).count_ones()).sum()
    };
    if differing(stored_trailer) == 1 {
        *stored_trailer = right;
        return true;
    }
    if block.len() > MAX_TRIED_BYTES || stored_trailer[0] != 0 {
        return false;
    }
    for bit in 0..block.len() * 8 {
        block[bit / 8] ^= 1 << (bit % 8);
        if trailer(block) == *stored_trailer {
            return true;
        }
        block[bit / 8] ^= 1 << (bit % 8);
    }
    false
}

#[cfg(test)]
#[path = "mend_tests.rs"]
mod tests;
