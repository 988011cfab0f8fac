//! Reading captured blocks.

use std::cell::RefCell;
use std::io::IoSliceMut;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use coldrise_block::{BLOCK_SIZE_BYTES, Context, Error, ErrorKind, Result, Waiting, would_wait};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::LayerFile;
use super::format::{RecordKind, SLOTS_PER_SEGMENT, slot_offset_bytes};
use super::keys::RecordPlace;
use super::map::Lookup;

const BLOCK: usize = BLOCK_SIZE_BYTES as usize;

/// How long a reader in another process assumes that a write is unfinished.
const WRITER_PATIENCE: Duration = Duration::from_secs(5);
const WRITER_PAUSE: Duration = Duration::from_micros(100);

/// Whether the caller holds the stripe of the block that it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stripe {
    /// The caller holds it: a partial write reads the block that it changes.
    Held,
    /// The caller does not hold it.
    Free,
}

/// How captured blocks are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadOptions {
    pub(crate) stripe: Stripe,
    pub(crate) waiting: Waiting,
}

/// Maximum number of blocks per read call.
pub(crate) const MAX_RUN_BLOCKS: usize = 64;

thread_local! {
    static STORED: RefCell<Vec<u8>> = RefCell::new(vec![0; MAX_RUN_BLOCKS * BLOCK]);
}

impl LayerFile {
    /// How many blocks from `block` on, at most `limit`, are captured in neighbouring slots that
    /// one call can read, if `block` is in `slot`.
    pub(crate) fn slot_run(&self, block: u64, slot: u32, limit: u64) -> u64 {
        let in_segment = u64::from(SLOTS_PER_SEGMENT - slot % SLOTS_PER_SEGMENT);
        let limit = limit.min(in_segment).min(MAX_RUN_BLOCKS as u64);
        let mut count = 1;
        while count < limit && self.lookup(block + count) == Lookup::Slot(slot + count as u32) {
            count += 1;
        }
        count
    }

    /// Reads whole blocks that a lookup found in neighbouring slots, from `slot` on. No lock is
    /// held, so a slot may have been reused after the lookup: the tags reveal that. Returns the
    /// number of blocks read. If it is smaller than requested, the caller looks up again.
    ///
    /// Errors: `Corrupt` if a block is damaged although the map still names its slot; `WouldWait`
    /// if waiting is refused, also for a block that must be read again.
    pub(crate) fn read_slots(
        &self,
        block: u64,
        slot: u32,
        out: &mut [u8],
        how: ReadOptions,
    ) -> Result<usize> {
        STORED.with_borrow_mut(|stored| {
            let stored = &mut stored[..out.len()];
            self.read_stored(stored, slot, how.waiting)?;
            let pieces = stored.chunks_exact(BLOCK).zip(out.chunks_exact_mut(BLOCK));
            for (i, (piece, out)) in pieces.enumerate() {
                let (block, slot) = (block + i as u64, slot + i as u32);
                if self.open_slot(block, slot, piece, out)? {
                    continue;
                }
                if i == 0 && self.lookup(block) == Lookup::Slot(slot) {
                    return match how.waiting {
                        Waiting::Allowed => self.read_again(block, slot, out, how.stripe),
                        Waiting::Refused => Err(would_wait()),
                    }
                    .map(usize::from);
                }
                return Ok(i);
            }
            Ok(out.len() / BLOCK)
        })
    }

    /// Reads slots in their stored form. (A record is read through its mapping: it lies in the same
    /// file and was written with its slot. A mapping has no call that refuses to wait.)
    fn read_stored(&self, stored: &mut [u8], slot: u32, waiting: Waiting) -> Result<()> {
        let offset_bytes = slot_offset_bytes(slot);
        if waiting == Waiting::Refused {
            let length = stored.len();
            let parts = &mut [IoSliceMut::new(stored)];
            let read = self.with_file(waiting, |file| {
                Ok(preadv2(file, parts, offset_bytes, ReadWriteFlags::NOWAIT))
            })?;
            match read {
                Ok(read) if read == length => return Ok(()),
                // Some file systems do not support this.
                Err(Errno::OPNOTSUPP) => {}
                _ => return Err(would_wait()),
            }
        }
        self.read_file(stored, offset_bytes)
    }

    fn read_file(&self, stored: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.with_file(Waiting::Allowed, |file| {
            let read = file.read_exact_at(stored, offset_bytes);
            read.context(|| format!("reading {}", self.path.display()))
        })
    }

    /// Authenticates captured blocks from `block` on, as far as one call reads and before `end`.
    /// Returns the number of blocks processed and the number of bytes read: 0 bytes if nothing is
    /// captured.
    ///
    /// Errors: `Corrupt` if that one block is damaged.
    pub(crate) fn check_captured(&self, block: u64, end: u64) -> Result<(u64, u64)> {
        let left = end - block;
        let Lookup::Slot(slot) = self.lookup(block) else {
            return Ok((self.uniform_blocks(block, left).max(1), 0));
        };
        let run = self.slot_run(block, slot, left) as usize;
        let mut content = vec![0; run * BLOCK];
        let how = ReadOptions { stripe: Stripe::Free, waiting: Waiting::Allowed };
        // If fewer were read, blocks moved meanwhile: they are looked up again.
        let blocks = self.read_slots(block, slot, &mut content, how)? as u64;
        Ok((blocks, blocks * BLOCK_SIZE_BYTES))
    }

    /// Authenticates the block in a slot that its block's newest record may not name any more.
    ///
    /// # Errors
    /// `Corrupt` if it is damaged.
    pub(crate) fn check_slot(&self, slot: u32) -> Result<()> {
        let (mut stored, mut out) = ([0; BLOCK], [0; BLOCK]);
        self.read_file(&mut stored, slot_offset_bytes(slot))?;
        let record = self.windows.load_record(&self.file, slot)?;
        let opened = self.keys.open_record(RecordPlace::of_slot(slot), &record);
        let is_sound = opened.is_some_and(|(record, nonce)| {
            self.keys.open_block(nonce, &record.payload, &stored, &mut out)
        });
        match is_sound {
            true => Ok(()),
            false => {
                let message = format!(
                    "slot {slot} of {}, which time marks need, is damaged",
                    self.path.display()
                );
                Err(Error::new(ErrorKind::Corrupt, message))
            }
        }
    }

    fn open_slot(&self, block: u64, slot: u32, stored: &[u8], out: &mut [u8]) -> Result<bool> {
        let record = self.windows.load_record(&self.file, slot)?;
        Ok(match self.keys.open_record(RecordPlace::of_slot(slot), &record) {
            Some((record, nonce)) => {
                record.kind == RecordKind::Block
                    && record.block == block
                    && self.keys.open_block(nonce, &record.payload, stored, out)
            }
            None => false,
        })
    }

    /// Reads a block again that does not match its record: a writer may be overwriting it in place.
    /// That writer holds the stripe, so the answer is final under the stripe's lock. Another
    /// process cannot take that lock and retries for a while. Returns true if the block was read,
    /// false if it moved.
    fn read_again(&self, block: u64, slot: u32, out: &mut [u8], stripe: Stripe) -> Result<bool> {
        let _held = match (&self.writer, stripe) {
            (Some(writer), Stripe::Free) => Some(writer.stripe(block).lock()),
            _ => None,
        };
        // The generation reveals a writer that opens an idle layer.
        let patience = if self.is_attached() { WRITER_PATIENCE } else { Duration::ZERO };
        let start = Instant::now();
        let mut stored = [0; BLOCK];
        loop {
            if self.lookup(block) != Lookup::Slot(slot) {
                return Ok(false);
            }
            self.read_file(&mut stored, slot_offset_bytes(slot))?;
            if self.open_slot(block, slot, &stored, &mut out[..BLOCK])? {
                return Ok(true);
            }
            if start.elapsed() >= patience || !self.is_current() {
                break;
            }
            std::thread::sleep(WRITER_PAUSE);
        }
        self.check_mapping()?;
        let message = format!(
            "captured block at byte {} (slot {slot} of {}) is damaged",
            block * BLOCK_SIZE_BYTES,
            self.path.display()
        );
        tracing::error!("{message}");
        Err(Error::new(ErrorKind::Corrupt, message))
    }
}
