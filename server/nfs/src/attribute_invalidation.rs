//! Invalidates the attributes of sessions' images that a host caches.
//!
//! nfs-ganesha asks for attributes three times per READ, under a lock, unless it may cache
//! them. So it may cache them for moments: at the next round it gets an upcall to discard the
//! attributes of every image that it has asked for. **What it shows is never older than two
//! rounds**, one of which is the node's own cache ([`LIVE_ATTRIBUTES_MS`]). This holds for
//! every cause of a change: another server, another file of the same disk, a seal, a writer
//! that comes or goes. After a change through the file itself nfs-ganesha asks at once. (If
//! a busy machine delays a round, [`VALID_LIVE_S`] is the bound.)
//!
//! Why for every image, and not only for those that others may change: nfs-ganesha 4.3
//! never shortens the caching time of a file's attributes once it has one.
//!
//! A node is listed before its attributes are read, and marked as not listed before the
//! upcall: a host that asks meanwhile lists it again.
//!
//! [`LIVE_ATTRIBUTES_MS`]: crate::node::attributes::LIVE_ATTRIBUTES_MS

use crate::{OpenNode, Shared};
use coldrise_block::{Context, Result};
use parking_lot::{Condvar, Mutex, RwLock};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two rounds.
const ROUND: Duration = Duration::from_millis(10);

/// Maximum time for which the host caches attributes without an invalidation, in seconds;
/// nfs-ganesha makes nearly two of one.
const VALID_LIVE_S: u32 = 1;

/// Makes the host discard the attributes of the file with this handle before it returns.
pub type AttributeWatcher = Box<dyn Fn(&[u8]) + Send + Sync>;

/// The nodes whose attributes the host caches.
#[derive(Default)]
pub(crate) struct AttributeInvalidation {
    /// Held during the calls of the host.
    watcher: RwLock<Option<AttributeWatcher>>,
    is_watched: AtomicBool,
    noted: Mutex<Noted>,
    wake: Condvar,
}

#[derive(Default)]
struct Noted {
    nodes: Vec<Arc<OpenNode>>,
    has_ended: bool,
}

impl AttributeInvalidation {
    /// Sets the watcher; returns when no call of the previous one is running.
    pub(crate) fn watch(&self, watcher: Option<AttributeWatcher>) {
        self.is_watched.store(watcher.is_some(), Ordering::SeqCst);
        *self.watcher.write() = watcher;
    }

    /// Lists a node whose attributes the host gets. Returns the seconds for which it may
    /// cache them.
    pub(crate) fn note(&self, node: &Arc<OpenNode>) -> u32 {
        if !self.is_watched.load(Ordering::Relaxed) {
            return 0;
        }
        if !node.is_noted.swap(true, Ordering::SeqCst) {
            let mut noted = self.noted.lock();
            noted.nodes.push(Arc::clone(node));
            if noted.nodes.len() == 1 {
                self.wake.notify_one();
            }
        }
        VALID_LIVE_S
    }

    fn tell(&self, node: &OpenNode) {
        node.is_noted.store(false, Ordering::SeqCst);
        if node.is_released() {
            return;
        }
        if let Some(watcher) = &*self.watcher.read() {
            watcher(&node.handle());
        }
    }
}

/// The thread that calls the host, until it is dropped.
pub(crate) struct InvalidationThread {
    shared: Weak<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl InvalidationThread {
    pub(crate) fn start(shared: &Arc<Shared>) -> Result<InvalidationThread> {
        let weak = Arc::downgrade(shared);
        let thread = std::thread::Builder::new()
            .name("coldrise-forget".to_owned())
            .spawn({
                let shared = Arc::clone(shared);
                move || run(&shared.invalidation)
            })
            .context(|| "starting the thread that invalidates attributes")?;
        Ok(InvalidationThread { shared: weak, thread: Some(thread) })
    }
}

impl Drop for InvalidationThread {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.invalidation.noted.lock().has_ended = true;
            shared.invalidation.wake.notify_all();
        }
        if let Some(thread) = self.thread.take() {
            // The thread catches no panic; one was already reported on stderr.
            let _ = thread.join();
        }
    }
}

fn run(invalidation: &AttributeInvalidation) {
    loop {
        let nodes = {
            let mut noted = invalidation.noted.lock();
            while noted.nodes.is_empty() && !noted.has_ended {
                invalidation.wake.wait(&mut noted);
            }
            if !noted.has_ended {
                invalidation.wake.wait_for(&mut noted, ROUND);
            }
            if noted.has_ended {
                noted.nodes.clear();
                return;
            }
            std::mem::take(&mut noted.nodes)
        };
        nodes.iter().for_each(|node| invalidation.tell(node));
    }
}
