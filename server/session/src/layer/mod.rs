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
//! 1. A slot is written only while nothing durable needs it: it was never used, or
//!    the record that superseded it has been synced, or no sync that has started
//!    covers what it holds (then the block is overwritten in place: a guest that
//!    rewrites a block before it flushes wants neither more space nor more pages).
//! 2. A record is believed only if it authenticates at its place and, unless a
//!    later record proves it durable, its slot authenticates with the record's tag.
//! 3. Of two believed records of a block the one with the higher sequence number
//!    counts. Sequence numbers of a block grow in the order in which its writes
//!    were published (both happen under the block's stripe lock).
//! 4. A record claims only what a finished sync made durable (`unflushed`).
//! 5. After a failed sync nothing is written and nothing is freed until the
//!    layer is opened again; opening rewrites and syncs what no record proves durable.
//!
//! # Why a crash is safe at each step of a write
//!
//! Slot written, record not: the record there is absent, damaged, or an old one
//! that a durable record supersedes; the block reads as before. Record written,
//! slot not (the disk may reorder): the tag does not match, the record is
//! rejected and erased at the next open; the older record of the block is
//! intact by invariant 1. Both written: the new content. Either torn: as absent.
//! In place it is the same: what was there before was never flushed, and the
//! block's flushed record, if it has one, is elsewhere and intact. After the sync both are there, and only then does FLUSH return.
//!
//! # Locks, in the order in which they are taken
//!
//! `gate` (writers share it; a sync takes it alone for an instant to learn which
//! writes it covers; so does a large zeroing), one `stripe` (64 neighbouring
//! blocks), `zero_cells`, `Slots`' own. Readers take none, but for a stripe where
//! a block does not match its record: then its writer may be half way.

mod format;
mod keys;
mod map;
mod open;
mod read;
mod recovery;
mod slots;
mod sync;
mod windows;
mod write;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard, RwLock};

use coldrise_block::{Error, ErrorKind, Result};

pub(crate) use format::{Superblock, SUPERBLOCK_AREA_BYTES};
pub(crate) use keys::LayerKeys;
pub(crate) use map::Lookup;
pub(crate) use open::{ReadMode, SealFacts};
pub(crate) use read::{How, Stripe};

use crate::lock::FileLock;
use keys::NoncePrefix;
use map::BlockMap;
use slots::Slots;
use sync::SyncState;
use windows::Windows;
use write::ZeroCells;

/// Blocks under one stripe lock: 256 KiB of the disk.
pub(crate) const STRIPE_BLOCKS: u64 = 64;
const STRIPES: usize = 1024;

/// One layer, open for reading or for writing.
pub(crate) struct Layer {
    file: File,
    path: PathBuf,
    keys: LayerKeys,
    map: BlockMap,
    windows: Windows,
    writer: Option<Writer>,
    /// The generation word when this opened; see `is_current`.
    generation: u64,
}

/// What only the writing side of a layer has.
struct Writer {
    gate: RwLock<()>,
    stripes: Box<[Mutex<()>]>,
    slots: Slots,
    next_sequence: AtomicU64,
    durable_sequence: AtomicU64,
    /// What the sync that started last covers; changes only under `gate` alone.
    covered_sequence: AtomicU64,
    /// Of the records that were stored; a failed write leaves a gap above it.
    highest_recorded: AtomicU64,
    /// See [`SealFacts::records`].
    records: AtomicU32,
    nonces: NoncePrefix,
    zero_cells: Mutex<ZeroCells>,
    sync: SyncState,
    poison: Poison,
    /// The session's lock: whoever still holds this layer, and will close the
    /// file with it, keeps every other writer out until then.
    _writing: Option<Arc<FileLock>>,
}

impl Writer {
    fn stripe(&self, block: u64) -> &Mutex<()> {
        &self.stripes[(block / STRIPE_BLOCKS) as usize % STRIPES]
    }
}

/// Set for a whole session when a sync or a write of one of its layers failed.
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

/// Holds back other writers of the same 64 blocks.
pub(crate) struct StripeGuard<'a> {
    _gate: parking_lot::RwLockReadGuard<'a, ()>,
    _stripe: MutexGuard<'a, ()>,
}

impl Layer {
    /// Number of blocks of the disk; the last may be short on the disk, never here.
    pub(crate) fn blocks(&self) -> u64 {
        self.map.blocks()
    }

    /// What this layer knows of `block`.
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

    /// False once another process opened, sealed or closed the layer for
    /// writing since this opened: what this shows may be old.
    pub(crate) fn is_current(&self) -> bool {
        self.writer.is_some()
            || self.windows.head().load64(format::GENERATION_WORD) == self.generation
    }

    /// True where another process keeps the block map.
    pub(crate) fn is_attached(&self) -> bool {
        self.map.is_attached()
    }

    fn writer(&self) -> Result<&Writer> {
        self.writer
            .as_ref()
            .ok_or_else(|| Error::new(ErrorKind::ReadOnly, "this layer is open for reading only"))
    }
}
