//! What the host is told of a node.

use crate::OpenNode;
use coldrise_block::Result;
use coldrise_export::NodeType;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What a session's file is like is found out at most once in so many milliseconds:
/// nfs-ganesha asks for it after every write. The size and the time that writes through
/// this node make show at once.
pub(crate) const LIVE_ATTRIBUTES_MS: u64 = 10;

/// For how long attributes hold, in seconds: points never change, but may be deleted;
/// machines get points. Sessions change at any moment, through any front end; for their
/// images see [`attribute_invalidation`](crate::attribute_invalidation).
const VALID_POINT_S: u32 = 60;
const VALID_MACHINE_S: u32 = 1;

/// What the host is told of a node. Times are since 1970.
#[derive(Clone, Copy, Debug)]
pub struct NodeAttributes {
    /// Size in bytes; 0 for a folder.
    pub size_bytes: u64,
    /// Bytes of it that are stored.
    pub stored_bytes: u64,
    /// When its content changed. A folder's differs whenever its entries do.
    pub modified: Duration,
    /// When anything of it changed: content, mode or name.
    pub changed: Duration,
    /// Permissions. They are told and not enforced.
    pub mode: u32,
    /// For so many seconds they may be remembered.
    pub valid_s: u32,
    /// Of a file that was made exclusively.
    pub verifier: Option<u64>,
}

/// Attributes of a session's file, from that moment, with so many changes.
#[derive(Clone, Copy)]
pub(crate) struct Remembered {
    at_ms: u64,
    changes: u64,
    attributes: NodeAttributes,
}

impl NodeAttributes {
    /// Another number after every change. Of a file whose time a client has set neither time
    /// alone tells: the one may be far ahead of the other.
    pub fn change(&self) -> u64 {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        nanoseconds(self.modified).wrapping_add(nanoseconds(self.changed))
    }
}

impl OpenNode {
    /// Its attributes. The host may remember those of a session's image until it is told to
    /// forget them; see [`Datastore::watch`](crate::Datastore::watch).
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
        // Before it is looked at: a change that comes meanwhile makes this one too old.
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

    /// What was seen a moment ago, after writes through this node: another time. `None`
    /// where more has changed.
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
        // Who may connect at all is a matter of the allow list: the users of a client
        // are its own matter.
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

    /// A folder's time, whose fraction of a second tells its entries apart: by the time
    /// alone clients see whether they have to read it again, and a point that is sealed
    /// from an older one does not make its machine any newer.
    fn folder_time(&self, modified: Duration) -> Result<Duration> {
        let mut hasher = DefaultHasher::new();
        for entry in self.shared.folders.entries(&self.node)? {
            entry.file_id.hash(&mut hasher);
        }
        // Below a billion, so it fits.
        Ok(Duration::new(modified.as_secs(), (hasher.finish() % 1_000_000_000) as u32))
    }

    /// To be called after each change through this node.
    pub(crate) fn has_changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }
}

fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}
