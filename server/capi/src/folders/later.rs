//! Work that has to wait, on threads of the library, so that it holds none of the host's.
//!
//! ```text
//!   run       what decodes chunks or reads a drive      reading threads
//!   flush     one node's flushes, as many as came        syncing threads
//!             together: they share one sync
//! ```
//!
//! Both are bounded, in threads and in what waits. What finds no room is done by its
//! caller, who so has to wait himself: a client that asks for more than the machine can do
//! is held up.

use super::OpenNode;
use crate::guard::defect;
use crate::message::{fail, fail_with};
use coldrise_block::{Context, Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::thread::JoinHandle;

const READING_THREADS: usize = 16;
const SYNCING_THREADS: usize = 32;
/// Requests that may wait for either.
const MOST_WAITING: usize = 1024;

/// `coldrise_task_callback` of the header.
pub type Task = unsafe extern "C" fn(*mut c_void);
/// `coldrise_done_callback` of the header.
pub type DoneCallback = unsafe extern "C" fn(*mut c_void, c_int);

/// Both kinds of threads.
pub(super) struct Later {
    pub(super) reading: Threads,
    pub(super) syncing: Threads,
}

impl Default for Later {
    fn default() -> Later {
        Later {
            reading: Threads::new("coldrise-read", READING_THREADS),
            syncing: Threads::new("coldrise-sync", SYNCING_THREADS),
        }
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads that are started when they are needed.
pub(super) struct Threads {
    name: &'static str,
    most: usize,
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: Vec<JoinHandle<()>>,
    idle: usize,
    has_ended: bool,
}

impl Threads {
    fn new(name: &'static str, most: usize) -> Threads {
        Threads { name, most, queue: Arc::default() }
    }

    /// Has a thread do it. `WouldWait` where there is no room.
    fn start(&self, job: Job) -> Result<()> {
        let mut state = self.queue.state.lock();
        if state.has_ended || state.jobs.len() >= MOST_WAITING {
            return Err(no_room());
        }
        if state.jobs.len() >= state.idle && state.threads.len() < self.most {
            let queue = Arc::clone(&self.queue);
            let started = std::thread::Builder::new()
                .name(self.name.to_owned())
                .spawn(move || queue.work())
                .context(|| format!("starting a thread {}", self.name));
            match started {
                Ok(thread) => state.threads.push(thread),
                // Those that run do it.
                Err(_) if !state.threads.is_empty() => {}
                Err(error) => return Err(error),
            }
        }
        state.jobs.push_back(job);
        self.queue.wake.notify_one();
        Ok(())
    }
}

impl Queue {
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                if let Err(panic) = catch_unwind(AssertUnwindSafe(job)) {
                    eprintln!("coldrise: {}", defect(panic));
                }
                state = self.state.lock();
                continue;
            }
            if state.has_ended {
                return;
            }
            state.idle += 1;
            self.wake.wait(&mut state);
            state.idle -= 1;
        }
    }
}

impl Threads {
    /// Waits until everything is done; nothing is started any more.
    fn end(&self) {
        let threads = {
            let mut state = self.queue.state.lock();
            state.has_ended = true;
            std::mem::take(&mut state.threads)
        };
        self.queue.wake.notify_all();
        let here = std::thread::current().id();
        for thread in threads {
            // What it did last may be what closes the repository.
            if thread.thread().id() != here {
                let _ = thread.join();
            }
        }
    }
}

impl Later {
    /// Waits until everything is done; nothing is started any more.
    pub(super) fn end(&self) {
        self.reading.end();
        self.syncing.end();
    }
}

fn no_room() -> Error {
    Error::new(ErrorKind::WouldWait, "too much is waiting already")
}

/// A host's function with its argument, which it keeps valid until it is called.
struct Call<F> {
    function: F,
    context: *mut c_void,
}

// SAFETY: the host promises that it may be called from any thread.
unsafe impl<F> Send for Call<F> {}

/// Runs the host's task.
///
/// # Safety
/// `task` takes `context` from any thread.
pub(super) unsafe fn run(threads: &Threads, task: Task, context: *mut c_void) -> Result<()> {
    let call = Call { function: task, context };
    threads.start(Box::new(move || {
        let call = call;
        // SAFETY: the caller's promise.
        unsafe { (call.function)(call.context) }
    }))
}

/// Who waits for a node's next flush.
#[derive(Default)]
pub(super) struct Flushes(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    calls: Vec<Call<DoneCallback>>,
    /// A thread will see to them.
    is_started: bool,
}

/// Flushes a node, and tells whoever asked for it before the flush began. One thread at a
/// time is at it for each node: whoever comes meanwhile shares the next flush.
///
/// # Safety
/// `done` takes `context` from any thread.
pub(super) unsafe fn flush(
    node: &Arc<OpenNode>,
    threads: &Threads,
    done: DoneCallback,
    context: *mut c_void,
) -> Result<()> {
    let mut waiting = node.flushes().0.lock();
    if waiting.calls.len() >= MOST_WAITING {
        return Err(no_room());
    }
    if !waiting.is_started {
        start_flush(node, threads)?;
        waiting.is_started = true;
    }
    waiting.calls.push(Call { function: done, context });
    Ok(())
}

fn start_flush(node: &Arc<OpenNode>, threads: &Threads) -> Result<()> {
    let node = Arc::clone(node);
    threads.start(Box::new(move || flush_all(&node)))
}

fn flush_all(node: &Arc<OpenNode>) {
    loop {
        let calls = {
            let mut waiting = node.flushes().0.lock();
            waiting.is_started = !waiting.calls.is_empty();
            std::mem::take(&mut waiting.calls)
        };
        if calls.is_empty() {
            return;
        }
        // Unwind safe: after a panic the open files refuse every call.
        let flushed = catch_unwind(AssertUnwindSafe(|| node.flush()));
        let flushed = flushed.unwrap_or_else(|panic| {
            node.poison();
            Err(Error::new(ErrorKind::Internal, defect(panic)))
        });
        for call in calls {
            let result = match &flushed {
                Ok(()) => 0,
                // Each time: the one before may have made other calls.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    fail_with(libc::ESTALE, &error.full_message())
                }
                Err(error) => fail(error),
            };
            // SAFETY: the promise to `flush`.
            unsafe { (call.function)(call.context, result) };
        }
        // Others may wait for a thread.
        let mut waiting = node.flushes().0.lock();
        if waiting.calls.is_empty() {
            waiting.is_started = false;
            return;
        }
        if start_flush(node, &node.shared().later.syncing).is_ok() {
            return;
        }
    }
}
