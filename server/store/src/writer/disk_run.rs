//! The state of one disk being written, shared by its caller, the workers and the committer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use roaring::RoaringTreemap;
use serde::{Deserialize, Serialize};

use crate::map::{MapBuilder, MapRoot};

/// Counters of one written disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteCounts {
    /// New chunks, which were stored.
    pub stored_chunks: u64,
    /// Bytes that the new chunks take in the store.
    pub stored_bytes: u64,
    /// Chunks that the store already had.
    pub known_chunks: u64,
    /// Chunks of zeroes, stored as holes.
    pub zero_chunks: u64,
    /// Chunks that were damaged in the store and were stored again.
    pub healed_chunks: u64,
}

impl std::ops::Add for WriteCounts {
    type Output = WriteCounts;

    fn add(self, other: WriteCounts) -> WriteCounts {
        WriteCounts {
            stored_chunks: self.stored_chunks + other.stored_chunks,
            stored_bytes: self.stored_bytes + other.stored_bytes,
            known_chunks: self.known_chunks + other.known_chunks,
            zero_chunks: self.zero_chunks + other.zero_chunks,
            healed_chunks: self.healed_chunks + other.healed_chunks,
        }
    }
}

/// The unfinished map of a disk. Only the committer locks it.
pub(super) struct DiskMap {
    /// Created with the first step.
    pub(super) builder: Option<MapBuilder>,
    /// Pages stored so far; deleted if the disk is cancelled.
    pub(super) pages: RoaringTreemap,
}

pub(super) struct DiskRun {
    pub(super) size_bytes: u64,
    pub(super) base: MapRoot,
    pub(super) map: Mutex<DiskMap>,
    /// This disk was cancelled or has failed.
    stopped: AtomicBool,
    failure: Mutex<Option<Error>>,
    stored_chunks: AtomicU64,
    stored_bytes: AtomicU64,
    known_chunks: AtomicU64,
    zero_chunks: AtomicU64,
    healed_chunks: AtomicU64,
}

impl DiskRun {
    pub(super) fn new(base: MapRoot, size_bytes: u64) -> DiskRun {
        DiskRun {
            size_bytes,
            base,
            map: Mutex::new(DiskMap { builder: None, pages: RoaringTreemap::new() }),
            stopped: AtomicBool::new(false),
            failure: Mutex::new(None),
            stored_chunks: AtomicU64::new(0),
            stored_bytes: AtomicU64::new(0),
            known_chunks: AtomicU64::new(0),
            zero_chunks: AtomicU64::new(0),
            healed_chunks: AtomicU64::new(0),
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// Keeps the first failure of this disk and stops the disk; other disks continue.
    pub(super) fn fail(&self, error: Error) {
        let mut failure = self.failure.lock();
        if failure.is_none() && !self.is_stopped() {
            *failure = Some(error);
        }
        drop(failure);
        self.stop();
    }

    /// Returns the failure the first time, and afterwards only an error that there was one.
    pub(super) fn check(&self) -> Result<()> {
        if !self.is_stopped() {
            return Ok(());
        }
        Err(self.failure.lock().take().unwrap_or_else(|| {
            Error::new(ErrorKind::Poisoned, "writing this disk has failed before: start it again")
        }))
    }

    pub(super) fn count(&self, more: &WriteCounts) {
        self.stored_chunks.fetch_add(more.stored_chunks, Ordering::Relaxed);
        self.stored_bytes.fetch_add(more.stored_bytes, Ordering::Relaxed);
        self.known_chunks.fetch_add(more.known_chunks, Ordering::Relaxed);
        self.zero_chunks.fetch_add(more.zero_chunks, Ordering::Relaxed);
        self.healed_chunks.fetch_add(more.healed_chunks, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> WriteCounts {
        WriteCounts {
            stored_chunks: self.stored_chunks.load(Ordering::Relaxed),
            stored_bytes: self.stored_bytes.load(Ordering::Relaxed),
            known_chunks: self.known_chunks.load(Ordering::Relaxed),
            zero_chunks: self.zero_chunks.load(Ordering::Relaxed),
            healed_chunks: self.healed_chunks.load(Ordering::Relaxed),
        }
    }
}
