//! The attributes that stat(2) returns, and how long the kernel may cache them.

use crate::served::Owner;
use coldrise_export::{Attributes, Node, NodeType};
use fuser::{FileAttr, FileType, INodeNo};
use std::time::Duration;

/// The files of a point never change.
const OF_FILES_OF_POINTS: Duration = Duration::from_secs(3600);
/// Machines and points are added and removed, and a backup may get the name of a removed point.
const OF_FOLDERS: Duration = Duration::from_secs(1);

/// How long the kernel may cache a node's name and attributes. Those of a session
/// are not cached: the same disk changes through NBD, another mount, and its
/// other files in this mount.
pub(crate) fn validity(node: &Node) -> Duration {
    if node.is_live() {
        Duration::ZERO
    } else if node.is_immutable() && node.node_type() == NodeType::File {
        OF_FILES_OF_POINTS
    } else {
        OF_FOLDERS
    }
}

pub(crate) fn file_type(node_type: NodeType) -> FileType {
    match node_type {
        NodeType::Folder => FileType::Directory,
        NodeType::File => FileType::RegularFile,
        NodeType::Link => FileType::Symlink,
    }
}

pub(crate) fn stat(node: &Node, attributes: &Attributes, owner: Owner) -> FileAttr {
    let is_kept = node.is_immutable();
    let perm = match (attributes.node_type, node.is_live()) {
        // At most 0o7777.
        _ if attributes.mode.is_some() => {
            let given = attributes.mode.unwrap_or(0) & 0o7777;
            (if is_kept { given & 0o555 } else { given }) as u16
        }
        (NodeType::Folder, false) => 0o555,
        (NodeType::Folder, true) => 0o755,
        (NodeType::File, _) if attributes.is_writable => 0o644,
        (NodeType::File, _) => 0o444,
        (NodeType::Link, _) => 0o777,
    };
    FileAttr {
        ino: INodeNo(node.file_id()),
        size: attributes.size_bytes,
        blocks: attributes.stored_bytes.div_ceil(512),
        atime: attributes.modified,
        mtime: attributes.modified,
        ctime: attributes.changed,
        crtime: attributes.modified,
        kind: file_type(attributes.node_type),
        perm,
        // For a folder, 1 means that its subfolders are not counted, as on other
        // file systems: counting them would require a listing.
        nlink: 1,
        uid: owner.user,
        gid: owner.group,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}
