//! A session's disk that counts what its clients do.

use std::sync::Arc;
use std::time::Instant;

use coldrise_block::{Disk, ErrorKind, Extent, ReadContext, Result};

use super::counters::{Counters, Operation};
use crate::boot_trace::TraceRecorder;
use crate::disks::layered_disk::LayeredDisk;

/// A disk of a session, in the process that writes it. Requests through [`Disk`] count; those of the
/// session itself go to [`ActiveDisk::layered`].
pub(crate) struct ActiveDisk {
    layered: Arc<LayeredDisk>,
    counters: Arc<Counters>,
    /// The session's, and the disk's index in it.
    trace: (Arc<TraceRecorder>, u16),
}

impl ActiveDisk {
    /// Counts from zero. The session has `disks` disks.
    pub(crate) fn new(
        layered: Arc<LayeredDisk>,
        disks: usize,
        trace: (Arc<TraceRecorder>, u16),
    ) -> ActiveDisk {
        let counters = Arc::new(Counters::new(layered.size_bytes(), disks));
        ActiveDisk { layered, counters, trace }
    }

    /// The disk without its counters.
    pub(crate) fn layered(&self) -> &Arc<LayeredDisk> {
        &self.layered
    }

    pub(crate) fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    fn change(
        &self,
        kind: Operation,
        (offset_bytes, length_bytes): (u64, u64),
        change: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let start = Instant::now();
        let changed = change();
        match &changed {
            Ok(()) => {
                self.counters.add_change(kind, offset_bytes, length_bytes, start.elapsed());
            }
            Err(_) => self.counters.add_failed(kind),
        }
        changed
    }
}

impl Disk for ActiveDisk {
    fn size_bytes(&self) -> u64 {
        self.layered.size_bytes()
    }

    fn is_read_only(&self) -> bool {
        self.layered.is_read_only()
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()> {
        let mut observed = ReadContext::observed(context.waiting());
        let read = self.layered.read(buffer, offset_bytes, &mut observed);
        match &read {
            Ok(()) => {
                self.counters.add_read(&observed);
                self.trace.0.note(self.trace.1, &observed);
            }
            // The caller reads again and waits.
            Err(error) if error.kind() == ErrorKind::WouldWait => {}
            Err(_) => self.counters.add_failed(Operation::Read),
        }
        read
    }

    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        let range = (offset_bytes, bytes.len() as u64);
        self.change(Operation::Write, range, || self.layered.write_at(bytes, offset_bytes))
    }

    fn write_zeroes(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        let range = (offset_bytes, length_bytes);
        let write = || self.layered.write_zeroes(offset_bytes, length_bytes);
        self.change(Operation::WriteZeroes, range, write)
    }

    fn trim(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        let range = (offset_bytes, length_bytes);
        self.change(Operation::Trim, range, || self.layered.trim(offset_bytes, length_bytes))
    }

    fn flush(&self) -> Result<()> {
        self.change(Operation::Flush, (0, 0), || self.layered.flush())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        self.layered.extents(offset_bytes, length_bytes, limit)
    }
}
