//! Sealed layers keep no descriptor.
//!
//! A session that is sealed every hour lies over hundreds of layers after some weeks, and
//! a server of many sessions over thousands. Records and block maps are mapped, which
//! takes none; for a captured block the file is opened, and the files that were read last
//! stay open, in one pool for the process.
//!
//! A file that is opened again may be another one. Its blocks are not believed then: the
//! tags are in the records, which are those of the file that was opened first.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use coldrise_block::{would_wait, Context, Result, Waiting};
use parking_lot::Mutex;
use rustix::process::{getrlimit, Resource};

use super::{Layer, LayerFile};

/// The pool takes a quarter of what the process may open, within these bounds.
const LEAST_OPEN: u64 = 16;
const MOST_OPEN: u64 = 1024;

static POOL: Mutex<Option<Pool>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(0);
/// In the place of a parked layer's file: every read and write through it fails.
static NO_FILE: OnceLock<Arc<File>> = OnceLock::new();

/// A layer's key in the pool, for as long as it is parked.
pub(super) struct Parked(u64);

impl Drop for Parked {
    fn drop(&mut self) {
        if let Some(pool) = &mut *POOL.lock() {
            pool.files.remove(&self.0);
        }
    }
}

struct Pool {
    /// With the time of their last use.
    files: HashMap<u64, (Arc<File>, u64)>,
    uses: u64,
    most: usize,
}

impl Pool {
    fn new() -> Pool {
        let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = (allowed / 4).clamp(LEAST_OPEN, MOST_OPEN) as usize;
        Pool { files: HashMap::new(), uses: 0, most }
    }

    fn find(&mut self, key: u64) -> Option<Arc<File>> {
        self.uses += 1;
        let (file, used) = self.files.get_mut(&key)?;
        *used = self.uses;
        Some(Arc::clone(file))
    }

    fn keep(&mut self, key: u64, file: &Arc<File>) {
        if self.files.len() >= self.most {
            let oldest = self.files.iter().min_by_key(|(_, (_, used))| *used);
            if let Some(oldest) = oldest.map(|(key, _)| *key) {
                self.files.remove(&oldest);
            }
        }
        self.files.insert(key, (Arc::clone(file), self.uses));
    }
}

fn pooled<T>(look: impl FnOnce(&mut Pool) -> T) -> T {
    look(POOL.lock().get_or_insert_with(Pool::new))
}

fn no_file() -> Result<Arc<File>> {
    if let Some(file) = NO_FILE.get() {
        return Ok(Arc::clone(file));
    }
    let flags = rustix::fs::OFlags::PATH.bits() as i32;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open("/");
    let opened = Arc::new(opened.context(|| "opening /")?);
    Ok(Arc::clone(NO_FILE.get_or_init(|| opened)))
}

impl Layer {
    /// Gives the descriptors back, when the layer takes no more writes. Readers in other
    /// processes find its records in the file from now on.
    ///
    /// # Errors
    /// `Io`; then it keeps them.
    pub(crate) fn park(&mut self) -> Result<()> {
        self.join_ahead();
        let Some(file) = Arc::get_mut(&mut self.file) else { return Ok(()) };
        let slots = file.writer.as_ref().map_or(0, |writer| writer.slots.end());
        file.park(slots)
    }

    /// Opens the file of a parked layer again, to close the layer.
    pub(super) fn unpark(&mut self) -> Result<()> {
        Arc::get_mut(&mut self.file).map_or(Ok(()), LayerFile::unpark)
    }

    /// Ends the layer's own thread, which holds the file, and with it the session's lock
    /// and the block map.
    pub(super) fn join_ahead(&mut self) {
        if let Some(writer) = &self.file.writer {
            writer.sync.ahead.stop();
        }
        if let Some(thread) = self.ahead.take() {
            let _ = thread.join();
        }
    }
}

impl LayerFile {
    /// The same for a layer that uses `slots` slots: their records stay mapped.
    pub(super) fn park(&mut self, slots: u32) -> Result<()> {
        if self.parked.is_none() {
            self.windows.map_all(&self.file, slots)?;
            self.file = no_file()?;
            self.parked = Some(Parked(NEXT.fetch_add(1, Ordering::Relaxed)));
            self.map.withdraw();
        }
        Ok(())
    }

    fn unpark(&mut self) -> Result<()> {
        if self.parked.take().is_some() {
            let opened = OpenOptions::new().read(true).write(true).open(&self.path);
            self.file = Arc::new(opened.context(|| format!("opening {}", self.path.display()))?);
        }
        Ok(())
    }

    /// Reads from the file.
    ///
    /// # Errors
    /// `WouldWait`, where waiting is refused, for one that has to be opened; `Io`.
    pub(super) fn with_file<T>(
        &self,
        waiting: Waiting,
        read: impl FnOnce(&File) -> Result<T>,
    ) -> Result<T> {
        let Some(Parked(key)) = self.parked else { return read(&self.file) };
        if let Some(file) = pooled(|pool| pool.find(key)) {
            return read(&file);
        }
        if waiting == Waiting::Refused {
            return Err(would_wait());
        }
        let file = open(&self.path)?;
        pooled(|pool| pool.keep(key, &file));
        read(&file)
    }
}

fn open(path: &Path) -> Result<Arc<File>> {
    File::open(path).map(Arc::new).context(|| format!("opening {}", path.display()))
}
