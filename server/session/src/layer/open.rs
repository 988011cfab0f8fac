//! Creating, opening and closing a layer file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result, BLOCK_SIZE_BYTES, MAX_DISK_SIZE_BYTES};
use parking_lot::{Mutex, RwLock};

use super::format::{
    segment_offset_bytes, segments_in, Superblock, GENERATION_WORD, MAX_SLOTS, PRIVATE_MAP_WORD,
    SLOTS_PER_SEGMENT, SUPERBLOCK_AREA_BYTES, SUPERBLOCK_BYTES,
};
use super::keys::{LayerKeys, NoncePrefix};
use super::map::BlockMap;
use super::mark::{empty_head, Mark, SealFacts};
use super::recovery::{self, Known};
use super::slots::{reserve_existing, Slots};
use super::sync::{Marking, SyncState};
use super::windows::Windows;
use super::write::OpenCells;
use super::{Layer, LayerFile, Poison, Writer, STRIPES};
use crate::lock::FileLock;
use crate::mapping::SharedWords;

/// How a layer is opened for reading.
pub(crate) enum ReadMode<'a> {
    /// It was sealed: it never changes and must be complete.
    Sealed(SealFacts),
    /// It belongs to a session that nobody writes now. The last sequence number is at
    /// least this.
    Idle(u64),
    /// Another process writes it and publishes its block map here.
    Attached(&'a Path),
    /// Another process writes the session, and perhaps this layer.
    PerhapsAttached(&'a Path),
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
            .and_then(|()| file.write_all_at(&empty_head(superblock, keys.marks()), 0))
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
        let mut mark = Mark::read(&file, path, keys.marks())?;
        check_length(path, segments, &mark.facts)?;
        // A crash may have left a part of a segment behind the last whole one.
        file.set_len(segment_offset_bytes(segments)).context(|| "trimming a layer file")?;
        reserve_existing(&file, segments)?;
        let max_slots = max_slots(blocks);
        let windows = Windows::new(&file, max_slots, true)?;
        windows.head().store64(PRIVATE_MAP_WORD, 0);
        bump_generation(windows.head());
        let generation = windows.head().load64(GENERATION_WORD);
        let map = BlockMap::shared(blocks, map_path, Arc::clone(windows.head()))?;
        let (file, path) = (Arc::new(file), path.to_owned());
        let mut layer =
            LayerFile { file, parked: None, path, keys, map, windows, writer: None, generation };
        let slots = segments * SLOTS_PER_SEGMENT;
        let what = |layer: &LayerFile| format!("opening the layer {}", layer.path.display());
        let known = Known { facts: mark.facts, is_whole: mark.is_closed };
        let found = recovery::scan(&layer, slots, &known).context(|| what(&layer))?;
        let nonces = NoncePrefix::random()?;
        let facts = recovery::settle(&layer, &found, &nonces)?;
        // The closed mark must be gone, durably, before a write can make it wrong. The other
        // one goes, too; the next sync makes that durable.
        let key = layer.keys.marks();
        mark.write_next(&layer.file, key, facts, false)
            .and_then(|()| layer.file.sync_data())
            .and_then(|()| mark.write_next(&layer.file, key, facts, false))
            .context(|| what(&layer))?;
        layer.writer = Some(Writer {
            gate: RwLock::new(()),
            stripes: (0..STRIPES).map(|_| Mutex::new(())).collect(),
            slots: Slots::new(found.free_slots(&layer), facts.slots, slots, max_slots),
            next_sequence: AtomicU64::new(facts.sequence + 1),
            durable_sequence: AtomicU64::new(facts.sequence),
            covered_sequence: AtomicU64::new(facts.sequence),
            highest_recorded: AtomicU64::new(facts.sequence),
            cells: AtomicU32::new(facts.cells),
            nonces,
            open_cells: Mutex::new(OpenCells::none()),
            sync: SyncState::new(Marking::new(mark)),
            poison,
            _writing: writing,
        });
        layer.map.reveal();
        // Readers that came in between look again.
        bump_generation(layer.windows.head());
        let file = Arc::new(layer);
        Ok(Arc::new(Layer { ahead: LayerFile::start_ahead(&file), file }))
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
        let mode = match mode {
            ReadMode::PerhapsAttached(map_path) if map_path.exists() => {
                ReadMode::Attached(map_path)
            }
            ReadMode::PerhapsAttached(_) => {
                check_shared_map(&windows, path)?;
                ReadMode::Idle(0)
            }
            mode => mode,
        };
        let map = match mode {
            ReadMode::Attached(map_path) => {
                // Looked at first: a writer that gives its map up says so before the map goes.
                let attached = BlockMap::attach(blocks, map_path);
                check_shared_map(&windows, path)?;
                attached?
            }
            _ => BlockMap::private(blocks)?,
        };
        let path = path.to_owned();
        let file = Arc::new(file);
        let mut layer =
            LayerFile { file, parked: None, path, keys, map, windows, writer: None, generation };
        match mode {
            ReadMode::Attached(_) | ReadMode::PerhapsAttached(_) => {}
            ReadMode::Idle(least_sequence) => {
                // Read after the generation: a writer that comes now shows in that.
                let looked = layer.look(slots, least_sequence);
                if !layer.is_current() {
                    let message = "a writer is opening the layer; try again in a moment";
                    return Err(Error::new(ErrorKind::Busy, message));
                }
                looked?;
            }
            ReadMode::Sealed(facts) => {
                check_length(&layer.path, slots / SLOTS_PER_SEGMENT, &facts)?;
                let known = Known { facts, is_whole: true };
                recovery::scan(&layer, facts.slots, &known)?;
                layer.park(facts.slots)?;
            }
        }
        Ok(Arc::new(Layer { file: Arc::new(layer), ahead: None }))
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
        let mark = Mark::read(&file, path, keys.marks())?;
        check_length(path, segments_in(length_of(&file, path)?), &mark.facts)?;
        if mark.is_closed && mark.facts.sequence < least_sequence {
            return Err(older(path));
        }
        Ok(mark.is_closed.then_some(mark.facts))
    }

    /// Has readers of a layer that nobody writes look again at what its session is.
    pub(crate) fn announce_change(path: &Path) {
        change_head(path, bump_generation);
    }

    /// A writer was killed that had the layer's block map to itself.
    pub(crate) fn forget_private_map(path: &Path) {
        change_head(path, |head| {
            if head.load64(PRIVATE_MAP_WORD) != 0 {
                head.store64(PRIVATE_MAP_WORD, 0);
            }
        });
    }
}

impl LayerFile {
    /// Fills the map of a layer that nobody writes.
    fn look(&self, slots: u32, least_sequence: u64) -> Result<()> {
        let mark = Mark::read(&self.file, &self.path, self.keys.marks())?;
        check_length(&self.path, slots / SLOTS_PER_SEGMENT, &mark.facts)?;
        let known = Known { facts: mark.facts, is_whole: mark.is_closed };
        let found = recovery::scan(self, slots, &known)?;
        self.check_reaches(found.highest_sequence, least_sequence)
    }

    /// Checks that a layer open for writing has come as far as it had when it was closed.
    ///
    /// Errors: `Corrupt` where it is an older version of itself.
    pub(crate) fn check_not_older(&self, least_sequence: u64) -> Result<()> {
        let reached = self.writer()?.highest_recorded.load(Ordering::SeqCst);
        self.check_reaches(reached, least_sequence)
    }

    fn check_reaches(&self, reached: u64, least_sequence: u64) -> Result<()> {
        if reached < least_sequence {
            return Err(older(&self.path));
        }
        Ok(())
    }

    /// Flushes and tells what a seal must remember. The caller lets no write in.
    pub(crate) fn seal_facts(&self) -> Result<SealFacts> {
        self.flush()?;
        Ok(self.writer()?.facts())
    }

    /// After a seal: no more writes come, and readers in other processes look again.
    pub(crate) fn announce_seal(&self) {
        if let Some(writer) = &self.writer {
            writer.sync.ahead.stop();
        }
        bump_generation(self.windows.head());
    }

    /// Flushes, gives unused space back and marks the file as closed.
    fn close(&self) -> Result<()> {
        let facts = self.seal_facts()?;
        // Never below what a mark says: readers look no further.
        self.file
            .set_len(segment_offset_bytes(facts.slots.div_ceil(SLOTS_PER_SEGMENT)))
            .context(|| "giving back a layer's unused space")?;
        self.mark_closed(facts).context(|| format!("closing the layer {}", self.path.display()))
    }
}

impl Writer {
    /// Holds while no write is half done.
    pub(super) fn facts(&self) -> SealFacts {
        SealFacts {
            sequence: self.highest_recorded.load(Ordering::SeqCst),
            slots: self.slots.end(),
            cells: self.cells.load(Ordering::SeqCst),
        }
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        if self.file.writer.is_none() {
            return;
        }
        self.join_ahead();
        if let Err(error) = self.unpark().and_then(|()| self.file.close()) {
            // Nothing is lost: the next open recovers what was flushed.
            tracing::warn!(layer = %self.path.display(), error = %error.full_message(), "the layer was not closed cleanly");
        }
        self.windows.head().store64(PRIVATE_MAP_WORD, 0);
        bump_generation(self.windows.head());
    }
}

fn missing(path: &Path) -> String {
    format!("the layer file {} cannot be opened", path.display())
}

fn check_length(path: &Path, segments: u32, facts: &SealFacts) -> Result<()> {
    if segments < facts.slots.div_ceil(SLOTS_PER_SEGMENT) {
        let message = format!("the layer {} is shorter than it was", path.display());
        return Err(Error::new(ErrorKind::Corrupt, message));
    }
    Ok(())
}

/// Checks that the process that writes the layer lets others see its block map.
///
/// Errors: `NoSpace` where it could not.
pub(super) fn check_shared_map(windows: &Windows, path: &Path) -> Result<()> {
    if windows.head().load64(PRIVATE_MAP_WORD) == 0 {
        return Ok(());
    }
    let message = format!(
        "the layer {} can be read only through the process that writes it: there was no room in \
         /dev/shm for its block map. Make /dev/shm larger, then restart that process",
        path.display()
    );
    Err(Error::new(ErrorKind::NoSpace, message))
}

fn change_head(path: &Path, change: impl FnOnce(&SharedWords)) {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    match opened.context(|| missing(path)).and_then(|file| Windows::new(&file, 1, true)) {
        Ok(windows) => change(windows.head()),
        Err(error) => {
            tracing::warn!(layer = %path.display(), error = %error.full_message(), "readers of the session may go on with what it was");
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
pub(super) fn truncated(path: &Path, error: std::io::Error) -> Error {
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

/// Has readers in other processes open the layer again.
pub(super) fn bump_generation(head: &SharedWords) {
    let next = head.load64(GENERATION_WORD).wrapping_add(1);
    head.store64(GENERATION_WORD, next);
}
