//! Files that are open: one export for all who have the same file open.

use super::node::NodeKey;
use super::seek;
use crate::Export;
use coldrise_block::{check_range, Disk, Error, ErrorKind, Extent, ExtentKind, Result};
use coldrise_block::{Context, StoredRanges};
use coldrise_store::Configuration;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What a file is opened for. Who only reads a session's file does not keep
/// another process from writing the session, so both are kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Intent {
    Read,
    Write,
}

/// An open file. The export behind it, with its lease and its session, stays open
/// until the last who shares it lets go.
pub struct OpenFile {
    export: Export,
    path: Arc<str>,
    /// Something was written since the last flush.
    is_dirty: AtomicBool,
    /// When something was written last, in milliseconds since 1970; 0: never.
    written_at_ms: AtomicU64,
}

impl OpenFile {
    /// A file that shows an export.
    pub fn new(path: &str, export: Export) -> OpenFile {
        OpenFile {
            export,
            path: Arc::from(path),
            is_dirty: AtomicBool::new(false),
            written_at_ms: AtomicU64::new(0),
        }
    }

    pub(super) fn text(path: &str, configuration: &Configuration) -> Result<Arc<OpenFile>> {
        OpenFile::bytes(path, configuration.text.clone().into_bytes())
    }

    /// A file of these bytes, read-only.
    pub(super) fn bytes(path: &str, bytes: Vec<u8>) -> Result<Arc<OpenFile>> {
        let text = Arc::new(Text(bytes));
        Ok(Arc::new(OpenFile::new(path, Export::of_disk(path, "", text))))
    }

    /// Its address in the tree.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its size; those of a session's VMDK descriptor and of clients' files change.
    pub fn size_bytes(&self) -> u64 {
        self.export.disk().size_bytes()
    }

    /// Fills `buffer` from `offset_bytes` on, up to the file's end; returns how many
    /// bytes it has filled.
    pub fn read(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<usize> {
        self.read_by(buffer, offset_bytes, |disk, part| disk.read_at(part, offset_bytes))
    }

    /// The same from what is in memory; `ErrorKind::WouldWait` where that is not all of it.
    pub fn read_in_memory(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<usize> {
        self.read_by(buffer, offset_bytes, |disk, part| disk.read_in_memory(part, offset_bytes))
    }

    fn read_by(
        &self,
        buffer: &mut [u8],
        offset_bytes: u64,
        read: impl FnOnce(&dyn Disk, &mut [u8]) -> Result<()>,
    ) -> Result<usize> {
        self.export.check()?;
        let disk = self.export.disk();
        let left = disk.size_bytes().saturating_sub(offset_bytes);
        let length = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
        if length > 0 {
            read(disk, &mut buffer[..length])?;
        }
        Ok(length)
    }

    /// Writes; durable after the next [`OpenFile::flush`]. `ErrorKind::OutOfRange`
    /// behind the end of what cannot grow.
    pub fn write(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        self.export.check()?;
        self.touch_after(self.export.disk().write_at(bytes, offset_bytes))
    }

    /// Makes a range read as zeroes and gives its space back. What of it is behind
    /// the file's end is left out, as where a hole is punched.
    pub fn punch_hole(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.export.check()?;
        let disk = self.export.disk();
        let left = disk.size_bytes().saturating_sub(offset_bytes);
        let length = length_bytes.min(left);
        if length == 0 {
            return Ok(());
        }
        // Not a trim: that leaves what is no whole block as it is, and who punches
        // a hole may count on its zeroes.
        self.touch_after(disk.write_zeroes(offset_bytes, length))
    }

    /// Makes a file longer or shorter; see [`Export::set_size_bytes`].
    pub fn set_size_bytes(&self, size_bytes: u64) -> Result<()> {
        self.export.check()?;
        if size_bytes == self.size_bytes() {
            return self.export.set_size_bytes(size_bytes);
        }
        self.touch_after(self.export.set_size_bytes(size_bytes))
    }

    /// Makes durable what was written to the session, whoever wrote it.
    pub fn flush(&self) -> Result<()> {
        self.export.check()?;
        self.is_dirty.swap(false, Ordering::AcqRel);
        self.export.disk().flush().inspect_err(|_| self.is_dirty.store(true, Ordering::Release))
    }

    /// Flushes if anything was written since the last flush of this file.
    pub fn flush_if_written(&self) -> Result<()> {
        if self.is_dirty.load(Ordering::Acquire) {
            self.flush()?;
        }
        Ok(())
    }

    /// The first stored byte from an offset on, as SEEK_DATA finds it; `None` where
    /// only zeroes follow. `ErrorKind::OutOfRange` behind the end.
    pub fn next_stored(&self, offset_bytes: u64) -> Result<Option<u64>> {
        self.export.check()?;
        seek::next_stored(self.export.disk(), offset_bytes)
    }

    /// The next hole from an offset on, as SEEK_HOLE finds it: the file's end where
    /// there is none. `ErrorKind::OutOfRange` behind the end.
    pub fn next_hole(&self, offset_bytes: u64) -> Result<u64> {
        self.export.check()?;
        seek::next_hole(self.export.disk(), offset_bytes)
    }

    /// True once a failure has stopped its session: what was written and not flushed
    /// may be lost.
    pub fn has_stopped(&self) -> bool {
        self.export.has_stopped()
    }

    pub(super) fn export(&self) -> &Export {
        &self.export
    }

    /// Stops the file for good, after a defect; see [`Export::poison`].
    pub fn poison(&self) {
        self.export.poison();
    }

    /// Bytes that are stored, in steps of what the disk tells apart. All extents
    /// are walked; no data is read.
    pub(super) fn stored_bytes(&self) -> Result<u64> {
        self.export.check()?;
        sum_stored(self.export.disk())
    }

    /// When something was written last through this file, if ever.
    pub fn written_at(&self) -> Option<SystemTime> {
        let at_ms = Some(self.written_at_ms()).filter(|at_ms| *at_ms > 0)?;
        Some(UNIX_EPOCH + Duration::from_millis(at_ms))
    }

    pub(super) fn written_at_ms(&self) -> u64 {
        self.written_at_ms.load(Ordering::Relaxed)
    }

    /// Only what has completed is covered by a flush, so a write is noted behind
    /// its end: a flush that began before does not count for it.
    fn touch_after<T>(&self, result: Result<T>) -> Result<T> {
        self.is_dirty.store(true, Ordering::Release);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        self.written_at_ms.store(now_ms, Ordering::Relaxed);
        result
    }
}

/// Bytes that a disk or file stores. Its extents are walked; no data is read.
pub(super) fn sum_stored(disk: &dyn Disk) -> Result<u64> {
    let mut ranges = StoredRanges::of(disk);
    let stored = (&mut ranges).map(|range| range.end - range.start).sum();
    ranges.end()?;
    Ok(stored)
}

/// Every open file, as long as anybody has it open.
#[derive(Default)]
pub(super) struct OpenFiles {
    slots: Mutex<Slots>,
}

type Slot = Arc<Mutex<Weak<OpenFile>>>;

#[derive(Default)]
struct Slots {
    by_key: HashMap<(NodeKey, Intent), Slot>,
    /// Slots that are tolerated before those nobody uses are removed.
    tolerated: usize,
}

/// Unused slots are looked for at the earliest when there are so many.
const FEW_SLOTS: usize = 64;

impl OpenFiles {
    /// The file, open already or opened now. Who wants the same file meanwhile
    /// waits; other files are opened at the same time.
    pub(super) fn open(
        &self,
        key: &NodeKey,
        path: &str,
        intent: Intent,
        open: impl FnOnce() -> Result<Export>,
    ) -> Result<Arc<OpenFile>> {
        let slot = self.slots.lock().slot(key, intent);
        let mut file = slot.lock();
        // After a defect a new export is a new chance, where there is one.
        if let Some(open) = file.upgrade().filter(|file| file.export.check().is_ok()) {
            return Ok(open);
        }
        let opened = Arc::new(OpenFile::new(path, open()?));
        *file = Arc::downgrade(&opened);
        Ok(opened)
    }

    /// The file, if anybody has it open; for writing rather than for reading.
    pub(super) fn find(&self, key: &NodeKey) -> Option<Arc<OpenFile>> {
        [Intent::Write, Intent::Read].into_iter().find_map(|intent| {
            let slot = self.slots.lock().by_key.get(&(key.clone(), intent)).map(Arc::clone)?;
            // Who opens it now holds the slot, perhaps for long.
            let file = slot.try_lock()?.upgrade();
            file
        })
    }

    pub(super) fn paths(&self) -> Vec<String> {
        let mut paths: Vec<_> = self.all().iter().map(|file| file.path().to_owned()).collect();
        paths.sort_unstable();
        paths.dedup();
        paths
    }

    pub(super) fn flush_all(&self) -> Result<()> {
        let mut result = Ok(());
        for file in self.all() {
            let flushed = file.flush_if_written().context(|| file.path().to_owned());
            result = result.and(flushed);
        }
        result
    }

    fn all(&self) -> Vec<Arc<OpenFile>> {
        let slots: Vec<Slot> = self.slots.lock().by_key.values().map(Arc::clone).collect();
        slots.iter().filter_map(|slot| slot.lock().upgrade()).collect()
    }
}

impl Slots {
    fn slot(&mut self, key: &NodeKey, intent: Intent) -> Slot {
        if self.by_key.len() > self.tolerated.max(FEW_SLOTS) {
            // Who holds a slot's Arc is about to use it.
            self.by_key
                .retain(|_, slot| Arc::strong_count(slot) > 1 || slot.lock().strong_count() > 0);
            self.tolerated = 2 * self.by_key.len();
        }
        Arc::clone(self.by_key.entry((key.clone(), intent)).or_default())
    }
}

/// A text as a read-only file.
struct Text(Vec<u8>);

impl Disk for Text {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        check_range(self.size_bytes(), offset_bytes, buffer.len() as u64)?;
        let start = usize::try_from(offset_bytes).map_err(|_| too_far())?;
        buffer.copy_from_slice(&self.0[start..start + buffer.len()]);
        Ok(())
    }

    fn read_in_memory(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.read_at(buffer, offset_bytes)
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, _limit: usize) -> Result<Vec<Extent>> {
        check_range(self.size_bytes(), offset_bytes, length_bytes)?;
        Ok(vec![Extent { offset_bytes, length_bytes, kind: ExtentKind::Stored }])
    }
}

fn too_far() -> Error {
    Error::new(ErrorKind::OutOfRange, "behind the end of a text")
}
