//! Captures blocks and zeroes.
//!
//! If no started sync covers a block's slot, the block is overwritten there. Every other block goes
//! to a free slot. Only `capture` writes slots, under the block's stripe and with `gate` shared. So
//! no sync can start to cover a slot meanwhile.

use std::cell::RefCell;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use coldrise_block::{BLOCK_SIZE_BYTES, Context, Error, ErrorKind, Result};

use super::format::{
    CELLS_PER_SLOT, MAX_SEQUENCE, RECORD_BYTES, Record, RecordKind, slot_offset_bytes,
};
use super::history::Superseded;
use super::keys::{NONCE_BYTES, RecordPlace, sequence_in_nonce};
use super::map::Lookup;
use super::slots::runs;
use super::{LayerFile, STRIPE_BLOCKS, StripeGuard, Writer};

const BLOCK: usize = BLOCK_SIZE_BYTES as usize;

/// Number of cells for which there is room after `reserve_cells`.
const RESERVED_CELLS: usize = 4;

/// Buffers for a write. Each thread keeps them between writes.
#[derive(Default)]
struct Scratch {
    stored: Vec<u8>,
    slots: Vec<u32>,
    fresh: Vec<u32>,
    records: Vec<[u8; RECORD_BYTES]>,
    superseded: Vec<Superseded>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The slot that takes the next cells.
pub(crate) struct OpenCells {
    slot: u32,
    /// The nonce of the slot's record.
    nonce: [u8; NONCE_BYTES],
    used: usize,
}

impl OpenCells {
    /// No open slot: the first cell takes one.
    pub(crate) fn none() -> Self {
        OpenCells { slot: 0, nonce: [0; NONCE_BYTES], used: CELLS_PER_SLOT }
    }
}

impl LayerFile {
    /// Captures whole blocks from `first` on. All of them lie in the stripe that `_guard` holds.
    /// They are durable after the next flush.
    pub(crate) fn capture(&self, _guard: &StripeGuard<'_>, first: u64, bytes: &[u8]) -> Result<()> {
        debug_assert_eq!(bytes.len() % BLOCK, 0);
        debug_assert_eq!(
            first / STRIPE_BLOCKS,
            (first + (bytes.len() / BLOCK) as u64 - 1) / STRIPE_BLOCKS
        );
        let writer = self.writer()?;
        writer.poison.check()?;
        SCRATCH.with_borrow_mut(|scratch| self.capture_with(writer, scratch, first, bytes))
    }

    fn capture_with(
        &self,
        writer: &Writer,
        scratch: &mut Scratch,
        first: u64,
        bytes: &[u8],
    ) -> Result<()> {
        let count = (bytes.len() / BLOCK) as u64;
        let sequences = self.take_sequences(writer, count)?;
        scratch.fresh.clear();
        let stored = self
            .choose_slots(writer, scratch, first, count)
            .and_then(|()| self.store_blocks(writer, scratch, first, bytes, sequences));
        if let Err(error) = stored {
            self.poison_unless_full(writer, &error);
            self.give_back(writer, &scratch.fresh);
            return Err(error);
        }
        let Scratch { slots, records, superseded, .. } = scratch;
        superseded.clear();
        for ((&slot, record), block) in slots.iter().zip(records.iter()).zip(first..) {
            // This fails only if the address space is exhausted.
            self.store_record(slot, record).inspect_err(|_| writer.poison.set())?;
            match self.map.set_slot(block, slot) {
                Lookup::Slot(old) if old != slot => superseded.push(self.supersede(writer, old)),
                _ => {}
            }
        }
        writer.highest_recorded.fetch_max(sequences.first + count - 1, Ordering::Relaxed);
        writer.slots.supersede(superseded);
        self.check_mapping().inspect_err(|_| writer.poison.set())
    }

    /// Describes a slot whose block was captured or zeroed again.
    fn supersede(&self, writer: &Writer, slot: u32) -> Superseded {
        // If its record cannot be read, the layer takes no more writes (`check_mapping`).
        let record = || self.windows.load_record_start(&self.file, slot);
        writer.history.supersede(slot, || record().map_or(0, |start| sequence_in_nonce(&start)))
    }

    /// Gives back slots whose write failed. A slot that never had a record gets a vacant one.
    fn give_back(&self, writer: &Writer, slots: &[u32]) {
        for &slot in slots {
            let given_back = self.windows.load_record(&self.file, slot).and_then(|stored| {
                if stored != [0; RECORD_BYTES] {
                    return Ok(());
                }
                let sequence = writer.next_sequence.fetch_add(1, Ordering::Relaxed);
                let stored = self.keys.seal_vacant(slot, &writer.nonces, sequence);
                writer.highest_recorded.fetch_max(sequence, Ordering::Relaxed);
                self.store_record(slot, &stored)
            });
            if given_back.is_err() {
                writer.poison.set();
            }
        }
        writer.slots.give_back(slots);
    }

    /// Chooses one slot per block: its own one if no sync covers the content, otherwise a free one.
    fn choose_slots(
        &self,
        writer: &Writer,
        scratch: &mut Scratch,
        first: u64,
        count: u64,
    ) -> Result<()> {
        const NONE: u32 = u32::MAX;
        let Scratch { slots, fresh, .. } = scratch;
        slots.clear();
        let covered = writer.covered_sequence.load(Ordering::Relaxed);
        let mut missing = 0;
        for block in first..first + count {
            let own = match self.map.lookup(block) {
                Lookup::Slot(slot) => {
                    let nonce = self.windows.load_record_start(&self.file, slot)?;
                    let is_uncovered = writer.nonces.sequence(&nonce).is_some_and(|s| s > covered);
                    is_uncovered.then_some(slot)
                }
                _ => None,
            };
            missing += u32::from(own.is_none());
            slots.push(own.unwrap_or(NONE));
        }
        if missing == 0 {
            return Ok(());
        }
        if writer.slots.take(&self.file, missing, fresh)? {
            self.want_ahead();
        }
        let mut next = fresh.iter();
        for slot in slots.iter_mut().filter(|slot| **slot == NONE) {
            *slot = *next.next().expect("as many slots as were missing");
        }
        Ok(())
    }

    /// Encrypts the blocks, writes them run by run, and makes the records. Publishes nothing.
    fn store_blocks(
        &self,
        writer: &Writer,
        scratch: &mut Scratch,
        first: u64,
        bytes: &[u8],
        sequences: Sequences,
    ) -> Result<()> {
        let Scratch { stored, slots, records, .. } = scratch;
        records.clear();
        stored.resize(stored.len().max(bytes.len()), 0);
        let stored = &mut stored[..bytes.len()];
        let pieces = bytes.chunks_exact(BLOCK).zip(stored.chunks_exact_mut(BLOCK));
        for (i, (plain, piece)) in pieces.enumerate() {
            // Copy block by block, so that the copy is still in the L1 cache.
            piece.copy_from_slice(plain);
            let sequence = sequences.first + i as u64;
            let nonce = writer.nonces.nonce(sequence);
            let payload = self.keys.seal_block(nonce, piece);
            let record = Record {
                sequence,
                unflushed: sequences.unflushed(sequence),
                block: first + i as u64,
                kind: RecordKind::Block,
                payload,
            };
            records.push(self.keys.seal_record(RecordPlace::of_slot(slots[i]), nonce, &record));
        }
        let mut rest = &*stored;
        for run in runs(slots) {
            let (piece, after) = rest.split_at(run.count as usize * BLOCK);
            self.file
                .write_all_at(piece, slot_offset_bytes(run.first))
                .context(|| format!("writing to {}", self.path.display()))?;
            rest = after;
        }
        Ok(())
    }

    /// Makes `count` blocks from `first` on read as zeroes. Stores one 64-byte record, or none if
    /// they already do. Takes its own locks.
    pub(crate) fn capture_zeroes(&self, first: u64, count: u64) -> Result<()> {
        let writer = self.writer()?;
        writer.poison.check()?;
        let last = first + count - 1;
        if first / STRIPE_BLOCKS == last / STRIPE_BLOCKS {
            let guard = self.lock_stripe(first)?;
            let result = self.zero_range(writer, first, count);
            drop(guard);
            result
        } else {
            // The range covers many stripes: lock the gate exclusively instead of hundreds of
            // stripes.
            let _alone = writer.gate.write();
            self.zero_range(writer, first, count)
        }
    }

    fn zero_range(&self, writer: &Writer, first: u64, count: u64) -> Result<()> {
        if self.map.is_zero(first, count) {
            return Ok(());
        }
        let mut payload = [0; 16];
        payload[..8].copy_from_slice(&count.to_le_bytes());
        self.store_cell(writer, RecordKind::ZeroRange, first, payload)?;
        let mut superseded = Vec::new();
        self.map.set_zero(first, count, |slot| superseded.push(self.supersede(writer, slot)));
        writer.slots.supersede(&superseded);
        Ok(())
    }

    /// Stores a cell, and returns its sequence number.
    pub(super) fn store_cell(
        &self,
        writer: &Writer,
        kind: RecordKind,
        block: u64,
        payload: [u8; 16],
    ) -> Result<u64> {
        let mut cells = writer.open_cells.lock();
        if cells.used == CELLS_PER_SLOT {
            *cells = self.open_cells(writer)?;
        }
        let sequences = self.take_sequences(writer, 1)?;
        let sequence = sequences.first;
        let unflushed = sequences.unflushed(sequence);
        let record = Record { sequence, unflushed, block, kind, payload };
        let place = RecordPlace { slot: cells.slot, cell: Some((cells.used as u8, cells.nonce)) };
        let stored = self.keys.seal_record(place, writer.nonces.nonce(sequence), &record);
        let offset_bytes = slot_offset_bytes(cells.slot) + (cells.used * RECORD_BYTES) as u64;
        self.write_or_poison(writer, &stored, offset_bytes)?;
        writer.highest_recorded.fetch_max(sequence, Ordering::Relaxed);
        writer.cells.fetch_add(1, Ordering::Relaxed);
        cells.used += 1;
        Ok(sequence)
    }

    /// Makes sure that the next cells need no new slot. Returns true if it took one.
    pub(super) fn reserve_cells(&self, writer: &Writer) -> Result<bool> {
        let mut cells = writer.open_cells.lock();
        let is_short = cells.used + RESERVED_CELLS > CELLS_PER_SLOT;
        if is_short {
            *cells = self.open_cells(writer)?;
        }
        Ok(is_short)
    }

    /// Takes a slot for cells. Its bytes are cleared before its record is stored. If a crash keeps
    /// the record and loses the clearing, the slot's old content is not a cell: cells are bound to the
    /// record's nonce.
    fn open_cells(&self, writer: &Writer) -> Result<OpenCells> {
        let sequences = self.take_sequences(writer, 1)?;
        let mut slots = Vec::with_capacity(1);
        let taken = writer.slots.take(&self.file, 1, &mut slots);
        if taken.inspect_err(|_| self.give_back(writer, &slots))? {
            self.want_ahead();
        }
        let slot = slots[0];
        self.write_or_poison(writer, &[0; BLOCK], slot_offset_bytes(slot))
            .inspect_err(|_| self.give_back(writer, &slots))?;
        let sequence = sequences.first;
        let unflushed = sequences.unflushed(sequence);
        let record =
            Record { sequence, unflushed, block: 0, kind: RecordKind::Cells, payload: [0; 16] };
        let nonce = writer.nonces.nonce(sequence);
        let stored = self.keys.seal_record(RecordPlace::of_slot(slot), nonce, &record);
        self.store_record(slot, &stored).inspect_err(|_| writer.poison.set())?;
        writer.highest_recorded.fetch_max(sequence, Ordering::Relaxed);
        Ok(OpenCells { slot, nonce, used: 0 })
    }

    fn write_or_poison(&self, writer: &Writer, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        self.file
            .write_all_at(bytes, offset_bytes)
            .context(|| format!("writing to {}", self.path.display()))
            .inspect_err(|error| self.poison_unless_full(writer, error))
    }

    /// A full disk fails one write. Any other failure ends the session's writes.
    fn poison_unless_full(&self, writer: &Writer, error: &Error) {
        if error.kind() != ErrorKind::NoSpace {
            writer.poison.set();
            let layer = self.path.display();
            tracing::error!(%layer, error = %error.full_message(), "a write failed: the session takes no more writes");
        }
    }

    /// Takes `count` sequence numbers.
    fn take_sequences(&self, writer: &Writer, count: u64) -> Result<Sequences> {
        let first = writer.next_sequence.fetch_add(count, Ordering::Relaxed);
        if first + count > MAX_SEQUENCE - KEPT_SEQUENCES {
            return Err(Error::new(
                ErrorKind::NoSpace,
                "the session's layer has reached its maximum number of writes; seal the session to continue",
            ));
        }
        Ok(Sequences { first, durable: writer.durable_sequence.load(Ordering::Relaxed) })
    }
}

/// Sequence numbers reserved for slots that are given back.
const KEPT_SEQUENCES: u64 = 1 << 32;

/// Sequence numbers for one write.
#[derive(Clone, Copy)]
struct Sequences {
    first: u64,
    /// The last durable sequence number.
    durable: u64,
}

impl Sequences {
    /// The record's count of writes that were not yet durable.
    fn unflushed(self, sequence: u64) -> u32 {
        u32::try_from(sequence - self.durable).unwrap_or(u32::MAX)
    }
}
