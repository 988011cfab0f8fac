//! Creating, opening and closing a layer file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result, BLOCK_SIZE_BYTES, MAX_DISK_SIZE_BYTES};
use parking_lot::{Mutex, RwLock};

use super::format::{
    segment_offset_bytes, segments_in, CloseMark, DurableMark, Superblock, CLOSE_MARK_BYTES,
    CLOSE_MARK_OFFSET_BYTES, DURABLE_MARK_BYTES, DURABLE_MARK_OFFSET_BYTES, GENERATION_WORD,
    MAX_SLOTS, SLOTS_PER_SEGMENT, SUPERBLOCK_AREA_BYTES, SUPERBLOCK_BYTES,
};
use super::keys::{LayerKeys, NoncePrefix};
use super::map::BlockMap;
use super::recovery::{self, Verify};
use super::slots::{reserve_existing, Slots};
use super::sync::SyncState;
use super::windows::Windows;
use super::write::ZeroCells;
use super::{Layer, Poison, Writer, STRIPES};
use crate::lock::FileLock;

/// What a restore point remembers of a layer that was sealed into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SealFacts {
    /// The last sequence number of the layer; 0 when nothing was captured.
    pub(crate) sequence: u64,
    /// Slots in use: the file must reach to the last of them.
    pub(crate) slots: u32,
    /// Records there are, those in zero cells included, modulo 2^32; 0: not known.
    pub(crate) records: u32,
}

/// How a layer is opened for reading.
pub(crate) enum ReadMode<'a> {
    /// It was sealed: it never changes and must be complete.
    Sealed(SealFacts),
    /// It belongs to a session that nobody writes now. The last sequence number is at
    /// least this.
    Idle(u64),
    /// Another process writes it and publishes its block map here.
    Attached(&'a Path),
}

/// Slots a layer may come to use: twice the disk (live and superseded), and
/// room for small disks.
fn max_slots(blocks: u64) -> u32 {
    let wanted = blocks.saturating_mul(2).saturating_add(1 << 20);
    u32::try_from(wanted).unwrap_or(MAX_SLOTS).min(MAX_SLOTS)
}

impl Layer {
    /// Makes the file of an empty layer, durably (the caller syncs the folder).
    pub(crate) fn create(path: &Path, superblock: &Superblock, keys: &LayerKeys) -> Result<()> {
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .context(|| format!("creating the layer {}", path.display()))?;
        let written = file
            .set_len(SUPERBLOCK_AREA_BYTES)
            .and_then(|()| file.write_all_at(&superblock.encode(keys.marks()), 0))
            .and_then(|()| file.sync_all());
        written.context(|| format!("creating the layer {}", path.display()))
    }

    /// Opens the layer for writing, under the session's lock, which it shares. What a
    /// crash left is put in order, which takes time in proportion to the slots
    /// in use. The block map appears at `map_path`.
    pub(crate) fn open_for_writing(
        path: &Path,
        expected: &Superblock,
        keys: LayerKeys,
        map_path: &Path,
        poison: Poison,
        writing: Option<Arc<FileLock>>,
    ) -> Result<Arc<Layer>> {
        let opened = OpenOptions::new().read(true).write(true).open(path);
        let file = opened.context(|| missing(path))?;
        check(&file, path, expected, &keys)?;
        let blocks = expected.disk_size_bytes.div_ceil(BLOCK_SIZE_BYTES);
        let length_bytes = length_of(&file, path)?;
        let segments = segments_in(length_bytes);
        let marks = Marks::read(&file, path, &keys)?;
        marks.check_length(path, segments)?;
        // A crash may have left a part of a segment behind the last whole one.
        file.set_len(segment_offset_bytes(segments)).context(|| "trimming a layer file")?;
        reserve_existing(&file, segments)?;
        let max_slots = max_slots(blocks);
        let windows = Windows::new(&file, max_slots, true)?;
        bump_generation(&windows);
        let generation = windows.head().load64(GENERATION_WORD);
        let mut layer = Layer {
            file: Arc::new(file),
            parked: None,
            path: path.to_owned(),
            keys,
            map: BlockMap::shared(blocks, map_path)?,
            windows,
            writer: None,
            generation,
        };
        let slots = segments * SLOTS_PER_SEGMENT;
        let found = recovery::scan(&layer, slots, Verify::After(marks.floor()))
            .and_then(|found| marks.check_found(&layer, &found).map(|()| found))
            .context(|| format!("opening the layer {}", path.display()))?;
        // The mark must be gone, durably, before a record can make it wrong.
        let file = &layer.file;
        file.write_all_at(&[0; CLOSE_MARK_BYTES], CLOSE_MARK_OFFSET_BYTES as u64)
            .and_then(|()| file.sync_data())
            .context(|| format!("opening the layer {}", path.display()))?;
        recovery::settle(&layer, &found)?;
        let next_sequence = found.highest_sequence + 1;
        layer.writer = Some(Writer {
            gate: RwLock::new(()),
            stripes: (0..STRIPES).map(|_| Mutex::new(())).collect(),
            slots: Slots::new(
                found.free_slots(&layer),
                found.end,
                segments * SLOTS_PER_SEGMENT,
                max_slots,
            ),
            next_sequence: AtomicU64::new(next_sequence),
            durable_sequence: AtomicU64::new(found.highest_sequence),
            covered_sequence: AtomicU64::new(found.highest_sequence),
            highest_recorded: AtomicU64::new(found.highest_believed),
            records: AtomicU32::new(found.records),
            nonces: NoncePrefix::random()?,
            zero_cells: Mutex::new(ZeroCells::none()),
            sync: SyncState::new(),
            poison,
            _writing: writing,
        });
        layer.map.reveal();
        // Readers that came in between look again.
        bump_generation(&layer.windows);
        let layer = Arc::new(layer);
        layer.start_ahead();
        Ok(layer)
    }

    /// Opens the layer for reading.
    ///
    /// Errors: `Corrupt` when a sealed layer is shorter or older than its point says.
    pub(crate) fn open_for_reading(
        path: &Path,
        expected: &Superblock,
        keys: LayerKeys,
        mode: ReadMode<'_>,
    ) -> Result<Arc<Layer>> {
        let file = File::open(path).context(|| missing(path))?;
        check(&file, path, expected, &keys)?;
        let blocks = expected.disk_size_bytes.div_ceil(BLOCK_SIZE_BYTES);
        let length_bytes = length_of(&file, path)?;
        let slots = segments_in(length_bytes) * SLOTS_PER_SEGMENT;
        let windows = Windows::new(&file, max_slots(blocks).max(slots), false)?;
        let generation = windows.head().load64(GENERATION_WORD);
        let map = match mode {
            ReadMode::Attached(map_path) => BlockMap::attach(blocks, map_path)?,
            _ => BlockMap::private(blocks)?,
        };
        let path = path.to_owned();
        let file = Arc::new(file);
        let mut layer =
            Layer { file, parked: None, path, keys, map, windows, writer: None, generation };
        match mode {
            ReadMode::Attached(_) => {}
            ReadMode::Idle(least_sequence) => {
                // Read after the generation: a writer that comes now shows in that.
                let marks = Marks::read(&layer.file, &layer.path, &layer.keys)?;
                let looked = marks
                    .check_length(&layer.path, slots / SLOTS_PER_SEGMENT)
                    .and_then(|()| recovery::scan(&layer, slots, Verify::After(marks.floor())))
                    .and_then(|found| {
                        marks.check_found(&layer, &found)?;
                        layer.check_reaches(found.highest_sequence, least_sequence)
                    });
                if !layer.is_current() {
                    let message = "a writer is opening the layer; try again in a moment";
                    return Err(Error::new(ErrorKind::Busy, message));
                }
                looked?;
            }
            ReadMode::Sealed(facts) => {
                let damaged = |why: &str| {
                    Error::new(
                        ErrorKind::Corrupt,
                        format!("the sealed layer {} {why}", layer.path.display()),
                    )
                };
                if slots < facts.slots {
                    return Err(damaged("is shorter than its restore point says"));
                }
                let found = recovery::scan(&layer, slots.min(facts.slots), Verify::Nothing)?;
                found.check_complete(&layer, facts.sequence, facts.records)?;
                layer.park()?;
            }
        }
        Ok(Arc::new(layer))
    }

    /// What a seal must remember, of a layer that was closed cleanly; `None`
    /// when it was not and has to be opened first.
    pub(crate) fn clean_facts(
        path: &Path,
        expected: &Superblock,
        keys: &LayerKeys,
        least_sequence: u64,
    ) -> Result<Option<SealFacts>> {
        let file = File::open(path).context(|| missing(path))?;
        check(&file, path, expected, keys)?;
        let length_bytes = length_of(&file, path)?;
        let marks = Marks::read(&file, path, keys)?;
        marks.check_length(path, segments_in(length_bytes))?;
        if marks.close.is_some_and(|close| close.sequence < least_sequence) {
            return Err(older(path));
        }
        if length_bytes == SUPERBLOCK_AREA_BYTES && least_sequence == 0 {
            return Ok(Some(SealFacts { sequence: 0, slots: 0, records: 0 }));
        }
        let facts = |CloseMark { sequence, slots, records }| SealFacts { sequence, slots, records };
        Ok(marks.close.map(facts))
    }

    /// Checks that a layer open for writing has come as far as it had when it was closed.
    ///
    /// Errors: `Corrupt` where it is an older version of itself.
    pub(crate) fn check_not_older(&self, least_sequence: u64) -> Result<()> {
        let reached = self.writer()?.highest_recorded.load(Ordering::SeqCst);
        self.check_reaches(reached, least_sequence)
    }

    fn check_reaches(&self, reached: u64, least_sequence: u64) -> Result<()> {
        match reached < least_sequence {
            true => Err(older(&self.path)),
            false => Ok(()),
        }
    }

    /// Flushes and tells what a seal must remember. The caller lets no write in.
    pub(crate) fn seal_facts(&self) -> Result<SealFacts> {
        self.flush()?;
        let writer = self.writer()?;
        let sequence = writer.highest_recorded.load(Ordering::SeqCst);
        let records = writer.records.load(Ordering::SeqCst);
        Ok(SealFacts { sequence, slots: writer.slots.end(), records })
    }

    /// After a seal: no more writes come, and readers in other processes look again.
    pub(crate) fn announce_seal(&self) {
        if let Some(writer) = &self.writer {
            writer.sync.ahead.stop();
        }
        bump_generation(&self.windows);
    }

    /// Has readers of a layer that nobody writes look again at what its session is.
    pub(crate) fn announce_change(path: &Path) {
        let announced = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .context(|| missing(path))
            .and_then(|file| Windows::new(&file, 1, true));
        match announced {
            Ok(windows) => bump_generation(&windows),
            Err(error) => {
                tracing::warn!(layer = %path.display(), error = %error.full_message(), "readers of the session may go on with what it was");
            }
        }
    }

    /// Flushes, gives unused space back and marks the file as cleanly closed.
    fn close(&self) -> Result<()> {
        let facts = self.seal_facts()?;
        let segments = facts.slots.div_ceil(SLOTS_PER_SEGMENT);
        let SealFacts { sequence, slots, records } = facts;
        let mark = CloseMark { sequence, slots, records };
        // No longer than the file will be, before it is shortened.
        let durable = DurableMark { sequence, segments };
        self.file
            .write_all_at(&durable.encode(self.keys.marks()), DURABLE_MARK_OFFSET_BYTES as u64)
            .and_then(|()| self.file.sync_data())
            .context(|| format!("closing the layer {}", self.path.display()))?;
        self.file
            .set_len(segment_offset_bytes(segments))
            .context(|| "giving back a layer's unused space")?;
        self.file
            .write_all_at(&mark.encode(self.keys.marks()), CLOSE_MARK_OFFSET_BYTES as u64)
            .and_then(|()| self.file.sync_data())
            .context(|| format!("closing the layer {}", self.path.display()))
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        let Some(writer) = &self.writer else { return };
        writer.sync.ahead.stop();
        if let Err(error) = self.unpark().and_then(|()| self.close()) {
            // Nothing is lost: the next open recovers what was flushed.
            tracing::warn!(layer = %self.path.display(), error = %error.full_message(), "the layer was not closed cleanly");
        }
        bump_generation(&self.windows);
    }
}

fn missing(path: &Path) -> String {
    format!("the layer file {} cannot be opened", path.display())
}

/// What a layer's last writer left beside the superblock.
struct Marks {
    /// Only of a writer that closed the layer.
    close: Option<CloseMark>,
    durable: DurableMark,
}

impl Marks {
    fn read(file: &File, path: &Path, keys: &LayerKeys) -> Result<Marks> {
        let (mut close, mut durable) = ([0; CLOSE_MARK_BYTES], [0; DURABLE_MARK_BYTES]);
        file.read_exact_at(&mut close, CLOSE_MARK_OFFSET_BYTES as u64)
            .and_then(|()| file.read_exact_at(&mut durable, DURABLE_MARK_OFFSET_BYTES as u64))
            .map_err(|error| truncated(path, error))?;
        Ok(Marks {
            close: CloseMark::decode(&close, keys.marks()),
            durable: DurableMark::decode(&durable, keys.marks()).unwrap_or_default(),
        })
    }

    /// The last sequence number that is known to be durable.
    fn floor(&self) -> u64 {
        self.close.map_or(self.durable.sequence, |close| close.sequence)
    }

    fn check_length(&self, path: &Path, segments: u32) -> Result<()> {
        let wanted = match self.close {
            Some(close) => close.slots.div_ceil(SLOTS_PER_SEGMENT),
            None => self.durable.segments,
        };
        match segments < wanted {
            false => Ok(()),
            true => Err(Error::new(
                ErrorKind::Corrupt,
                format!("the layer {} is shorter than it was", path.display()),
            )),
        }
    }

    fn check_found(&self, layer: &Layer, found: &recovery::Found) -> Result<()> {
        match self.close {
            Some(close) => found.check_complete(layer, close.sequence, close.records),
            None => Ok(()),
        }
    }
}

fn older(path: &Path) -> Error {
    let message = format!("the layer {} is an older version of itself", path.display());
    Error::new(ErrorKind::Corrupt, message)
}

fn length_of(file: &File, path: &Path) -> Result<u64> {
    Ok(file.metadata().context(|| format!("reading the size of {}", path.display()))?.len())
}

/// What a read that ends too early says of a layer; one that the drive fails says nothing.
fn truncated(path: &Path, error: std::io::Error) -> Error {
    if error.kind() != std::io::ErrorKind::UnexpectedEof {
        return Error::io(format!("reading {}", path.display()), error);
    }
    let message = format!("the layer {} is truncated", path.display());
    Error::with_source(ErrorKind::Corrupt, message, error)
}

/// Checks the superblock against what the session says.
fn check(file: &File, path: &Path, expected: &Superblock, keys: &LayerKeys) -> Result<()> {
    let mut head = [0; SUPERBLOCK_BYTES];
    file.read_exact_at(&mut head, 0).map_err(|error| truncated(path, error))?;
    let length_bytes = length_of(file, path)?;
    if length_bytes < SUPERBLOCK_AREA_BYTES {
        let message = format!("the layer {} is truncated", path.display());
        return Err(Error::new(ErrorKind::Corrupt, message));
    }
    let found = Superblock::decode(&head, keys.marks())
        .context(|| format!("reading the layer {}", path.display()))?;
    if found != *expected || found.disk_size_bytes > MAX_DISK_SIZE_BYTES {
        return Err(Error::new(
            ErrorKind::Corrupt,
            format!("{} is the layer of another disk", path.display()),
        ));
    }
    Ok(())
}

fn bump_generation(windows: &Windows) {
    let next = windows.head().load64(GENERATION_WORD).wrapping_add(1);
    windows.head().store64(GENERATION_WORD, next);
}
