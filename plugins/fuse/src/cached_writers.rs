//! Sessions' disks that the kernel caches, in a mount that serves one program.
//!
//! The cache is right only while every write goes through it. So:
//!
//! - Only openings for writing are cached. While one is open, this process has the session, and no
//!   other process writes it. Readers are not cached: they may stay open after the writer.
//! - One file of a disk at a time is open for writing, any number of times. The disk's other files
//!   are EBUSY, because their writes would miss the first file's cache.
//! - Each opening empties the kernel's cache of the file: others may have written before.
//!
//! The kernel passes each write on at once and waits for it, as without a cache; it never holds back
//! a write. So a seal has every write that was answered, and flushes mean what they meant.

use crate::answer::Answer;
use coldrise_export::{Node, NodeKey};
use fuser::{Errno, FopenFlags};
use parking_lot::Mutex;
use std::collections::HashMap;

/// Openings for writing, by disk.
#[derive(Default)]
pub(crate) struct CachedWriters(Mutex<Open>);

#[derive(Default)]
struct Open {
    by_disk: HashMap<NodeKey, Writers>,
    disk_of: HashMap<u64, NodeKey>,
}

/// Those of one file.
struct Writers {
    inode: u64,
    /// Including openings that have not finished.
    count: usize,
}

impl CachedWriters {
    /// Opens a file of a session for writing; `open` returns its handle.
    pub(crate) fn open(
        &self,
        node: &Node,
        open: impl FnOnce() -> Answer<u64>,
    ) -> Answer<(u64, FopenFlags)> {
        let disk = node.content_key();
        self.admit(&disk, node)?;
        let opened = open();
        let mut table = self.0.lock();
        match opened {
            Ok(handle) => {
                table.disk_of.insert(handle, disk);
                Ok((handle, FopenFlags::empty()))
            }
            Err(errno) => {
                table.leave(&disk);
                Err(errno)
            }
        }
    }

    fn admit(&self, disk: &NodeKey, node: &Node) -> Answer<()> {
        let mut table = self.0.lock();
        let inode = node.file_id();
        let writers = table.by_disk.entry(disk.clone()).or_insert(Writers { inode, count: 0 });
        if writers.inode != inode {
            tracing::warn!(
                "{}: another file of this disk is open for writing: close that one first",
                node.path()
            );
            return Err(Errno::EBUSY);
        }
        writers.count += 1;
        Ok(())
    }

    /// The handle is closed.
    pub(crate) fn closed(&self, handle: u64) {
        let mut table = self.0.lock();
        if let Some(disk) = table.disk_of.remove(&handle) {
            table.leave(&disk);
        }
    }
}

impl Open {
    fn leave(&mut self, disk: &NodeKey) {
        let Some(writers) = self.by_disk.get_mut(disk) else { return };
        writers.count -= 1;
        if writers.count == 0 {
            self.by_disk.remove(disk);
        }
    }
}
