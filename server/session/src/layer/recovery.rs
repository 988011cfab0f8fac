//! Building the block map from the records, after a crash or not.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;

use coldrise_block::{Context, Error, ErrorKind, Result, BLOCK_SIZE_BYTES};

use super::format::{slot_offset_bytes, Record, RecordKind, CELLS_PER_SLOT, RECORD_BYTES};
use super::keys::{RecordPlace, NONCE_BYTES};
use super::map::Lookup;
use super::Layer;

const BLOCK: usize = BLOCK_SIZE_BYTES as usize;

/// What is damaged beyond one bit is looked at so often before the layer is given up.
const MAX_MENDED: usize = 1000;

/// Which slots are compared with their records' tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verify {
    /// Those written after this sequence number, unless a later record proves them durable.
    After(u64),
    /// None: the layer was sealed after a sync. (Every read authenticates anyway.)
    Nothing,
}

/// What a scan found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The highest sequence number in any record, believed or not.
    pub(crate) highest_sequence: u64,
    /// The highest sequence number in a believed record.
    pub(crate) highest_believed: u64,
    /// First slot without a record.
    pub(crate) end: u32,
    /// Believed slots that no record proves durable.
    pub(crate) unproven: Vec<u32>,
    /// Slots whose record did not match their bytes, or was torn.
    pub(crate) rejected: Vec<u32>,
    /// Records, zero cells included, that authenticate: modulo 2^32.
    pub(crate) records: u32,
    /// Of these, records of slots in which a bit had flipped, as they were.
    mended: HashMap<u32, [u8; RECORD_BYTES]>,
    /// Slots of zero cells, with the highest sequence number in each.
    zero_slots: HashMap<u32, u64>,
}

struct ZeroRange {
    sequence: u64,
    first: u64,
    count: u64,
}

/// Reads all records of the first `slots` slots and fills the layer's map.
pub(crate) fn scan(layer: &Layer, slots: u32, verify: Verify) -> Result<Found> {
    let mut found = Found::default();
    let mut zeroes = Vec::new();
    let mut durable = match verify {
        Verify::After(sequence) => sequence,
        Verify::Nothing => u64::MAX,
    };
    let mut unreadable = Vec::new();
    // First pass: how far the records reach, and what they prove durable.
    for slot in 0..slots {
        let mut stored = layer.windows.load_record(&layer.file, slot)?;
        if stored == [0; RECORD_BYTES] {
            continue;
        }
        found.end = slot + 1;
        if is_interrupted(&stored) {
            found.rejected.push(slot);
            continue;
        }
        let place = RecordPlace::of_slot(slot);
        let mut opened = layer.keys.open_record(place, &stored);
        if opened.is_none() && unreadable.len() < MAX_MENDED {
            if let Some(mended) = layer.keys.mend_record(place, &stored) {
                stored = mended;
                found.mended.insert(slot, mended);
                opened = layer.keys.open_record(place, &stored);
            }
        }
        let Some((record, _)) = opened else {
            unreadable.push((slot, sequence_in_nonce(&stored)));
            continue;
        };
        found.records = found.records.wrapping_add(1);
        found.highest_sequence = found.highest_sequence.max(record.sequence);
        durable = durable.max(record.durable_sequence());
        if record.kind == RecordKind::ZeroCells {
            let mut newest = record.sequence;
            let (cells, torn) = read_cells(layer, slot)?;
            // Where not even the slot's own record is durable, these are whatever the
            // slot held before, and no damage.
            let age = |sequence: u64| sequence.max(record.sequence);
            unreadable.extend(torn.into_iter().map(|sequence| (u32::MAX, age(sequence))));
            found.records = found.records.wrapping_add(cells.len() as u32);
            for cell in cells {
                newest = newest.max(cell.sequence);
                durable = durable.max(cell.durable_sequence());
                zeroes.extend(zero_range(&cell, layer.blocks()));
            }
            found.zero_slots.insert(slot, newest);
            found.highest_sequence = found.highest_sequence.max(newest);
            found.highest_believed = found.highest_believed.max(newest);
        }
    }
    // A write that a crash interrupted was not durable, and no sequence number is older.
    for (slot, sequence) in unreadable {
        if sequence <= durable {
            return Err(damaged(layer, "has damaged records of captured blocks"));
        }
        if slot != u32::MAX {
            found.rejected.push(slot);
        }
    }
    let unproven_cells = found.zero_slots.iter().filter(|(_, newest)| **newest > durable);
    found.unproven.extend(unproven_cells.map(|(slot, _)| *slot));
    // Second pass: the newest believed record of each block.
    for slot in 0..found.end {
        let Some((record, nonce)) = found.load(layer, slot)? else { continue };
        if record.kind != RecordKind::Block || record.block >= layer.blocks() {
            continue;
        }
        if record.sequence > durable {
            if !slot_matches(layer, slot, &record, nonce)? {
                found.rejected.push(slot);
                found.records = found.records.wrapping_sub(1);
                continue;
            }
            found.unproven.push(slot);
        }
        found.highest_believed = found.highest_believed.max(record.sequence);
        if let Lookup::Slot(other) = layer.lookup(record.block) {
            if found.sequence_of(layer, other)? > record.sequence {
                continue;
            }
        }
        layer.map.set_slot(record.block, slot);
    }
    for zero in &zeroes {
        apply_zeroes(layer, &found, zero)?;
    }
    if !found.rejected.is_empty() {
        tracing::info!(
            layer = %layer.path.display(),
            rejected = found.rejected.len(),
            "writes that a crash interrupted before they were flushed were dropped"
        );
    }
    Ok(found)
}

/// Makes the found state durable before the first new write: erases rejected
/// records (a later sync would make them look proven), and writes unproven
/// slots again (after a failed sync the page cache may show bytes that the disk
/// never got). A crash in here leaves everything as it was, to be done again.
pub(crate) fn settle(layer: &Layer, found: &Found) -> Result<()> {
    if found.rejected.is_empty() && found.unproven.is_empty() && found.mended.is_empty() {
        return Ok(());
    }
    for (&slot, record) in &found.mended {
        layer.windows.store_record(&layer.file, slot, record)?;
    }
    for &slot in &found.rejected {
        layer.windows.store_record(&layer.file, slot, &[0; RECORD_BYTES])?;
    }
    let mut bytes = [0; BLOCK];
    for &slot in &found.unproven {
        let record = layer.windows.load_record(&layer.file, slot)?;
        let offset_bytes = slot_offset_bytes(slot);
        layer
            .file
            .read_exact_at(&mut bytes, offset_bytes)
            .and_then(|()| layer.file.write_all_at(&bytes, offset_bytes))
            .context(|| format!("recovering {}", layer.path.display()))?;
        layer.windows.store_record(&layer.file, slot, &record)?;
    }
    layer.file.sync_data().context(|| format!("recovering {}", layer.path.display()))
}

impl Found {
    /// The record of a slot, as the first pass has it.
    fn load(&self, layer: &Layer, slot: u32) -> Result<Option<(Record, [u8; NONCE_BYTES])>> {
        let stored = match self.mended.get(&slot) {
            Some(mended) => *mended,
            None => layer.windows.load_record(&layer.file, slot)?,
        };
        if stored == [0; RECORD_BYTES] {
            return Ok(None);
        }
        Ok(layer.keys.open_record(RecordPlace::of_slot(slot), &stored))
    }

    fn sequence_of(&self, layer: &Layer, slot: u32) -> Result<u64> {
        Ok(self.load(layer, slot)?.map_or(0, |(record, _)| record.sequence))
    }

    /// Checks that the layer is as it was closed or sealed.
    ///
    /// Errors: `Corrupt` where writes are missing.
    pub(crate) fn check_complete(&self, layer: &Layer, sequence: u64, records: u32) -> Result<()> {
        if self.highest_believed != sequence {
            return Err(damaged(layer, "is not as it was stored: its last write is missing"));
        }
        // 0: from before records were counted.
        if records != 0 && self.records != records {
            return Err(damaged(layer, "is not as it was stored: captured blocks are missing"));
        }
        Ok(())
    }

    /// Slots below the end that nothing refers to, once the scan is settled.
    pub(crate) fn free_slots(&self, layer: &Layer) -> Vec<u32> {
        let mut used = vec![0u64; (self.end as usize).div_ceil(64)];
        let mut block = 0;
        while block < layer.blocks() {
            if let Lookup::Slot(slot) = layer.lookup(block) {
                used[slot as usize / 64] |= 1 << (slot % 64);
            }
            block += layer.uniform_blocks(block, layer.blocks() - block);
        }
        for &slot in self.zero_slots.keys() {
            used[slot as usize / 64] |= 1 << (slot % 64);
        }
        (0..self.end).filter(|slot| used[*slot as usize / 64] & (1 << (slot % 64)) == 0).collect()
    }
}

fn damaged(layer: &Layer, why: &str) -> Error {
    let message = format!("the layer {} {why}", layer.path.display());
    Error::new(ErrorKind::Corrupt, message)
}

/// Whether a process was killed while it stored this record: see
/// [`publishing`](crate::mapping::publishing).
fn is_interrupted(stored: &[u8; RECORD_BYTES]) -> bool {
    stored[..8] == [0; 8]
}

fn sequence_in_nonce(stored: &[u8; RECORD_BYTES]) -> u64 {
    let mut sequence = [0; 8];
    sequence[..5].copy_from_slice(&stored[7..NONCE_BYTES]);
    u64::from_le_bytes(sequence)
}

fn slot_matches(
    layer: &Layer,
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

/// The zero cells of a slot, and the sequence numbers of those that do not authenticate.
fn read_cells(layer: &Layer, slot: u32) -> Result<(Vec<Record>, Vec<u64>)> {
    let mut stored = [0; BLOCK];
    layer
        .file
        .read_exact_at(&mut stored, slot_offset_bytes(slot))
        .context(|| format!("reading {}", layer.path.display()))?;
    let (mut cells, mut torn) = (Vec::with_capacity(CELLS_PER_SLOT), Vec::new());
    for (i, piece) in stored.chunks_exact(RECORD_BYTES).enumerate() {
        let mut bytes = [0; RECORD_BYTES];
        bytes.copy_from_slice(piece);
        let place = RecordPlace { slot, cell: Some(i as u8) };
        if bytes == [0; RECORD_BYTES] {
            continue;
        }
        let opened = layer
            .keys
            .open_record(place, &bytes)
            .or_else(|| layer.keys.open_record(place, &layer.keys.mend_record(place, &bytes)?));
        match opened {
            Some((record, _)) => cells.push(record),
            None => torn.push(sequence_in_nonce(&bytes)),
        }
    }
    Ok((cells, torn))
}

fn zero_range(cell: &Record, blocks: u64) -> Option<ZeroRange> {
    let mut count = [0; 8];
    count.copy_from_slice(&cell.payload[..8]);
    let count = u64::from_le_bytes(count).min(blocks.checked_sub(cell.block)?);
    let is_zero = cell.kind == RecordKind::ZeroRange && count > 0;
    is_zero.then_some(ZeroRange { sequence: cell.sequence, first: cell.block, count })
}

/// Zeroes every block of the range that was not captured later.
fn apply_zeroes(layer: &Layer, found: &Found, zero: &ZeroRange) -> Result<()> {
    let end = zero.first + zero.count;
    let mut block = zero.first;
    while block < end {
        // More than one: a group without entries, so without captured blocks.
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
