//! The inode numbers that the kernel knows, and their nodes.

use coldrise_export::Node;
use parking_lot::Mutex;
use std::collections::HashMap;

/// The nodes that the kernel has looked up and not forgotten.
///
/// An inode number is the node's own file id. It is the same on every look-up,
/// and a listing can report it without storing anything.
pub(crate) struct Nodes {
    root: Node,
    known: Mutex<HashMap<u64, LookedUpNode>>,
}

struct LookedUpNode {
    node: Node,
    /// Look-ups that the kernel got an answer to and will forget.
    lookups: u64,
}

impl Nodes {
    pub(crate) fn new(root: Node) -> Nodes {
        Nodes { root, known: Mutex::default() }
    }

    /// The node of that number, as of its last look-up.
    pub(crate) fn get(&self, inode: u64) -> Option<Node> {
        if inode == self.root.file_id() {
            return Some(self.root.clone());
        }
        self.known.lock().get(&inode).map(|known| known.node.clone())
    }

    /// Counts a look-up of the node; false if another node has the same number.
    pub(crate) fn look_up(&self, node: Node) -> bool {
        let mut known = self.known.lock();
        match known.get_mut(&node.file_id()) {
            Some(there) if there.node.is_same(&node) => {
                there.node = node;
                there.lookups += 1;
                true
            }
            Some(_) => false,
            None => {
                known.insert(node.file_id(), LookedUpNode { node, lookups: 1 });
                true
            }
        }
    }

    /// The kernel has forgotten `lookups` look-ups.
    pub(crate) fn forget(&self, inode: u64, lookups: u64) {
        let mut known = self.known.lock();
        let Some(there) = known.get_mut(&inode) else { return };
        there.lookups = there.lookups.saturating_sub(lookups);
        if there.lookups == 0 {
            known.remove(&inode);
        }
    }
}
