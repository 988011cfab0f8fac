//! Allocation of slots, and growth of the file ahead of the writes.
//!
//! A slot goes through these states: never used -> in use -> superseded (its block was captured
//! again and not yet flushed) -> free (the new capture is durable) -> in use. Only a sync moves
//! slots from superseded to free. So after a crash an older write never replaces a flushed one. (A
//! slot that no sync has covered yet is overwritten in place: see `write`. A slot that a time mark
//! needs stays superseded: see `history`.)

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};

use coldrise_block::{BLOCK_SIZE_BYTES, Context, Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::fs::FallocateFlags;

use super::format::{
    MAX_SLOTS, SEGMENT_BYTES, SEGMENT_INDEX_BYTES, SLOTS_PER_SEGMENT, SUPERBLOCK_AREA_BYTES,
    segment_offset_bytes,
};
use super::history::Superseded;
use crate::layer::mapping::name_of;

/// A run of neighbouring slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotRun {
    pub(crate) first: u32,
    pub(crate) count: u32,
}

struct State {
    free: Vec<u32>,
    superseded: Vec<Superseded>,
    /// Number of slots so far that time marks needed when they were superseded.
    marked: u64,
    /// The first never-used slot.
    next: u32,
    /// The file has space for the slots below this one.
    ready: u32,
    syncs_since_growth: u32,
    growth_segments: u32,
    taken_since_sync: u32,
}

impl State {
    fn too_much_unsynced(&self) -> bool {
        self.taken_since_sync > UNSYNCED_SLOTS_LIMIT
    }
}

/// The slots of a layer that is open for writing.
pub(crate) struct Slots {
    state: Mutex<State>,
    growing: Mutex<()>,
    max_slots: AtomicU32,
}

/// After this many syncs within one growth step, space is written ahead. Then a sync has no extent
/// to convert and no journal to commit (165 instead of 250 microseconds where this was measured).
const SYNCS_THAT_WANT_WRITTEN_SPACE: u32 = 16;
const MAX_GROWTH_SEGMENTS: u32 = 16;

/// After this many slots (1 GiB) since the last sync, a sync is requested. This bounds the slots
/// that a recovery must verify, the time that a flush or a seal must wait, and the number of slots
/// that are superseded but not free. Blocks overwritten in place do not count.
const UNSYNCED_SLOTS_LIMIT: u32 = 256 << 10;

impl Slots {
    /// `free`: unused slots below `next`.
    pub(crate) fn new(free: Vec<u32>, next: u32, ready: u32, max_slots: u32) -> Self {
        Slots {
            state: Mutex::new(State {
                free,
                superseded: Vec::new(),
                marked: 0,
                next,
                ready,
                syncs_since_growth: 0,
                growth_segments: 1,
                taken_since_sync: 0,
            }),
            growing: Mutex::new(()),
            max_slots: AtomicU32::new(max_slots.min(MAX_SLOTS)),
        }
    }

    /// Limits the layer to this number of slots.
    pub(crate) fn bound(&self, slots: u32) {
        self.max_slots.fetch_min(slots, Ordering::Relaxed);
    }

    /// Takes `count` slots and appends them to `taken`, in as few runs as the free slots allow. On
    /// failure the caller gives back the appended slots. Returns true if the layer's own thread
    /// should run: the space ahead is getting short, or too much is unsynced.
    pub(crate) fn take(&self, file: &File, count: u32, taken: &mut Vec<u32>) -> Result<bool> {
        let mut missing = count;
        while missing > 0 {
            let mut state = self.state.lock();
            // Large writes prefer new, contiguous space until the free slots are an eighth of the
            // layer.
            if state.free.len() >= missing as usize
                && (missing == 1 || state.free.len() as u32 >= state.next / 8)
            {
                take_free(&mut state.free, missing, taken);
                state.taken_since_sync = state.taken_since_sync.saturating_add(missing);
                return Ok(state.too_much_unsynced());
            }
            let available = (state.ready - state.next).min(missing);
            if available > 0 {
                state.taken_since_sync = state.taken_since_sync.saturating_add(available);
                taken.extend(state.next..state.next + available);
                state.next += available;
                missing -= available;
                if missing == 0 {
                    let ahead = (state.growth_segments * SLOTS_PER_SEGMENT / 2).max(512);
                    return Ok(state.ready - state.next < ahead || state.too_much_unsynced());
                }
                continue;
            }
            let wanted = state.next + missing;
            drop(state);
            if let Err(error) = self.grow(file, wanted) {
                // Without new space, free slots are better than a failure.
                let mut state = self.state.lock();
                if state.free.len() >= missing as usize {
                    take_free(&mut state.free, missing, taken);
                    return Ok(false);
                }
                return Err(error);
            }
        }
        Ok(false)
    }

    /// Returns slots that were taken and not used. Each has a record that is not needed.
    pub(crate) fn give_back(&self, slots: &[u32]) {
        self.state.lock().free.extend_from_slice(slots);
    }

    /// Notes slots whose blocks were captured again.
    pub(crate) fn supersede(&self, slots: &[Superseded]) {
        if !slots.is_empty() {
            let mut state = self.state.lock();
            state.marked += slots.iter().filter(|slot| slot.is_marked()).count() as u64;
            state.superseded.extend_from_slice(slots);
        }
    }

    /// Number of superseded slots that time marks need, and that no sync has covered yet.
    pub(crate) fn marked_unsynced(&self) -> u64 {
        self.state.lock().superseded.iter().filter(|slot| slot.is_marked()).count() as u64
    }

    /// Number of slots so far that time marks needed when they were superseded.
    pub(crate) fn marked(&self) -> u64 {
        self.state.lock().marked
    }

    /// Takes the slots superseded so far. The caller syncs, then calls `release`.
    pub(crate) fn begin_sync(&self) -> Vec<Superseded> {
        let mut state = self.state.lock();
        state.syncs_since_growth = state.syncs_since_growth.saturating_add(1);
        state.taken_since_sync = 0;
        std::mem::take(&mut state.superseded)
    }

    /// True if too many slots were taken since the last sync to wait for the next one.
    pub(crate) fn too_much_unsynced(&self) -> bool {
        self.state.lock().too_much_unsynced()
    }

    /// Frees slots after the sync.
    pub(crate) fn release(&self, mut slots: Vec<u32>) {
        if slots.is_empty() {
            return;
        }
        // Sort them, so that large writes find runs again.
        slots.sort_unstable();
        let mut state = self.state.lock();
        if state.free.is_empty() {
            state.free = slots;
        } else {
            state.free.extend_from_slice(&slots);
        }
    }

    /// The first never-used slot.
    pub(crate) fn end(&self) -> u32 {
        self.state.lock().next
    }

    /// Makes sure that slots below `wanted` have space. Grows by whole steps.
    pub(crate) fn grow(&self, file: &File, wanted: u32) -> Result<()> {
        let _growing = self.growing.lock();
        let (from, segments, written_ahead) = {
            let mut state = self.state.lock();
            if state.ready >= wanted {
                return Ok(());
            }
            let flushed_often = state.syncs_since_growth >= SYNCS_THAT_WANT_WRITTEN_SPACE;
            state.syncs_since_growth = 0;
            state.growth_segments = if flushed_often {
                2
            } else {
                (state.growth_segments * 2).min(MAX_GROWTH_SEGMENTS)
            };
            (state.ready / SLOTS_PER_SEGMENT, state.growth_segments, flushed_often)
        };
        let max_slots = self.max_slots.load(Ordering::Relaxed);
        if wanted > max_slots {
            return Err(Error::new(
                ErrorKind::NoSpace,
                "the session's layer is full; seal the session to continue in a new layer",
            ));
        }
        // A bounded layer takes no space that it does not use.
        let segments =
            segments.min(max_slots.div_ceil(SLOTS_PER_SEGMENT).saturating_sub(from)).max(1);
        let segments = match allocate(file, from, segments) {
            Err(error) if error.kind() == ErrorKind::NoSpace && segments > 1 => {
                allocate(file, from, 1)?;
                1
            }
            other => other.map(|()| segments)?,
        };
        if written_ahead {
            write_ahead(file, from, segments)?;
        }
        self.state.lock().ready = (from + segments) * SLOTS_PER_SEGMENT;
        Ok(())
    }

    /// Grows the file ahead of need. The layer's own thread calls this.
    pub(crate) fn grow_ahead(&self, file: &File) -> Result<()> {
        let wanted = {
            let state = self.state.lock();
            let ahead = (state.growth_segments * SLOTS_PER_SEGMENT / 2).max(512);
            if state.ready - state.next >= ahead {
                return Ok(());
            }
            state.ready + 1
        };
        self.grow(file, wanted)
    }
}

fn take_free(free: &mut Vec<u32>, count: u32, taken: &mut Vec<u32>) {
    let rest = free.len() - count as usize;
    free[rest..].sort_unstable();
    taken.extend_from_slice(&free[rest..]);
    free.truncate(rest);
}

/// Splits slots into runs whose bytes are contiguous in the file: neighbours, never across
/// segments.
pub(crate) fn runs(slots: &[u32]) -> impl Iterator<Item = SlotRun> + '_ {
    let mut rest = slots;
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let mut count = 1;
        while rest.get(count) == Some(&(first + count as u32))
            && (first + count as u32) % SLOTS_PER_SEGMENT != 0
        {
            count += 1;
        }
        rest = &rest[count..];
        Some(SlotRun { first, count: count as u32 })
    })
}

/// Captured writes leave this much of the drive: forget and gc, which make room, and seals need
/// some space themselves.
const KEPT_BYTES: u64 = 2 << 20;

/// Reserves the space of `segments` segments from `from` on and makes the file that long.
/// Leaves the drive [`KEPT_BYTES`].
pub(crate) fn allocate(file: &File, from: u32, segments: u32) -> Result<()> {
    let offset_bytes = segment_offset_bytes(from);
    let length_bytes = u64::from(segments) * SEGMENT_BYTES;
    let drive = rustix::fs::fstatvfs(file).map_err(std::io::Error::from);
    let drive = drive.context(|| format!("reading the free space for {}", name_of(file)))?;
    if drive.f_bavail.saturating_mul(drive.f_frsize) < KEPT_BYTES + length_bytes {
        return Err(Error::new(
            ErrorKind::NoSpace,
            "no space for more captured writes: the rest is reserved for coldrise gc; free some \
             space and try again",
        ));
    }
    let reserve =
        || rustix::fs::fallocate(file, FallocateFlags::empty(), offset_bytes, length_bytes);
    match reserve() {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP) => write_ahead(file, from, segments),
        Err(errno) => Err(std::io::Error::from(errno))
            .context(|| "no space for more captured writes; free some space and try again"),
    }
}

/// Makes sure that everything up to the file's last whole segment has its space, so that a store
/// through the mapping cannot hit a full disk.
pub(crate) fn reserve_existing(file: &File, segments: u32) -> Result<()> {
    let length_bytes = SUPERBLOCK_AREA_BYTES + u64::from(segments) * SEGMENT_BYTES;
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, length_bytes) {
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        Err(errno) => Err(std::io::Error::from(errno))
            .context(|| format!("reserving space of {}", name_of(file))),
    }
}

/// Writes zeroes into new segments, and syncs them.
///
/// The records are written page by page. The page cache keeps what one call writes in pieces of up
/// to that size (large folios), and a store through the mapping makes its whole piece dirty: each
/// flush would write hundreds of KiB for one record.
fn write_ahead(file: &File, from: u32, segments: u32) -> Result<()> {
    let zeroes = vec![0; 1 << 18];
    for segment in from..from + segments {
        let start = segment_offset_bytes(segment);
        let (slots, end) = (start + SEGMENT_INDEX_BYTES, segment_offset_bytes(segment + 1));
        write_zeroes(file, start, slots, &zeroes[..BLOCK_SIZE_BYTES as usize])?;
        write_zeroes(file, slots, end, &zeroes)?;
    }
    file.sync_data().context(|| format!("syncing space of {}", name_of(file)))
}

/// Writes zeroes from `start` to `end`, at most `piece` in one call.
fn write_zeroes(file: &File, start: u64, end: u64, piece: &[u8]) -> Result<()> {
    for offset_bytes in (start..end).step_by(piece.len()) {
        let length = (end - offset_bytes).min(piece.len() as u64) as usize;
        file.write_all_at(&piece[..length], offset_bytes)
            .context(|| format!("writing space of {} ahead", name_of(file)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gibibyte_of_taken_slots_calls_for_a_sync_and_a_sync_ends_the_call() {
        let file = tempfile::tempfile().unwrap();
        let many = UNSYNCED_SLOTS_LIMIT;
        // More space than the test takes, so that the file need not grow.
        let slots = Slots::new(Vec::new(), 0, 3 * many, 3 * many);
        let mut taken = Vec::new();
        assert!(!slots.take(&file, many, &mut taken).unwrap());
        assert!(slots.take(&file, 1, &mut taken).unwrap() && slots.too_much_unsynced());

        let superseded: Vec<_> = taken.iter().copied().map(Superseded::unneeded).collect();
        slots.supersede(&superseded);
        assert_eq!(slots.begin_sync(), superseded);
        assert!(!slots.too_much_unsynced());
        slots.release(taken.clone());
        // Reused slots count like new ones.
        taken.clear();
        assert!(!slots.take(&file, many, &mut taken).unwrap());
        assert!(slots.take(&file, 1, &mut taken).unwrap() && slots.too_much_unsynced());
    }

    #[test]
    fn a_bounded_layer_grows_to_its_bound() {
        let file = tempfile::tempfile().unwrap();
        let slots = Slots::new(Vec::new(), 0, 0, MAX_SLOTS);
        slots.bound(SLOTS_PER_SEGMENT + 1);
        let mut taken = Vec::new();
        slots.take(&file, SLOTS_PER_SEGMENT + 1, &mut taken).unwrap();
        // Whole segments, and none ahead of the bound.
        assert_eq!(file.metadata().unwrap().len(), segment_offset_bytes(2));
        let error = slots.take(&file, SLOTS_PER_SEGMENT, &mut taken).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
    }
}
