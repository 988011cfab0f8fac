//! The names of a session's files and folders.
//!
//! A [`FileTree`] never changes. Each operation returns a new tree, which replaces the old one once
//! it is stored.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::LayerId;
use serde::{Deserialize, Serialize};

use super::names::{MAX_DEPTH, check_name, is_folder, missing, no_folder, not_empty, too_deep};
use crate::hexadecimal;

/// Maximum number of files and folders of clients in one session.
pub(crate) const MAX_CLIENT_FILES: usize = 10_000;

/// Identifies a file or folder of a client for its whole life, whatever its name; random.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FileId(pub(crate) LayerId);

impl FileId {
    /// Stands for the session's own folder.
    pub const ROOT: FileId = FileId(LayerId([0; 16]));

    /// The whole id as a number.
    pub fn as_u128(&self) -> u128 {
        u128::from_be_bytes(*self.0.as_bytes())
    }

    /// The 64-bit number by which front ends know the file. It is unique in its session.
    pub fn number(&self) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0.as_bytes()[..8]);
        u64::from_le_bytes(bytes)
    }
}

/// Longest content in the list, in bytes. Most files of clients are locks and empty files, and a
/// list takes one sync less than a list and a document.
pub(crate) const MAX_LISTED_BYTES: usize = 256;
/// Maximum number of files in a list that stores contents: each change of a content replaces the
/// whole list.
const MOST_LISTED: usize = 256;

/// Numbers below this one are never assigned: front ends reserve them.
const FIRST_NUMBER: u64 = 16;

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A folder.
    Folder,
    /// A file whose content is in the list.
    Listed {
        /// Time of the content's last change, in nanoseconds since 1970-01-01T00:00:00Z.
        modified_ns: u64,
    },
    /// A file whose content is one document.
    Small,
    /// A file whose content is a layer.
    Large {
        /// The size in bytes with which the layer was created.
        capacity_bytes: u64,
    },
}

/// A file or folder of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its id.
    pub id: FileId,
    /// Its folder; [`FileId::ROOT`] for the session's own.
    pub parent: FileId,
    /// Its name in that folder.
    pub name: String,
    /// Its kind.
    pub kind: FileKind,
    /// Permissions as the client set them. They are reported and not enforced.
    pub mode: u32,
    /// Time of the last creation, rename or change of the mode, or of a change inside the folder:
    /// nanoseconds since 1970-01-01T00:00:00Z.
    pub changed_ns: u64,
    /// Tells a client that creates a file exclusively whether it created this one. Valid until the
    /// client sets the file's times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verifier: Option<u64>,
    /// The content of a listed file, at most [`MAX_LISTED_BYTES`]; empty for other kinds.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "hexadecimal")]
    pub(crate) content: Vec<u8>,
}

impl FileEntry {
    fn is_whole(&self) -> bool {
        match self.kind {
            FileKind::Listed { .. } => self.content.len() <= MAX_LISTED_BYTES,
            _ => self.content.is_empty(),
        }
    }
}

/// How a file is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Creation {
    /// An existing file is accepted.
    Unchecked,
    /// The file must not exist.
    Guarded,
    /// The file must not exist, unless it was created with the same verifier.
    Exclusive(u64),
}

/// The kind of entry to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// A file or a folder.
    Any,
    /// A file.
    File,
    /// A folder.
    Folder,
}

#[derive(Serialize, Deserialize)]
struct TreeDocument {
    /// Time of the last change of the session's own folder.
    changed_ns: u64,
    files: Vec<FileEntry>,
}

/// The files and folders of a session at one moment.
#[derive(Clone, Debug, Default)]
pub struct FileTree {
    changed_ns: u64,
    by_id: HashMap<FileId, Arc<FileEntry>>,
    by_number: HashMap<u64, FileId>,
    by_name: BTreeMap<(FileId, String), FileId>,
}

impl FileTree {
    pub(crate) fn decode(text: &[u8]) -> Result<FileTree> {
        let document: TreeDocument = serde_json::from_slice(text).map_err(|error| {
            Error::with_source(ErrorKind::Corrupt, "the list of files has an unknown form", error)
        })?;
        let mut tree = FileTree { changed_ns: document.changed_ns, ..FileTree::default() };
        for entry in document.files {
            check_name(&entry.name)?;
            tree.put(Arc::new(entry));
        }
        let is_whole = tree.by_id.len() == tree.by_name.len()
            && tree.by_id.len() == tree.by_number.len()
            && tree.by_id.values().all(|entry| entry.is_whole() && tree.depth(entry).is_some());
        if is_whole {
            Ok(tree)
        } else {
            Err(Error::new(ErrorKind::Corrupt, "the list of files contradicts itself"))
        }
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let files = self.by_name.values().filter_map(|id| self.by_id.get(id));
        let files = files.map(|entry| FileEntry::clone(entry)).collect();
        let document = TreeDocument { changed_ns: self.changed_ns, files };
        serde_json::to_vec(&document).map_err(|error| {
            Error::with_source(ErrorKind::Internal, "describing a session's files", error)
        })
    }

    /// True if the list stores this content. Otherwise it needs its own document.
    pub(crate) fn takes(&self, content: &[u8]) -> bool {
        content.len() <= MAX_LISTED_BYTES && self.len() <= MOST_LISTED
    }

    /// Number of files and folders.
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Time of a folder's last change, in nanoseconds since 1970; 0 if it never changed.
    pub fn changed_ns(&self, folder: FileId) -> u64 {
        match folder {
            FileId::ROOT => self.changed_ns,
            _ => self.by_id.get(&folder).map_or(0, |entry| entry.changed_ns),
        }
    }

    /// The entry with this id.
    pub fn get(&self, id: FileId) -> Option<&Arc<FileEntry>> {
        self.by_id.get(&id)
    }

    /// The entry with this [`FileId::number`].
    pub fn of_number(&self, number: u64) -> Option<&Arc<FileEntry>> {
        self.by_number.get(&number).and_then(|id| self.by_id.get(id))
    }

    /// The entry with this name in a folder.
    pub fn find(&self, folder: FileId, name: &str) -> Option<&Arc<FileEntry>> {
        self.by_name.get(&(folder, name.to_owned())).and_then(|id| self.by_id.get(id))
    }

    /// The entries of a folder, sorted by name.
    pub fn entries(&self, folder: FileId) -> impl Iterator<Item = &Arc<FileEntry>> {
        self.by_name
            .range((folder, String::new())..)
            .take_while(move |((parent, _), _)| *parent == folder)
            .filter_map(|(_, id)| self.by_id.get(id))
    }

    /// All entries, in no order.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<FileEntry>> {
        self.by_id.values()
    }

    /// The path from the session's folder, with slashes.
    pub(crate) fn path(&self, entry: &FileEntry) -> String {
        match self.by_id.get(&entry.parent) {
            Some(parent) => format!("{}/{}", self.path(parent), entry.name),
            None => entry.name.clone(),
        }
    }

    /// The entry with this path below the session's folder.
    pub(crate) fn of_path(&self, path: &str) -> Option<FileId> {
        path.split('/')
            .try_fold(FileId::ROOT, |folder, name| self.find(folder, name).map(|entry| entry.id))
    }

    /// Number of folders above it; `None` if they do not lead to the root.
    fn depth(&self, entry: &FileEntry) -> Option<usize> {
        let mut parent = entry.parent;
        for depth in 0..=MAX_DEPTH {
            if parent == FileId::ROOT {
                return Some(depth);
            }
            let folder = self.by_id.get(&parent)?;
            if folder.kind != FileKind::Folder {
                return None;
            }
            parent = folder.parent;
        }
        None
    }

    fn put(&mut self, entry: Arc<FileEntry>) {
        self.by_name.insert((entry.parent, entry.name.clone()), entry.id);
        self.by_number.insert(entry.id.number(), entry.id);
        self.by_id.insert(entry.id, entry);
    }

    fn take(&mut self, entry: &FileEntry) {
        self.by_name.remove(&(entry.parent, entry.name.clone()));
        self.by_number.remove(&entry.id.number());
        self.by_id.remove(&entry.id);
    }

    /// Sets a later time than before, so that clients can detect a change by the time alone.
    fn touch(&mut self, folder: FileId, now_ns: u64) {
        if folder == FileId::ROOT {
            self.changed_ns = now_ns.max(self.changed_ns + 1);
        } else if let Some(entry) = self.by_id.get(&folder) {
            let mut entry = FileEntry::clone(entry);
            entry.changed_ns = now_ns.max(entry.changed_ns + 1);
            self.put(Arc::new(entry));
        }
    }

    fn check_folder(&self, folder: FileId) -> Result<()> {
        match self.by_id.get(&folder) {
            _ if folder == FileId::ROOT => Ok(()),
            Some(entry) if entry.kind == FileKind::Folder => Ok(()),
            Some(entry) => Err(no_folder(&entry.name)),
            None => Err(Error::new(ErrorKind::NotFound, "that folder was removed")),
        }
    }

    /// Adds a file or folder. The name must be free.
    pub(crate) fn with_new(
        &self,
        parent: FileId,
        name: &str,
        kind: FileKind,
        mode: u32,
        verifier: Option<u64>,
        now_ns: u64,
    ) -> Result<(FileTree, Arc<FileEntry>)> {
        check_name(name)?;
        self.check_folder(parent)?;
        if self.len() >= MAX_CLIENT_FILES {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("the session already has {MAX_CLIENT_FILES} files, which is the maximum"),
            ));
        }
        let id = self.free_id()?;
        let name = name.to_owned();
        let content = Vec::new();
        let entry =
            FileEntry { id, parent, name, kind, mode, changed_ns: now_ns, verifier, content };
        if self.depth(&entry).is_none_or(|depth| depth >= MAX_DEPTH) {
            return Err(too_deep());
        }
        let entry = Arc::new(entry);
        let mut tree = self.clone();
        tree.put(Arc::clone(&entry));
        tree.touch(parent, now_ns);
        Ok((tree, entry))
    }

    fn free_id(&self) -> Result<FileId> {
        loop {
            let id = FileId(LayerId::random()?);
            if id.number() >= FIRST_NUMBER && !self.by_number.contains_key(&id.number()) {
                return Ok(id);
            }
        }
    }

    /// Replaces an entry by one of the same id, name and folder.
    pub(crate) fn with_changed(&self, entry: FileEntry) -> FileTree {
        let mut tree = self.clone();
        tree.put(Arc::new(entry));
        tree
    }

    /// Removes the entry with this name, and returns it.
    pub(crate) fn without(
        &self,
        parent: FileId,
        name: &str,
        what: Removal,
        now_ns: u64,
    ) -> Result<(FileTree, Arc<FileEntry>)> {
        let entry = self.find(parent, name).ok_or_else(|| missing(name))?;
        match (what, entry.kind == FileKind::Folder) {
            (Removal::File, true) => return Err(is_folder(name)),
            (Removal::Folder, false) => return Err(no_folder(name)),
            (_, true) if self.entries(entry.id).next().is_some() => return Err(not_empty(name)),
            _ => {}
        }
        let mut tree = self.clone();
        tree.take(entry);
        tree.touch(parent, now_ns);
        Ok((tree, Arc::clone(entry)))
    }

    /// Renames an entry. Removes and returns the entry that had the new name. Returns `None` if
    /// both names already refer to the same entry.
    pub(crate) fn renamed(
        &self,
        from: (FileId, &str),
        to: (FileId, &str),
        now_ns: u64,
    ) -> Result<Option<(FileTree, Option<Arc<FileEntry>>)>> {
        let (new_parent, new_name) = to;
        check_name(new_name)?;
        self.check_folder(new_parent)?;
        let entry = self.find(from.0, from.1).ok_or_else(|| missing(from.1))?;
        let replaced = self.find(new_parent, new_name).map(Arc::clone);
        let is_folder_here = entry.kind == FileKind::Folder;
        if let Some(there) = &replaced {
            if there.id == entry.id {
                return Ok(None);
            }
            match (is_folder_here, there.kind == FileKind::Folder) {
                (true, false) => return Err(no_folder(new_name)),
                (false, true) => return Err(is_folder(new_name)),
                (true, true) if self.entries(there.id).next().is_some() => {
                    return Err(not_empty(new_name));
                }
                _ => {}
            }
        }
        if is_folder_here && self.is_within(new_parent, entry.id) {
            let text = format!("{}: a folder cannot be moved into itself", entry.name);
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let mut moved = FileEntry::clone(entry);
        moved.parent = new_parent;
        moved.name = new_name.to_owned();
        moved.changed_ns = now_ns.max(entry.changed_ns + 1);
        let mut tree = self.clone();
        if let Some(there) = &replaced {
            tree.take(there);
        }
        tree.take(entry);
        tree.put(Arc::new(moved));
        if is_folder_here && tree.all().any(|entry| tree.depth(entry).is_none()) {
            return Err(too_deep());
        }
        tree.touch(from.0, now_ns);
        if new_parent != from.0 {
            tree.touch(new_parent, now_ns);
        }
        Ok(Some((tree, replaced)))
    }

    fn is_within(&self, folder: FileId, outer: FileId) -> bool {
        let mut at = folder;
        for _ in 0..=MAX_DEPTH {
            if at == outer {
                return true;
            }
            match self.by_id.get(&at) {
                Some(entry) => at = entry.parent,
                None => return false,
            }
        }
        false
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
