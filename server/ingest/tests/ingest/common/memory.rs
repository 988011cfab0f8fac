//! A disk in memory, shared by the tests of restores.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use coldrise_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, NoProgress, Progress, ProgressState, ReadContext,
    Result, push_extent,
};
use coldrise_ingest::{RestoreOptions, RestoreSummary, RestoreTarget, restore};

/// The granularity of the disk's stored ranges.
const CHUNK: usize = 64 << 10;

/// A disk in memory. Reading a hole panics; reading a given place can panic, too.
pub(crate) struct MemoryDisk {
    pub content: Vec<u8>,
    pub bad_offset: Option<u64>,
}

impl MemoryDisk {
    pub(crate) fn new(content: Vec<u8>) -> MemoryDisk {
        MemoryDisk { content, bad_offset: None }
    }

    fn chunk_is_zero(&self, index: usize) -> bool {
        let end = ((index + 1) * CHUNK).min(self.content.len());
        self.content[index * CHUNK..end].iter().all(|&byte| byte == 0)
    }
}

impl Disk for MemoryDisk {
    fn size_bytes(&self) -> u64 {
        self.content.len() as u64
    }
    fn read(&self, buffer: &mut [u8], offset_bytes: u64, _: &mut ReadContext) -> Result<()> {
        let at = offset_bytes as usize;
        let range = offset_bytes..offset_bytes + buffer.len() as u64;
        if self.bad_offset.is_some_and(|bad| range.contains(&bad)) {
            return Err(Error::new(ErrorKind::Corrupt, "chunk 7 fails its authentication"));
        }
        buffer.copy_from_slice(&self.content[at..at + buffer.len()]);
        Ok(())
    }
    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        let mut extents = Vec::new();
        let end = offset_bytes + length_bytes;
        let mut at = offset_bytes;
        while at < end && extents.len() < limit {
            let index = at as usize / CHUNK;
            let next = (((index + 1) * CHUNK) as u64).min(end);
            let kind =
                if self.chunk_is_zero(index) { ExtentKind::Hole } else { ExtentKind::Stored };
            let length_bytes = next - at;
            push_extent(&mut extents, Extent { offset_bytes: at, length_bytes, kind });
            at = next;
        }
        Ok(extents)
    }
}

/// Restores to a target given as text.
pub(crate) fn restore_to(
    disk: &dyn Disk,
    target: &str,
    options: &RestoreOptions,
) -> Result<RestoreSummary> {
    let target = RestoreTarget::parse(target).unwrap();
    restore(disk, &target, options, &NoProgress, &AtomicBool::new(false))
}

/// The names in a folder: nothing may be left behind.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Cancels after some bytes; the work must stop soon after.
pub(crate) struct CancelAfter<'a> {
    cancel: &'a AtomicBool,
    bytes: u64,
    pub last: AtomicU64,
}

impl<'a> CancelAfter<'a> {
    pub(crate) fn new(cancel: &'a AtomicBool, bytes: u64) -> Self {
        CancelAfter { cancel, bytes, last: AtomicU64::new(0) }
    }
}

impl Progress for CancelAfter<'_> {
    fn update(&self, state: &ProgressState<'_>) {
        self.last.fetch_max(state.done_bytes, Ordering::Relaxed);
        if state.done_bytes >= self.bytes {
            self.cancel.store(true, Ordering::Relaxed);
        }
    }
}
