//! Which slot holds a block: the in-memory index of a layer.
//!
//! One 32-bit entry per block, one group word per 1024 blocks. An entry of 0
//! follows its group, so that trimming terabytes touches only group words. The
//! writer keeps the map in shared memory (never on the repository's disk, where
//! it would tell which blocks were written), so that other processes can read it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};

use crate::mapping::SharedWords;

/// Blocks that share one group word.
pub(crate) const GROUP_BLOCKS: u64 = 1024;

const ENTRY_INHERIT: u32 = 0;
const ENTRY_ZERO: u32 = 1;
const ENTRY_FIRST_SLOT: u32 = 2;

const GROUP_ZERO: u32 = 1;
const GROUP_HAS_ENTRIES: u32 = 2;

/// What a layer knows of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// Nothing: what lies below shows through.
    Below,
    /// It reads as zeroes.
    Zero,
    /// It is captured in this slot.
    Slot(u32),
}

/// The map of one layer. Lookups may come from any thread; a change of a block
/// needs the lock of that block's stripe (see `stripes`).
pub(crate) struct BlockMap {
    words: SharedWords,
    blocks: u64,
    group_start: usize,
    /// Removed when the map goes: the name in shared memory, once revealed.
    published: Option<PathBuf>,
    /// The name it has until then.
    hidden: Option<PathBuf>,
    is_attached: bool,
}

fn length_bytes(blocks: u64) -> Result<(usize, usize)> {
    let entries = usize::try_from(blocks).map_err(|_| {
        Error::new(ErrorKind::InvalidInput, "the disk is too large for this machine")
    })?;
    let groups = entries.div_ceil(GROUP_BLOCKS as usize);
    Ok((entries, (entries + groups) * 4))
}

impl BlockMap {
    /// An empty map in private memory.
    pub(crate) fn private(blocks: u64) -> Result<Self> {
        let (group_start, bytes) = length_bytes(blocks)?;
        Ok(BlockMap {
            words: SharedWords::private(bytes)?,
            blocks,
            group_start,
            published: None,
            hidden: None,
            is_attached: false,
        })
    }

    /// An empty map in shared memory. It appears at `path` when it is revealed; a
    /// stale one there is removed now. Falls back to private memory where the
    /// machine has no shared memory.
    pub(crate) fn shared(blocks: u64, path: &Path) -> Result<Self> {
        let (group_start, bytes) = length_bytes(blocks)?;
        let hidden = path.with_extension("new");
        let _ = std::fs::remove_file(path);
        let _ = std::fs::remove_file(&hidden);
        let created = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&hidden)
            .and_then(|file: File| file.set_len(bytes as u64).map(|()| file));
        let file = match created {
            Ok(file) => file,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "no shared memory: other processes cannot read this session while it is written");
                return BlockMap::private(blocks);
            }
        };
        let words = SharedWords::of_file(&file, 0, bytes)?;
        let hidden = Some(hidden);
        Ok(BlockMap {
            words,
            blocks,
            group_start,
            published: Some(path.to_owned()),
            hidden,
            is_attached: false,
        })
    }

    /// Lets other processes find the map, now that it is complete.
    pub(crate) fn reveal(&mut self) {
        let (Some(path), Some(hidden)) = (&self.published, self.hidden.take()) else { return };
        if let Err(error) = std::fs::rename(&hidden, path) {
            tracing::warn!(path = %path.display(), %error, "other processes cannot read this session while it is written");
            let _ = std::fs::remove_file(hidden);
        }
    }

    /// The map that a writer in another process published.
    pub(crate) fn attach(blocks: u64, path: &Path) -> Result<Self> {
        let (group_start, bytes) = length_bytes(blocks)?;
        let file = File::open(path).context(|| {
            "the session is being opened or closed by another process; try again in a moment"
        })?;
        let found = file.metadata().context(|| "reading the shared block map")?.len();
        if found != bytes as u64 {
            return Err(Error::new(ErrorKind::Corrupt, "the shared block map has a wrong size"));
        }
        let words = SharedWords::of_file_read_only(&file, 0, bytes)?;
        Ok(BlockMap {
            words,
            blocks,
            group_start,
            published: None,
            hidden: None,
            is_attached: true,
        })
    }

    /// True for a map that another process keeps.
    pub(crate) fn is_attached(&self) -> bool {
        self.is_attached
    }

    /// Number of blocks of the disk.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    fn group(&self, block: u64) -> u32 {
        self.words.load32(self.group_start + (block / GROUP_BLOCKS) as usize)
    }

    fn set_group(&self, block: u64, value: u32) {
        self.words.store32(self.group_start + (block / GROUP_BLOCKS) as usize, value);
    }

    /// What the layer knows of `block`.
    #[inline]
    pub(crate) fn lookup(&self, block: u64) -> Lookup {
        let group = self.group(block);
        // Looking at an entry takes its page of memory, whatever it says: not where there
        // is none.
        let entry = match group & GROUP_HAS_ENTRIES {
            0 => ENTRY_INHERIT,
            _ => self.words.load32(block as usize),
        };
        match entry {
            ENTRY_INHERIT if group & GROUP_ZERO != 0 => Lookup::Zero,
            ENTRY_INHERIT => Lookup::Below,
            ENTRY_ZERO => Lookup::Zero,
            slot => Lookup::Slot(slot - ENTRY_FIRST_SLOT),
        }
    }

    /// How many blocks from `block` on, at most `limit`, are known to share the
    /// answer `lookup(block)` gives without looking at each of them.
    pub(crate) fn uniform_blocks(&self, block: u64, limit: u64) -> u64 {
        if self.group(block) & GROUP_HAS_ENTRIES != 0 {
            return 1;
        }
        limit.min(GROUP_BLOCKS - block % GROUP_BLOCKS)
    }

    /// Points `block` at `slot` and returns what it was before.
    pub(crate) fn set_slot(&self, block: u64, slot: u32) -> Lookup {
        let before = self.lookup(block);
        let group = self.group(block);
        if group & GROUP_HAS_ENTRIES == 0 {
            self.set_group(block, group | GROUP_HAS_ENTRIES);
        }
        self.words.store32(block as usize, slot + ENTRY_FIRST_SLOT);
        before
    }

    /// Makes a range read as zeroes; `superseded` hears of each slot given up.
    pub(crate) fn set_zero(&self, first: u64, count: u64, mut superseded: impl FnMut(u32)) {
        let mut block = first;
        let end = first + count;
        while block < end {
            let group_end = (block / GROUP_BLOCKS + 1) * GROUP_BLOCKS;
            let whole = block % GROUP_BLOCKS == 0 && end >= group_end.min(self.blocks);
            let group = self.group(block);
            if whole && group & GROUP_HAS_ENTRIES == 0 {
                self.set_group(block, GROUP_ZERO);
                block = group_end.min(end);
                continue;
            }
            let stop = group_end.min(end);
            self.set_group(block, group | GROUP_HAS_ENTRIES);
            for entry in block..stop {
                if let Lookup::Slot(slot) = self.lookup(entry) {
                    superseded(slot);
                }
                self.words.store32(entry as usize, ENTRY_ZERO);
            }
            block = stop;
        }
    }

    /// True when the whole range already reads as zeroes in this layer.
    pub(crate) fn is_zero(&self, first: u64, count: u64) -> bool {
        let mut block = first;
        while block < first + count {
            if self.lookup(block) != Lookup::Zero {
                return false;
            }
            block += self.uniform_blocks(block, first + count - block);
        }
        true
    }
}

impl Drop for BlockMap {
    fn drop(&mut self) {
        for path in self.published.iter().chain(&self.hidden) {
            let _ = std::fs::remove_file(path);
        }
    }
}
