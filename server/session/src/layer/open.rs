//! Creating, opening and closing a layer file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use coldrise_block::{BLOCK_SIZE_BYTES, Context, Error, ErrorKind, MAX_DISK_SIZE_BYTES, Result};
use parking_lot::{Mutex, RwLock};

use super::format::{
    GENERATION_WORD, MAX_SLOTS, PRIVATE_MAP_WORD, SLOTS_PER_SEGMENT, SUPERBLOCK_AREA_BYTES,
    SUPERBLOCK_BYTES, Superblock, segment_offset_bytes, segments_in,
};
use super::keys::{LayerKeys, NoncePrefix};
use super::map::BlockMap;
use super::mark::{Mark, SealFacts, empty_head};
use super::recovery::{self, RecoveryFacts};
use super::slots::{Slots, reserve_existing};
use super::sync::{Marking, SyncState};
use super::windows::Windows;
use super::write::OpenCells;
use super::{Layer, LayerFile, Poison, STRIPES, Writer};
use crate::layer::mapping::SharedWords;
use crate::locks::file_lock::FileLock;

/// Number of looks at an unreadable mark: its writer may be writing it.
const MARK_LOOKS: u32 = 3;

/// How a layer is opened for reading.
pub(crate) enum ReadMode<'a> {
    /// The layer was sealed: it never changes and must be complete. Only writes up to this sequence
    /// number count.
    Sealed(SealFacts, u64),
    /// The layer belongs to a session that no process writes now. The last sequence number is at
    /// least this.
    Idle(u64),
    /// Another process writes the layer and publishes its block map here.
    Attached(&'a Path),
    /// Another process writes the session, and perhaps this layer.
    PerhapsAttached(&'a Path),
}

/// Maximum number of slots of a layer: four times the disk (live, superseded, and twice as many that
/// only time marks need), and room for small disks.
fn max_slots(blocks: u64) -> u32 {
    let wanted = blocks.saturating_mul(4).saturating_add(1 << 20);
    u32::try_from(wanted).unwrap_or(MAX_SLOTS).min(MAX_SLOTS)
}

impl Layer {
    /// Creates the file of an empty layer, durably (the caller syncs the folder). Returns its lock.
    pub(crate) fn create(
        path: &Path,
        superblock: &Superblock,
        keys: &LayerKeys,
    ) -> Result<Option<FileLock>> {
        let what = || format!("creating the layer {}", path.display());
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(path).context(what)?;
        // Before the sync, which takes the longest.
        let lock = FileLock::of_file(file.try_clone().context(what)?, path)?;
        file.set_len(SUPERBLOCK_AREA_BYTES)
            .and_then(|()| file.write_all_at(&empty_head(superblock, keys.marks()), 0))
            .and_then(|()| file.sync_all())
            .context(what)?;
        Ok(lock)
    }

    /// Opens the layer for writing, under the session's lock, which it shares. First recovers the
    /// layer after a crash; this takes time in proportion to the used slots. The block map appears
    /// at `map_path`.
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
        // A crash may have left a part of a segment after the last whole one.
        let trimmed = file.set_len(segment_offset_bytes(segments));
        trimmed.context(|| format!("trimming {}", path.display()))?;
        reserve_existing(&file, segments)?;
        let max_slots = max_slots(blocks);
        let windows = Windows::new(&file, max_slots, true)?;
        windows.head().store64(PRIVATE_MAP_WORD, 0);
        bump_generation(windows.head());
        let generation = windows.head().load64(GENERATION_WORD);
        let map = BlockMap::shared(blocks, map_path, Arc::clone(windows.head()))?;
        let (file, path) = (Arc::new(file), path.to_owned());
        let mut layer = LayerFile {
            file,
            unopened: None,
            path,
            keys,
            map,
            windows,
            writer: None,
            generation,
            marks: Vec::new(),
        };
        let slots = segments * SLOTS_PER_SEGMENT;
        let what = |layer: &LayerFile| format!("opening the layer {}", layer.path.display());
        let known = RecoveryFacts { rebuilds_history: true, ..RecoveryFacts::of_mark(&mark) };
        let mut found = recovery::scan(&layer, slots, &known).context(|| what(&layer))?;
        let nonces = NoncePrefix::random()?;
        let facts = recovery::finish_interrupted(&layer, &found, &nonces)?;
        // A mark must not claim records that a failed access lost.
        layer.check_mapping()?;
        // The closed mark must be replaced, durably, before a write can make it wrong. The other
        // mark is replaced, too; the next sync makes that durable.
        let key = layer.keys.marks();
        if mark.history_from == 0 {
            mark.history_from = facts.sequence + 1;
        }
        mark.write_next(&layer.file, key, facts, false)
            .and_then(|()| layer.file.sync_data())
            .and_then(|()| mark.write_next(&layer.file, key, facts, false))
            .context(|| what(&layer))?;
        let history = found.history(&layer, facts.sequence);
        layer.writer = Some(Writer {
            gate: RwLock::new(()),
            stripes: (0..STRIPES).map(|_| Mutex::new(())).collect(),
            slots: Slots::new(found.free_slots(&layer, &history), facts.slots, slots, max_slots),
            next_sequence: AtomicU64::new(facts.sequence + 1),
            durable_sequence: AtomicU64::new(facts.sequence),
            covered_sequence: AtomicU64::new(facts.sequence),
            highest_recorded: AtomicU64::new(facts.sequence),
            cells: AtomicU32::new(facts.cells),
            nonces,
            open_cells: Mutex::new(OpenCells::none()),
            history,
            sync: SyncState::new(Marking::new(mark)),
            poison,
            _writing: writing,
        });
        layer.map.reveal();
        // Readers that opened the layer in between must check it again.
        bump_generation(layer.windows.head());
        let file = Arc::new(layer);
        Ok(Arc::new(Layer { ahead: LayerFile::start_ahead(&file), file }))
    }

    /// Opens the layer for reading.
    ///
    /// Errors: `Corrupt` if a sealed layer is shorter or older than its point says.
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
                // Attach first: a writer that ends the sharing of its map records that before it removes
                // the map.
                let attached = BlockMap::attach(blocks, map_path);
                check_shared_map(&windows, path)?;
                attached?
            }
            _ => BlockMap::private(blocks)?,
        };
        let path = path.to_owned();
        let file = Arc::new(file);
        let mut layer = LayerFile {
            file,
            unopened: None,
            path,
            keys,
            map,
            windows,
            writer: None,
            generation,
            marks: Vec::new(),
        };
        match mode {
            ReadMode::Attached(_) | ReadMode::PerhapsAttached(_) => {}
            ReadMode::Idle(least_sequence) => {
                // The generation was read before this: it reveals a writer that opens the layer
                // now.
                let looked = layer.look(slots, least_sequence);
                if !layer.is_current() {
                    let message = "a writer is opening the layer; try again in a moment";
                    return Err(Error::new(ErrorKind::Busy, message));
                }
                looked?;
            }
            ReadMode::Sealed(facts, as_of) => {
                check_length(&layer.path, slots / SLOTS_PER_SEGMENT, &facts)?;
                let mark = Mark::read(&layer.file, &layer.path, layer.keys.marks());
                // Without the mark the content is the same, but its history is unknown.
                let history_from = mark.map_or(0, |mark| mark.history_from);
                let known = RecoveryFacts {
                    is_whole: true,
                    history_from,
                    as_of,
                    ..RecoveryFacts::of_mark(&Mark { facts, ..Mark::default() })
                };
                let found = recovery::scan(&layer, facts.slots, &known)?;
                layer.marks = found.marks.into_iter().filter(|m| m.sequence <= as_of).collect();
                layer.close_until_read(facts.slots)?;
            }
        }
        Ok(Arc::new(Layer { file: Arc::new(layer), ahead: None }))
    }

    /// The facts that a seal stores about a cleanly closed layer; `None` if it was not closed
    /// cleanly and must be opened first.
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

    /// Checks that the file of a sealed layer exists, belongs to this disk and is not shorter than
    /// `slots` slots. Reads neither records nor blocks.
    ///
    /// Errors: `NotFound`; `Corrupt`.
    pub(crate) fn check_sealed(
        path: &Path,
        expected: &Superblock,
        keys: &LayerKeys,
        slots: u32,
    ) -> Result<()> {
        let file = File::open(path).context(|| missing(path))?;
        check(&file, path, expected, keys)?;
        let facts = SealFacts { slots, ..SealFacts::default() };
        check_length(path, segments_in(length_of(&file, path)?), &facts)
    }

    /// Describes the damage of one of the two marks; `None` if both are sound, or if neither is
    /// readable: then the open of the layer reports it.
    pub(crate) fn damaged_mark(path: &Path, keys: &LayerKeys) -> Option<String> {
        let file = File::open(path).ok()?;
        let mut offset_bytes = None;
        for _ in 0..MARK_LOOKS {
            offset_bytes = Some(Mark::damaged(&file, keys.marks()).ok()??);
        }
        let offset_bytes = offset_bytes?;
        Some(format!("the mark at byte {offset_bytes} of {} is damaged", path.display()))
    }

    /// Makes readers of a layer that no process writes check its session again.
    pub(crate) fn announce_change(path: &Path) {
        change_head(path, bump_generation);
    }

    /// Clears the private-map word of a layer whose writer was killed.
    pub(crate) fn forget_private_map(path: &Path) {
        change_head(path, |head| {
            if head.load64(PRIVATE_MAP_WORD) != 0 {
                head.store64(PRIVATE_MAP_WORD, 0);
            }
        });
    }
}

impl LayerFile {
    /// The same file, open for reading, with an empty map.
    pub(super) fn reopened(&self, keys: LayerKeys) -> Result<LayerFile> {
        let file = File::open(&self.path).context(|| missing(&self.path))?;
        let slots = segments_in(length_of(&file, &self.path)?) * SLOTS_PER_SEGMENT;
        Ok(LayerFile {
            windows: Windows::new(&file, max_slots(self.blocks()).max(slots), false)?,
            file: Arc::new(file),
            unopened: None,
            path: self.path.clone(),
            keys,
            map: BlockMap::private(self.blocks())?,
            writer: None,
            generation: self.generation,
            marks: Vec::new(),
        })
    }

    /// Fills the map of a layer that no process writes.
    fn look(&mut self, slots: u32, least_sequence: u64) -> Result<()> {
        let mark = Mark::read(&self.file, &self.path, self.keys.marks())?;
        check_length(&self.path, slots / SLOTS_PER_SEGMENT, &mark.facts)?;
        let found = recovery::scan(self, slots, &RecoveryFacts::of_mark(&mark))?;
        self.marks = found.marks;
        self.check_reaches(found.highest_sequence, least_sequence)
    }

    /// Checks that a layer open for writing reaches the sequence number of its last close.
    ///
    /// Errors: `Corrupt` if it is an older version of itself.
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

    /// Limits the bytes of blocks that the layer captures. Call it after the opening.
    pub(crate) fn bound(&self, bytes: u64) {
        if let Some(writer) = &self.writer {
            writer.slots.bound(u32::try_from(bytes / BLOCK_SIZE_BYTES).unwrap_or(MAX_SLOTS));
        }
    }

    /// Flushes, and returns the facts that a seal stores. The caller keeps writes out.
    pub(crate) fn seal_facts(&self) -> Result<SealFacts> {
        self.flush()?;
        Ok(self.writer()?.facts())
    }

    /// Whether no block was ever captured, if this process writes the layer.
    pub(crate) fn is_unwritten(&self) -> bool {
        self.writer().is_ok_and(|writer| writer.facts().sequence == 0)
    }

    /// After a seal: no more writes come, and readers in other processes must check the session
    /// again.
    pub(crate) fn announce_seal(&self) {
        if let Some(writer) = &self.writer {
            writer.sync.ahead.stop();
        }
        bump_generation(self.windows.head());
    }

    /// Makes readers in other processes open the session again: its lower layers were replaced.
    pub(crate) fn announce_rebase(&self) {
        bump_generation(self.windows.head());
    }

    /// Flushes, gives unused space back and marks the file as closed.
    fn close(&self) -> Result<()> {
        let facts = self.seal_facts()?;
        self.give_back_unused(facts.slots)?;
        self.mark_closed(facts).context(|| format!("closing the layer {}", self.path.display()))
    }

    /// Truncates the file after its first `slots` slots. Never below the slots of a mark: readers
    /// look no further.
    pub(super) fn give_back_unused(&self, slots: u32) -> Result<()> {
        self.file
            .set_len(segment_offset_bytes(slots.div_ceil(SLOTS_PER_SEGMENT)))
            .context(|| format!("giving back unused space of {}", self.path.display()))
    }
}

impl Writer {
    /// These facts are valid while no write is unfinished.
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
        let closed = if self.is_unopened() { Ok(()) } else { self.file.close() };
        if let Err(error) = closed {
            // Nothing is lost: the next open recovers all flushed writes.
            tracing::warn!(layer = %self.path.display(), error = %error.full_message(), "the layer was not closed cleanly");
        }
        self.windows.head().store64(PRIVATE_MAP_WORD, 0);
        bump_generation(self.windows.head());
    }
}

/// The error of a layer that a document or an open disk needs: a missing file is damage.
pub(crate) fn layer_damage(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::Corrupt => error.with_kind(ErrorKind::Corrupt).advise(
            "run coldrise verify to see what it affects, and put the file back from a copy of the \
             repository",
        ),
        _ => error,
    }
}

pub(super) fn missing(path: &Path) -> String {
    format!("the layer file {} cannot be opened", path.display())
}

pub(super) fn check_length(path: &Path, segments: u32, facts: &SealFacts) -> Result<()> {
    if segments < facts.slots.div_ceil(SLOTS_PER_SEGMENT) {
        let message = format!(
            "the layer {} is shorter than it was: did another program truncate it?",
            path.display()
        );
        return Err(Error::new(ErrorKind::Corrupt, message));
    }
    Ok(())
}

/// Checks that the process that writes the layer shares its block map.
///
/// Errors: `NoSpace` if it has no room for that.
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
            tracing::warn!(layer = %path.display(), error = %error.full_message(), "readers of the session may keep seeing its earlier state");
        }
    }
}

fn older(path: &Path) -> Error {
    let message = format!("the layer {} is an older version of itself", path.display());
    Error::new(ErrorKind::Corrupt, message)
}

pub(super) fn length_of(file: &File, path: &Path) -> Result<u64> {
    Ok(file.metadata().context(|| format!("reading the size of {}", path.display()))?.len())
}

/// Turns a read that ended too early into damage of the layer. A read error of the drive says
/// nothing about the layer.
pub(super) fn truncated(path: &Path, error: std::io::Error) -> Error {
    if error.kind() != std::io::ErrorKind::UnexpectedEof {
        return Error::io(format!("reading {}", path.display()), error);
    }
    let message = format!("the layer {} is truncated", path.display());
    Error::with_source(ErrorKind::Corrupt, message, error)
}

/// Checks the superblock against the session's document.
pub(super) fn check(
    file: &File,
    path: &Path,
    expected: &Superblock,
    keys: &LayerKeys,
) -> Result<()> {
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

/// Makes readers in other processes open the layer again.
pub(super) fn bump_generation(head: &SharedWords) {
    let next = head.load64(GENERATION_WORD).wrapping_add(1);
    head.store64(GENERATION_WORD, next);
}
