//! The layer: captured blocks of one disk, in one file.
//!
//! ```text
//!   write ──▶ slot (4 KiB, encrypted)  ──▶ record (64 B) ──▶ block map ──▶ readers
//!             pwrite                       mapped store      memory
//!   flush ──▶ one fdatasync of the file makes slots and records durable
//! ```
//!
//! # Invariants
//!
//! 0. While no write is unfinished, every slot below the first never-used one holds a record that
//!    authenticates. A slot whose write failed, or that a crash left without a record, gets a
//!    vacant one. So a missing record there is damage (see `mark`).
//! 1. A slot is written only while no durable record needs it: it was never used, or the record
//!    that superseded it has been synced, or no sync that has started covers its content. In the
//!    last case the block is overwritten in place: a guest that rewrites a block before it flushes
//!    needs neither more space nor more pages.
//! 2. A record is valid only if it authenticates at its place and, unless a later record proves it
//!    durable, its slot authenticates with the record's tag.
//! 3. Of two valid records of a block the one with the higher sequence number counts. Sequence
//!    numbers of a block grow in the order in which its writes were published (both happen under
//!    the block's stripe lock).
//! 4. A record claims as durable only what a finished sync covered (`unflushed`).
//! 5. After a failed sync nothing is written and nothing is freed until the layer is reopened.
//!    Opening rewrites and syncs all slots that no record proves durable.
//! 6. A slot of cells has no other use. A cell is written once, and is valid only under the very
//!    record of its slot.
//! 7. A slot that a time mark needs is neither overwritten nor free (see `history`).
//!
//! # Why a crash is safe at each step of a write
//!
//! - The slot is written, its record is not: the record there is absent, damaged, or an old one
//!   that a durable record supersedes. The block reads as before.
//! - The record is written, its slot is not (the disk may reorder): the tag does not match, the
//!   record is rejected, and the slot is vacant from the next open on. The older record of the
//!   block is intact by invariant 1.
//! - Both are written: the block has the new content.
//! - Either is torn: this is the same as if it were absent.
//!
//! A write in place is equally safe: the old content was never flushed, and the block's flushed
//! record, if it has one, is elsewhere and intact. After the sync both are on the disk, and only
//! then does FLUSH return.
//!
//! # Locks, in the order in which they are taken
//!
//! `gate` (writers share it; a sync takes it exclusively for a moment to learn which writes it
//! covers; a large zeroing takes it exclusively, too), one `stripe` (64 neighbouring blocks),
//! `open_cells`, the lock of `Slots`. Readers take no lock, except for a stripe if a block does not
//! match its record: its write may be unfinished.

mod changes;
mod format;
mod history;
mod keys;
mod map;
#[allow(unsafe_code)]
mod mapping;
mod mark;
mod open;
mod read;
mod recovery;
mod slots;
mod sync;
mod time_marks;
mod unopened;
mod windows;
mod write;

#[cfg(test)]
mod damage_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod time_mark_tests;

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Mutex, MutexGuard, RwLock};

use coldrise_block::{Error, ErrorKind, Result};

pub(crate) use changes::{ChangedLayer, LayerWrites};
pub(crate) use format::{RemovedMarks, SUPERBLOCK_AREA_BYTES, Superblock, TimeMark};
pub(crate) use keys::LayerKeys;
pub(crate) use map::Lookup;
pub(crate) use mark::SealFacts;
pub(crate) use open::{ReadMode, layer_damage};
pub(crate) use read::{ReadOptions, Stripe};

use crate::locks::file_lock::FileLock;
use format::RECORD_BYTES;
use history::History;
use keys::NoncePrefix;
use map::BlockMap;
use slots::Slots;
use sync::SyncState;
use unopened::Unopened;
use windows::Windows;
use write::OpenCells;

/// Number of blocks under one stripe lock: 256 KiB of the disk.
pub(crate) const STRIPE_BLOCKS: u64 = 64;
const STRIPES: usize = 1024;

/// One layer, open for reading or for writing. Dropping it ends the layer's own thread, waits for
/// it, and closes the file. No other holder of the file closes it.
pub(crate) struct Layer {
    file: Arc<LayerFile>,
    ahead: Option<JoinHandle<()>>,
}

impl std::ops::Deref for Layer {
    type Target = LayerFile;

    fn deref(&self) -> &LayerFile {
        &self.file
    }
}

/// The file of a layer, shared by its owner and the layer's own thread.
pub(crate) struct LayerFile {
    /// The open file. For an unopened layer every read and write through it fails.
    file: Arc<File>,
    unopened: Option<Unopened>,
    path: PathBuf,
    keys: LayerKeys,
    map: BlockMap,
    windows: Windows,
    writer: Option<Writer>,
    /// The generation word at the time of the open; see `is_current`.
    generation: u64,
    /// The time marks in a layer that was opened for reading, and not through the map of its
    /// writer.
    marks: Vec<TimeMark>,
}

/// The state that only the writing side of a layer has.
struct Writer {
    gate: RwLock<()>,
    stripes: Box<[Mutex<()>]>,
    slots: Slots,
    next_sequence: AtomicU64,
    durable_sequence: AtomicU64,
    /// The last sequence number that the most recently started sync covers. It changes only while
    /// `gate` is held exclusively.
    covered_sequence: AtomicU64,
    /// The highest sequence number of a stored record. A failed write leaves a gap above it.
    highest_recorded: AtomicU64,
    /// See [`SealFacts::cells`].
    cells: AtomicU32,
    nonces: NoncePrefix,
    open_cells: Mutex<OpenCells>,
    history: History,
    sync: SyncState,
    poison: Poison,
    /// The session's lock. A holder of this layer, which will also close the file, keeps every
    /// other writer out until then.
    _writing: Option<Arc<FileLock>>,
}

impl Writer {
    fn stripe(&self, block: u64) -> &Mutex<()> {
        &self.stripes[(block / STRIPE_BLOCKS) as usize % STRIPES]
    }
}

/// Set for a whole session if a sync or a write of one of its layers failed.
#[derive(Clone, Default)]
pub(crate) struct Poison(Arc<AtomicBool>);

impl Poison {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::Poisoned,
                "an earlier write or sync of this session failed; it takes no more writes. \
                 Look at the log and the file system, then stop and start the front end",
            ));
        }
        Ok(())
    }
}

/// Keeps other writers of the same 64 blocks waiting.
pub(crate) struct StripeGuard<'a> {
    _gate: parking_lot::RwLockReadGuard<'a, ()>,
    _stripe: MutexGuard<'a, ()>,
}

impl LayerFile {
    /// Number of blocks of the disk. The last one may be short on the disk, but never here.
    pub(crate) fn blocks(&self) -> u64 {
        self.map.blocks()
    }

    /// The state of `block` in this layer.
    #[inline]
    pub(crate) fn lookup(&self, block: u64) -> Lookup {
        self.map.lookup(block)
    }

    /// See `BlockMap::uniform_blocks`.
    pub(crate) fn uniform_blocks(&self, block: u64, limit: u64) -> u64 {
        self.map.uniform_blocks(block, limit)
    }

    /// The first block from `block` on that this layer captured or zeroed.
    pub(crate) fn next_captured(&self, mut block: u64) -> Option<u64> {
        while block < self.blocks() {
            if self.lookup(block) != Lookup::Below {
                return Some(block);
            }
            block += self.uniform_blocks(block, self.blocks() - block);
        }
        None
    }

    /// Locks the stripe of `block` for a change.
    pub(crate) fn lock_stripe(&self, block: u64) -> Result<StripeGuard<'_>> {
        let writer = self.writer()?;
        let gate = writer.gate.read();
        Ok(StripeGuard { _gate: gate, _stripe: writer.stripe(block).lock() })
    }

    /// False once another process has opened, sealed or closed the layer for writing after this
    /// process opened it: its content here may be old.
    pub(crate) fn is_current(&self) -> bool {
        self.writer.is_some()
            || self.windows.head().load64(format::GENERATION_WORD) == self.generation
    }

    /// True if another process keeps the block map.
    pub(crate) fn is_attached(&self) -> bool {
        self.map.is_attached()
    }

    fn store_record(&self, slot: u32, stored: &[u8; RECORD_BYTES]) -> Result<()> {
        self.windows.store_record(&self.file, slot, stored, self.keys.unfinished())
    }

    /// # Errors
    /// `Io` if an access through a mapping of the file failed: what was read may be zeroes, and
    /// what was stored may be lost.
    fn check_mapping(&self) -> Result<()> {
        if !self.windows.have_failed() {
            return Ok(());
        }
        let message = format!(
            "{} could not be read or written in memory: its drive has failed, it has no space, or \
             another program truncated the file. The kernel's log (dmesg) says more",
            self.path.display()
        );
        Err(Error::new(ErrorKind::Io, message))
    }

    fn writer(&self) -> Result<&Writer> {
        self.writer
            .as_ref()
            .ok_or_else(|| Error::new(ErrorKind::ReadOnly, "this layer is open for reading only"))
    }
}
