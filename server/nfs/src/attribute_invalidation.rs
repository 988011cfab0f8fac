//! Attributes of sessions' images, which a host remembers until it is told to forget them.
//!
//! nfs-ganesha wants attributes three times for each READ, and takes a lock for it unless it
//! may remember them. So it may, for moments: of every image whose attributes it was given
//! it is told to forget them at the next round. **What it shows is never older than two
//! rounds**, one of which is what the node itself remembers ([`LIVE_ATTRIBUTES_MS`]),
//! whoever changed the disk: another server, another file of the same disk, a seal, a
//! writer that comes or goes. What changes through the file itself it asks for at once, by
//! itself. (A round that comes late, on a machine without a moment to spare, is bounded by
//! [`VALID_LIVE_S`].)
//!
//! Why not only where something may change behind its back: nfs-ganesha 4.3 takes back no
//! time for which attributes of a file may be remembered, once there was one.
//!
//! A node is noted before its attributes are looked at, and forgets that it is noted before
//! the host is told: so whoever gets attributes meanwhile notes it again.
//!
//! [`LIVE_ATTRIBUTES_MS`]: crate::node_attributes::LIVE_ATTRIBUTES_MS

use crate::{OpenNode, Shared};
use coldrise_block::{Context, Result};
use parking_lot::{Condvar, Mutex, RwLock};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two rounds.
const ROUND: Duration = Duration::from_millis(10);

/// For how long the host may remember attributes that nobody tells it to forget, in
/// seconds; nfs-ganesha makes nearly two of one.
const VALID_LIVE_S: u32 = 1;

/// Has the host forget the attributes of the file with this handle before it returns.
pub type AttributeWatcher = Box<dyn Fn(&[u8]) + Send + Sync>;

/// What the host remembers now.
#[derive(Default)]
pub(crate) struct AttributeInvalidation {
    /// Held while it is told to forget.
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
    /// Sets who is told; returns when nobody else is being told any more.
    pub(crate) fn watch(&self, watcher: Option<AttributeWatcher>) {
        self.is_watched.store(watcher.is_some(), Ordering::SeqCst);
        *self.watcher.write() = watcher;
    }

    /// Notes a node of which the host gets attributes. For so many seconds it may
    /// remember them.
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

/// The thread that tells, until it is dropped.
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
            .context(|| "starting the thread that has attributes forgotten")?;
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
            // It catches nothing; a panic in it was reported on stderr.
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
