//! What the tree of folders consists of.

use crate::image_name::ImagePart;
use coldrise_session::SessionDocument;
use coldrise_store::{DiskName, MachineName, PointDocument, Repository};
use std::sync::Arc;

/// The folder of the sessions.
pub(super) const LIVE: &str = "live";
/// The link to a machine's newest point.
pub(super) const LATEST: &str = "latest";

/// Purpose of the key that file ids are taken from; it never changes.
const FILE_ID: &str = "file id";
/// The root's file id, as FUSE has it.
const ROOT_ID: u64 = 1;

/// What a front end shows a node as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeType {
    /// A folder.
    Folder,
    /// A regular file.
    File,
    /// A symbolic link.
    Link,
}

/// A folder, a file or a link. It stays valid when what it stands for is gone:
/// then its use ends with `ErrorKind::NotFound`.
#[derive(Clone, Debug)]
pub struct Node {
    pub(super) kind: Kind,
    pub(super) key: Key,
    file_id: u64,
    parent_id: u64,
}

/// Tells one node from every other, also from an earlier one of the same path: a
/// session's name can be given again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) path: Arc<str>,
    /// When the point or session was made; 0 outside of both.
    pub(super) made_at_ms: u64,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Root,
    Live,
    Machine(MachineName),
    Latest(MachineName),
    Point(Arc<PointDocument>),
    Session(Arc<SessionDocument>),
    PointFile(Arc<PointDocument>, FolderFile),
    SessionFile(Arc<SessionDocument>, FolderFile),
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
        let key = Key { path: Arc::from(""), made_at_ms: 0 };
        Node { kind: Kind::Root, key, file_id: ROOT_ID, parent_id: ROOT_ID }
    }

    /// A node of that name in this folder.
    pub(super) fn child(
        &self,
        repository: &Repository,
        name: &str,
        kind: Kind,
        made_at_ms: u64,
    ) -> Node {
        let path = match self.key.path.is_empty() {
            true => name.to_owned(),
            false => format!("{}/{name}", self.key.path),
        };
        let key = Key { path: Arc::from(path), made_at_ms };
        let file_id = file_id(repository, &key);
        Node { kind, key, file_id, parent_id: self.file_id }
    }

    /// The number by which front ends know it: the same at every look, in every
    /// front end and after every restart; different from all others, as far as
    /// 64 bits of a keyed hash are (compare [`Node::is_same`] where it matters).
    /// The root's is 1, no other one's is below 2.
    pub fn file_id(&self) -> u64 {
        self.file_id
    }

    /// The number of the folder that it is in; the root's own for the root.
    pub fn parent_id(&self) -> u64 {
        self.parent_id
    }

    /// Whether both are the same thing, and not only of the same number.
    pub fn is_same(&self, other: &Node) -> bool {
        self.key == other.key
    }

    /// Its address: `web01/20261120T100000Z/vda.vhdx`; empty for the root.
    pub fn path(&self) -> &str {
        &self.key.path
    }

    /// What it is.
    pub fn node_type(&self) -> NodeType {
        match self.kind {
            Kind::PointFile(..) | Kind::SessionFile(..) => NodeType::File,
            Kind::Latest(_) => NodeType::Link,
            _ => NodeType::Folder,
        }
    }

    /// True for a point and everything in it: it never changes, and its content
    /// can be kept for as long as it is there.
    pub fn is_immutable(&self) -> bool {
        matches!(self.kind, Kind::Point(_) | Kind::PointFile(..))
    }

    /// True for the folder of the sessions and everything below: it may change at
    /// any moment, through any front end.
    pub fn is_live(&self) -> bool {
        matches!(self.kind, Kind::Live | Kind::Session(_) | Kind::SessionFile(..))
    }
}

fn file_id(repository: &Repository, key: &Key) -> u64 {
    let material = format!("{}@{}", key.path, key.made_at_ms);
    let hash = repository.derive_key(FILE_ID, material.as_bytes());
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hash[..8]);
    // 0 is no number of a file for many programs, 1 is the root's.
    u64::from_le_bytes(bytes).max(ROOT_ID + 1)
}
