//! Recording a trace while clients read.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use coldrise_block::{ReadContext, ReadSource};
use coldrise_store::Repository;
use parking_lot::{Condvar, Mutex};

use super::{BootTrace, MAX_RUNS, MAX_UNITS, Run, UNIT_BYTES};
use crate::session_folder::document::SessionDocument;

/// How long after the first read the reads belong to the boot.
const BOOT_TIME: Duration = Duration::from_secs(300);
/// Longer requests are those of a copy. QEMU joins neighbouring requests of a boot to some 100 KiB.
const MAX_REQUEST_BYTES: u64 = 512 << 10;
/// A recording of fewer units (1 MiB) is not a boot.
const MIN_UNITS: usize = 64;

/// Notes the first reads of a session, of all its disks.
#[derive(Default)]
pub(crate) struct TraceRecorder {
    /// False once there is nothing more to note: reads then take no lock.
    is_attentive: AtomicBool,
    reads: Mutex<Reads>,
    first_read: Condvar,
}

#[derive(Default)]
struct Reads {
    /// The time of the first read.
    since: Option<Instant>,
    /// False for a session whose machine has written: it does not read all that it reads at a boot
    /// from the point.
    is_fresh: bool,
    is_closed: bool,
    seen: HashSet<(u16, u32)>,
    runs: Vec<Run>,
}

impl TraceRecorder {
    pub(crate) fn new(is_fresh: bool) -> TraceRecorder {
        let reads = Reads { is_fresh, ..Reads::default() };
        let is_attentive = AtomicBool::new(true);
        TraceRecorder { is_attentive, reads: Mutex::new(reads), first_read: Condvar::new() }
    }

    /// Notes a completed read of a disk.
    #[inline]
    pub(crate) fn note(&self, disk: u16, read: &ReadContext) {
        if self.is_attentive.load(Relaxed) {
            self.note_first(disk, read);
        }
    }

    #[cold]
    fn note_first(&self, disk: u16, read: &ReadContext) {
        let mut reads = self.reads.lock();
        let now = Instant::now();
        let since = *reads.since.get_or_insert(now);
        self.first_read.notify_all();
        let is_over = now.duration_since(since) > BOOT_TIME || reads.seen.len() > MAX_UNITS;
        if is_over || !reads.is_fresh {
            self.is_attentive.store(false, Relaxed);
            return;
        }
        if read.pieces().map(|piece| piece.length_bytes).sum::<u64>() > MAX_REQUEST_BYTES {
            return;
        }
        for piece in read.pieces() {
            if piece.source != ReadSource::Zero {
                let end_bytes = piece.offset_bytes + piece.length_bytes;
                let units = piece.offset_bytes / UNIT_BYTES..end_bytes.div_ceil(UNIT_BYTES);
                let units = units.filter_map(|unit| u32::try_from(unit).ok());
                units.for_each(|unit| reads.note(disk, unit));
            }
        }
    }

    /// Waits for the first read. Returns false if the session is closed before one.
    pub(super) fn wait_for_first_read(&self) -> bool {
        let mut reads = self.reads.lock();
        while reads.since.is_none() && !reads.is_closed {
            self.first_read.wait(&mut reads);
        }
        !reads.is_closed
    }

    /// The session is being closed.
    pub(super) fn close(&self) {
        self.reads.lock().is_closed = true;
        self.first_read.notify_all();
    }

    /// Stores the recording, if it is one of a boot, as the trace of the session's machine.
    pub(crate) fn store(&self, repository: &Repository, session: &SessionDocument) {
        let reads = self.reads.lock();
        if !(MIN_UNITS..=MAX_UNITS).contains(&reads.seen.len()) {
            return;
        }
        let disks = session.disks.iter().map(|disk| disk.name.clone()).collect();
        let trace = BootTrace { disks, runs: reads.runs.clone() };
        if let Err(error) = trace.store(repository, &session.machine) {
            tracing::warn!(error = %error.full_message(), "the machine's next boot is not read ahead");
        }
    }
}

impl Reads {
    fn note(&mut self, disk: u16, unit: u32) {
        if !self.seen.insert((disk, unit)) {
            return;
        }
        let is_full = self.runs.len() == MAX_RUNS;
        match self.runs.last_mut() {
            Some(last) if last.disk == disk && last.first_unit + last.units == unit => {
                last.units += 1;
            }
            _ if is_full => {}
            _ => self.runs.push(Run { disk, first_unit: unit, units: 1 }),
        }
    }
}
