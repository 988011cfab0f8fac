//! Closes what nobody uses: NFSv3 clients open nothing and close nothing.

use super::Shared;
use coldrise_block::{Context, Result};
use parking_lot::{Condvar, Mutex};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// A thread that looks for idle files, until it is dropped.
pub(super) struct Idle {
    end: Arc<End>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct End {
    is_asked: Mutex<bool>,
    asked: Condvar,
}

impl Idle {
    pub(super) fn start(shared: &Arc<Shared>, limit: Duration) -> Result<Idle> {
        let end = Arc::new(End::default());
        let (weak, ending) = (Arc::downgrade(shared), Arc::clone(&end));
        let thread = std::thread::Builder::new()
            .name("coldrise-idle".to_owned())
            .spawn(move || run(&weak, &ending, limit))
            .context(|| "starting the thread that closes idle files")?;
        Ok(Idle { end, thread: Some(thread) })
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        *self.end.is_asked.lock() = true;
        self.end.asked.notify_all();
        if let Some(thread) = self.thread.take() {
            // It catches nothing; a panic in it was reported on stderr.
            let _ = thread.join();
        }
    }
}

fn run(shared: &Weak<Shared>, end: &End, limit: Duration) {
    let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
    let interval = (limit / 4).max(Duration::from_millis(10));
    loop {
        let mut is_asked = end.is_asked.lock();
        if !*is_asked {
            end.asked.wait_for(&mut is_asked, interval);
        }
        if *is_asked {
            return;
        }
        drop(is_asked);
        let Some(shared) = shared.upgrade() else { return };
        let nodes: Vec<_> = shared.in_use.lock().values().map(Arc::clone).collect();
        for node in nodes {
            node.close_if_idle(limit_ms);
        }
    }
}
