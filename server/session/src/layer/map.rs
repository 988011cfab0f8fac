//! The block map: the in-memory index from a block to its slot.
//!
//! It has one 32-bit entry per block and one group word per 1024 blocks. An entry of 0 follows its
//! group, so trimming terabytes touches only group words. The writer keeps the map in shared
//! memory, so that other processes can read it. The map is never on the repository's disk, where it
//! would reveal the written blocks.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::io::Errno;

use super::format::PRIVATE_MAP_WORD;
use super::open::bump_generation;
use crate::layer::mapping::SharedWords;
use crate::paths::MAP_PREFIX;

/// Number of blocks that share one group word.
pub(crate) const GROUP_BLOCKS: u64 = 1024;

const ENTRY_INHERIT: u32 = 0;
const ENTRY_ZERO: u32 = 1;
const ENTRY_FIRST_SLOT: u32 = 2;

const GROUP_ZERO: u32 = 1;
const GROUP_HAS_ENTRIES: u32 = 2;
/// The entries are in the writer's private memory.
const GROUP_IS_PRIVATE: u32 = 4;

const ENTRY_BYTES: u64 = 4;
// The entries of a group fill one page, which is reserved when the group gets entries.
const _: () = assert!(GROUP_BLOCKS * ENTRY_BYTES == 4096);

/// The state of a block in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// The layer has nothing; reads go to the layer or map below.
    Below,
    /// The block reads as zeroes.
    Zero,
    /// The block is captured in this slot.
    Slot(u32),
}

/// The map of one layer. Any thread may look up a block. A change of a block needs the lock of its
/// stripe (see `stripes`).
pub(crate) struct BlockMap {
    words: SharedWords,
    blocks: u64,
    group_start: usize,
    /// The name in shared memory once the map is revealed. Removed with the map.
    published: Option<PathBuf>,
    /// The name in shared memory before that.
    hidden: Option<PathBuf>,
    /// Set for a shared map.
    sharing: Option<Sharing>,
    is_attached: bool,
}

/// The parts of a map in shared memory beside its words.
struct Sharing {
    /// Open and locked, so that no process considers the map abandoned. `None` once it is
    /// withdrawn.
    file: Option<File>,
    /// Holds the entries for which shared memory has no room.
    spill: SharedWords,
    /// Held while a group gets entries, so that the reservation of its page is decided once.
    reserving: Mutex<()>,
    /// The layer's words. They tell readers in other processes that the map is no longer available.
    head: Arc<SharedWords>,
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
            sharing: None,
            is_attached: false,
        })
    }

    /// An empty map in shared memory. It appears at `path` when it is revealed. Removes a stale map
    /// there, and all maps beside it whose writers were killed. If shared memory has no room or
    /// does not exist, the map is in private memory, completely or in part, and the layer's `head`
    /// records that: other processes cannot read it then.
    pub(crate) fn shared(blocks: u64, path: &Path, head: Arc<SharedWords>) -> Result<Self> {
        let (group_start, bytes) = length_bytes(blocks)?;
        let hidden = path.with_extension("new");
        let _ = std::fs::remove_file(path);
        path.parent().into_iter().for_each(remove_abandoned);
        let groups = (group_start as u64 * ENTRY_BYTES, (bytes - group_start * 4) as u64);
        let created = create_locked(&hidden).and_then(|file| {
            file.set_len(bytes as u64)?;
            reserve(&file, groups.0, groups.1)?;
            Ok(file)
        });
        let file = match created {
            Ok(file) => file,
            Err(error) => {
                let _ = std::fs::remove_file(&hidden);
                tell_private(&head, path, &error);
                return BlockMap::private(blocks);
            }
        };
        let words = SharedWords::of_file(&file, 0, bytes)?;
        let spill = SharedWords::private(group_start * 4)?;
        Ok(BlockMap {
            words,
            blocks,
            group_start,
            published: Some(path.to_owned()),
            hidden: Some(hidden),
            sharing: Some(Sharing { file: Some(file), spill, reserving: Mutex::new(()), head }),
            is_attached: false,
        })
    }

    /// Makes the complete map visible to other processes.
    pub(crate) fn reveal(&mut self) {
        let (Some(path), Some(hidden)) = (&self.published, self.hidden.take()) else { return };
        if self.is_private() {
            let _ = std::fs::remove_file(hidden);
            return;
        }
        if let Err(error) = std::fs::rename(&hidden, path) {
            tracing::warn!(path = %path.display(), %error, "other processes cannot read this session while it is written");
            let _ = std::fs::remove_file(hidden);
        }
    }

    /// The map that a writer in another process published.
    pub(crate) fn attach(blocks: u64, path: &Path) -> Result<Self> {
        let (group_start, bytes) = length_bytes(blocks)?;
        let file = File::open(path).context(
            || "the session is being opened or closed by another process; try again in a moment",
        )?;
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
            sharing: None,
            is_attached: true,
        })
    }

    /// Hides the map from other processes. This process continues to use it.
    pub(crate) fn withdraw(&mut self) {
        for path in self.published.take().iter().chain(&self.hidden.take()) {
            let _ = std::fs::remove_file(path);
        }
        if let Some(sharing) = &mut self.sharing {
            sharing.file = None;
        }
    }

    /// True for a map of another process.
    pub(crate) fn is_attached(&self) -> bool {
        self.is_attached
    }

    /// Number of blocks of the disk.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// True once a part of the map is in private memory.
    fn is_private(&self) -> bool {
        self.sharing.as_ref().is_some_and(|s| s.head.load64(PRIVATE_MAP_WORD) != 0)
    }

    /// Reserves room for the entries of the group of `block`, and returns the group's word.
    fn with_entries(&self, block: u64) -> u32 {
        let group = self.group(block);
        if group & GROUP_HAS_ENTRIES != 0 {
            return group;
        }
        let mut flags = GROUP_HAS_ENTRIES;
        let _reserving = self.sharing.as_ref().map(|sharing| sharing.reserving.lock());
        let group = self.group(block);
        if group & GROUP_HAS_ENTRIES != 0 {
            return group;
        }
        if let Some(sharing) = &self.sharing {
            let first = block / GROUP_BLOCKS * GROUP_BLOCKS;
            let count = GROUP_BLOCKS.min(self.blocks - first);
            let reserved = match &sharing.file {
                Some(file) => reserve(file, first * ENTRY_BYTES, count * ENTRY_BYTES),
                None => Err(std::io::ErrorKind::StorageFull.into()),
            };
            if let Err(error) = reserved {
                flags |= GROUP_IS_PRIVATE;
                self.give_up_sharing(sharing, &error);
            }
        }
        self.set_group(block, group | flags);
        group | flags
    }

    /// Ends the sharing. Readers in other processes would see only a part of the map from here on,
    /// so they are notified before the first entry goes into private memory.
    fn give_up_sharing(&self, sharing: &Sharing, error: &std::io::Error) {
        if self.is_private() {
            return;
        }
        for path in self.published.iter().chain(&self.hidden) {
            tell_private(&sharing.head, path, error);
            let _ = std::fs::remove_file(path);
        }
    }

    fn entries(&self, group: u32) -> &SharedWords {
        match &self.sharing {
            Some(sharing) if group & GROUP_IS_PRIVATE != 0 => &sharing.spill,
            _ => &self.words,
        }
    }

    fn group(&self, block: u64) -> u32 {
        self.words.load32(self.group_start + (block / GROUP_BLOCKS) as usize)
    }

    fn set_group(&self, block: u64, value: u32) {
        self.words.store32(self.group_start + (block / GROUP_BLOCKS) as usize, value);
    }

    /// The state of `block` in this layer.
    #[inline]
    pub(crate) fn lookup(&self, block: u64) -> Lookup {
        let group = self.group(block);
        let inherited = match group & GROUP_ZERO {
            0 => Lookup::Below,
            _ => Lookup::Zero,
        };
        // Reading an entry allocates its page of shared memory, even if it was never written. A
        // reader of a whole disk would fill the memory with an empty map.
        if group & GROUP_HAS_ENTRIES == 0 {
            return inherited;
        }
        if group & GROUP_IS_PRIVATE != 0 && self.sharing.is_none() {
            // The entry has no page in shared memory. The caller then checks whether the layer is
            // current, which it is not.
            return inherited;
        }
        match self.entries(group).load32(block as usize) {
            ENTRY_INHERIT => inherited,
            ENTRY_ZERO => Lookup::Zero,
            slot => Lookup::Slot(slot - ENTRY_FIRST_SLOT),
        }
    }

    /// How many blocks from `block` on, at most `limit`, are known to have the same state as
    /// `block` without a lookup of each.
    pub(crate) fn uniform_blocks(&self, block: u64, limit: u64) -> u64 {
        if self.group(block) & GROUP_HAS_ENTRIES != 0 {
            return 1;
        }
        limit.min(GROUP_BLOCKS - block % GROUP_BLOCKS)
    }

    /// Points `block` at `slot` and returns its previous state.
    pub(crate) fn set_slot(&self, block: u64, slot: u32) -> Lookup {
        let before = self.lookup(block);
        let group = self.with_entries(block);
        self.entries(group).store32(block as usize, slot + ENTRY_FIRST_SLOT);
        before
    }

    /// Makes a range read as zeroes. `superseded` receives each slot that is no longer used.
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
            let group = self.with_entries(block);
            for entry in block..stop {
                if let Lookup::Slot(slot) = self.lookup(entry) {
                    superseded(slot);
                }
                self.entries(group).store32(entry as usize, ENTRY_ZERO);
            }
            block = stop;
        }
    }

    /// True if the whole range already reads as zeroes in this layer.
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

/// Allocates the memory now: a store into a page that cannot be allocated would end the process.
fn reserve(file: &File, offset_bytes: u64, length_bytes: u64) -> std::io::Result<()> {
    loop {
        match fallocate(file, FallocateFlags::empty(), offset_bytes, length_bytes) {
            Err(Errno::INTR) => {}
            reserved => return Ok(reserved?),
        }
    }
}

fn tell_private(head: &SharedWords, path: &Path, error: &std::io::Error) {
    head.store64(PRIVATE_MAP_WORD, 1);
    bump_generation(head);
    tracing::warn!(path = %path.display(), %error, "no room for a block map in shared memory: other processes cannot read this session while it is written. Make /dev/shm larger, then restart this process");
}

/// Creates the file and locks it. If another process removed it as abandoned before it was locked,
/// creates it again.
fn create_locked(path: &Path) -> std::io::Result<File> {
    loop {
        let _ = std::fs::remove_file(path);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        if file.metadata()?.nlink() > 0 {
            return Ok(file);
        }
    }
}

/// Removes maps that no process has locked: killed writers left them. The map of a layer that is
/// never opened again would take memory until the machine restarts.
fn remove_abandoned(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if !name.to_string_lossy().starts_with(MAP_PREFIX) {
            continue;
        }
        // Maps of other users stay.
        let Ok(file) = File::open(entry.path()) else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

impl Drop for BlockMap {
    fn drop(&mut self) {
        self.withdraw();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIB_BLOCKS: u64 = 1 << 28;

    fn head() -> Arc<SharedWords> {
        Arc::new(SharedWords::private(4096).unwrap())
    }

    fn used_bytes(path: &Path) -> u64 {
        path.metadata().unwrap().blocks() * 512
    }

    #[test]
    fn looking_at_a_whole_disk_takes_no_memory() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("coldrise-map-test");
        let mut map = BlockMap::shared(TIB_BLOCKS, &path, head()).unwrap();
        map.reveal();
        map.set_slot(5000, 7);
        map.set_zero(1 << 20, 1 << 20, |_| {});
        let (mut block, mut zeroes) = (0, 0);
        while block < TIB_BLOCKS {
            let count = map.uniform_blocks(block, TIB_BLOCKS - block);
            match map.lookup(block) {
                Lookup::Slot(slot) => assert_eq!((block, slot), (5000, 7)),
                Lookup::Zero => zeroes += count,
                Lookup::Below => {}
            }
            block += count;
        }
        assert_eq!(zeroes, 1 << 20);
        assert!(map.is_zero(1 << 20, 1 << 20) && !map.is_zero(0, TIB_BLOCKS));
        // A page of entries, and the words of the groups.
        assert!(used_bytes(&path) <= (2 << 20), "{}", used_bytes(&path));
    }

    #[test]
    fn only_maps_of_killed_writers_are_removed() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["coldrise-map-killed", "coldrise-map-killed.new", "other"] {
            std::fs::write(at(name), "x").unwrap();
        }
        let mut first = BlockMap::shared(100, &at("coldrise-map-first"), head()).unwrap();
        first.reveal();
        let hidden = BlockMap::shared(100, &at("coldrise-map-second"), head()).unwrap();
        let mut names: Vec<_> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["coldrise-map-first", "coldrise-map-second.new", "other"]);
        drop((first, hidden));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
