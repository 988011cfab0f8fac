//! What all requests share, from the mount to its end.

use crate::handles::{Files, Handles, Listings};
use crate::nodes::Nodes;
use coldrise_block::Result;
use coldrise_export::Folders;
use parking_lot::RwLock;

/// The user whose files they are: who mounted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) user: u32,
    pub(crate) group: u32,
}

/// The tree, with what the kernel knows and has open of it.
pub(crate) struct Tree {
    pub(crate) folders: Folders,
    pub(crate) nodes: Nodes,
    pub(crate) files: Files,
    pub(crate) listings: Listings,
    pub(crate) owner: Owner,
}

impl Tree {
    pub(crate) fn new(folders: Folders, owner: Owner) -> Tree {
        let nodes = Nodes::new(folders.root());
        Tree { folders, nodes, files: Handles::new(), listings: Handles::new(), owner }
    }
}

/// A tree until its end. fuser's threads may outlive the mount, blocked on files
/// that somebody still has open; what they held is gone then.
pub(crate) struct Served {
    tree: RwLock<Option<Tree>>,
}

impl Served {
    pub(crate) fn new(tree: Tree) -> Served {
        Served { tree: RwLock::new(Some(tree)) }
    }

    /// Calls with the tree, or not at all once it has ended.
    pub(crate) fn with<T>(&self, call: impl FnOnce(&Tree) -> T) -> Option<T> {
        self.tree.read().as_ref().map(call)
    }

    /// Files that somebody has open, by path.
    pub(crate) fn open_paths(&self) -> Vec<String> {
        self.with(|tree| tree.folders.open_paths()).unwrap_or_default()
    }

    /// Flushes, closes every file and session, and gives the lease back, when the
    /// requests under way have been answered. All later ones are refused.
    ///
    /// # Errors
    /// What a flush ended with; everything is closed all the same.
    pub(crate) fn end(&self) -> Result<()> {
        let Some(tree) = self.tree.write().take() else { return Ok(()) };
        let flushed = tree.folders.flush_all();
        drop(tree);
        flushed
    }
}
