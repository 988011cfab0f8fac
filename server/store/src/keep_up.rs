//! What a process that reads for long does so that space and memory come back meanwhile.
//!
//! A reader has the files of the database open as it saw them last. What a gc deletes stays
//! on the drive until it looks again: a server that nobody connects to would hold it for good.
//! Its cache of decoded chunks shrinks while the machine is short of memory.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::allocator::return_free_memory;
use crate::cache::ChunkCache;
use crate::memory::{CacheSizer, Memory};
use crate::Repository;

/// Between two looks at the length of one file, and at the memory that is available.
const INTERVAL: Duration = Duration::from_secs(1);

/// As long as it lives a reader sees within seconds what the writer has committed, and has
/// let go of what it has deleted.
pub struct KeepUp {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Stop {
    is_asked: Mutex<bool>,
    wake: Condvar,
}

impl Repository {
    /// Starts a thread that catches up whenever the list of the database's files has changed.
    /// Where it cannot be started a warning says so.
    pub fn keep_up(self: &Arc<Self>) -> KeepUp {
        let stop = Arc::new(Stop::default());
        let (repository, asked) = (Arc::downgrade(self), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("keep-up".into())
            .spawn(move || run(&repository, &asked))
            .inspect_err(|error| {
                tracing::warn!(%error, "space that a gc gives back is held until the next request");
            });
        KeepUp { stop, thread: thread.ok() }
    }
}

fn run(repository: &Weak<Repository>, stop: &Stop) {
    let mut seen = None;
    let mut sizer = repository.upgrade().and_then(|repository| {
        let cache = repository.chunk_cache()?;
        Some(CacheSizer::new(Memory::of_this_process(), cache.capacity_bytes()))
    });
    loop {
        let mut is_asked = stop.is_asked.lock();
        if !*is_asked {
            stop.wake.wait_for(&mut is_asked, INTERVAL);
        }
        if *is_asked {
            return;
        }
        drop(is_asked);
        let Some(repository) = repository.upgrade() else { return };
        if let (Some(cache), Some(sizer)) = (repository.chunk_cache(), &mut sizer) {
            fit(cache, sizer);
        }
        let found = repository.database().list_stamp();
        if found.is_some() && found != seen {
            match repository.catch_up() {
                Ok(()) => seen = found,
                // A writer may replace its files just then.
                Err(error) => tracing::debug!(%error, "not caught up with the writer"),
            }
        }
    }
}

fn fit(cache: &ChunkCache, sizer: &mut CacheSizer) {
    let used = cache.used_bytes();
    let Some(allowed) = sizer.look(used) else { return };
    cache.resize(allowed);
    if allowed < used {
        return_free_memory();
        tracing::info!(
            used,
            allowed,
            "little memory is available: the cache of decoded chunks shrinks"
        );
    }
}

impl Drop for KeepUp {
    fn drop(&mut self) {
        *self.stop.is_asked.lock() = true;
        self.stop.wake.notify_all();
        // The thread itself may have held the last reference to whoever holds this.
        if let Some(thread) = self.thread.take() {
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
