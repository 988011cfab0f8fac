//! `live/HASH/files/`: the stored files of clients, and their encryption.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use coldrise_block::{
    Context, Error, ErrorKind, ReplaceError, Result, remove_if_present, replace_file_with,
    sync_directory,
};
use coldrise_store::{LayerId, Repository};

use super::tree::{FileId, FileKind, FileTree};
use crate::paths::{SessionPaths, map_path, remove_folder};
use crate::session_folder::document::SessionDocument;
use crate::session_folder::side_file::SideFileKey;

/// Maximum size of a content stored as a document, in bytes. A larger one becomes a layer.
pub const MAX_SMALL_BYTES: u64 = 1 << 20;
/// Contents and the list are padded to a multiple of this many bytes, which hides their lengths.
const QUANTUM_BYTES: usize = 1024;
const LENGTH_BYTES: usize = size_of::<u64>();
/// Largest encrypted content that is read, in bytes.
const MAX_STORED_BYTES: u64 = MAX_SMALL_BYTES + 4096;
/// Largest list of files, in bytes. JSON may write a name of 255 bytes as 1530.
const MAX_TREE_BYTES: u64 = 16 << 20;

/// The files of one session on the repository's disk.
pub(crate) struct FilesFolder {
    repository: Arc<Repository>,
    folder: PathBuf,
    /// Binds documents to this session, and to no other one of the same name.
    purpose: String,
}

/// Identifies the version of a file that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    inode: u64,
    length_bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Mark {
    fn of(path: &Path) -> Result<Option<Mark>> {
        match std::fs::metadata(path) {
            Ok(found) => Ok(Some(Mark {
                inode: found.ino(),
                length_bytes: found.len(),
                modified: (found.mtime(), found.mtime_nsec()),
                changed: (found.ctime(), found.ctime_nsec()),
            })),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context(|| format!("looking at {}", path.display())),
        }
    }
}

impl FilesFolder {
    pub(crate) fn of(repository: &Arc<Repository>, document: &SessionDocument) -> FilesFolder {
        let place = SessionPaths::of(repository, &document.name);
        let purpose = format!("{} {}", place.purpose(), document.created_at_ms);
        let folder = place.client_files();
        FilesFolder { repository: Arc::clone(repository), folder, purpose }
    }

    pub(crate) fn repository(&self) -> &Arc<Repository> {
        &self.repository
    }

    fn tree_path(&self) -> PathBuf {
        self.folder.join("tree")
    }

    fn content_path(&self, id: FileId) -> PathBuf {
        self.folder.join(id.0.to_string())
    }

    pub(crate) fn layer_path(&self, id: FileId) -> PathBuf {
        self.folder.join(format!("{}.layer", id.0))
    }

    /// The layer of a large file.
    pub(crate) fn layer(&self, id: FileId, capacity_bytes: u64) -> SideFileKey {
        SideFileKey::at(&self.repository, self.layer_path(id), id.0, capacity_bytes)
    }

    /// Creates the folder, and removes the remains of an unfinished publish. The folder is durable
    /// once the list is written.
    pub(crate) fn create(&self) -> Result<()> {
        remove_folder(&self.folder)?;
        SessionPaths::make_folder(&self.folder)?;
        self.folder.parent().map_or(Ok(()), sync_directory)
    }

    pub(crate) fn tree_mark(&self) -> Result<Option<Mark>> {
        Mark::of(&self.tree_path())
    }

    /// The list of files; `None` if there is none.
    pub(crate) fn read_tree(&self) -> Result<Option<FileTree>> {
        let path = self.tree_path();
        let Some(stored) = read(&path, MAX_TREE_BYTES)? else { return Ok(None) };
        let what = || format!("reading {}", path.display());
        let purpose = format!("client tree {}", self.purpose);
        let text = self.repository.decrypt_document(&purpose, &stored).context(what)?;
        FileTree::decode(&text).map(Some).context(what)
    }

    /// Replaces the list, durably.
    pub(crate) fn write_tree(&self, tree: &FileTree) -> ReplaceResult {
        let purpose = format!("client tree {}", self.purpose);
        let sealed = tree.encode().and_then(|mut text| {
            // Padding hides the lengths of contents.
            text.resize(text.len().next_multiple_of(QUANTUM_BYTES), b' ');
            self.repository.encrypt_document(&purpose, &text)
        });
        replace(&self.tree_path(), &sealed.map_err(ReplaceError::Unchanged)?, None)
    }

    fn content_purpose(&self, id: FileId) -> String {
        format!("client file {} {}", self.purpose, id.0)
    }

    pub(crate) fn content_mark(&self, id: FileId) -> Result<Option<Mark>> {
        Mark::of(&self.content_path(id))
    }

    /// The content of a small file; `None` if its document does not exist.
    pub(crate) fn read_content(&self, id: FileId) -> Result<Option<Vec<u8>>> {
        let path = self.content_path(id);
        let Some(stored) = read(&path, MAX_STORED_BYTES)? else { return Ok(None) };
        let what = || format!("reading {}", path.display());
        let padded = self.repository.decrypt_document(&self.content_purpose(id), &stored);
        unpad(padded.context(what)?).context(what).map(Some)
    }

    /// Stores the content of a small file, durably. On failure the old content stays. `modified` is
    /// the time that [`FilesFolder::looks`] returns.
    pub(crate) fn write_content(
        &self,
        id: FileId,
        content: &[u8],
        modified: SystemTime,
    ) -> ReplaceResult {
        let sealed = self.repository.encrypt_document(&self.content_purpose(id), &pad(content));
        let sealed = sealed.map_err(ReplaceError::Unchanged)?;
        replace(&self.content_path(id), &sealed, Some(modified))
    }

    /// Removes the stored parts of a file, large or small, that is in no list.
    pub(crate) fn remove(&self, id: FileId) -> Result<()> {
        self.remove_content(id)?;
        self.remove_layer(id)
    }

    pub(crate) fn remove_content(&self, id: FileId) -> Result<()> {
        remove_if_present(&self.content_path(id)).map(drop)
    }

    pub(crate) fn remove_layer(&self, id: FileId) -> Result<()> {
        remove_if_present(&self.layer_path(id))?;
        remove_if_present(&map_path(&id.0)).map(drop)
    }

    fn stored_path(&self, id: FileId, kind: FileKind) -> PathBuf {
        match kind {
            FileKind::Large { .. } => self.layer_path(id),
            _ => self.content_path(id),
        }
    }

    /// The time of the last change of a content outside the list, and the space it takes, in bytes;
    /// `None` if it does not exist.
    pub(crate) fn looks(&self, id: FileId, kind: FileKind) -> Result<Option<(SystemTime, u64)>> {
        let path = self.stored_path(id, kind);
        let what = || format!("looking at {}", path.display());
        match std::fs::metadata(&path) {
            Ok(found) => Ok(Some((found.modified().context(what)?, found.blocks() * 512))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context(what),
        }
    }

    /// Sets the time that [`FilesFolder::looks`] returns.
    pub(crate) fn set_modified(&self, id: FileId, kind: FileKind, to: SystemTime) -> Result<()> {
        let path = self.stored_path(id, kind);
        let set = std::fs::File::open(&path).and_then(|file| {
            file.set_modified(to)?;
            file.sync_all()
        });
        set.context(|| format!("setting the time of {}", path.display()))
    }

    /// Removes the remains of a crash: unfinished files, contents of files that are in no list, and
    /// block maps in shared memory. The caller holds the session's lock.
    pub(crate) fn remove_unlisted(&self, tree: &FileTree) -> Result<()> {
        let what = || format!("reading {}", self.folder.display());
        let entries = match std::fs::read_dir(&self.folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            entries => entries.context(what)?,
        };
        for entry in entries {
            let entry = entry.context(what)?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            let (stem, end) = name.split_once('.').unwrap_or((name, ""));
            let Ok(id) = LayerId::parse(stem) else { continue };
            remove_if_present(&map_path(&id))?;
            let kind = tree.get(FileId(id)).map(|entry| entry.kind);
            let is_named = match end {
                "" => kind == Some(FileKind::Small),
                "layer" => matches!(kind, Some(FileKind::Large { .. })),
                _ => false,
            };
            if !is_named {
                remove_if_present(&entry.path())?;
            }
        }
        Ok(())
    }
}

fn pad(content: &[u8]) -> Vec<u8> {
    let mut padded = Vec::with_capacity(LENGTH_BYTES + content.len() + QUANTUM_BYTES);
    padded.extend_from_slice(&(content.len() as u64).to_le_bytes());
    padded.extend_from_slice(content);
    padded.resize(padded.len().next_multiple_of(QUANTUM_BYTES), 0);
    padded
}

fn unpad(mut padded: Vec<u8>) -> Result<Vec<u8>> {
    let damaged = || Error::new(ErrorKind::Corrupt, "the content has an unknown form");
    let (length, rest) = padded.split_first_chunk::<LENGTH_BYTES>().ok_or_else(damaged)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| damaged())?;
    if length > rest.len() {
        return Err(damaged());
    }
    padded.drain(..LENGTH_BYTES);
    padded.truncate(length);
    Ok(padded)
}

fn read(path: &Path, limit_bytes: u64) -> Result<Option<Vec<u8>>> {
    let what = || format!("reading {}", path.display());
    let length_bytes = match std::fs::metadata(path) {
        Ok(found) => found.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).context(what),
    };
    if length_bytes > limit_bytes {
        return Err(Error::new(ErrorKind::Corrupt, format!("{} is too large", path.display())));
    }
    match std::fs::read(path) {
        Ok(stored) => Ok(Some(stored)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).context(what),
    }
}

type ReplaceResult = std::result::Result<(), ReplaceError>;

/// Replaces a file and sets its modification time.
fn replace(path: &Path, bytes: &[u8], modified: Option<SystemTime>) -> ReplaceResult {
    replace_file_with(path, |file| {
        file.write_all(bytes)?;
        modified.map_or(Ok(()), |modified| file.set_modified(modified))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_keep_their_length_and_do_not_show_it() {
        for length in [0, 1, 84, 1015, 1016, 1017, 1 << 20] {
            let content: Vec<u8> = (0..length).map(|i| (i * 7) as u8).collect();
            let padded = pad(&content);
            assert_eq!(padded.len() % QUANTUM_BYTES, 0);
            assert!(padded.len() as u64 + 29 <= MAX_STORED_BYTES);
            assert_eq!(unpad(padded).unwrap(), content);
        }
        assert_eq!(pad(b"").len(), pad(&[1; 1000]).len());
    }

    #[test]
    fn a_length_beyond_the_content_is_damage() {
        let mut padded = pad(b"abc");
        padded[0] = 0xff;
        padded[1] = 0xff;
        assert_eq!(unpad(padded).unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(unpad(vec![0; 7]).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
