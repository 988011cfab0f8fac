//! The attributes of a node for the host.

use crate::OpenNode;
use coldrise_block::Result;
use coldrise_export::NodeType;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Interval in milliseconds at which the attributes of a session's file are read again:
/// nfs-ganesha asks after every write. Size and time changes through this node show at
/// once.
pub(crate) const LIVE_ATTRIBUTES_MS: u64 = 10;

/// Seconds for which the host may cache attributes: points never change, but may be
/// deleted; machines get points. Sessions change at any moment, through any front end; for
/// their images see [`attribute_invalidation`](crate::attribute_invalidation).
const VALID_POINT_S: u32 = 60;
const VALID_MACHINE_S: u32 = 1;

/// The attributes of a node. Times are since 1970.
#[derive(Clone, Copy, Debug)]
pub struct NodeAttributes {
    /// Size in bytes; 0 for a folder.
    pub size_bytes: u64,
    /// Its stored bytes.
    pub stored_bytes: u64,
    /// The last change of its content. A folder's differs whenever its entries do.
    pub modified: Duration,
    /// The last change of content, mode or name.
    pub changed: Duration,
    /// Permissions, shown to clients and not enforced.
    pub mode: u32,
    /// Seconds for which the host may cache them.
    pub valid_s: u32,
    /// The verifier of an exclusive creation.
    pub verifier: Option<u64>,
}

/// Attributes of a session's file, with the time of reading and the number of changes then.
#[derive(Clone, Copy)]
pub(crate) struct Remembered {
    at_ms: u64,
    changes: u64,
    attributes: NodeAttributes,
}

impl NodeAttributes {
    /// A number that differs after every change. If a client has set a file's time, neither
    /// time alone shows every change: one may be far ahead of the other.
    pub fn change(&self) -> u64 {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        nanoseconds(self.modified).wrapping_add(nanoseconds(self.changed))
    }
}

impl OpenNode {
    /// Its attributes. The host may cache those of a session's image until it gets an upcall to
    /// discard them; see [`Datastore::watch`](crate::Datastore::watch).
    pub fn attributes(self: &Arc<Self>) -> Result<NodeAttributes> {
        self.check()?;
        let is_image = self.node_type() == NodeType::File && !self.node.is_of_clients();
        if !self.is_live() || !is_image {
            return self.look_at();
        }
        let valid_s = self.shared.invalidation.note(self);
        Ok(NodeAttributes { valid_s, ..self.live_attributes()? })
    }

    fn live_attributes(&self) -> Result<NodeAttributes> {
        // Taken before the reading: a change meanwhile makes this one too old.
        let (at_ms, changes) = (self.shared.now_ms(), self.changes.load(Ordering::Acquire));
        let known = *self.remembered.lock();
        let is_young = |known: &Remembered| at_ms.saturating_sub(known.at_ms) < LIVE_ATTRIBUTES_MS;
        if let Some(known) = known.filter(is_young) {
            if known.changes == changes {
                return Ok(known.attributes);
            }
            if let Some(attributes) = self.written_since(known.attributes) {
                return Ok(attributes);
            }
        }
        let attributes = self.look_at()?;
        *self.remembered.lock() = Some(Remembered { at_ms, changes, attributes });
        Ok(attributes)
    }

    /// The recent attributes with another time, after writes through this node. `None` if
    /// more than that has changed.
    fn written_since(&self, mut attributes: NodeAttributes) -> Option<NodeAttributes> {
        let file = self.held.read().get(true)?;
        if file.size_bytes() != attributes.size_bytes {
            return None;
        }
        attributes.modified = since_1970(file.written_at()?).max(attributes.modified);
        attributes.changed = attributes.modified.max(attributes.changed);
        Some(attributes)
    }

    fn look_at(&self) -> Result<NodeAttributes> {
        let node = &self.node;
        let found = self.shared.folders.attributes(node)?;
        let (mut modified, mut changed) = (since_1970(found.modified), since_1970(found.changed));
        let node_type = self.node_type();
        if node_type == NodeType::Folder && !node.is_immutable() && !node.takes_files() {
            modified = self.folder_time(modified)?;
            changed = modified;
        }
        let valid_s = if node.is_live() {
            0
        } else if node.is_immutable() {
            VALID_POINT_S
        } else {
            VALID_MACHINE_S
        };
        // The allow list decides about clients; a client decides about its own users.
        let least = match (node_type, found.is_writable) {
            (NodeType::Folder, _) if node.takes_files() => 0o777,
            (NodeType::Folder, _) if node.is_live() => 0o755,
            (NodeType::Folder, _) => 0o555,
            (NodeType::Link, _) => 0o777,
            (NodeType::File, true) => 0o666,
            (NodeType::File, false) => 0o444,
        };
        let refused = if node.is_immutable() { 0o222 } else { 0 };
        Ok(NodeAttributes {
            size_bytes: found.size_bytes,
            stored_bytes: found.stored_bytes,
            modified,
            changed,
            mode: least | (found.mode.unwrap_or(0) & 0o777 & !refused),
            valid_s,
            verifier: found.verifier,
        })
    }

    /// A folder's time; its fraction of a second is derived from the entries. Clients see
    /// only by the time whether they must read the folder again, and a point that is sealed
    /// from an older one does not make its machine newer.
    fn folder_time(&self, modified: Duration) -> Result<Duration> {
        let mut hasher = DefaultHasher::new();
        for entry in self.shared.folders.entries(&self.node)? {
            entry.file_id.hash(&mut hasher);
        }
        // It fits: below one billion.
        Ok(Duration::new(modified.as_secs(), (hasher.finish() % 1_000_000_000) as u32))
    }

    /// Call this after each change through this node.
    pub(crate) fn has_changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }
}

fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}
