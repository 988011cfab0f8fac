//! What a process that reads for long does so that space and memory come back meanwhile.
//!
//! A reader has the files of the database open as it saw them last. What a gc deletes stays
//! on the drive until it looks again: a server that nobody connects to would hold it for good.
//! Its cache of decoded chunks shrinks while the machine is short of memory.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::PeriodicThread;

use crate::allocator::return_free_memory;
use crate::cache::ChunkCache;
use crate::memory::{CacheSizer, Memory};
use crate::Repository;

/// Between two looks at the length of one file, and at the memory that is available.
const INTERVAL: Duration = Duration::from_secs(1);

/// As long as it lives a reader sees within seconds what the writer has committed, and has
/// let go of what it has deleted.
pub struct KeepUp {
    _thread: Option<PeriodicThread>,
}

impl Repository {
    /// Starts a thread that catches up whenever the list of the database's files has changed.
    /// Where it cannot be started a warning says so.
    pub fn keep_up(self: &Arc<Self>) -> KeepUp {
        let mut sizer = self
            .chunk_cache()
            .map(|cache| CacheSizer::new(Memory::of_this_process(), cache.capacity_bytes()));
        let repository = Arc::downgrade(self);
        let mut seen = None;
        let thread = PeriodicThread::start("keep-up", INTERVAL, move || {
            let Some(repository) = repository.upgrade() else { return ControlFlow::Break(()) };
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
            ControlFlow::Continue(())
        });
        let thread = thread.inspect_err(|error| {
            tracing::warn!(%error, "space that a gc gives back is held until the next request");
        });
        KeepUp { _thread: thread.ok() }
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
