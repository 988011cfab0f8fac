//! The repository as folders and files; the contract is `include/coldrise-folders.h`.
//!
//! ```text
//!   C ─▶ calls, node_calls, file_calls ─▶ OpenNode ─▶ Shared ─▶ Folders
//!        (raw pointers)                    │  └─ HeldFiles: what is open of it, and for whom
//!                                          └─ its file ids from the root down: its handle
//! ```
//!
//! Locks: the files of one node (held while they are opened, so that who wants the same
//! file waits and shares it), then the list of nodes in use. None of them is held while the
//! host is told to forget attributes (`forget`): it asks for new ones.

mod calls;
mod client_calls;
mod file_calls;
mod forget;
mod held_files;
mod idle;
mod later;
mod node;
mod node_calls;
mod share_reservations;

pub use calls::*;
pub use client_calls::*;
pub use file_calls::*;
pub use forget::ForgetCallback;
pub use later::{DoneCallback, Task};
pub use node::OpenNode;
pub use node_calls::*;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_export::{Folders, Node};
use forget::{Remembering, Rounds};
use idle::Idle;
use later::Later;
use parking_lot::Mutex;
use share_reservations::ShareReservations;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// `coldrise_folders` of the header.
pub struct FoldersHandle {
    shared: Arc<Shared>,
    /// Ends its thread when dropped.
    _idle: Idle,
    /// The same.
    _rounds: Rounds,
}

/// What all nodes share.
pub(crate) struct Shared {
    folders: Folders,
    started: Instant,
    /// Set once everything was closed: nothing is opened any more.
    has_ended: AtomicBool,
    /// Nodes that have files open, by their address in memory.
    in_use: Mutex<HashMap<usize, Arc<OpenNode>>>,
    remembering: Remembering,
    shares: ShareReservations,
    later: Later,
}

impl FoldersHandle {
    pub(crate) fn new(folders: Folders, idle_limit: Duration) -> Result<FoldersHandle> {
        let shared = Arc::new(Shared {
            folders,
            started: Instant::now(),
            has_ended: AtomicBool::new(false),
            in_use: Mutex::default(),
            remembering: Remembering::default(),
            shares: ShareReservations::default(),
            later: Later::default(),
        });
        let idle = Idle::start(&shared, idle_limit)?;
        let rounds = Rounds::start(&shared)?;
        Ok(FoldersHandle { shared, _idle: idle, _rounds: rounds })
    }

    /// Flushes and closes every file; nodes are of no use afterwards.
    pub(crate) fn end(&self) {
        self.shared.has_ended.store(true, Ordering::SeqCst);
        self.shared.later.end();
        if let Err(error) = self.shared.folders.flush_all() {
            eprintln!("coldrise: {}", error.full_message());
        }
        let in_use = std::mem::take(&mut *self.shared.in_use.lock());
        in_use.values().for_each(|node| node.close_all());
    }
}

impl Shared {
    /// Milliseconds since the start: cheap to keep in an atomic.
    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn check(&self) -> Result<()> {
        match self.has_ended.load(Ordering::SeqCst) {
            false => Ok(()),
            true => Err(Error::new(ErrorKind::NotFound, "the repository was closed")),
        }
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
