//! Keeps a long-running reader from holding space and memory.
//!
//! A reader has the database files open that it saw last. Files that a gc deletes take space until
//! the reader catches up; a server without clients would hold them forever. The cache of decoded
//! chunks shrinks while the machine is short of memory.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::PeriodicThread;

use crate::Repository;
use crate::allocator::return_free_memory;
use crate::cache::ChunkCache;
use crate::memory::{CacheSizer, Memory};

/// Interval between two checks of the manifest's length and of the available memory.
const INTERVAL: Duration = Duration::from_secs(1);

/// As long as it lives, the reader sees the writer's commits within seconds, and has closed the
/// files that the writer has deleted.
pub struct CatchUpThread {
    _thread: Option<PeriodicThread>,
}

impl Repository {
    /// Starts a thread that catches up whenever the manifest has changed. If it cannot be started,
    /// a warning is logged.
    pub fn catch_up_in_background(self: &Arc<Self>) -> CatchUpThread {
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
                    // A writer may be replacing its files.
                    Err(error) => tracing::debug!(%error, "not caught up with the writer"),
                }
            }
            ControlFlow::Continue(())
        });
        let thread = thread.inspect_err(|error| {
            tracing::warn!(%error, "space that a gc gives back is held until the next request");
        });
        CatchUpThread { _thread: thread.ok() }
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
