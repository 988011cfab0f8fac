//! Sealed layers keep no file descriptor.
//!
//! A session that is sealed every hour has hundreds of layers after some weeks, and a server of
//! many sessions has thousands. Records and block maps are memory-mapped, which takes no
//! descriptor. For a captured block the file is opened. The files that were read last stay open, in
//! one pool for the process.
//!
//! An unopened layer needs no closing: the points describe its content, and its unused space was given
//! back. Its file may no longer exist when it is dropped.
//!
//! A file that is opened again may be a different one. Its blocks are then rejected: the tags are
//! in the records, which belong to the file that was opened first.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use coldrise_block::{Context, Result, Waiting, would_wait};
use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};

use super::{Layer, LayerFile, layer_damage};

/// The pool takes a quarter of the files that the process may open, within these bounds.
const LEAST_OPEN: u64 = 16;
const MOST_OPEN: u64 = 1024;

static POOL: Mutex<Option<Pool>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(0);
/// Replaces an unopened layer's file: every read and write through it fails.
static NO_FILE: OnceLock<Arc<File>> = OnceLock::new();

/// A layer's key in the pool while it is unopened.
pub(super) struct Unopened(u64);

impl Drop for Unopened {
    fn drop(&mut self) {
        if let Some(pool) = &mut *POOL.lock() {
            pool.files.remove(&self.0);
        }
    }
}

struct Pool {
    /// Open files with the time of their last use.
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
    /// Closes the descriptors after the layer's last write. From now on readers in other processes
    /// find its records in the file.
    ///
    /// # Errors
    /// `Io`; then the layer keeps its descriptors.
    pub(crate) fn close_until_read(&mut self) -> Result<()> {
        self.join_ahead();
        let Some(file) = Arc::get_mut(&mut self.file) else { return Ok(()) };
        let slots = file.writer.as_ref().map_or(0, |writer| writer.slots.end());
        file.close_until_read(slots)
    }

    /// Ends the layer's own thread. The thread holds the file, and with it the session's lock and
    /// the block map.
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
    pub(super) fn is_unopened(&self) -> bool {
        self.unopened.is_some()
    }

    /// Parks a layer that uses `slots` slots. Their records stay mapped.
    pub(super) fn close_until_read(&mut self, slots: u32) -> Result<()> {
        if self.unopened.is_none() {
            self.windows.map_all(&self.file, slots)?;
            if self.writer.is_some() {
                self.give_back_unused(slots)?;
            }
            self.file = no_file()?;
            self.unopened = Some(Unopened(NEXT.fetch_add(1, Ordering::Relaxed)));
            self.map.withdraw();
        }
        Ok(())
    }

    /// Reads from the file.
    ///
    /// # Errors
    /// `WouldWait` if waiting is refused and the file must be opened; `Corrupt` if it is missing;
    /// `Io`.
    pub(super) fn with_file<T>(
        &self,
        waiting: Waiting,
        read: impl FnOnce(&File) -> Result<T>,
    ) -> Result<T> {
        let Some(Unopened(key)) = self.unopened else { return read(&self.file) };
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
    let opened = File::open(path).map(Arc::new);
    opened.context(|| format!("opening the layer {}", path.display())).map_err(layer_damage)
}
