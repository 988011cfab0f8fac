//! What the NFS front end decides. The C ABI (`server/capi`) and the FSAL (`plugins/ganesha`)
//! convert and call; nothing here knows C or nfs-ganesha's types.
//!
//! ```text
//!   FSAL ─ C ABI ─▶ Datastore ─▶ OpenNode ─▶ Folders (export)
//!                       │           ├─ its file ids from the root down: its handle
//!                       │           └─ HeldFiles: what is open of it, and for whom
//!                       ├─ ShareReservations         what opens keep each other from
//!                       ├─ ThreadPools               what has to wait
//!                       ├─ AttributeInvalidation     what the host may remember, and for how long
//!                       └─ idle closing              NFSv3 opens nothing and closes nothing
//! ```
//!
//! Locks: the files of one node (held while they are opened, so that who wants the same
//! file waits and shares it), then the list of nodes in use. None of them is held while the
//! host is told to forget attributes ([`AttributeWatcher`]): it asks for new ones.
#![forbid(unsafe_code)]

mod attribute_invalidation;
mod client_changes;
mod held_files;
mod node;
mod node_attributes;
mod node_files;
mod share_reservations;
mod shared_flush;
mod thread_pool;

pub use attribute_invalidation::AttributeWatcher;
pub use node::{ListedEntry, MissingName, Named, OpenNode, MAX_HANDLE_BYTES};
pub use node_attributes::NodeAttributes;
pub use node_files::{OpenError, OpenResult, ReadOutcome};
pub use share_reservations::{Checked, Share, ShareDenied};

use attribute_invalidation::{AttributeInvalidation, InvalidationThread};
use coldrise_block::{Context, Error, ErrorKind, PeriodicThread, Result};
use coldrise_export::{Folders, Node, Space};
use parking_lot::Mutex;
use share_reservations::ShareReservations;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thread_pool::ThreadPools;

/// A repository as an NFS server shows it.
pub struct Datastore {
    shared: Arc<Shared>,
    /// Ends when dropped.
    _idle: PeriodicThread,
    /// The same.
    _invalidation: InvalidationThread,
}

/// What all nodes share.
struct Shared {
    folders: Folders,
    started: Instant,
    /// Set once everything was closed: nothing is opened any more.
    has_ended: AtomicBool,
    /// Nodes that have files open, by their address in memory.
    in_use: Mutex<HashMap<usize, Arc<OpenNode>>>,
    invalidation: AttributeInvalidation,
    shares: ShareReservations,
    pools: ThreadPools,
}

impl Datastore {
    /// Starts to serve these folders. A file that no client has open (those of NFSv3 never do)
    /// and that nobody has used for `idle_limit` is closed.
    pub fn new(folders: Folders, idle_limit: Duration) -> Result<Datastore> {
        let shared = Arc::new(Shared {
            folders,
            started: Instant::now(),
            has_ended: AtomicBool::new(false),
            in_use: Mutex::default(),
            invalidation: AttributeInvalidation::default(),
            shares: ShareReservations::default(),
            pools: ThreadPools::default(),
        });
        let idle = close_idle(&shared, idle_limit)?;
        let invalidation = InvalidationThread::start(&shared)?;
        Ok(Datastore { shared, _idle: idle, _invalidation: invalidation })
    }

    /// Flushes and closes every file; nodes are of no use afterwards.
    pub fn end(&self) {
        self.shared.has_ended.store(true, Ordering::SeqCst);
        self.shared.pools.end();
        if let Err(error) = self.shared.folders.flush_all() {
            eprintln!("coldrise: {}", error.full_message());
        }
        let in_use = std::mem::take(&mut *self.shared.in_use.lock());
        in_use.values().for_each(|node| node.close_all());
    }

    /// The folder in which everything is. `ErrorKind::NotFound` after the end.
    pub fn root(&self) -> Result<Arc<OpenNode>> {
        self.shared.check()?;
        Ok(OpenNode::root(&self.shared))
    }

    /// The node of a handle: `ErrorKind::InvalidInput` where it is none, `ErrorKind::NotFound`
    /// where what it stands for is gone.
    pub fn node_of_handle(&self, handle: &[u8]) -> Result<Arc<OpenNode>> {
        self.shared.check()?;
        OpenNode::of_handle(&self.shared, handle)
    }

    /// Space on the file system that the repository lies on.
    pub fn space(&self) -> Result<Space> {
        self.shared.check()?;
        self.shared.folders.space()
    }

    /// Sets who is told to forget attributes, which may be remembered then. On return the one
    /// before is called no more.
    pub fn watch(&self, watcher: Option<AttributeWatcher>) {
        self.shared.invalidation.watch(watcher);
    }
}

impl Shared {
    /// Milliseconds since the start: cheap to keep in an atomic.
    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn check(&self) -> Result<()> {
        if self.has_ended.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::NotFound, "the repository was closed"));
        }
        Ok(())
    }

    /// The node of these file ids, from below the root down.
    fn resolve(&self, ids: &[u64]) -> Result<Node> {
        let mut node = self.folders.root();
        for id in ids {
            node = match self.folders.find_of_clients_by_id(&node, *id)? {
                Some(found) => found,
                None => self.folders.find_id(&node, *id)?,
            };
        }
        Ok(node)
    }
}

/// Starts the thread that closes what nobody uses: NFSv3 clients open nothing and close nothing.
fn close_idle(shared: &Arc<Shared>, limit: Duration) -> Result<PeriodicThread> {
    let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
    let interval = (limit / 4).max(Duration::from_millis(10));
    let shared = Arc::downgrade(shared);
    PeriodicThread::start("coldrise-idle", interval, move || {
        let Some(shared) = shared.upgrade() else { return ControlFlow::Break(()) };
        let nodes: Vec<_> = shared.in_use.lock().values().map(Arc::clone).collect();
        nodes.iter().for_each(|node| node.close_if_idle(limit_ms));
        ControlFlow::Continue(())
    })
    .context(|| "starting the thread that closes idle files")
}
