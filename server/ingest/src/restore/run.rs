//! The worker threads of a restore: they take pieces of the disk until none is left.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use coldrise_block::{Context, Disk, Error, ErrorKind, Phase, Progress, ProgressState, Result};

use super::pieces::{Piece, Pieces};
use super::{Sink, SinkWriter};

/// Upper bound of the threads.
const MAX_THREADS: usize = 16;
/// The shortest run of zeroes, in bytes, that is skipped on a zeroed target. Skipping
/// shorter ones costs more in file fragments than it saves.
const ZERO_RUN_BYTES: usize = 64 << 10;

/// One restore.
pub(super) struct Run<'a> {
    pub(super) disk: &'a dyn Disk,
    /// The target's name.
    pub(super) name: &'a str,
    /// 0: one per processor.
    pub(super) threads: usize,
    pub(super) progress: &'a dyn Progress,
    pub(super) cancel: &'a AtomicBool,
}

/// State that the workers of one disk share.
#[derive(Default)]
pub(super) struct Counters {
    done_bytes: AtomicU64,
    written_bytes: AtomicU64,
    /// One worker failed, so the others stop.
    is_over: AtomicBool,
}

impl Counters {
    pub(super) fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }
}

impl Run<'_> {
    pub(super) fn report(&self, phase: Phase, done_bytes: u64, written_bytes: u64) {
        self.progress.update(&ProgressState {
            phase,
            disk: self.name,
            done_bytes,
            total_bytes: self.disk.size_bytes(),
            read_bytes: written_bytes,
            stored_bytes: written_bytes,
        });
    }

    /// Counts a completed piece.
    pub(super) fn advance(&self, counters: &Counters, done_bytes: u64, written_bytes: u64) {
        let written = counters.written_bytes.fetch_add(written_bytes, Ordering::Relaxed);
        let done = counters.done_bytes.fetch_add(done_bytes, Ordering::Relaxed);
        self.report(Phase::Restoring, done + done_bytes, written + written_bytes);
    }

    /// Whether a worker must take another piece; fails if the user cancelled.
    pub(super) fn must_continue(&self, counters: &Counters) -> Result<bool> {
        self.check_cancel()?;
        Ok(!counters.is_over.load(Ordering::Relaxed))
    }

    pub(super) fn check_cancel(&self) -> Result<()> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
        Ok(())
    }

    /// Runs `work` on up to `most` threads. Returns the first error.
    pub(super) fn in_parallel(
        &self,
        most: usize,
        counters: &Counters,
        work: impl Fn() -> Result<()> + Sync,
    ) -> Result<()> {
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        let wanted = if self.threads == 0 { processors.max(2) } else { self.threads };
        let threads = wanted.min(most).clamp(1, MAX_THREADS);
        let work = || {
            let result = work();
            if result.is_err() {
                counters.is_over.store(true, Ordering::Relaxed);
            }
            result
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut outcomes = vec![work()];
            outcomes.extend(workers.into_iter().map(|worker| {
                worker.join().unwrap_or_else(|_| {
                    Err(Error::new(ErrorKind::Internal, "a thread of the restore panicked"))
                })
            }));
            outcomes.into_iter().collect()
        })
    }

    /// Copies the disk into `sink` and makes it durable. Returns the bytes written.
    pub(super) fn copy(&self, sink: &dyn Sink) -> Result<u64> {
        let counters = Counters::default();
        let pieces = Pieces::new(self.disk, sink.alignment_bytes(), sink.needs_zeroes());
        self.in_parallel(sink.useful_writers(), &counters, || {
            self.copy_pieces(sink, &pieces, &counters)
        })?;
        self.report(Phase::Finishing, self.disk.size_bytes(), counters.written_bytes());
        sink.finish()?;
        Ok(counters.written_bytes())
    }

    /// One worker: takes pieces until none is left.
    fn copy_pieces(&self, sink: &dyn Sink, pieces: &Pieces<'_>, counters: &Counters) -> Result<()> {
        let mut writer = sink.writer()?;
        let mut buffer = Vec::new();
        while self.must_continue(counters)? {
            let Some(piece) = pieces.next()? else { break };
            let written = match piece {
                Piece::Stored { offset_bytes, length_bytes } => {
                    self.read(&mut buffer, offset_bytes, length_bytes)?;
                    if sink.needs_zeroes() {
                        writer.write_at(&buffer, offset_bytes)?;
                        length_bytes as u64
                    } else {
                        write_sparsely(writer.as_mut(), &buffer, offset_bytes)?
                    }
                }
                Piece::Zeroes { offset_bytes, length_bytes } => {
                    writer.write_zeroes(offset_bytes, length_bytes)?;
                    0
                }
                Piece::Skipped { .. } => 0,
            };
            self.advance(counters, piece.length_bytes(), written);
        }
        Ok(())
    }

    /// Fills `buffer` with a piece of the disk.
    pub(super) fn read(
        &self,
        buffer: &mut Vec<u8>,
        offset_bytes: u64,
        length_bytes: usize,
    ) -> Result<()> {
        buffer.resize(length_bytes, 0);
        self.disk
            .read_at(buffer, offset_bytes)
            .context(|| format!("reading the disk at offset {offset_bytes}"))
    }
}

/// Writes all but the zeroes. Returns the bytes written.
pub(super) fn write_sparsely(
    writer: &mut dyn SinkWriter,
    bytes: &[u8],
    offset_bytes: u64,
) -> Result<u64> {
    let mut written = 0;
    let mut start = 0;
    while start < bytes.len() {
        let end = (start + ZERO_RUN_BYTES).min(bytes.len());
        if is_zero(&bytes[start..end]) {
            start = end;
            continue;
        }
        // Adjacent runs are written together.
        let mut stop = end;
        while stop < bytes.len() {
            let next = (stop + ZERO_RUN_BYTES).min(bytes.len());
            if is_zero(&bytes[stop..next]) {
                break;
            }
            stop = next;
        }
        writer.write_at(&bytes[start..stop], offset_bytes + start as u64)?;
        written += (stop - start) as u64;
        start = stop;
    }
    Ok(written)
}

/// True when all bytes are zero. Checks the start first.
fn is_zero(bytes: &[u8]) -> bool {
    let (head, rest) = bytes.split_at(bytes.len().min(16));
    // Comparing a slice with itself, shifted, runs at the speed of memcmp.
    head.iter().all(|&byte| byte == 0)
        && (rest.is_empty() || (head.len() == 16 && bytes[..rest.len()] == *rest))
}
