//! Caches facts about folders that stay true: the files of a point, and the name that
//! belongs to a file's number.

use super::Folders;
use super::node::{FolderFile, Node, NodeKey};
use coldrise_block::{Error, ErrorKind, Result};
use quick_cache::sync::Cache;
use std::sync::Arc;

/// Number of points with cached files; each takes one or two KiB.
const POINTS: usize = 1 << 12;
/// Number of cached names by number.
const NAMES: usize = 1 << 16;

pub(super) struct FolderCache {
    points: Cache<NodeKey, Arc<[FolderFile]>>,
    /// Only a hint: the name may belong to something else by now.
    names: Cache<EntryNumbers, Box<str>>,
}

/// An entry of a folder, by [`Node::file_id`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct EntryNumbers {
    folder_id: u64,
    file_id: u64,
}

impl Default for FolderCache {
    fn default() -> FolderCache {
        FolderCache { points: Cache::new(POINTS), names: Cache::new(NAMES) }
    }
}

impl FolderCache {
    pub(super) fn point_files(
        &self,
        point: &NodeKey,
        find: impl FnOnce() -> Vec<FolderFile>,
    ) -> Arc<[FolderFile]> {
        if let Some(files) = self.points.get(point) {
            return files;
        }
        let files: Arc<[FolderFile]> = find().into();
        self.points.insert(point.clone(), Arc::clone(&files));
        files
    }
}

impl Folders {
    /// The node with that [`Node::file_id`] in a folder; `ErrorKind::NotFound` if there is
    /// none. Lists the folder only if the number is new or its name has gone.
    pub fn find_id(&self, folder: &Node, file_id: u64) -> Result<Node> {
        let numbers = |file_id| EntryNumbers { folder_id: folder.file_id(), file_id };
        let name = self.known.names.get(&numbers(file_id));
        if let Some(found) = name.map(|name| self.find(folder, &name)) {
            match found {
                Ok(node) if node.file_id() == file_id => return Ok(node),
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        let mut wanted = None;
        for entry in self.entries(folder)? {
            self.known.names.insert(numbers(entry.file_id), entry.name.into());
            if entry.file_id == file_id {
                wanted = Some(entry.node);
            }
        }
        wanted.ok_or_else(|| {
            let text = format!("{}: what had number {file_id:016x} is gone", folder.path());
            Error::new(ErrorKind::NotFound, text)
        })
    }
}
