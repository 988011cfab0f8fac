//! Reads the entries of one file of chunks without RocksDB: in long reads, without RocksDB's copy
//! of every block.
//!
//! For callers that read everything. This reads and checks all that RocksDB would read on the way
//! to an entry, so a file that reads here without an error also reads with RocksDB. Anything in a
//! format that this crate does not write is an error, and RocksDB must judge it.
//!
//! The format, in addition to [`super::table`]:
//!
//! ```text
//! trailer:           after a block: compression (1, here 0 for none), XXH3 of block and that
//!                    byte (4)
//! index block:       as any block, without the lengths of values: key (the cut after a block:
//!                    not before the block's last key, and before all keys that follow), handle
//! data block:        keys end with 8 bytes: kind (1 for a value), sequence number (7)
//! ```

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Result};
use twox_hash::XxHash3_64;

use super::internal_key::{KIND_VALUE, split};
use super::table::{Footer, Handle, damaged, next_handle, varint, without_restarts};

pub(super) const CHECKSUM_XXH3: u8 = 4;
/// Later versions mix the position of a block into its checksum.
pub(super) const VERSION: u32 = 5;
pub(super) const TRAILER_BYTES: usize = 5;
/// Bytes of one read, unless a single block is longer.
const RUN_BYTES: usize = 512 << 10;
/// Maximum length of a block; a chunk has at most 256 KiB.
pub(super) const MAX_BLOCK_BYTES: u64 = 16 << 20;

/// A file of chunks with its top-level index in memory: about 60 bytes for 200 blocks.
pub(super) struct BlockFile {
    file: File,
    path: PathBuf,
    parts: Vec<Place>,
}

/// The position of a block, and the index's cut after it.
struct Place {
    cut: Vec<u8>,
    offset: u64,
    bytes: u64,
}

/// Buffers for reading, reused between calls.
#[derive(Default)]
pub(crate) struct BlockBuffers {
    run: Vec<u8>,
    index: Vec<u8>,
    key: Vec<u8>,
}

impl BlockFile {
    /// # Errors
    /// `NotFound` if the file was deleted meanwhile; `Corrupt` if this module cannot read it.
    pub(super) fn open(path: &Path) -> Result<BlockFile> {
        let file = File::open(path).context(|| format!("reading {}", path.display()))?;
        let (footer, _) = Footer::read(&file, path)?;
        if (footer.checksum, footer.version) != (CHECKSUM_XXH3, VERSION) {
            return Err(damaged(path));
        }
        let mut opened = BlockFile { file, path: path.to_owned(), parts: Vec::new() };
        let mut top = Vec::new();
        opened.read_block(footer.index, &mut top)?;
        opened.parts = places(&top).ok_or_else(|| damaged(path))?;
        Ok(opened)
    }

    /// Calls `entry` with the keys from `from` up to, but not including, `end`, ascending, and
    /// their values. Skips blocks for which `is_wanted` returns false; its arguments are the cuts
    /// before and after the block.
    ///
    /// # Errors
    /// `Corrupt` at the first damaged byte; errors of the operating system; errors of `entry`.
    pub(super) fn read(
        &self,
        (from, end): (&[u8], &[u8]),
        buffers: &mut BlockBuffers,
        is_wanted: impl Fn(&[u8], &[u8]) -> bool,
        mut entry: impl FnMut(&[u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        let BlockBuffers { run, index, key } = buffers;
        key.clear();
        let mut wanted = Run { start: 0, bytes: 0, blocks: Vec::new() };
        let mut hear = |key: &[u8], value: &[u8]| {
            if (from..end).contains(&key) { entry(key, value) } else { Ok(()) }
        };
        let first = self.parts.partition_point(|part| part.cut.as_slice() < from);
        let mut before = from.to_vec();
        'parts: for part in self.parts.get(first..).unwrap_or_default() {
            self.read_block(Handle { offset: part.offset, bytes: part.bytes }, index)?;
            for (cut, handle) in raw_entries(index).ok_or_else(|| damaged(&self.path))? {
                if cut < from {
                    continue;
                }
                if before.as_slice() >= end {
                    break 'parts;
                }
                if is_wanted(&before, cut) {
                    if !wanted.takes(handle) {
                        self.read_run(&mut wanted, run, key, &mut hear)?;
                    }
                    wanted.push(handle).ok_or_else(|| damaged(&self.path))?;
                }
                before.clear();
                before.extend_from_slice(cut);
            }
        }
        self.read_run(&mut wanted, run, key, &mut hear)
    }

    fn read_block(&self, Handle { offset, bytes }: Handle, block: &mut Vec<u8>) -> Result<()> {
        if bytes > MAX_BLOCK_BYTES {
            return Err(damaged(&self.path));
        }
        block.resize(bytes as usize + TRAILER_BYTES, 0);
        self.read_at(block, offset)?;
        let length = checked(block).ok_or_else(|| damaged(&self.path))?.len();
        block.truncate(length);
        Ok(())
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<()> {
        self.file
            .read_exact_at(bytes, offset)
            .context(|| format!("reading {}", self.path.display()))
    }

    /// Reads the blocks of a run and empties it.
    fn read_run(
        &self,
        run: &mut Run,
        buffer: &mut Vec<u8>,
        key: &mut Vec<u8>,
        hear: &mut impl FnMut(&[u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        if buffer.len() < run.bytes {
            buffer.resize(run.bytes, 0);
        }
        let mut rest = &mut buffer[..run.bytes];
        self.read_at(rest, run.start)?;
        for bytes in run.blocks.drain(..) {
            let (block, after) = rest.split_at_mut(bytes);
            let entries = checked(block).ok_or_else(|| damaged(&self.path))?;
            walk(entries, key, hear).ok_or_else(|| damaged(&self.path))??;
            rest = after;
        }
        run.bytes = 0;
        Ok(())
    }
}

/// Neighbouring blocks that are read at once.
struct Run {
    start: u64,
    bytes: usize,
    /// The length of each block with its trailer.
    blocks: Vec<usize>,
}

impl Run {
    /// Whether the block at this position may be appended.
    fn takes(&self, Handle { offset, .. }: Handle) -> bool {
        self.bytes == 0 || (self.bytes < RUN_BYTES && self.start + self.bytes as u64 == offset)
    }

    fn push(&mut self, Handle { offset, bytes }: Handle) -> Option<()> {
        if bytes > MAX_BLOCK_BYTES || i64::try_from(offset).is_err() {
            return None;
        }
        if self.bytes == 0 {
            self.start = offset;
        }
        let bytes = bytes as usize + TRAILER_BYTES;
        self.bytes += bytes;
        self.blocks.push(bytes);
        Some(())
    }
}

/// A block without its trailer, if the trailer is valid.
pub(super) fn checked(stored: &[u8]) -> Option<&[u8]> {
    let (block, trailer) = stored.split_last_chunk::<TRAILER_BYTES>()?;
    let [compression, checksum @ ..] = trailer;
    let is_sound =
        *compression == 0 && u32::from_le_bytes(*checksum) == XxHash3_64::oneshot(block) as u32;
    is_sound.then_some(block)
}

/// The entries of an index block: cuts and handles.
pub(super) fn raw_entries(block: &[u8]) -> Option<Vec<(&[u8], Handle)>> {
    let mut rest = without_restarts(block)?;
    let mut found = Vec::new();
    while !rest.is_empty() {
        // Each entry has a restart point, so none shares bytes with the one before.
        let (0, unshared) = (varint(&mut rest)?, varint(&mut rest)?) else { return None };
        let (cut, after) = rest.split_at_checked(usize::try_from(unshared).ok()?)?;
        rest = after;
        found.push((cut, next_handle(&mut rest)?));
    }
    Some(found)
}

fn places(block: &[u8]) -> Option<Vec<Place>> {
    let found = raw_entries(block)?.into_iter();
    Some(
        found
            .map(|(cut, Handle { offset, bytes })| Place { cut: cut.to_vec(), offset, bytes })
            .collect(),
    )
}

/// Walks through a data block; keys must ascend, starting from the one in `key`.
fn walk(
    block: &[u8],
    key: &mut Vec<u8>,
    hear: &mut impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Option<Result<()>> {
    let mut rest = without_restarts(block)?;
    let mut stored_key = Vec::new();
    while !rest.is_empty() {
        let mut length = || usize::try_from(varint(&mut rest)?).ok();
        let (shared, unshared, value_bytes) = (length()?, length()?, length()?);
        let (own, after) = rest.split_at_checked(unshared)?;
        let (value, after) = after.split_at_checked(value_bytes)?;
        rest = after;
        if shared > stored_key.len() {
            return None;
        }
        stored_key.truncate(shared);
        stored_key.extend_from_slice(own);
        let (user_key, _, kind) = split(&stored_key)?;
        if kind != KIND_VALUE || (!key.is_empty() && user_key <= key.as_slice()) {
            return None;
        }
        key.clear();
        key.extend_from_slice(user_key);
        if let Err(error) = hear(user_key, value) {
            return Some(Err(error));
        }
    }
    Some(Ok(()))
}
