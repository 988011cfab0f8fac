//! The caller's side of writing one disk.

use std::sync::mpsc::{channel, Sender};
use std::sync::Arc;
use std::thread::JoinHandle;

use coldrise_block::{Error, ErrorKind, Result, MAX_DISK_SIZE_BYTES};

use crate::map::MapRoot;

use super::commit::{commit_all, Outcome};
use super::run::{Job, Run, Step, WriteCounts};
use super::{worker, Shared};

/// What one worker takes at once.
const JOB_BYTES: usize = 1 << 20;
/// Plaintext on its way, at most, besides one job per worker.
const IN_FLIGHT_BYTES: u64 = 24 << 20;
const MAX_THREADS: usize = 256;

/// How a disk is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOptions {
    /// Threads that hash, compress and encrypt: 1 to 256. One more, mostly
    /// idle, writes the store.
    pub threads: usize,
}

impl Default for WriteOptions {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(2, |n| n.get());
        WriteOptions { threads: threads.min(MAX_THREADS) }
    }
}

/// Writes one disk of one backup, in parallel and in bounded memory.
///
/// Dropped without [`DiskWriter::finish`] it is cancelled: nothing becomes
/// visible, and what was already committed is found again by the next backup.
pub struct DiskWriter {
    run: Arc<Run>,
    base: MapRoot,
    steps: Option<Sender<(u64, Step)>>,
    workers: Vec<JoinHandle<()>>,
    committer: Option<JoinHandle<Outcome>>,
    next_turn: u64,
    next_order: u64,
    /// Everything before is written.
    next_offset: u64,
    in_flight_limit: u64,
}

impl DiskWriter {
    pub(super) fn start(
        shared: Arc<Shared>,
        base: MapRoot,
        size_bytes: u64,
        options: WriteOptions,
    ) -> Result<DiskWriter> {
        if size_bytes == 0 || size_bytes > MAX_DISK_SIZE_BYTES {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("a disk of {size_bytes} bytes is not possible: 1 to {MAX_DISK_SIZE_BYTES}"),
            ));
        }
        if options.threads == 0 || options.threads > MAX_THREADS {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{} threads are not possible: 1 to {MAX_THREADS}", options.threads),
            ));
        }
        let state = {
            let mut progress = shared.progress.lock();
            if progress.failed {
                return Err(Error::new(
                    ErrorKind::Poisoned,
                    "an earlier write has failed: open the repository again",
                ));
            }
            if progress.busy {
                return Err(Error::new(ErrorKind::Busy, "another disk is being written"));
            }
            progress.busy = true;
            progress.state
        };
        let run = Arc::new(Run::new(shared, size_bytes, state.next_chunk));
        let (sender, receiver) = channel();
        let mut writer = DiskWriter {
            run: run.clone(),
            base,
            steps: Some(sender.clone()),
            workers: Vec::new(),
            committer: None,
            next_turn: 0,
            next_order: 0,
            next_offset: 0,
            in_flight_limit: IN_FLIGHT_BYTES + (options.threads * JOB_BYTES) as u64,
        };
        let started = |e| Error::io("starting a thread", e);
        let committer_run = run.clone();
        let committer = std::thread::Builder::new()
            .name("committer".to_owned())
            .spawn(move || commit_all(&committer_run, &receiver, base, state))
            .map_err(started)?;
        writer.committer = Some(committer);
        for number in 0..options.threads {
            let (run, steps) = (run.clone(), sender.clone());
            let worker = std::thread::Builder::new()
                .name(format!("worker-{number}"))
                .spawn(move || worker::work(&run, &steps))
                .map_err(started)?;
            writer.workers.push(worker);
        }
        Ok(writer)
    }

    /// Writes `bytes` at `offset_bytes`: a multiple of the chunk size, not
    /// before the end of what was written last. The length is a multiple of
    /// the chunk size, except where it reaches the end of the disk. Chunks of
    /// zeroes become holes. Waits while much is on its way.
    ///
    /// # Errors
    /// `InvalidInput` for a range that is not possible; the failure of an
    /// earlier write, which happens in the background.
    pub fn write(&mut self, offset_bytes: u64, bytes: Vec<u8>) -> Result<()> {
        self.advance(offset_bytes, bytes.len() as u64)?;
        let chunk_size = self.run.chunk_size;
        let step = JOB_BYTES.max(chunk_size);
        let length = bytes.len();
        let bytes = Arc::new(bytes);
        for start in (0..length).step_by(step) {
            let end = (start + step).min(length);
            self.run.enter((end - start) as u64, self.in_flight_limit);
            self.run.push_job(Job {
                turn: self.next_turn,
                order: self.next_order,
                first_chunk: (offset_bytes + start as u64) / chunk_size as u64,
                bytes: bytes.clone(),
                range: start..end,
            });
            self.next_turn += 1;
            self.next_order += 1;
        }
        Ok(())
    }

    /// Makes a range read as zeroes: bounds as for [`DiskWriter::write`].
    ///
    /// # Errors
    /// As for [`DiskWriter::write`].
    pub fn write_hole(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.advance(offset_bytes, length_bytes)?;
        let chunk_size = self.run.chunk_size as u64;
        let step = Step::Holes {
            first_chunk: offset_bytes / chunk_size,
            count: length_bytes.div_ceil(chunk_size),
        };
        if let Some(steps) = &self.steps {
            // Where the committer is gone the run has failed, and says so.
            let _ = steps.send((self.next_order, step));
            self.next_order += 1;
        }
        Ok(())
    }

    /// An empty buffer, used before where there is one: fill it and give it to
    /// [`DiskWriter::write`].
    pub fn buffer(&mut self) -> Vec<u8> {
        self.run.take_buffer()
    }

    /// What has been done so far.
    pub fn counts(&self) -> WriteCounts {
        self.run.counts()
    }

    /// Ends the disk. On return its chunks, their index and its map are
    /// durable.
    ///
    /// # Errors
    /// The first failure of anything before.
    pub fn finish(mut self) -> Result<(MapRoot, WriteCounts)> {
        self.trim_tail()?;
        let root = self.join();
        self.run.check()?;
        let root = root.ok_or_else(|| Error::new(ErrorKind::Internal, "the committer ended"))?;
        Ok((root, self.run.counts()))
    }

    /// A base that was larger may hold bytes in the last chunk that are beyond
    /// the end now; they must not come back when the disk grows again.
    fn trim_tail(&mut self) -> Result<()> {
        let chunk_size = self.run.chunk_size as u64;
        let used = (self.run.size_bytes % chunk_size) as usize;
        let start = self.run.size_bytes - used as u64;
        if used == 0 || self.next_offset > start || self.base.page() == 0 {
            return Ok(());
        }
        let mut chunk = vec![0; self.run.chunk_size];
        let base = self.run.shared.repository.disk(self.base, start + chunk_size);
        base.read_at(&mut chunk, start)?;
        if chunk[used..].iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        chunk.truncate(used);
        self.write(start, chunk)
    }

    fn advance(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.run.check()?;
        let chunk_size = self.run.chunk_size as u64;
        let end = offset_bytes.checked_add(length_bytes).filter(|end| {
            *end <= self.run.size_bytes
                && offset_bytes >= self.next_offset
                && offset_bytes % chunk_size == 0
                && (end % chunk_size == 0 || *end == self.run.size_bytes)
        });
        let Some(end) = end else {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "a write of {length_bytes} bytes at {offset_bytes} is not in chunks of \
                     {chunk_size}, ascending, within {} bytes",
                    self.run.size_bytes
                ),
            ));
        };
        self.next_offset = end;
        Ok(())
    }

    /// Lets the threads end, and takes over what they have come to.
    fn join(&mut self) -> Option<MapRoot> {
        self.run.close_jobs();
        self.steps = None;
        for worker in self.workers.drain(..) {
            // Workers catch their panics.
            let _ = worker.join();
        }
        let outcome = self.committer.take()?.join();
        let next_chunk = self.run.numbering.lock().next_chunk;
        let mut progress = self.run.shared.progress.lock();
        let root = match outcome {
            Ok(outcome) => {
                progress.state = outcome.state;
                outcome.root
            }
            Err(_) => {
                progress.failed = true;
                None
            }
        };
        // Ids that were handed out stay used.
        progress.state.next_chunk = progress.state.next_chunk.max(next_chunk);
        if std::mem::take(&mut progress.is_to_be_counted) && !progress.failed {
            // Counters that count too much do no harm until the next gc.
            if let Err(error) = progress.state.count_anew(&self.run.shared.repository) {
                tracing::warn!(error = %error.full_message(), "chunks were not counted anew");
            }
        }
        root
    }
}

impl Drop for DiskWriter {
    fn drop(&mut self) {
        if self.committer.is_some() {
            self.run.stop();
            self.join();
        }
        self.run.shared.progress.lock().busy = false;
    }
}
