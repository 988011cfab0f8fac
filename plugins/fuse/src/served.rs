//! The state that all requests share until the end of the mount.

use crate::answer::{Answer, on_open_file};
use crate::cached_writers::CachedWriters;
use crate::handles::{Files, Handles, Listings};
use crate::nodes::Nodes;
use coldrise_block::{Result, defect};
use coldrise_export::{Folders, OpenFile};
use fuser::Errno;
use parking_lot::RwLock;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The owner of all files: the user who mounts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) user: u32,
    pub(crate) group: u32,
}

/// The tree, with the kernel's nodes and open files.
pub(crate) struct Tree {
    pub(crate) folders: Folders,
    pub(crate) nodes: Nodes,
    pub(crate) files: Files,
    pub(crate) listings: Listings,
    pub(crate) owner: Owner,
    /// `None`: the kernel caches nothing of sessions.
    pub(crate) cached: Option<CachedWriters>,
}

impl Tree {
    pub(crate) fn new(folders: Folders, owner: Owner, caches_sessions: bool) -> Tree {
        let nodes = Nodes::new(folders.root());
        let cached = caches_sessions.then(CachedWriters::default);
        Tree { folders, nodes, files: Handles::new(), listings: Handles::new(), owner, cached }
    }
}

/// A tree until its end. fuser's threads may outlive the mount, blocked on files
/// that are still open; the tree behind them is gone then.
pub(crate) struct Served {
    tree: RwLock<Option<Tree>>,
}

impl Served {
    pub(crate) fn new(tree: Tree) -> Served {
        Served { tree: RwLock::new(Some(tree)) }
    }

    /// Calls with the tree, or does nothing once the tree has ended.
    pub(crate) fn with<T>(&self, call: impl FnOnce(&Tree) -> T) -> Option<T> {
        self.tree.read().as_ref().map(call)
    }

    /// Answers a request that belongs to no open file.
    pub(crate) fn answer<T>(&self, call: impl FnOnce(&Tree) -> Answer<T>) -> Answer<T> {
        // Unwind safe: state of the panicked call is dropped with it, or lies
        // behind locks and atomics whose tables stay valid on unwinding.
        let answered = self.with(|tree| catch_unwind(AssertUnwindSafe(|| call(tree))));
        match answered {
            Some(Ok(answer)) => answer,
            Some(Err(panic)) => {
                tracing::error!("{}", defect(panic));
                Err(Errno::EIO)
            }
            None => Err(Errno::ENODEV),
        }
    }

    /// Answers a request on an open file. A panic stops the file permanently, and
    /// with it every file of its session.
    #[inline]
    pub(crate) fn on_file<T>(
        &self,
        handle: u64,
        call: impl FnOnce(&OpenFile) -> coldrise_block::Result<T>,
    ) -> Answer<T> {
        self.answer(|tree| {
            let file = tree.files.get(handle).ok_or(Errno::EBADF)?;
            on_open_file(&file, call)
        })
    }

    /// Open files, by path.
    pub(crate) fn open_paths(&self) -> Vec<String> {
        self.with(|tree| tree.folders.open_paths()).unwrap_or_default()
    }

    /// Waits for the requests in flight, then flushes, closes every file and
    /// session, and returns the lease. All later requests are refused.
    ///
    /// # Errors
    /// The error of a flush; everything is closed nevertheless.
    pub(crate) fn end(&self) -> Result<()> {
        let Some(tree) = self.tree.write().take() else { return Ok(()) };
        let flushed = tree.folders.flush_all();
        drop(tree);
        flushed
    }
}
