//! Reading ahead by a trace.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use coldrise_block::{Disk, ReadContext, Waiting};
use coldrise_store::{DiskName, Repository};

use super::{BootTrace, TraceRecorder, UNIT_BYTES};
use crate::disks::layered_disk::LayeredDisk;
use crate::session_folder::document::SessionDocument;

/// Parts read at once. On a slow drive they wait side by side; on a fast one the threads end within
/// a second.
const THREADS: usize = 64;
/// Parts of a point that is on its way read at once: enough to fill a line, and few before what the machine asks for.
const LINE_THREADS: usize = 16;
/// Longest part of a point that is on its way, in bytes: over a line, each part takes a round trip.
const LINE_PART_BYTES: u64 = 256 << 10;

/// A part of a disk to read.
struct Part {
    disk: Arc<LayeredDisk>,
    offset_bytes: u64,
    length_bytes: u64,
}

/// How a trace is cut into parts.
#[derive(Clone, Copy)]
enum Cut {
    /// Parts of one chunk each, or of the chunks of one unit: read side by side. At most [`UNIT_BYTES`], which caches a larger
    /// chunk as well.
    Chunks { bytes: u64 },
    /// As long as the trace has it in one piece.
    Runs,
}

/// Reads the parts of a trace into the cache once a client has read from the session. Dropping it
/// waits for the reads that have begun.
pub(crate) struct TraceReadAhead {
    recorder: Arc<TraceRecorder>,
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TraceReadAhead {
    /// By the stored trace of the session's machine; `None` without one.
    pub(crate) fn start(
        repository: &Repository,
        session: &SessionDocument,
        disks: &[Arc<LayeredDisk>],
        recorder: &Arc<TraceRecorder>,
    ) -> Option<TraceReadAhead> {
        let trace = BootTrace::read(repository, &session.machine).unwrap_or_else(|error| {
            tracing::warn!(error = %error.full_message(), "the machine's boot is not read ahead");
            None
        })?;
        // A disk of the trace may be gone, and another may have its place.
        let index_of = |name: &DiskName| session.disks.iter().position(|disk| disk.name == *name);
        let traced = trace.disks.iter().map(|name| disks.get(index_of(name)?));
        let chunk_bytes = UNIT_BYTES.max(repository.chunk_size_bytes().into());
        let (cut, threads) = match session.incoming_created_at_ms {
            Some(_) => (Cut::Runs, LINE_THREADS),
            None => (Cut::Chunks { bytes: chunk_bytes }, THREADS),
        };
        // A quarter of the cache is left for what the machine reads otherwise.
        let most_bytes = repository.cache_bytes() / 4 * 3;
        let parts = parts_of(&trace, &traced.collect::<Vec<_>>(), cut, most_bytes);
        let is_stopped = Arc::new(AtomicBool::new(false));
        let (waiting, stopped) = (Arc::clone(recorder), Arc::clone(&is_stopped));
        let run = move || {
            if waiting.wait_for_first_read() {
                read_all(&parts, threads, &stopped);
            }
        };
        let thread = std::thread::Builder::new().name("boot trace".into()).spawn(run);
        let thread = thread.inspect_err(|error| tracing::warn!(%error, "no reading ahead")).ok()?;
        let recorder = Arc::clone(recorder);
        Some(TraceReadAhead { recorder, is_stopped, thread: Some(thread) })
    }
}

impl Drop for TraceReadAhead {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.recorder.close();
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("reading ahead panicked");
        }
    }
}

/// The first parts of a trace, which fill `most_bytes` of the cache. `disks` are those that it names.
fn parts_of(
    trace: &BootTrace,
    disks: &[Option<&Arc<LayeredDisk>>],
    cut: Cut,
    most_bytes: u64,
) -> Vec<Part> {
    let (mut parts, mut cached_bytes) = (Vec::new(), 0);
    for run in &trace.runs {
        let Some(Some(disk)) = disks.get(usize::from(run.disk)) else { continue };
        let mut at = u64::from(run.first_unit) * UNIT_BYTES;
        let end = (at + u64::from(run.units) * UNIT_BYTES).min(disk.size_bytes());
        while at < end && cached_bytes < most_bytes {
            let (length_bytes, next) = match cut {
                Cut::Chunks { bytes } => (UNIT_BYTES.min(end - at), (at / bytes + 1) * bytes),
                Cut::Runs => (LINE_PART_BYTES.min(end - at), at + LINE_PART_BYTES),
            };
            parts.push(Part { disk: Arc::clone(disk), offset_bytes: at, length_bytes });
            cached_bytes += next.min(end) - at;
            at = next;
        }
    }
    parts
}

/// Reads the parts in their order, this many at a time. Ends at the first error: a client that reads
/// the same part gets it, too.
fn read_all(parts: &[Part], threads: usize, is_stopped: &AtomicBool) {
    let next = AtomicUsize::new(0);
    let read = || {
        let mut buffer = Vec::new();
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            if is_stopped.load(Ordering::Relaxed) {
                return;
            }
            buffer.resize(part.length_bytes as usize, 0);
            let context = &mut ReadContext::new(Waiting::Allowed);
            if let Err(error) = part.disk.read(&mut buffer, part.offset_bytes, context) {
                tracing::warn!(error = %error.full_message(), "reading ahead has ended");
                is_stopped.store(true, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        // Without a further thread, those that exist read on.
        let start = || std::thread::Builder::new().spawn_scoped(scope, read).is_ok();
        let _ = (1..threads.min(parts.len())).all(|_| start());
        read();
    });
}
