//! Builds the block map from the records, after a crash or a clean close.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;

use coldrise_block::{BLOCK_SIZE_BYTES, Context, Error, ErrorKind, Result};

use super::LayerFile;
use super::format::{
    CELLS_PER_SLOT, RECORD_BYTES, Record, RecordKind, RemovedMarks, SEGMENT_INDEX_BYTES,
    SLOTS_PER_SEGMENT, TimeMark, record_offset_bytes, slot_offset_bytes,
};
use super::history::{Capture, History};
use super::keys::{NONCE_BYTES, NoncePrefix, RecordPlace, sequence_in_nonce};
use super::map::Lookup;
use super::mark::{Mark, SealFacts};

const BLOCK: usize = BLOCK_SIZE_BYTES as usize;

/// Number of damaged records that are checked for a one-bit repair before the layer counts as
/// damaged.
const MAX_MENDED: usize = 1000;

/// The known state of a layer before its records are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecoveryFacts {
    /// The records below `facts.slots` and the cells are durable: a missing one is damage.
    pub(crate) facts: SealFacts,
    /// The layer was closed or sealed: it holds exactly `facts`, and all of it is durable.
    pub(crate) is_whole: bool,
    /// Time marks from this sequence number on count; 0: none does.
    pub(crate) history_from: u64,
    /// Only writes up to this sequence number count: those before a time mark.
    pub(crate) as_of: u64,
    /// The records that time marks need are gathered.
    pub(crate) rebuilds_history: bool,
}

impl RecoveryFacts {
    /// What the layer's own mark says.
    pub(crate) fn of_mark(mark: &Mark) -> RecoveryFacts {
        let Mark { facts, is_closed, history_from, .. } = *mark;
        RecoveryFacts {
            facts,
            is_whole: is_closed,
            history_from,
            as_of: u64::MAX,
            rebuilds_history: false,
        }
    }
}

/// The result of a scan.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The highest sequence number of an authentic record.
    pub(crate) highest_sequence: u64,
    /// The first slot after the last record.
    pub(crate) end: u32,
    /// Number of authentic cells.
    pub(crate) cells: u32,
    /// Valid slots that no record proves durable.
    unproven: Vec<u32>,
    /// Slots below the end without a valid record: it does not match its slot's bytes, or a crash
    /// interrupted its store, or it was never stored.
    vacant: Vec<u32>,
    /// Repaired records in which one bit had flipped.
    mended: HashMap<u32, [u8; RECORD_BYTES]>,
    /// Invalid cells: old content of their slot, or a store that a crash interrupted.
    torn_cells: Vec<(u32, usize)>,
    /// Slots of cells, with the highest sequence number in each.
    cell_slots: HashMap<u32, u64>,
    /// The last sequence number that is known to be durable.
    durable: u64,
    /// The time marks, the oldest first.
    pub(crate) marks: Vec<TimeMark>,
    /// The cells of marks: slot and cell.
    mark_cells: Vec<(TimeMark, (u32, usize))>,
    removed_marks: Vec<RemovedMarks>,
    /// All valid records of blocks, if there are marks and their history is rebuilt.
    captures: Vec<Capture>,
}

/// Blocks that a cell makes read as zeroes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ZeroRange {
    pub(crate) sequence: u64,
    pub(crate) first: u64,
    pub(crate) count: u64,
}

/// Reads all records of the first `slots` slots and fills the layer's map.
///
/// Errors: `Corrupt` if a durable record is missing or damaged.
pub(crate) fn scan(layer: &LayerFile, slots: u32, known: &RecoveryFacts) -> Result<Found> {
    let durable = if known.is_whole { u64::MAX } else { known.facts.sequence };
    let mut found = Found { durable, ..Found::default() };
    let (mut zeroes, mut unreadable) = (Vec::new(), Vec::new());
    read_records(layer, slots, known, &mut found, &mut zeroes, &mut unreadable)?;
    // An interrupted write was not durable, and its sequence number is higher than every durable
    // one.
    if unreadable.iter().any(|sequence| *sequence <= found.durable) {
        return Err(damaged(layer, "has damaged records of captured blocks"));
    }
    found.choose_marks(known.history_from);
    let unproven = found.cell_slots.iter().filter(|(_, newest)| **newest > found.durable);
    let unproven: Vec<u32> = unproven.map(|(slot, _)| *slot).collect();
    found.unproven.extend(unproven);
    // Find the newest valid record of each block.
    for slot in 0..found.end {
        let Some((record, nonce)) = found.load(layer, slot)? else { continue };
        let is_block = record.kind == RecordKind::Block && record.block < layer.blocks();
        if !is_block || record.sequence > known.as_of {
            continue;
        }
        if record.sequence > found.durable {
            if !slot_matches(layer, slot, &record, nonce)? {
                found.vacant.push(slot);
                continue;
            }
            found.unproven.push(slot);
        }
        if known.rebuilds_history && !found.marks.is_empty() {
            let Record { block, sequence, .. } = record;
            found.captures.push(Capture { block, sequence, slot });
        }
        if let Lookup::Slot(other) = layer.lookup(record.block) {
            if found.sequence_of(layer, other)? > record.sequence {
                continue;
            }
        }
        layer.map.set_slot(record.block, slot);
    }
    for zero in zeroes.iter().filter(|zero| zero.sequence <= known.as_of) {
        apply_zeroes(layer, &found, zero)?;
    }
    let SealFacts { sequence, slots, .. } = known.facts;
    let is_less = found.highest_sequence < sequence;
    if is_less || (known.is_whole && (found.highest_sequence, found.end) != (sequence, slots)) {
        return Err(damaged(layer, "is not as it was stored: its last write is missing"));
    }
    layer.check_mapping()?;
    Ok(found)
}

/// The first pass: finds the end of the records, and the last sequence number that they prove
/// durable. A record that does not authenticate may be an interrupted write: its sequence number
/// goes to `unreadable`, and the caller decides.
fn read_records(
    layer: &LayerFile,
    slots: u32,
    known: &RecoveryFacts,
    found: &mut Found,
    zeroes: &mut Vec<ZeroRange>,
    unreadable: &mut Vec<u64>,
) -> Result<()> {
    let (mut index, mut tries, mut old_cells) = (vec![0; SEGMENT_INDEX_BYTES as usize], 0, 0u32);
    for slot in 0..slots {
        let at = slot as usize % SLOTS_PER_SEGMENT as usize * RECORD_BYTES;
        if at == 0 {
            read_index(layer, slot, &mut index)?;
        }
        let mut stored = [0; RECORD_BYTES];
        stored.copy_from_slice(&index[at..at + RECORD_BYTES]);
        if stored == [0; RECORD_BYTES] {
            if slot < known.facts.slots {
                return Err(damaged(layer, "has lost records of captured blocks"));
            }
            continue;
        }
        // A crash lost the records in between.
        found.vacant.extend(found.end..slot);
        found.end = slot + 1;
        let place = RecordPlace::of_slot(slot);
        let mut opened = layer.keys.open_record(place, &stored);
        let is_unfinished = stored[..8] == layer.keys.unfinished().to_ne_bytes();
        if opened.is_none() && !is_unfinished && tries < MAX_MENDED {
            tries += 1;
            if let Some(mended) = layer.keys.mend_record(place, &stored) {
                found.mended.insert(slot, mended);
                opened = layer.keys.open_record(place, &mended);
            }
        }
        let Some((record, nonce)) = opened else {
            if known.is_whole || (slot < known.facts.slots && !is_unfinished) {
                return Err(damaged(layer, "has damaged records of captured blocks"));
            }
            if !is_unfinished {
                unreadable.push(sequence_in_nonce(&stored));
            }
            found.vacant.push(slot);
            continue;
        };
        found.note(&record);
        if record.kind == RecordKind::Cells {
            let mut newest = record.sequence;
            let (cells, torn) = read_cells(layer, slot, nonce)?;
            // If not even the slot's own record is durable, these cells are old content of the
            // slot, and not damage.
            for (cell, sequence) in torn {
                unreadable.push(sequence.max(record.sequence));
                found.torn_cells.push((slot, cell));
            }
            for (number, cell) in cells {
                found.durable = found.durable.max(cell.durable_sequence());
                if let Some(mark) = TimeMark::of_cell(&cell) {
                    found.mark_cells.push((mark, (slot, number)));
                } else {
                    newest = newest.max(cell.sequence);
                    found.note(&cell);
                }
                found.removed_marks.extend(RemovedMarks::of_cell(&cell));
                found.cells = found.cells.wrapping_add(1);
                old_cells =
                    old_cells.wrapping_add(u32::from(cell.sequence <= known.facts.sequence));
                zeroes.extend(zero_range(&cell, layer.blocks()));
            }
            found.cell_slots.insert(slot, newest);
        }
    }
    if old_cells != known.facts.cells {
        return Err(damaged(layer, "has lost records of zeroed ranges"));
    }
    Ok(())
}

/// Reads the records of the segment that begins with `slot`, but not through the mapping: a writer
/// that closes the layer gives back space that it never used. A record
/// beyond the file's end is absent.
fn read_index(layer: &LayerFile, slot: u32, index: &mut [u8]) -> Result<()> {
    let mut done = 0;
    while done < index.len() {
        let offset_bytes = record_offset_bytes(slot) + done as u64;
        match layer.file.read_at(&mut index[done..], offset_bytes) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => {
                return Err(error).context(|| format!("reading {}", layer.path.display()));
            }
        }
    }
    index[done..].fill(0);
    Ok(())
}

/// Makes the found state durable before the first new write. Slots without a valid record get a
/// vacant one: a rejected record would look proven after a later sync. Unproven slots are written
/// again: after a failed sync the page cache may show bytes that the disk never got. Invalid cells
/// are cleared. A crash during this function leaves the same work to the next open. Returns the
/// layer's new extent.
pub(crate) fn finish_interrupted(
    layer: &LayerFile,
    found: &Found,
    nonces: &NoncePrefix,
) -> Result<SealFacts> {
    let facts =
        SealFacts { sequence: found.highest_sequence, slots: found.end, cells: found.cells };
    let Found { vacant, unproven, mended, torn_cells, .. } = found;
    if vacant.is_empty() && unproven.is_empty() && mended.is_empty() && torn_cells.is_empty() {
        return Ok(facts);
    }
    // Once the slot is durable these cells would count as damage.
    for &(slot, cell) in torn_cells {
        let offset_bytes = slot_offset_bytes(slot) + (cell * RECORD_BYTES) as u64;
        layer
            .file
            .write_all_at(&[0; RECORD_BYTES], offset_bytes)
            .context(|| format!("recovering {}", layer.path.display()))?;
    }
    for (&slot, record) in mended {
        layer.store_record(slot, record)?;
    }
    let mut sequence = found.highest_sequence;
    for &slot in vacant {
        sequence += 1;
        layer.store_record(slot, &layer.keys.seal_vacant(slot, nonces, sequence))?;
    }
    let mut bytes = [0; BLOCK];
    for &slot in unproven {
        let record = layer.windows.load_record(&layer.file, slot)?;
        let offset_bytes = slot_offset_bytes(slot);
        layer
            .file
            .read_exact_at(&mut bytes, offset_bytes)
            .and_then(|()| layer.file.write_all_at(&bytes, offset_bytes))
            .context(|| format!("recovering {}", layer.path.display()))?;
        layer.store_record(slot, &record)?;
    }
    layer.file.sync_data().context(|| format!("recovering {}", layer.path.display()))?;
    if !vacant.is_empty() {
        tracing::info!(
            layer = %layer.path.display(),
            slots = vacant.len(),
            "writes that a crash interrupted before they were flushed were dropped"
        );
    }
    Ok(SealFacts { sequence, ..facts })
}

impl Found {
    /// Finds the marks that count: those that are durable and were not removed. A writer clears the
    /// cells of those that are not durable, because some writes before them may be lost.
    fn choose_marks(&mut self, history_from: u64) {
        for (mark, cell) in std::mem::take(&mut self.mark_cells) {
            if mark.sequence > self.durable {
                self.torn_cells.push(cell);
                self.cells = self.cells.wrapping_sub(1);
                continue;
            }
            self.highest_sequence = self.highest_sequence.max(mark.sequence);
            let is_in = |range: &RemovedMarks| (range.first..=range.last).contains(&mark.sequence);
            let is_kept = history_from != 0 && mark.sequence >= history_from;
            if is_kept && !self.removed_marks.iter().any(is_in) {
                self.marks.push(mark);
            }
        }
        self.marks.sort_unstable_by_key(|mark| mark.sequence);
    }

    /// The history of a layer that is opened for writing.
    pub(crate) fn history(&mut self, layer: &LayerFile, highest_sequence: u64) -> History {
        let captures = std::mem::take(&mut self.captures);
        let is_current =
            |capture: &Capture| layer.lookup(capture.block) == Lookup::Slot(capture.slot);
        History::rebuild(&self.marks, captures, is_current, highest_sequence)
    }

    fn note(&mut self, record: &Record) {
        self.highest_sequence = self.highest_sequence.max(record.sequence);
        self.durable = self.durable.max(record.durable_sequence());
    }

    /// The record of a slot as the first pass read it.
    fn load(&self, layer: &LayerFile, slot: u32) -> Result<Option<(Record, [u8; NONCE_BYTES])>> {
        let stored = match self.mended.get(&slot) {
            Some(mended) => *mended,
            None => layer.windows.load_record(&layer.file, slot)?,
        };
        if stored == [0; RECORD_BYTES] {
            return Ok(None);
        }
        Ok(layer.keys.open_record(RecordPlace::of_slot(slot), &stored))
    }

    fn sequence_of(&self, layer: &LayerFile, slot: u32) -> Result<u64> {
        Ok(self.load(layer, slot)?.map_or(0, |(record, _)| record.sequence))
    }

    /// Slots below the end that neither the map nor a time mark uses. Valid once the scan has ended.
    pub(crate) fn free_slots(&self, layer: &LayerFile, history: &History) -> Vec<u32> {
        let mut used = vec![0u64; (self.end as usize).div_ceil(64)];
        let mut block = 0;
        while block < layer.blocks() {
            if let Lookup::Slot(slot) = layer.lookup(block) {
                used[slot as usize / 64] |= 1 << (slot % 64);
            }
            block += layer.uniform_blocks(block, layer.blocks() - block);
        }
        for slot in self.cell_slots.keys().copied().chain(history.slots()) {
            used[slot as usize / 64] |= 1 << (slot % 64);
        }
        (0..self.end).filter(|slot| used[*slot as usize / 64] & (1 << (slot % 64)) == 0).collect()
    }
}

fn damaged(layer: &LayerFile, why: &str) -> Error {
    let message = format!("the layer {} {why}", layer.path.display());
    Error::new(ErrorKind::Corrupt, message)
}

fn slot_matches(
    layer: &LayerFile,
    slot: u32,
    record: &Record,
    nonce: [u8; NONCE_BYTES],
) -> Result<bool> {
    let mut stored = [0; BLOCK];
    let mut plain = [0; BLOCK];
    layer
        .file
        .read_exact_at(&mut stored, slot_offset_bytes(slot))
        .context(|| format!("verifying {}", layer.path.display()))?;
    Ok(layer.keys.open_block(nonce, &record.payload, &stored, &mut plain))
}

/// The number of a cell that does not authenticate, and the sequence number in its nonce.
type TornCell = (usize, u64);

/// An authentic cell with its number.
type NumberedCell = (usize, Record);

/// The authentic cells of a slot with their numbers, and the numbers and sequence numbers of the
/// other ones.
fn read_cells(
    layer: &LayerFile,
    slot: u32,
    nonce: [u8; NONCE_BYTES],
) -> Result<(Vec<NumberedCell>, Vec<TornCell>)> {
    let mut stored = [0; BLOCK];
    layer
        .file
        .read_exact_at(&mut stored, slot_offset_bytes(slot))
        .context(|| format!("reading {}", layer.path.display()))?;
    let (mut cells, mut torn) = (Vec::with_capacity(CELLS_PER_SLOT), Vec::new());
    for (i, piece) in stored.chunks_exact(RECORD_BYTES).enumerate() {
        let mut bytes = [0; RECORD_BYTES];
        bytes.copy_from_slice(piece);
        let place = RecordPlace { slot, cell: Some((i as u8, nonce)) };
        if bytes == [0; RECORD_BYTES] {
            continue;
        }
        let opened = layer
            .keys
            .open_record(place, &bytes)
            .or_else(|| layer.keys.open_record(place, &layer.keys.mend_record(place, &bytes)?));
        match opened {
            Some((record, _)) => cells.push((i, record)),
            None => torn.push((i, sequence_in_nonce(&bytes))),
        }
    }
    Ok((cells, torn))
}

pub(super) fn zero_range(cell: &Record, blocks: u64) -> Option<ZeroRange> {
    let mut count = [0; 8];
    count.copy_from_slice(&cell.payload[..8]);
    let count = u64::from_le_bytes(count).min(blocks.checked_sub(cell.block)?);
    let is_zero = cell.kind == RecordKind::ZeroRange && count > 0;
    is_zero.then_some(ZeroRange { sequence: cell.sequence, first: cell.block, count })
}

/// Zeroes every block of the range that was not captured later.
fn apply_zeroes(layer: &LayerFile, found: &Found, zero: &ZeroRange) -> Result<()> {
    let end = zero.first + zero.count;
    let mut block = zero.first;
    while block < end {
        // If this is more than 1, the group has no entries and so no captured blocks.
        let uniform = layer.uniform_blocks(block, end - block);
        let is_newer = match layer.lookup(block) {
            Lookup::Slot(slot) => found.sequence_of(layer, slot)? > zero.sequence,
            _ => false,
        };
        if !is_newer {
            layer.map.set_zero(block, uniform, |_| {});
        }
        block += uniform;
    }
    Ok(())
}
