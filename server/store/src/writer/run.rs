//! What the threads that write one disk share.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use crate::chunk::ChunkId;
use crate::dedup::ChunkHash;

use super::Shared;

/// Buffers that are kept for another use, of each sort.
const KEPT_BUFFERS: usize = 16;

/// What writing a disk has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteCounts {
    /// Chunks that were new and were stored.
    pub stored_chunks: u64,
    /// Bytes that those take in the store.
    pub stored_bytes: u64,
    /// Chunks that the store already had.
    pub known_chunks: u64,
    /// Chunks of zeroes, which became holes.
    pub zero_chunks: u64,
    /// Chunks that the store had, damaged, and that were stored again.
    pub healed_chunks: u64,
}

/// One piece of a disk on its way to a worker.
pub(super) struct Job {
    /// Its place among the jobs, for handing out ids.
    pub(super) turn: u64,
    /// Its place among all steps, for the map.
    pub(super) order: u64,
    pub(super) first_chunk: u64,
    pub(super) bytes: Arc<Vec<u8>>,
    pub(super) range: std::ops::Range<usize>,
}

/// A chunk that is new: its value ends at `value_end` in the step's values.
pub(super) struct NewChunk {
    pub(super) id: ChunkId,
    pub(super) hash: ChunkHash,
    pub(super) value_end: usize,
}

/// A chunk that was damaged, as it is stored again.
pub(crate) struct HealedChunk {
    pub(crate) id: ChunkId,
    pub(crate) hash: ChunkHash,
    pub(crate) value: Vec<u8>,
}

/// What the committer does, in order.
pub(super) enum Step {
    /// Chunks for the map, 0 for a hole, and the values of the new ones.
    Chunks {
        first_chunk: u64,
        ids: Vec<ChunkId>,
        new: Vec<NewChunk>,
        values: Vec<u8>,
        healed: Vec<HealedChunk>,
        bytes: u64,
    },
    /// A hole.
    Holes { first_chunk: u64, count: u64 },
    /// Nothing: the run has failed or is cancelled.
    Nothing { bytes: u64 },
}

/// Which content has which id, as long as the dedup family may not know it.
pub(super) struct Numbering {
    /// The job whose turn it is.
    pub(super) turn: u64,
    pub(super) next_chunk: ChunkId,
    /// New contents of this commit and the one before: a worker that looked
    /// into the dedup family before a commit still finds here what it missed.
    pub(super) fresh: HashMap<ChunkHash, ChunkId>,
    /// Of the last commit; they leave `fresh` with the next one.
    committed: Vec<ChunkHash>,
}

pub(super) struct Run {
    pub(super) shared: Arc<Shared>,
    pub(super) size_bytes: u64,
    pub(super) chunk_size: usize,
    pub(super) numbering: Mutex<Numbering>,
    pub(super) turn_changed: Condvar,
    /// Commits so far.
    pub(super) commits: AtomicU64,
    in_flight_bytes: Mutex<u64>,
    in_flight_changed: Condvar,
    /// Work is of no use any more: cancelled or failed.
    stopped: AtomicBool,
    failure: Mutex<Option<Error>>,
    buffers: Mutex<Vec<Vec<u8>>>,
    values: Mutex<Vec<Vec<u8>>>,
    jobs: Mutex<JobQueue>,
    jobs_changed: Condvar,
    stored_chunks: AtomicU64,
    stored_bytes: AtomicU64,
    known_chunks: AtomicU64,
    zero_chunks: AtomicU64,
    healed_chunks: AtomicU64,
}

#[derive(Default)]
struct JobQueue {
    waiting: VecDeque<Job>,
    closed: bool,
}

impl Run {
    pub(super) fn new(shared: Arc<Shared>, size_bytes: u64, next_chunk: ChunkId) -> Self {
        let chunk_size = shared.repository.chunk_size_bytes() as usize;
        Run {
            shared,
            size_bytes,
            chunk_size,
            numbering: Mutex::new(Numbering {
                turn: 0,
                next_chunk,
                fresh: HashMap::new(),
                committed: Vec::new(),
            }),
            turn_changed: Condvar::new(),
            commits: AtomicU64::new(0),
            in_flight_bytes: Mutex::new(0),
            in_flight_changed: Condvar::new(),
            stopped: AtomicBool::new(false),
            failure: Mutex::new(None),
            buffers: Mutex::default(),
            values: Mutex::default(),
            jobs: Mutex::default(),
            jobs_changed: Condvar::new(),
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

    /// Remembers the first failure and stops the run.
    pub(super) fn fail(&self, error: Error) {
        self.shared.progress.lock().failed = true;
        let mut failure = self.failure.lock();
        if failure.is_none() && !self.is_stopped() {
            *failure = Some(error);
        }
        drop(failure);
        self.stop();
    }

    /// The failure, once; afterwards only that there was one.
    pub(super) fn check(&self) -> Result<()> {
        if !self.is_stopped() {
            return Ok(());
        }
        Err(self.failure.lock().take().unwrap_or_else(|| {
            Error::new(ErrorKind::Poisoned, "writing this disk has failed before: start it again")
        }))
    }

    /// Waits until less than `limit` bytes are on their way, and adds some.
    pub(super) fn enter(&self, bytes: u64, limit: u64) {
        let mut in_flight = self.in_flight_bytes.lock();
        while *in_flight > 0 && *in_flight + bytes > limit {
            self.in_flight_changed.wait(&mut in_flight);
        }
        *in_flight += bytes;
    }

    pub(super) fn leave(&self, bytes: u64) {
        *self.in_flight_bytes.lock() -= bytes;
        self.in_flight_changed.notify_one();
    }

    pub(super) fn push_job(&self, job: Job) {
        self.jobs.lock().waiting.push_back(job);
        self.jobs_changed.notify_one();
    }

    pub(super) fn close_jobs(&self) {
        self.jobs.lock().closed = true;
        self.jobs_changed.notify_all();
    }

    /// The next job; none when there will be no more.
    pub(super) fn next_job(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        loop {
            if let Some(job) = jobs.waiting.pop_front() {
                return Some(job);
            }
            if jobs.closed {
                return None;
            }
            self.jobs_changed.wait(&mut jobs);
        }
    }

    /// Forgets what was committed one commit ago; `committed` is what now is.
    pub(super) fn forget_committed(&self, committed: Vec<ChunkHash>) {
        let mut numbering = self.numbering.lock();
        let old = std::mem::replace(&mut numbering.committed, committed);
        for hash in &old {
            numbering.fresh.remove(hash);
        }
        self.commits.fetch_add(1, Ordering::Release);
    }

    pub(super) fn take_buffer(&self) -> Vec<u8> {
        self.buffers.lock().pop().unwrap_or_default()
    }

    pub(super) fn take_values(&self) -> Vec<u8> {
        self.values.lock().pop().unwrap_or_default()
    }

    pub(super) fn recycle_buffer(&self, buffer: Vec<u8>) {
        keep(&self.buffers, buffer);
    }

    pub(super) fn recycle_values(&self, values: Vec<u8>) {
        keep(&self.values, values);
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

fn keep(kept: &Mutex<Vec<Vec<u8>>>, mut buffer: Vec<u8>) {
    buffer.clear();
    let mut kept = kept.lock();
    if kept.len() < KEPT_BUFFERS {
        kept.push(buffer);
    }
}
