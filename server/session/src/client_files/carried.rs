//! The files that a restore point carries, and their encoding.
//!
//! A point sealed from a session has the session's small files: the machine's configuration, its
//! nvram, logs. Locks and swap files are skipped: they have no meaning without the running machine.
//! Files that are too large are skipped and reported by the seal.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coldrise_block::{Context, Disk, Error, ErrorKind, ReplaceError, Result};
use coldrise_store::{PointFiles, Repository};
use serde::{Deserialize, Serialize};

use super::folder::{FilesFolder, MAX_SMALL_BYTES};
use super::names::check_name;
use super::reader::ClientFilesReader;
use super::tree::{FileEntry, FileId, FileKind, FileTree, MAX_CLIENT_FILES};
use super::writer::ClientFiles;
use crate::session_folder::document::SessionDocument;

/// Maximum size of all files in one restore point, in bytes.
const MAX_CARRIED_BYTES: u64 = 4 << 20;

/// A file or folder that a restore point carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CarriedFile {
    /// Path in the machine's folder, with slashes.
    pub path: String,
    /// Its content; `None` for a folder.
    pub content: Option<Vec<u8>>,
    /// Permissions as a client set them.
    pub mode: u32,
    /// Time of the last change, in milliseconds since 1970-01-01T00:00:00Z.
    pub modified_ms: u64,
}

impl CarriedFile {
    /// Time of the last change.
    pub(crate) fn modified(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.modified_ms)
    }
}

/// The files of a restore point. Each folder comes before its entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CarriedFiles {
    /// Sorted by path.
    pub files: Vec<CarriedFile>,
}

/// A file that a seal skipped because it is too large.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedFile {
    /// Path in the session's folder.
    pub path: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// True if it looks like a hypervisor's own snapshot. Then the machine wrote into this file and
    /// not to the disk, and the restore point lacks those writes.
    pub is_snapshot: bool,
}

#[derive(Serialize, Deserialize)]
struct Described {
    path: String,
    /// Length of the content in bytes; absent for a folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    size_bytes: Option<u64>,
    mode: u32,
    modified_ms: u64,
}

const COUNT_BYTES: usize = size_of::<u32>();

impl CarriedFiles {
    /// The file with this path.
    pub fn find(&self, path: &str) -> Option<&CarriedFile> {
        self.files.iter().find(|file| file.path == path)
    }

    /// The files as a point of `repository` carries them; `None` if there are none.
    ///
    /// # Errors
    /// `InvalidInput` if there are too many.
    pub fn for_point(&self, repository: &Repository) -> Result<Option<(PointFiles, Vec<u8>)>> {
        if self.files.is_empty() {
            return Ok(None);
        }
        let bytes = self.encode()?;
        let contents = self.files.iter().filter_map(|file| file.content.as_ref());
        let facts = PointFiles {
            count: u32::try_from(self.files.len()).unwrap_or(u32::MAX),
            size_bytes: contents.map(|content| content.len() as u64).sum(),
            hash: hash(repository, &bytes),
        };
        Ok(Some((facts, bytes)))
    }

    /// The encoded set: the length of a description, the description, the contents.
    ///
    /// # Errors
    /// `InvalidInput` if there are too many.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let described: Vec<_> = self
            .files
            .iter()
            .map(|file| Described {
                path: file.path.clone(),
                size_bytes: file.content.as_ref().map(|content| content.len() as u64),
                mode: file.mode,
                modified_ms: file.modified_ms,
            })
            .collect();
        let text = serde_json::to_vec(&described).map_err(|error| {
            Error::with_source(ErrorKind::Internal, "describing a point's files", error)
        })?;
        let too_large = |_| Error::new(ErrorKind::Internal, "a point's files are too many");
        let mut bytes = u32::try_from(text.len()).map_err(too_large)?.to_le_bytes().to_vec();
        bytes.extend_from_slice(&text);
        self.files.iter().flat_map(|file| &file.content).for_each(|c| bytes.extend_from_slice(c));
        Ok(bytes)
    }

    /// Decodes a set.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn decode(bytes: &[u8]) -> Result<CarriedFiles> {
        let damaged = || Error::new(ErrorKind::Corrupt, "the point's files have an unknown form");
        let (length, rest) = bytes.split_first_chunk::<COUNT_BYTES>().ok_or_else(damaged)?;
        let (text, mut contents) =
            rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or_else(damaged)?;
        let described: Vec<Described> = serde_json::from_slice(text).map_err(|_| damaged())?;
        let mut files = Vec::with_capacity(described.len().min(MAX_CLIENT_FILES));
        for Described { path, size_bytes, mode, modified_ms } in described {
            path.split('/').try_for_each(check_name).map_err(|_| damaged())?;
            let mut content = None;
            if let Some(size_bytes) = size_bytes {
                let length = usize::try_from(size_bytes).map_err(|_| damaged())?;
                let (first, after) = contents.split_at_checked(length).ok_or_else(damaged)?;
                (content, contents) = (Some(first.to_vec()), after);
            }
            files.push(CarriedFile { path, content, mode, modified_ms });
        }
        if contents.is_empty() { Ok(CarriedFiles { files }) } else { Err(damaged()) }
    }
}

/// The files that a seal carries, ready to be stored.
#[derive(Debug, Default)]
pub(crate) struct Carried {
    /// `None` if there are no files.
    pub(crate) set: Option<(PointFiles, Vec<u8>)>,
    pub(crate) left_out: Vec<SkippedFile>,
}

impl Carried {
    /// Identifies this set; `None` if there are no files.
    pub(crate) fn hash(&self) -> Option<String> {
        self.set.as_ref().map(|(facts, _)| facts.hash.clone())
    }
}

/// The files of the session that this process writes, in their current state, durable or not.
pub(crate) fn carry(repository: &Repository, files: &ClientFiles) -> Result<Carried> {
    let tree = files.tree();
    let open = |entry: &FileEntry| files.file(entry.id).map(|file| file as Arc<dyn Disk>);
    gather(repository, &tree, &open, &|entry| files.modified(entry))
}

/// The files of a session that no process writes. The caller holds its lock.
pub(crate) fn carry_idle(
    repository: &Arc<Repository>,
    document: &SessionDocument,
) -> Result<Carried> {
    let files = Arc::new(ClientFilesReader::new(repository, document));
    let tree = files.tree()?;
    // Remove block maps of a killed writer: they would look like those of a running one.
    FilesFolder::of(repository, document).remove_unlisted(&tree)?;
    let open = |entry: &FileEntry| files.file(entry.id);
    gather(repository, &tree, &open, &|entry| files.looks(entry).map(|(modified, _)| modified))
}

/// Creates the files with which a session begins. They are durable except for the session's own
/// folder. Returns their [`Carried::hash`].
pub(crate) fn begin_files(
    repository: &Arc<Repository>,
    document: &SessionDocument,
    set: &CarriedFiles,
) -> Result<Option<String>> {
    let folder = FilesFolder::of(repository, document);
    folder.create()?;
    let mut tree = FileTree::default();
    for file in &set.files {
        let (parent, name) = match file.path.rsplit_once('/') {
            Some((folder, name)) => (tree.of_path(folder), name),
            None => (Some(FileId::ROOT), file.path.as_str()),
        };
        let parent = parent.ok_or_else(|| {
            let text = format!("{}: the folder that it is in comes later or never", file.path);
            Error::new(ErrorKind::Corrupt, text)
        })?;
        let kind = if file.content.is_some() { FileKind::Small } else { FileKind::Folder };
        let changed_ns = file.modified_ms.saturating_mul(1_000_000);
        let entry;
        (tree, entry) = tree.with_new(parent, name, kind, file.mode, None, changed_ns)?;
        if let Some(content) = &file.content {
            let written = folder.write_content(entry.id, content, file.modified());
            written.map_err(ReplaceError::into_error)?;
        }
    }
    folder.write_tree(&tree).map_err(ReplaceError::into_error)?;
    carry_idle(repository, document).map(|carried| carried.hash())
}

/// Small files come first if not all files fit.
fn gather(
    repository: &Repository,
    tree: &FileTree,
    open: &dyn Fn(&FileEntry) -> Result<Arc<dyn Disk>>,
    modified: &dyn Fn(&FileEntry) -> Result<SystemTime>,
) -> Result<Carried> {
    let mut carried = Vec::new();
    let mut by_size = Vec::new();
    let mut left_out = Vec::new();
    for entry in tree.all() {
        let path = tree.path(entry);
        if path.split('/').any(is_transient) {
            continue;
        }
        if entry.kind == FileKind::Folder {
            let modified_ms = entry.changed_ns / 1_000_000;
            carried.push(CarriedFile { path, content: None, mode: entry.mode, modified_ms });
            continue;
        }
        let disk = open(entry).context(|| path.clone())?;
        by_size.push((disk.size_bytes(), path, Arc::clone(entry), disk));
    }
    by_size.sort_unstable_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    let mut sum_bytes = 0;
    for (size_bytes, path, entry, disk) in by_size {
        if size_bytes > MAX_SMALL_BYTES || sum_bytes + size_bytes > MAX_CARRIED_BYTES {
            let is_snapshot = is_snapshot(&entry.name);
            left_out.push(SkippedFile { path, size_bytes, is_snapshot });
            continue;
        }
        sum_bytes += size_bytes;
        // At most MAX_SMALL_BYTES.
        let mut content = vec![0; size_bytes as usize];
        disk.read_at(&mut content, 0).context(|| path.clone())?;
        let since_1970 = modified(&entry)?.duration_since(UNIX_EPOCH).unwrap_or_default();
        let modified_ms = u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX);
        let (content, mode) = (Some(content), entry.mode);
        carried.push(CarriedFile { path, content, mode, modified_ms });
    }
    carried.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    let set = CarriedFiles { files: carried };
    Ok(Carried { set: set.for_point(repository)?, left_out })
}

/// Proves that the files of a point are those it was sealed with.
pub(crate) fn hash(repository: &Repository, encoded: &[u8]) -> String {
    let hash = repository.derive_key("point files", encoded);
    coldrise_block::hex::encode(&*hash)
}

/// True if a file with this name matters only to the running machine.
fn is_transient(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.starts_with(".lck-")
        || name.starts_with(".nfs")
        || [".lck", ".vswp", ".swp"].iter().any(|end| name.ends_with(end))
}

/// True if this is the name of a data file of a hypervisor's own snapshot.
fn is_snapshot(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let Some(stem) = name.strip_suffix(".vmdk") else { return false };
    let is_numbered = stem.rsplit_once('-').is_some_and(|(_, number)| {
        number.len() == 6 && number.bytes().all(|digit| digit.is_ascii_digit())
    });
    is_numbered || stem.ends_with("-delta") || stem.ends_with("-sesparse")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, content: Option<&[u8]>) -> CarriedFile {
        let content = content.map(<[u8]>::to_vec);
        CarriedFile { path: path.to_owned(), content, mode: 0o600, modified_ms: 1234 }
    }

    #[test]
    fn a_set_survives_its_encoding() {
        let files = vec![file("a", Some(b"first")), file("b", None), file("b/c", Some(b""))];
        let set = CarriedFiles { files };
        let bytes = set.encode().unwrap();
        assert_eq!(CarriedFiles::decode(&bytes).unwrap(), set);
        assert_eq!(set.find("b/c").unwrap().content.as_deref(), Some(&b""[..]));
        for length in 0..bytes.len() {
            assert!(CarriedFiles::decode(&bytes[..length]).is_err(), "{length} bytes");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(CarriedFiles::decode(&longer).is_err());
        let outside = CarriedFiles { files: vec![file("a/../b", Some(b""))] };
        assert!(CarriedFiles::decode(&outside.encode().unwrap()).is_err());
    }

    #[test]
    fn locks_and_swap_are_transient() {
        for name in [".lck-0123456789abcdef", "vm.vmx.lck", "a.VSWP", "x.swp", ".nfs80001"] {
            assert!(is_transient(name), "{name}");
        }
        for name in ["vm.vmx", "vm.vmx~", "vm.nvram", "vmware.log", "lck-1", "swp"] {
            assert!(!is_transient(name), "{name}");
        }
    }

    #[test]
    fn snapshots_are_known_by_their_names() {
        for name in ["vda-000001.vmdk", "vda-000012-delta.vmdk", "vda-000001-sesparse.vmdk"] {
            assert!(is_snapshot(name), "{name}");
        }
        for name in ["vda.vmdk", "vda-flat.vmdk", "vda-00001.vmdk", "vda-000001.vmsn", "delta"] {
            assert!(!is_snapshot(name), "{name}");
        }
    }
}
