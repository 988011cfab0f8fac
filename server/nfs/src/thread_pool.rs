//! Runs waiting work on threads of our own, so that it blocks none of the host's.
//!
//! ```text
//!   reading   what decodes chunks or reads a drive
//!   syncing   one node's flushes, as many as came together: they share one sync (shared_flush)
//! ```
//!
//! The numbers of threads and of waiting tasks are bounded. If there is no room the caller
//! does the work itself and so waits: a client that asks for more than the machine can do
//! is slowed down.

use coldrise_block::{Context, Error, ErrorKind, Result, defect};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

const READING_THREADS: usize = 16;
const SYNCING_THREADS: usize = 32;
/// Maximum number of waiting requests per pool.
pub(crate) const MOST_WAITING: usize = 1024;

/// Both pools.
pub(crate) struct ThreadPools {
    pub(crate) reading: ThreadPool,
    pub(crate) syncing: ThreadPool,
}

impl Default for ThreadPools {
    fn default() -> ThreadPools {
        ThreadPools {
            reading: ThreadPool::new("coldrise-read", READING_THREADS),
            syncing: ThreadPool::new("coldrise-sync", SYNCING_THREADS),
        }
    }
}

impl ThreadPools {
    /// Waits until all work is done; no work starts after that.
    pub(crate) fn end(&self) {
        self.reading.end();
        self.syncing.end();
    }
}

pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// Threads that start on demand.
pub(crate) struct ThreadPool {
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

impl ThreadPool {
    fn new(name: &'static str, most: usize) -> ThreadPool {
        ThreadPool { name, most, queue: Arc::default() }
    }

    /// Gives a task to a thread. `ErrorKind::WouldWait` if there is no room.
    pub(crate) fn start(&self, job: Job) -> Result<()> {
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
                // The running threads do it.
                Err(_) if !state.threads.is_empty() => {}
                Err(error) => return Err(error),
            }
        }
        state.jobs.push_back(job);
        self.queue.wake.notify_one();
        Ok(())
    }

    /// Waits until all work is done; no work starts after that.
    fn end(&self) {
        let threads = {
            let mut state = self.queue.state.lock();
            state.has_ended = true;
            std::mem::take(&mut state.threads)
        };
        self.queue.wake.notify_all();
        let here = std::thread::current().id();
        for thread in threads {
            // Its last task may close the repository.
            if thread.thread().id() != here {
                let _ = thread.join();
            }
        }
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

pub(crate) fn no_room() -> Error {
    Error::new(ErrorKind::WouldWait, "too many requests are waiting")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_full_pool_refuses_jobs_and_finishes_waiting_ones() {
        let pool = ThreadPool::new("test", 1);
        let (go, wait) = channel::<()>();
        let (done, finished) = channel();
        let (begun, first) = channel();
        pool.start(Box::new(move || {
            begun.send(()).unwrap();
            wait.recv().unwrap();
            panic!("a job's panic ends no thread");
        }))
        .unwrap();
        first.recv().unwrap();
        for _ in 0..MOST_WAITING {
            let done = done.clone();
            pool.start(Box::new(move || done.send(()).unwrap())).unwrap();
        }
        let refused = pool.start(Box::new(|| {})).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::WouldWait);
        go.send(()).unwrap();
        pool.end();
        drop(done);
        assert_eq!(finished.iter().count(), MOST_WAITING);
        assert_eq!(pool.start(Box::new(|| {})).unwrap_err().kind(), ErrorKind::WouldWait);
    }
}
