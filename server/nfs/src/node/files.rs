//! Files: clients' opens, reads and writes.

use crate::held_files::HeldFiles;
use crate::node::flush::FlushQueue;
use crate::share_reservations::{Checked, Share, ShareDenied};
use crate::{OpenNode, Shared};
use coldrise_block::{BLOCK_SIZE_BYTES, Error, ErrorKind, Result, would_wait};
use coldrise_export::OpenFile;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The reason why an open was refused.
#[derive(Debug)]
pub enum OpenError {
    /// A share reservation denies it.
    Denied(ShareDenied),
    /// Anything else.
    Failed(Error),
}

/// The result of an open.
pub type OpenResult = std::result::Result<(), OpenError>;

impl From<ShareDenied> for OpenError {
    fn from(denied: ShareDenied) -> OpenError {
        OpenError::Denied(denied)
    }
}

impl From<Error> for OpenError {
    fn from(error: Error) -> OpenError {
        OpenError::Failed(error)
    }
}

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOutcome {
    /// Number of bytes filled.
    pub length: usize,
    /// Whether the file ends behind them.
    pub is_end: bool,
}

/// Opens.
impl OpenNode {
    /// Opens it for a client, until [`OpenNode::close`]: no other process can end its
    /// session or, for a writing open, write it.
    pub fn open(self: &Arc<Self>, share: Share) -> OpenResult {
        self.reopen(Share::default(), share)
    }

    /// Changes the share of a client's open; after a failure the open is unchanged.
    pub fn reopen(self: &Arc<Self>, held: Share, wanted: Share) -> OpenResult {
        self.check()?;
        let content = self.node.content_key();
        self.shared.shares.change(&content, held, wanted)?;
        if let Err(error) = self.pin(wanted.is_for_writing()) {
            self.shared.shares.put_back(&content, wanted, held);
            return Err(OpenError::Failed(error));
        }
        if held != Share::default() {
            self.unpin(held.is_for_writing());
        }
        Ok(())
    }

    /// Closes a client's open. After the last one everything is closed at once: the client
    /// has finished.
    pub fn close(&self, held: Share) {
        self.shared.shares.put_back(&self.node.content_key(), held, Share::default());
        self.unpin(held.is_for_writing());
    }

    /// Whether a read or write without an open is allowed.
    pub fn check_share(&self, wanted: Share) -> Checked {
        self.shared.shares.check(|| self.node.content_key(), wanted)
    }

    /// Takes over the opens of another node of the same file, which is about to be
    /// released; their closes come through this node.
    pub fn take_over(self: &Arc<Self>, other: &OpenNode) -> Result<()> {
        let (readers, writers) = {
            let held = other.held.read();
            (held.readers, held.writers)
        };
        (0..writers).try_for_each(|_| self.pin(true))?;
        (0..readers).try_for_each(|_| self.pin(false))
    }

    fn pin(self: &Arc<Self>, for_writing: bool) -> Result<()> {
        {
            let mut held = self.held.write();
            self.open_file(&mut held, for_writing)?;
            if for_writing {
                held.writers += 1;
            } else {
                held.readers += 1;
            }
        }
        self.is_now_used();
        self.is_now_in_use();
        Ok(())
    }

    fn unpin(&self, for_writing: bool) {
        let mut held = self.held.write();
        if for_writing {
            held.writers = held.writers.saturating_sub(1);
        } else {
            held.readers = held.readers.saturating_sub(1);
        }
        self.close_unopened(&mut held);
    }

    fn open_file(&self, held: &mut HeldFiles, for_writing: bool) -> Result<Arc<OpenFile>> {
        if let Some(file) = held.get(for_writing) {
            return Ok(file);
        }
        let file = self.shared.folders.open(&self.node, for_writing)?;
        // It was opened by path, so check that it is still this node. From here on it
        // cannot end.
        self.shared.folders.again(&self.node)?;
        held.put(&file, for_writing);
        Ok(file)
    }

    fn is_now_used(&self) {
        self.used_at_ms.store(self.shared.now_ms(), Ordering::Relaxed);
    }

    fn is_now_in_use(self: &Arc<Self>) {
        let key = Arc::as_ptr(self) as usize;
        self.shared.in_use.lock().entry(key).or_insert_with(|| Arc::clone(self));
    }

    pub(crate) fn close_if_idle(&self, limit_ms: u64) {
        let idle_ms = self.shared.now_ms().saturating_sub(self.used_at_ms.load(Ordering::Relaxed));
        if idle_ms >= limit_ms {
            self.close_unopened(&mut self.held.write());
        }
    }

    fn close_unopened(&self, held: &mut HeldFiles) {
        if let Err(error) = held.close_unopened() {
            eprintln!("coldrise: {}: {}", self.path(), error.full_message());
        }
        if held.is_empty() {
            self.shared.in_use.lock().remove(&(std::ptr::from_ref(self) as usize));
        }
    }

    /// Closes everything, with or without opens.
    pub(crate) fn close_all(&self) {
        self.held.write().clear();
        self.shared.in_use.lock().remove(&(std::ptr::from_ref(self) as usize));
    }
}

/// Reads and writes. They open what they need; idle files are closed.
impl OpenNode {
    /// A file for reads or writes, opened if necessary.
    pub(crate) fn file(self: &Arc<Self>, for_writing: bool) -> Result<Arc<OpenFile>> {
        self.check()?;
        self.is_now_used();
        if let Some(file) = self.held.read().get(for_writing) {
            return Ok(file);
        }
        let opened = self.open_file(&mut self.held.write(), for_writing)?;
        self.is_now_in_use();
        Ok(opened)
    }

    /// The same, if it is open already.
    fn opened(&self, for_writing: bool) -> Result<Option<Arc<OpenFile>>> {
        self.check()?;
        self.is_now_used();
        Ok(self.held.try_read().and_then(|held| held.get(for_writing)))
    }

    /// Fails if a write would fail; changes nothing.
    pub fn check_writable(self: &Arc<Self>) -> Result<()> {
        self.file(true).map(drop)
    }

    /// Fills `buffer` up to the file's end.
    pub fn read(self: &Arc<Self>, buffer: &mut [u8], offset_bytes: u64) -> Result<ReadOutcome> {
        let open = self.file(false)?;
        let length = open.read(buffer, offset_bytes)?;
        Ok(outcome(&open, offset_bytes, length))
    }

    /// The same without waiting: `ErrorKind::WouldWait` if the file must be opened, or data
    /// be decoded or read from a drive.
    pub fn read_in_memory(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<ReadOutcome> {
        // An open reads the repository.
        let open = self.opened(false)?.ok_or_else(would_wait)?;
        let length = open.read_in_memory(buffer, offset_bytes)?;
        Ok(outcome(&open, offset_bytes, length))
    }

    /// Whether a write would have to open the file, or to read the unchanged part of a
    /// block from a drive.
    pub fn write_waits(&self, offset_bytes: u64, length: usize) -> Result<bool> {
        let Some(open) = self.opened(true)? else { return Ok(true) };
        let end = offset_bytes.saturating_add(length as u64).min(open.size_bytes());
        // A write of part of a block reads the rest of it.
        let edges = [offset_bytes, end].into_iter().filter(|edge| edge % BLOCK_SIZE_BYTES != 0);
        for edge in edges {
            let read = open.read_in_memory(&mut [0], edge - edge % BLOCK_SIZE_BYTES);
            if matches!(&read, Err(error) if error.kind() == ErrorKind::WouldWait) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Writes; durable after the next flush. `ErrorKind::OutOfRange` behind the end of a
    /// file that cannot grow.
    pub fn write(self: &Arc<Self>, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        let open = self.file(true)?;
        let written = open.write(bytes, offset_bytes);
        self.has_changed();
        written
    }

    /// Lengthens or shortens it. `ErrorKind::Unsupported` if the disk determines the size.
    pub fn set_size_bytes(self: &Arc<Self>, size_bytes: u64) -> Result<()> {
        let set = self.file(true)?.set_size_bytes(size_bytes);
        self.has_changed();
        set
    }

    /// Flushes all writes to the session. If nothing is open there are none, because
    /// closing flushes.
    pub fn flush(&self) -> Result<()> {
        let file = self.held.read().get(true);
        file.map_or(Ok(()), |file| file.flush())
    }

    /// Runs waiting work on a thread of our own. `ErrorKind::WouldWait` if there is no
    /// room.
    pub fn run_later(&self, task: impl FnOnce() + Send + 'static) -> Result<()> {
        self.shared.pools.reading.start(Box::new(task))
    }

    /// Whether unflushed writes may be lost, after a failure.
    pub fn has_stopped(&self) -> bool {
        self.held.read().get(true).is_some_and(|file| file.has_stopped())
    }

    /// Stops its open files permanently, after a defect.
    pub fn poison(&self) {
        self.held.read().poison();
    }

    pub(crate) fn flush_queue(&self) -> &FlushQueue {
        &self.flush_queue
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }
}

fn outcome(open: &OpenFile, offset_bytes: u64, length: usize) -> ReadOutcome {
    let end = offset_bytes.saturating_add(length as u64);
    ReadOutcome { length, is_end: end >= open.size_bytes() }
}
