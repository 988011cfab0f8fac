//! Open files. All users of a file share one export.

use super::node::NodeKey;
use super::seek;
use crate::Export;
use coldrise_block::{Context, ReadContext, StoredRanges, Waiting};
use coldrise_block::{Disk, Error, ErrorKind, Extent, ExtentKind, Result, check_range};
use coldrise_store::Configuration;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The purpose of an opening. A reader of a session's file does not keep another process
/// from writing the session, so the two are separate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Intent {
    Read,
    Write,
}

/// An open file. Its export, with lease and session, stays open until the last user drops
/// the file.
pub struct OpenFile {
    export: Export,
    path: Arc<str>,
    /// Whether a write completed since the last flush.
    is_dirty: AtomicBool,
    /// The time of the last write, in milliseconds since 1970; 0: never.
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

    /// Its size in bytes. The size of a session's VMDK descriptor and of clients' files can
    /// change.
    pub fn size_bytes(&self) -> u64 {
        self.export.disk().size_bytes()
    }

    /// Fills `buffer` from `offset_bytes` up to the file's end at most; returns the number
    /// of bytes filled.
    pub fn read(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<usize> {
        self.read_waiting(buffer, offset_bytes, Waiting::Allowed)
    }

    /// Reads only from memory; `ErrorKind::WouldWait` if memory does not hold the whole
    /// range.
    pub fn read_in_memory(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<usize> {
        self.read_waiting(buffer, offset_bytes, Waiting::Refused)
    }

    fn read_waiting(
        &self,
        buffer: &mut [u8],
        offset_bytes: u64,
        waiting: Waiting,
    ) -> Result<usize> {
        self.export.check()?;
        let disk = self.export.disk();
        let left = disk.size_bytes().saturating_sub(offset_bytes);
        let length = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
        if length > 0 {
            let context = &mut ReadContext::new(waiting);
            disk.read(&mut buffer[..length], offset_bytes, context)?;
        }
        Ok(length)
    }

    /// Writes; durable after the next [`OpenFile::flush`]. `ErrorKind::OutOfRange` behind
    /// the end of a file that cannot grow.
    pub fn write(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        self.export.check()?;
        self.touch_after(self.export.disk().write_at(bytes, offset_bytes))
    }

    /// Makes a range read as zeroes and frees its space. Ignores the part behind the file's
    /// end, as hole punching does.
    pub fn punch_hole(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.export.check()?;
        let disk = self.export.disk();
        let left = disk.size_bytes().saturating_sub(offset_bytes);
        let length = length_bytes.min(left);
        if length == 0 {
            return Ok(());
        }
        // Not a trim: a trim keeps partial blocks as they are, and after punching a hole a
        // client may rely on its zeroes.
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

    /// Makes durable what any client wrote to the session.
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

    /// The first stored byte from an offset on, as SEEK_DATA finds it; `None` if only
    /// zeroes follow. `ErrorKind::OutOfRange` behind the end.
    pub fn next_stored(&self, offset_bytes: u64) -> Result<Option<u64>> {
        self.export.check()?;
        seek::next_stored(self.export.disk(), offset_bytes)
    }

    /// The next hole from an offset on, as SEEK_HOLE finds it; the file's end if there is
    /// no hole. `ErrorKind::OutOfRange` behind the end.
    pub fn next_hole(&self, offset_bytes: u64) -> Result<u64> {
        self.export.check()?;
        seek::next_hole(self.export.disk(), offset_bytes)
    }

    /// True once a failure has stopped its session: unflushed writes may be lost.
    pub fn has_stopped(&self) -> bool {
        self.export.has_stopped()
    }

    pub(super) fn export(&self) -> &Export {
        &self.export
    }

    /// Stops the file permanently after a defect; see [`Export::poison`].
    pub fn poison(&self) {
        self.export.poison();
    }

    /// Stored bytes, in the disk's granularity. Walks all extents; reads no data.
    pub(super) fn stored_bytes(&self) -> Result<u64> {
        self.export.check()?;
        sum_stored(self.export.disk())
    }

    /// The time of the last write through this file; `None` if there was none.
    pub fn written_at(&self) -> Option<SystemTime> {
        let at_ms = Some(self.written_at_ms()).filter(|at_ms| *at_ms > 0)?;
        Some(UNIX_EPOCH + Duration::from_millis(at_ms))
    }

    pub(super) fn written_at_ms(&self) -> u64 {
        self.written_at_ms.load(Ordering::Relaxed)
    }

    /// A flush covers only completed writes. So a write is noted after its end: a flush
    /// that began before does not count for it.
    fn touch_after<T>(&self, result: Result<T>) -> Result<T> {
        self.is_dirty.store(true, Ordering::Release);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        self.written_at_ms.store(now_ms, Ordering::Relaxed);
        result
    }
}

/// Stored bytes of a disk or file. Walks its extents; reads no data.
pub(super) fn sum_stored(disk: &dyn Disk) -> Result<u64> {
    let mut ranges = StoredRanges::of(disk);
    let stored = (&mut ranges).map(|range| range.end - range.start).sum();
    ranges.end()?;
    Ok(stored)
}

/// The table of open files. An entry stays while the file has a user.
#[derive(Default)]
pub(super) struct OpenFiles {
    slots: Mutex<Slots>,
}

type Slot = Arc<Mutex<Weak<OpenFile>>>;

#[derive(Default)]
struct Slots {
    by_key: HashMap<(NodeKey, Intent), Slot>,
    /// Number of slots from which unused ones are removed.
    tolerated: usize,
}

/// Unused slots are removed once the table has at least this many slots.
const FEW_SLOTS: usize = 64;

impl OpenFiles {
    /// The file, already open or opened now. Other callers for the same file wait; other
    /// files open at the same time.
    pub(super) fn open(
        &self,
        key: &NodeKey,
        path: &str,
        intent: Intent,
        open: impl FnOnce() -> Result<Export>,
    ) -> Result<Arc<OpenFile>> {
        let slot = self.slots.lock().slot(key, intent);
        let mut file = slot.lock();
        // After a defect a new export may work.
        if let Some(open) = file.upgrade().filter(|file| file.export.check().is_ok()) {
            return Ok(open);
        }
        let opened = Arc::new(OpenFile::new(path, open()?));
        *file = Arc::downgrade(&opened);
        Ok(opened)
    }

    /// The file if it is open; the one for writing comes before the one for reading.
    pub(super) fn find(&self, key: &NodeKey) -> Option<Arc<OpenFile>> {
        [Intent::Write, Intent::Read].into_iter().find_map(|intent| {
            let slot = self.slots.lock().by_key.get(&(key.clone(), intent)).map(Arc::clone)?;
            // An opening in progress holds the slot, perhaps for long.
            slot.try_lock()?.upgrade()
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
            // A holder of a slot's Arc is about to use it.
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

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, _: &mut ReadContext) -> Result<()> {
        check_range(self.size_bytes(), offset_bytes, buffer.len() as u64)?;
        let start = usize::try_from(offset_bytes).map_err(|_| too_far())?;
        buffer.copy_from_slice(&self.0[start..start + buffer.len()]);
        Ok(())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, _limit: usize) -> Result<Vec<Extent>> {
        check_range(self.size_bytes(), offset_bytes, length_bytes)?;
        Ok(vec![Extent { offset_bytes, length_bytes, kind: ExtentKind::Stored }])
    }
}

fn too_far() -> Error {
    Error::new(ErrorKind::OutOfRange, "behind the end of a text")
}
