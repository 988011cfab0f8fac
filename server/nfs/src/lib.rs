//! The decisions of the NFS front end. The C ABI (`server/capi`) and the FSAL
//! (`plugins/ganesha`) convert and call; this crate knows neither C nor nfs-ganesha's
//! types.
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
//! Locks: the files of one node (held during opening, so that other callers for the same
//! file wait and share it), then the list of nodes in use. Neither is held while the host
//! discards attributes ([`AttributeWatcher`]): it asks for new ones.
#![forbid(unsafe_code)]

mod attribute_invalidation;
mod client_changes;
mod held_files;
mod node;
mod share_reservations;
mod thread_pool;

pub use attribute_invalidation::AttributeWatcher;
pub use node::attributes::NodeAttributes;
pub use node::files::{OpenError, OpenResult, ReadOutcome};
pub use node::{MAX_HANDLE_BYTES, MissingName, Named, OpenNode};
pub use share_reservations::{Checked, Share, ShareDenied};

use attribute_invalidation::{AttributeInvalidation, InvalidationThread};
use coldrise_block::{Context, Error, ErrorKind, PeriodicThread, Result};
use coldrise_export::{Folders, Node, Space};
use node::listing::Listings;
use parking_lot::Mutex;
use share_reservations::ShareReservations;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thread_pool::ThreadPools;

/// A repository for an NFS server.
pub struct Datastore {
    shared: Arc<Shared>,
    /// Ends when dropped.
    _idle: PeriodicThread,
    /// Ends when dropped.
    _invalidation: InvalidationThread,
}

/// The state that all nodes share.
struct Shared {
    folders: Folders,
    started: Instant,
    /// Set once everything was closed: nothing opens after that.
    has_ended: AtomicBool,
    /// Nodes with open files, by their address in memory.
    in_use: Mutex<HashMap<usize, Arc<OpenNode>>>,
    invalidation: AttributeInvalidation,
    shares: ShareReservations,
    pools: ThreadPools,
    listings: Listings,
}

impl Datastore {
    /// Starts to serve these folders. Closes a file after `idle_limit` without use if no
    /// client has it open (NFSv3 clients never have).
    pub fn new(folders: Folders, idle_limit: Duration) -> Result<Datastore> {
        let shared = Arc::new(Shared {
            folders,
            started: Instant::now(),
            has_ended: AtomicBool::new(false),
            in_use: Mutex::default(),
            invalidation: AttributeInvalidation::default(),
            shares: ShareReservations::default(),
            pools: ThreadPools::default(),
            listings: Listings::default(),
        });
        let idle = close_idle(&shared, idle_limit)?;
        let invalidation = InvalidationThread::start(&shared)?;
        Ok(Datastore { shared, _idle: idle, _invalidation: invalidation })
    }

    /// Flushes and closes every file; later calls on nodes fail.
    pub fn end(&self) {
        self.shared.has_ended.store(true, Ordering::SeqCst);
        self.shared.pools.end();
        if let Err(error) = self.shared.folders.flush_all() {
            eprintln!("coldrise: {}", error.full_message());
        }
        let in_use = std::mem::take(&mut *self.shared.in_use.lock());
        in_use.values().for_each(|node| node.close_all());
    }

    /// The root folder. `ErrorKind::NotFound` after the end.
    pub fn root(&self) -> Result<Arc<OpenNode>> {
        self.shared.check()?;
        Ok(OpenNode::root(&self.shared))
    }

    /// The node of a handle: `ErrorKind::InvalidInput` if it is not a handle,
    /// `ErrorKind::NotFound` if the node is gone.
    pub fn node_of_handle(&self, handle: &[u8]) -> Result<Arc<OpenNode>> {
        self.shared.check()?;
        OpenNode::of_handle(&self.shared, handle)
    }

    /// Space on the repository's file system.
    pub fn space(&self) -> Result<Space> {
        self.shared.check()?;
        self.shared.folders.space()
    }

    /// Sets the watcher that invalidates attributes, so that the host may cache them. On
    /// return no call of the previous one is running.
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

    /// The node with these file ids, from below the root down.
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

/// Starts the thread that closes idle files: NFSv3 clients open nothing and close nothing.
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
