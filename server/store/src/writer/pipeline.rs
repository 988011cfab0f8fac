//! The threads that write, and their shared state: one pipeline for all disks being written.
//!
//! ```text
//! disk ─┐                    ┌▶ worker ─┐
//! disk ─┼▶ queue: turn, order┼▶ worker ─┼▶ steps, in order ─▶ committer
//! disk ─┘  (bytes are here)  └▶ worker ─┘
//! ```
//!
//! The pipeline starts with the first disk and ends with the last one. A job gets its turn when it
//! is queued with its bytes, so a slow source never holds a turn that others wait for. The steps of
//! one disk stay in order, because the committer takes all steps in the order of the queue.
//!
//! **A chunk with an id is always stored.** As soon as a new chunk has its id, another disk may
//! find it in `Numbering::fresh` and name it in its map. From then on a worker finishes the job
//! even if its disk was cancelled, and the committer stores its chunks. A failure after that point,
//! or any failure of the store, fails the whole pipeline: every disk, and the writer until it is
//! reopened. An earlier failure fails one disk.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use crate::chunk::ChunkId;
use crate::dedup::ChunkHash;
use crate::map::MapRoot;
use crate::state::StoreState;

use super::commit::commit_all;
use super::disk_run::DiskRun;
use super::{Shared, worker};

/// Maximum number of buffers of each kind that are kept for reuse.
const KEPT_BUFFERS: usize = 16;
/// Bytes that one worker takes at once.
pub(super) const JOB_BYTES: usize = 1 << 20;
/// Maximum plaintext in flight, for all disks together, besides one job per worker.
const IN_FLIGHT_BYTES: u64 = 24 << 20;

/// One piece of a disk on its way to a worker.
pub(super) struct Job {
    pub(super) disk: Arc<DiskRun>,
    /// Its position among the jobs, for assigning ids.
    pub(super) turn: u64,
    /// Its position among all steps, for the committer.
    pub(super) order: u64,
    pub(super) first_chunk: u64,
    pub(super) bytes: Arc<Vec<u8>>,
    pub(super) range: std::ops::Range<usize>,
}

/// A new chunk: its value ends at `value_end` in the step's values.
pub(super) struct NewChunk {
    pub(super) id: ChunkId,
    pub(super) hash: ChunkHash,
    pub(super) value_end: usize,
}

/// A damaged chunk that is stored again.
pub(crate) struct HealedChunk {
    pub(crate) id: ChunkId,
    pub(crate) hash: ChunkHash,
    pub(crate) value: Vec<u8>,
}

/// One step of the committer, executed in order.
pub(super) enum Step {
    /// Chunks for the map, with id 0 for a hole, and the values of the new ones.
    Chunks(Chunks),
    /// A hole.
    Holes { disk: Arc<DiskRun>, first_chunk: u64, count: u64 },
    /// Nothing, because the disk has failed or was cancelled.
    Nothing { bytes: u64 },
    /// The disk is complete. The answer is its map, once all of it is durable; the channel closes
    /// without an answer if the disk failed.
    Finish { disk: Arc<DiskRun>, answer: Sender<MapRoot> },
    /// The disk was cancelled or has failed: its pages are deleted. The end of the channel signals
    /// completion.
    Abandon { disk: Arc<DiskRun>, _done: Sender<MapRoot> },
}

/// See [`Step::Chunks`].
pub(super) struct Chunks {
    pub(super) disk: Arc<DiskRun>,
    pub(super) first_chunk: u64,
    pub(super) ids: Vec<ChunkId>,
    pub(super) new: Vec<NewChunk>,
    pub(super) values: Vec<u8>,
    pub(super) healed: Vec<HealedChunk>,
    /// Bytes of plaintext.
    pub(super) bytes: u64,
}

impl Step {
    /// Plaintext that stays in flight until this step is done, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Step::Chunks(Chunks { bytes, .. }) | Step::Nothing { bytes } => *bytes,
            Step::Holes { .. } | Step::Finish { .. } | Step::Abandon { .. } => 0,
        }
    }
}

/// The ids of contents that the dedup family may not have yet.
pub(super) struct Numbering {
    /// The job whose turn it is.
    pub(super) turn: u64,
    pub(super) next_chunk: ChunkId,
    /// New contents of this commit and the one before. A worker that looked into the dedup family
    /// before a commit still finds the missed contents here.
    pub(super) fresh: HashMap<ChunkHash, ChunkId>,
    /// Contents of the last commit; they leave `fresh` with the next one.
    committed: Vec<ChunkHash>,
}

pub(super) struct Pipeline {
    pub(super) shared: Arc<Shared>,
    pub(super) chunk_size: usize,
    pub(super) numbering: Mutex<Numbering>,
    pub(super) turn_changed: Condvar,
    /// Number of commits so far.
    pub(super) commits: AtomicU64,
    queue: Mutex<Queue>,
    queue_changed: Condvar,
    in_flight: Mutex<InFlight>,
    in_flight_changed: Condvar,
    buffers: Mutex<Vec<Vec<u8>>>,
    values: Mutex<Vec<Vec<u8>>>,
    is_failed: AtomicBool,
    failure: Mutex<Option<(ErrorKind, String)>>,
}

/// Plaintext in flight, in bytes.
struct InFlight {
    bytes: u64,
    limit: u64,
}

struct Queue {
    waiting: VecDeque<Job>,
    next_turn: u64,
    next_order: u64,
    /// The channel to the committer; `None` after the last step.
    steps: Option<Sender<(u64, Step)>>,
}

impl Pipeline {
    fn new(shared: Arc<Shared>, next_chunk: ChunkId, steps: Sender<(u64, Step)>) -> Self {
        let chunk_size = shared.repository.chunk_size_bytes() as usize;
        let numbering =
            Numbering { turn: 0, next_chunk, fresh: HashMap::new(), committed: Vec::new() };
        let queue =
            Queue { waiting: VecDeque::new(), next_turn: 0, next_order: 0, steps: Some(steps) };
        Pipeline {
            shared,
            chunk_size,
            numbering: Mutex::new(numbering),
            turn_changed: Condvar::new(),
            commits: AtomicU64::new(0),
            queue: Mutex::new(queue),
            queue_changed: Condvar::new(),
            in_flight: Mutex::new(InFlight { bytes: 0, limit: IN_FLIGHT_BYTES }),
            in_flight_changed: Condvar::new(),
            buffers: Mutex::default(),
            values: Mutex::default(),
            is_failed: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    pub(super) fn is_failed(&self) -> bool {
        self.is_failed.load(Ordering::Acquire)
    }

    /// Keeps the first failure. No disk can be written afterwards.
    pub(super) fn fail(&self, error: &Error) {
        let failure = (error.kind(), error.full_message());
        self.shared.progress.lock().failure.get_or_insert_with(|| failure.clone());
        self.failure.lock().get_or_insert(failure);
        self.is_failed.store(true, Ordering::Release);
    }

    /// Returns the failure of the pipeline, if there is one.
    pub(super) fn check(&self) -> Result<()> {
        match &*self.failure.lock() {
            Some((kind, message)) => Err(Error::new(*kind, message.clone())),
            None => Ok(()),
        }
    }

    /// Queues a piece of a disk. Blocks while too many bytes are in flight.
    pub(super) fn push_job(
        &self,
        disk: &Arc<DiskRun>,
        first_chunk: u64,
        bytes: Arc<Vec<u8>>,
        range: std::ops::Range<usize>,
    ) {
        let length = range.len() as u64;
        let mut in_flight = self.in_flight.lock();
        while in_flight.bytes > 0 && in_flight.bytes + length > in_flight.limit {
            self.in_flight_changed.wait(&mut in_flight);
        }
        in_flight.bytes += length;
        drop(in_flight);
        let mut queue = self.queue.lock();
        let (turn, order) = (queue.next_turn, queue.next_order);
        let disk = Arc::clone(disk);
        queue.waiting.push_back(Job { disk, turn, order, first_chunk, bytes, range });
        queue.next_turn += 1;
        queue.next_order += 1;
        drop(queue);
        self.queue_changed.notify_one();
    }

    /// Queues a step that needs no worker.
    pub(super) fn push_step(&self, step: Step) {
        let mut queue = self.queue.lock();
        let order = queue.next_order;
        queue.next_order += 1;
        if let Some(steps) = &queue.steps {
            // If the committer has ended, the pipeline has failed and reports it.
            let _ = steps.send((order, step));
        }
    }

    /// Subtracts bytes from the plaintext in flight.
    pub(super) fn leave(&self, bytes: u64) {
        self.in_flight.lock().bytes -= bytes;
        self.in_flight_changed.notify_all();
    }

    /// The next job; `None` after the last one.
    pub(super) fn next_job(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(job) = queue.waiting.pop_front() {
                return Some(job);
            }
            queue.steps.as_ref()?;
            self.queue_changed.wait(&mut queue);
        }
    }

    fn close(&self) {
        self.queue.lock().steps = None;
        self.queue_changed.notify_all();
    }

    /// Removes the contents of the commit before last from `fresh`; `committed` are those of the
    /// last commit.
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
}

fn keep(kept: &Mutex<Vec<Vec<u8>>>, mut buffer: Vec<u8>) {
    buffer.clear();
    let mut kept = kept.lock();
    if kept.len() < KEPT_BUFFERS {
        kept.push(buffer);
    }
}

/// The pipeline of a writer while at least one disk is being written.
#[derive(Default)]
pub(crate) struct Running(Option<Threads>);

struct Threads {
    pipeline: Arc<Pipeline>,
    disks: usize,
    workers: Vec<JoinHandle<()>>,
    committer: JoinHandle<StoreState>,
    steps: Sender<(u64, Step)>,
}

impl Running {
    /// Whether a disk is being written.
    pub(crate) fn is_any(&self) -> bool {
        self.0.is_some()
    }
}

impl Shared {
    /// Adds a disk; at least `threads` workers run then. Paired with [`Shared::leave_pipeline`].
    ///
    /// # Errors
    /// The failure of an earlier write of any disk; `Io` if no thread can be started.
    pub(super) fn enter_pipeline(self: &Arc<Self>, threads: usize) -> Result<Arc<Pipeline>> {
        let mut running = self.running.lock();
        let state = {
            let progress = self.progress.lock();
            if let Some((kind, message)) = &progress.failure {
                return Err(Error::new(*kind, message.clone()));
            }
            progress.state
        };
        let started = |error| Error::io("starting a thread", error);
        let mut current = match running.0.take() {
            Some(current) => current,
            None => {
                let (steps, receiver) = channel();
                let pipeline =
                    Arc::new(Pipeline::new(Arc::clone(self), state.next_chunk, steps.clone()));
                let of_committer = Arc::clone(&pipeline);
                let committer = std::thread::Builder::new()
                    .name("committer".to_owned())
                    .spawn(move || commit_all(&of_committer, &receiver, state))
                    .map_err(started)?;
                Threads { pipeline, disks: 0, workers: Vec::new(), committer, steps }
            }
        };
        current.disks += 1;
        let mut grown = Ok(());
        while current.workers.len() < threads && grown.is_ok() {
            let (pipeline, steps) = (Arc::clone(&current.pipeline), current.steps.clone());
            grown = std::thread::Builder::new()
                .name(format!("worker-{}", current.workers.len()))
                .spawn(move || worker::work(&pipeline, &steps))
                .map(|worker| current.workers.push(worker))
                .map_err(started);
        }
        let workers = current.workers.len();
        current.pipeline.in_flight.lock().limit = IN_FLIGHT_BYTES + (workers * JOB_BYTES) as u64;
        let pipeline = Arc::clone(&current.pipeline);
        running.0 = Some(current);
        drop(running);
        if workers == 0 {
            self.leave_pipeline();
            grown?;
        }
        Ok(pipeline)
    }

    /// Removes a disk. The last one ends the threads and takes over their resulting state.
    pub(super) fn leave_pipeline(&self) {
        let mut running = self.running.lock();
        let Some(mut current) = running.0.take() else { return };
        current.disks -= 1;
        if current.disks > 0 {
            running.0 = Some(current);
            return;
        }
        let Threads { pipeline, workers, committer, steps, .. } = current;
        pipeline.close();
        drop(steps);
        for worker in workers {
            // Workers catch their panics.
            let _ = worker.join();
        }
        let state = committer.join();
        let next_chunk = pipeline.numbering.lock().next_chunk;
        let mut progress = self.progress.lock();
        match state {
            Ok(state) => progress.state = state,
            Err(_) => {
                let failure = (ErrorKind::Internal, "the committer panicked".to_owned());
                progress.failure.get_or_insert(failure);
            }
        }
        // Assigned ids stay used.
        progress.state.next_chunk = progress.state.next_chunk.max(next_chunk);
        if std::mem::take(&mut progress.is_to_be_counted) && progress.failure.is_none() {
            progress.state.count_after_gc(&self.repository);
        }
    }
}
