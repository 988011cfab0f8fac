//! One flush of a file for all callers that wait for one.

use crate::OpenNode;
use crate::thread_pool::{MOST_WAITING, no_room};
use coldrise_block::{Error, ErrorKind, Result, defect};
use parking_lot::Mutex;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Receives the result of a flush, on the thread that did it.
pub(crate) type FlushDone = Box<dyn FnOnce(&Result<()>) + Send>;

/// The callers that wait for a node's next flush.
#[derive(Default)]
pub(crate) struct FlushQueue(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    calls: Vec<FlushDone>,
    /// Whether a thread will serve them.
    is_started: bool,
}

impl OpenNode {
    /// Flushes on a thread of our own, and calls back every caller that came before the
    /// flush began. One thread at a time flushes a node: later callers share the next
    /// flush. `ErrorKind::WouldWait` if there is no room.
    pub fn flush_later(
        self: &Arc<Self>,
        done: impl FnOnce(&Result<()>) + Send + 'static,
    ) -> Result<()> {
        let mut waiting = self.flush_queue().0.lock();
        if waiting.calls.len() >= MOST_WAITING {
            return Err(no_room());
        }
        if !waiting.is_started {
            self.start_flush()?;
            waiting.is_started = true;
        }
        waiting.calls.push(Box::new(done));
        Ok(())
    }

    fn start_flush(self: &Arc<Self>) -> Result<()> {
        let node = Arc::clone(self);
        self.shared().pools.syncing.start(Box::new(move || node.flush_for_all()))
    }

    fn flush_for_all(self: &Arc<Self>) {
        loop {
            let calls = {
                let mut waiting = self.flush_queue().0.lock();
                waiting.is_started = !waiting.calls.is_empty();
                std::mem::take(&mut waiting.calls)
            };
            if calls.is_empty() {
                return;
            }
            // Unwind safe: after a panic the open files refuse every call.
            let flushed = catch_unwind(AssertUnwindSafe(|| self.flush()));
            let flushed = flushed.unwrap_or_else(|panic| {
                self.poison();
                Err(Error::new(ErrorKind::Internal, defect(panic)))
            });
            calls.into_iter().for_each(|done| done(&flushed));
            // Others may wait for a thread.
            let mut waiting = self.flush_queue().0.lock();
            if waiting.calls.is_empty() {
                waiting.is_started = false;
                return;
            }
            if self.start_flush().is_ok() {
                return;
            }
        }
    }
}
