//! The writes to a layer between two of its time marks, read from the file while another process writes it.
//!
//! A record carries the sequence number of its write, and the number is also in its nonce. So the writes after a mark are
//! found in the records: no process keeps a list of them. A record whose nonce has not changed since the last look is
//! not decrypted again.
//!
//! # Why nothing is missed
//!
//! Let `m` be a mark that is kept during the whole look. Each block that was written before `m` has its newest record
//! before `m` in the file: while the mark needs it, its slot is neither overwritten nor free. A new or changed record is
//! authenticated, whatever its number says: a damaged one is an error, and never an absent write. The
//! caller makes sure that the mark is kept (see `sessions::changes`).

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coldrise_block::{BLOCK_SIZE_BYTES, Context, Error, ErrorKind, Result};

use super::format::{
    CELLS_PER_SLOT, GENERATION_WORD, RECORD_BYTES, RecordKind, SEGMENT_INDEX_BYTES,
    SLOTS_PER_SEGMENT, Superblock, array, record_offset_bytes, segments_in, slot_offset_bytes,
};
use super::keys::{LayerKeys, NONCE_BYTES, RecordPlace};
use super::open::{check, length_of, missing};
use super::recovery::{ZeroRange, zero_range};

const BLOCK: usize = BLOCK_SIZE_BYTES as usize;
/// How long a record or a cell that does not authenticate counts as being written.
const WRITER_PATIENCE: Duration = Duration::from_secs(5);
const WRITER_PAUSE: Duration = Duration::from_millis(1);

/// The file of a layer, for looks at what changed.
pub(crate) struct ChangedLayer {
    file: File,
    path: PathBuf,
    keys: LayerKeys,
    blocks: u64,
    /// What was found in each slot; 20 bytes for each.
    slots: Vec<Seen>,
    /// The slots of cells, and which of their cells are known.
    cells: BTreeMap<u32, u64>,
    zeroes: Vec<ZeroRange>,
}

/// The record of a slot when it was read last.
#[derive(Clone, Copy, Default)]
struct Seen {
    nonce: [u8; NONCE_BYTES],
    /// Low 32 and high 16 bits of the block's number; all ones: the slot holds no block.
    block: (u32, u16),
}

const NO_BLOCK: u64 = (1 << 48) - 1;

impl Seen {
    fn block(&self) -> u64 {
        u64::from(self.block.0) | u64::from(self.block.1) << 32
    }

    fn sequence(&self) -> u64 {
        super::keys::sequence_in_nonce(&self.nonce)
    }
}

/// Writes to a layer, in no order.
#[derive(Debug, Default)]
pub(crate) struct LayerWrites {
    /// Sequence number, block, slot.
    pub(crate) blocks: Vec<(u64, u64, u32)>,
    pub(crate) zeroes: Vec<ZeroRange>,
}

impl ChangedLayer {
    /// Opens the file of a layer, whether a process writes it or not.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt` if the file is another layer's.
    pub(crate) fn open(path: &Path, expected: &Superblock, keys: LayerKeys) -> Result<Self> {
        let file = File::open(path).context(|| missing(path))?;
        check(&file, path, expected, &keys)?;
        let blocks = expected.disk_size_bytes.div_ceil(BLOCK_SIZE_BYTES);
        let path = path.to_owned();
        let (slots, cells, zeroes) = (Vec::new(), BTreeMap::new(), Vec::new());
        Ok(ChangedLayer { file, path, keys, blocks, slots, cells, zeroes })
    }

    /// Changes with each opening, seal and close by a writer.
    pub(crate) fn generation(&self) -> Result<u64> {
        let mut word = [0; 8];
        self.read_file(&mut word, GENERATION_WORD as u64 * 8)?;
        Ok(u64::from_ne_bytes(word))
    }

    /// The writes with sequence numbers above `after` and below `until`, which is a mark that is kept, or the end of a sealed
    /// layer. A write that a later one superseded may be missing.
    ///
    /// # Errors
    /// `Corrupt` if a record is damaged.
    pub(crate) fn between(&mut self, after: u64, until: u64) -> Result<LayerWrites> {
        self.look()?;
        let is_in = |sequence: u64| after < sequence && sequence < until;
        let seen = (0..).zip(&self.slots).map(|(slot, seen)| (seen.sequence(), seen.block(), slot));
        let of_block =
            |(sequence, block, _): &(u64, u64, u32)| *block < self.blocks && is_in(*sequence);
        let zeroes = self.zeroes.iter().filter(|zeroes| is_in(zeroes.sequence)).copied();
        Ok(LayerWrites { blocks: seen.filter(of_block).collect(), zeroes: zeroes.collect() })
    }

    /// Reads a block that [`ChangedLayer::between`] found.
    ///
    /// # Errors
    /// `Corrupt` if it is damaged, or if its slot was given to another block meanwhile: then the mark was not kept.
    pub(crate) fn read(&self, block: u64, slot: u32, out: &mut [u8]) -> Result<()> {
        let (mut record, mut stored) = ([0; RECORD_BYTES], [0; BLOCK]);
        self.read_file(&mut record, record_offset_bytes(slot))?;
        self.read_file(&mut stored, slot_offset_bytes(slot))?;
        let opened = self.keys.open_record(RecordPlace::of_slot(slot), &record);
        let is_sound = opened.is_some_and(|(record, nonce)| {
            record.kind == RecordKind::Block
                && record.block == block
                && self.keys.open_block(nonce, &record.payload, &stored, out)
        });
        match is_sound {
            true => Ok(()),
            false => Err(self.damaged(slot)),
        }
    }

    /// Reads the records that have changed since the last look.
    fn look(&mut self) -> Result<()> {
        let count = segments_in(length_of(&self.file, &self.path)?) * SLOTS_PER_SEGMENT;
        self.slots.resize(count.max(self.slots.len() as u32) as usize, Seen::default());
        let mut index = vec![0; SEGMENT_INDEX_BYTES as usize];
        for first in (0..count).step_by(SLOTS_PER_SEGMENT as usize) {
            self.read_file(&mut index, record_offset_bytes(first))?;
            for (slot, stored) in (first..).zip(index.chunks_exact(RECORD_BYTES)) {
                let seen = &self.slots[slot as usize];
                if stored[..NONCE_BYTES] != seen.nonce {
                    self.look_at(slot, array(stored))?;
                }
            }
        }
        let open: Vec<u32> = self
            .cells
            .iter()
            .filter(|(_, known)| **known != u64::MAX)
            .map(|(slot, _)| *slot)
            .collect();
        open.into_iter().try_for_each(|slot| self.look_at_cells(slot))
    }

    fn look_at(&mut self, slot: u32, mut stored: [u8; RECORD_BYTES]) -> Result<()> {
        let began = Instant::now();
        loop {
            // It is being written, after the mark. (A killed process leaves it like that.)
            if stored[..8] == self.keys.unfinished().to_ne_bytes() || stored == [0; RECORD_BYTES] {
                return Ok(());
            }
            if let Some((record, nonce)) =
                self.keys.open_record(RecordPlace::of_slot(slot), &stored)
            {
                let block = match record.kind {
                    RecordKind::Block => record.block,
                    _ => NO_BLOCK,
                };
                self.slots[slot as usize] =
                    Seen { nonce, block: (block as u32, (block >> 32) as u16) };
                self.cells.remove(&slot);
                if record.kind == RecordKind::Cells {
                    self.cells.insert(slot, 0);
                }
                return Ok(());
            }
            self.wait_for_writer(slot, began)?;
            self.read_file(&mut stored, record_offset_bytes(slot))?;
        }
    }

    fn look_at_cells(&mut self, slot: u32) -> Result<()> {
        let nonce = self.slots[slot as usize].nonce;
        let mut known = self.cells.get(&slot).copied().unwrap_or(0);
        let began = Instant::now();
        let mut stored = [0; BLOCK];
        'again: loop {
            self.read_file(&mut stored, slot_offset_bytes(slot))?;
            for (number, cell) in (0..CELLS_PER_SLOT).zip(stored.chunks_exact(RECORD_BYTES)) {
                if known & 1 << number != 0 || cell.iter().all(|byte| *byte == 0) {
                    continue;
                }
                let place = RecordPlace { slot, cell: Some((number as u8, nonce)) };
                match self.keys.open_record(place, &array(cell)) {
                    Some((cell, _)) => {
                        known |= 1 << number;
                        self.zeroes.extend(zero_range(&cell, self.blocks));
                    }
                    None => {
                        self.wait_for_writer(slot, began)?;
                        continue 'again;
                    }
                }
            }
            self.cells.insert(slot, known);
            return Ok(());
        }
    }

    /// # Errors
    /// `Corrupt` after [`WRITER_PATIENCE`].
    fn wait_for_writer(&self, slot: u32, began: Instant) -> Result<()> {
        if began.elapsed() > WRITER_PATIENCE {
            return Err(self.damaged(slot));
        }
        std::thread::sleep(WRITER_PAUSE);
        Ok(())
    }

    fn damaged(&self, slot: u32) -> Error {
        let path = self.path.display();
        let message = format!("slot {slot} of {path} has changed during a read, or is damaged");
        Error::new(ErrorKind::Corrupt, message)
    }

    /// Reads bytes of the file. Those beyond its end, which a writer that closes it gives back, are zeroes.
    fn read_file(&self, out: &mut [u8], offset_bytes: u64) -> Result<()> {
        let mut done = 0;
        while done < out.len() {
            match self.file.read_at(&mut out[done..], offset_bytes + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(error).context(|| format!("reading {}", self.path.display()));
                }
            }
        }
        out[done..].fill(0);
        Ok(())
    }
}
