//! Nodes of the tree of folders.

use crate::image_name::ImagePart;
use coldrise_session::{FileEntry, FileKind, SessionDocument};
use coldrise_store::{DiskName, MachineName, PointDocument, Repository, SessionName, SessionTime};
use std::sync::Arc;

/// The folder of the sessions.
pub(super) const LIVE: &str = "live";
/// The link to a machine's newest point.
pub(super) const LATEST: &str = "latest";

/// Purpose of the key that file ids are derived from; it never changes.
const FILE_ID: &str = "file id";
/// The root's file id, as FUSE has it.
const ROOT_ID: u64 = 1;

/// The kind under which a front end shows a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeType {
    /// A folder.
    Folder,
    /// A regular file.
    File,
    /// A symbolic link.
    Link,
}

/// A folder, a file or a link. It stays a valid value after its target is gone; every use
/// then fails with `ErrorKind::NotFound`.
#[derive(Clone, Debug)]
pub struct Node {
    pub(super) kind: Kind,
    pub(super) key: NodeKey,
    /// Its path at the look-up.
    path: Arc<str>,
    file_id: u64,
    parent_id: u64,
}

/// Distinguishes the node from every other, also from an earlier one of the same path: a
/// session's name can be reused.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NodeKey {
    pub(super) path: Arc<str>,
    /// When the point or session was made; 0 for nodes outside both.
    pub(super) made_at_ms: u64,
}

impl NodeKey {
    /// The id of a session's disk, the same for all files that show it.
    pub(super) fn of_disk(session: &SessionDocument, disk: &DiskName) -> NodeKey {
        let path = Arc::from(format!("{LIVE}/{}/{disk}", session.name));
        NodeKey { path, made_at_ms: session.created_at_ms }
    }
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Root,
    Live,
    Machine(MachineName),
    Latest(MachineName),
    /// A session as it was at a time.
    Marked(SessionName, SessionTime),
    Point(Arc<PointDocument>),
    Session(Arc<SessionDocument>),
    PointFile(Arc<PointDocument>, FolderFile),
    SessionFile(Arc<SessionDocument>, FolderFile),
    /// A client's file or folder in a session.
    Client(Arc<SessionDocument>, Arc<FileEntry>),
    /// A client's file or folder that a point carries.
    Carried(Arc<PointDocument>, Arc<CarriedEntry>),
}

/// A file or folder that a point carries, without its content.
#[derive(Debug)]
pub(super) struct CarriedEntry {
    /// Below the point's folder.
    pub(super) path: String,
    /// `None` for a folder.
    pub(super) size_bytes: Option<u64>,
    pub(super) mode: u32,
    pub(super) modified_ms: u64,
}

/// A file in the folder of a point or a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FolderFile {
    pub(super) name: String,
    pub(super) content: Content,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// A file of an image of this disk.
    Image { disk: DiskName, part: ImagePart },
    /// The machine's configuration, as it was stored.
    Configuration,
}

impl Node {
    pub(super) fn root() -> Node {
        let path: Arc<str> = Arc::from("");
        let key = NodeKey { path: Arc::clone(&path), made_at_ms: 0 };
        Node { kind: Kind::Root, key, path, file_id: ROOT_ID, parent_id: ROOT_ID }
    }

    /// A client's file or folder in this folder. It stays the same node after a rename.
    pub(super) fn client(&self, session: &Arc<SessionDocument>, entry: &Arc<FileEntry>) -> Node {
        let key = format!("{LIVE}/{}//{:032x}", session.name, entry.id.as_u128());
        Node {
            key: NodeKey { path: Arc::from(key), made_at_ms: session.created_at_ms },
            path: Arc::from(format!("{}/{}", self.path, entry.name)),
            file_id: entry.id.number(),
            parent_id: self.file_id,
            kind: Kind::Client(Arc::clone(session), Arc::clone(entry)),
        }
    }

    /// A node of that name in this folder.
    pub(super) fn child(
        &self,
        repository: &Repository,
        name: &str,
        kind: Kind,
        made_at_ms: u64,
    ) -> Node {
        let path = if self.key.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}/{name}", self.key.path)
        };
        let key = NodeKey { path: Arc::from(path), made_at_ms };
        let file_id = file_id(repository, &key);
        let path = Arc::clone(&key.path);
        Node { kind, key, path, file_id, parent_id: self.file_id }
    }

    /// The file id for front ends: the same at every look-up, in every front end and after
    /// every restart; different from all others, as far as 64 bits of a keyed hash can be
    /// (use [`Node::is_same`] if it must be certain). The root's is 1, all others are at
    /// least 2.
    pub fn file_id(&self) -> u64 {
        self.file_id
    }

    /// The file id of its folder; for the root its own.
    pub fn parent_id(&self) -> u64 {
        self.parent_id
    }

    /// Whether both are the same node, and do not only share a file id.
    pub fn is_same(&self, other: &Node) -> bool {
        self.key == other.key
    }

    /// The id of its content: for a session's image the id of the disk, because many files
    /// show the same disk; otherwise the node's own.
    pub fn content_key(&self) -> NodeKey {
        let Kind::SessionFile(session, file) = &self.kind else { return self.key.clone() };
        match &file.content {
            Content::Image { disk, part } if part.shows_disk(disk) => {
                NodeKey::of_disk(session, disk)
            }
            _ => self.key.clone(),
        }
    }

    /// Its address: `web01/20261120T100000Z/vda.vhdx`; empty for the root.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its kind.
    pub fn node_type(&self) -> NodeType {
        match self.kind {
            Kind::PointFile(..) | Kind::SessionFile(..) => NodeType::File,
            Kind::Client(_, ref entry) if entry.kind != FileKind::Folder => NodeType::File,
            Kind::Carried(_, ref entry) if entry.size_bytes.is_some() => NodeType::File,
            Kind::Latest(_) | Kind::Marked(..) => NodeType::Link,
            _ => NodeType::Folder,
        }
    }

    /// True for a point and everything in it: it never changes, so caches can keep its
    /// content while it exists.
    pub fn is_immutable(&self) -> bool {
        matches!(self.kind, Kind::Point(_) | Kind::PointFile(..) | Kind::Carried(..))
    }

    /// True for the folder of the sessions and everything below: it may change at
    /// any moment, through any front end.
    pub fn is_live(&self) -> bool {
        matches!(
            self.kind,
            Kind::Live
                | Kind::Marked(..)
                | Kind::Session(_)
                | Kind::SessionFile(..)
                | Kind::Client(..)
        )
    }

    /// True for client files, in a session and in a point. Their numbers are unique in the
    /// whole session or point, across its folders.
    pub fn is_of_clients(&self) -> bool {
        matches!(self.kind, Kind::Client(..) | Kind::Carried(..))
    }

    /// True for a session's folder and every folder in it: clients can change their
    /// content, and their time reflects every change.
    pub fn takes_files(&self) -> bool {
        match &self.kind {
            Kind::Session(_) => true,
            Kind::Client(_, entry) => entry.kind == FileKind::Folder,
            _ => false,
        }
    }
}

fn file_id(repository: &Repository, key: &NodeKey) -> u64 {
    let material = format!("{}@{}", key.path, key.made_at_ms);
    let hash = repository.derive_key(FILE_ID, material.as_bytes());
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hash[..8]);
    // Many programs take 0 for no file; 1 is the root's.
    u64::from_le_bytes(bytes).max(ROOT_ID + 1)
}
