//! Memory mappings of the layer file: records, and the mutable words of the superblock.

use std::fs::File;
use std::sync::{Arc, OnceLock};

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::format::{
    RECORD_BYTES, SEGMENT_BYTES, SLOTS_PER_SEGMENT, SUPERBLOCK_AREA_BYTES, record_offset_bytes,
};
use super::mapping::faults::Faults;
use super::mapping::{SharedWords, name_of};

/// Segments in one mapping: about 1 GiB of address space.
const WINDOW_SEGMENTS: u32 = 256;
const WINDOW_SLOTS: u32 = WINDOW_SEGMENTS * SLOTS_PER_SEGMENT;
const WINDOW_BYTES: u64 = WINDOW_SEGMENTS as u64 * SEGMENT_BYTES;

/// Mappings of one layer file, created on demand.
pub(crate) struct Windows {
    head: Arc<SharedWords>,
    windows: Box<[OnceLock<SharedWords>]>,
    is_writable: bool,
    faults: Faults,
}

impl Windows {
    /// Maps a file that will use at most `max_slots` slots.
    ///
    /// # Errors
    /// `Corrupt` if the file ends within its superblock area: an access beyond a file's end would
    /// end the process.
    pub(crate) fn new(file: &File, max_slots: u32, is_writable: bool) -> Result<Self> {
        let length = SUPERBLOCK_AREA_BYTES as usize;
        let what = || format!("reading the size of {}", name_of(file));
        if file.metadata().context(what)?.len() < SUPERBLOCK_AREA_BYTES {
            return Err(Error::new(ErrorKind::Corrupt, "the layer file is truncated"));
        }
        let faults = Faults::default();
        let head = Arc::new(mapped(file, 0, length, is_writable, &faults)?);
        let count = max_slots.div_ceil(WINDOW_SLOTS);
        let windows = (0..count).map(|_| OnceLock::new()).collect();
        Ok(Windows { head, windows, is_writable, faults })
    }

    /// The superblock area.
    pub(crate) fn head(&self) -> &Arc<SharedWords> {
        &self.head
    }

    /// Maps the records of the first `slots` slots. From now on they are read without the file.
    pub(crate) fn map_all(&self, file: &File, slots: u32) -> Result<()> {
        let mut first_slots = (0..slots).step_by(WINDOW_SLOTS as usize);
        first_slots.try_for_each(|slot| self.window(file, slot).map(drop))
    }

    fn window(&self, file: &File, slot: u32) -> Result<(&SharedWords, usize)> {
        let index = slot / WINDOW_SLOTS;
        let start = SUPERBLOCK_AREA_BYTES + u64::from(index) * WINDOW_BYTES;
        let cell = self.windows.get(index as usize).ok_or_else(|| {
            Error::new(
                ErrorKind::Corrupt,
                format!("slot {slot} is beyond the layer's largest size"),
            )
        })?;
        let inside = (record_offset_bytes(slot) - start) as usize;
        if let Some(words) = cell.get() {
            return Ok((words, inside));
        }
        let words = mapped(file, start, WINDOW_BYTES as usize, self.is_writable, &self.faults)?;
        // Two threads may both have mapped it. The second mapping is dropped.
        Ok((cell.get_or_init(|| words), inside))
    }

    /// The stored bytes of a record. The slot must lie within the file.
    pub(crate) fn load_record(&self, file: &File, slot: u32) -> Result<[u8; RECORD_BYTES]> {
        let (words, offset) = self.window(file, slot)?;
        Ok(words.load_bytes(offset))
    }

    /// The first 16 bytes of a record: its nonce, which is not secret.
    pub(crate) fn load_record_start(&self, file: &File, slot: u32) -> Result<[u8; 16]> {
        let (words, offset) = self.window(file, slot)?;
        Ok(words.load_bytes(offset))
    }

    /// Stores a record, in the order of [`publishing`](crate::layer::mapping::publishing). The slot must
    /// lie within the file.
    pub(crate) fn store_record(
        &self,
        file: &File,
        slot: u32,
        stored: &[u8; RECORD_BYTES],
        unfinished: u64,
    ) -> Result<()> {
        let (words, offset) = self.window(file, slot)?;
        words.publish_bytes(offset, stored, unfinished);
        Ok(())
    }

    /// Whether an access through a mapping failed: see [`Faults`].
    #[inline]
    pub(crate) fn have_failed(&self) -> bool {
        self.faults.seen()
    }
}

fn mapped(
    file: &File,
    offset_bytes: u64,
    length_bytes: usize,
    is_writable: bool,
    faults: &Faults,
) -> Result<SharedWords> {
    let map = if is_writable { SharedWords::of_file } else { SharedWords::of_file_read_only };
    Ok(map(file, offset_bytes, length_bytes)?.guarded(faults))
}
