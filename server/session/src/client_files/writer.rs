//! The files of a session in the process that writes it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coldrise_block::{Disk, Error, ErrorKind, ReplaceError, Result};
use parking_lot::{Mutex, RwLock};

use super::file::ClientFile;
use super::folder::FilesFolder;
use super::tree::{Creation, FileEntry, FileId, FileKind, FileTree, Removal};
use crate::layer::Poison;
use crate::locks::file_lock::FileLock;
use crate::session_folder::document::SessionDocument;

/// State that all files of a session share.
pub(super) struct Shared {
    pub(super) folder: FilesFolder,
    pub(super) poison: Poison,
    pub(super) writing: Arc<FileLock>,
    /// Memory that small files take, in bytes.
    pub(super) resident_bytes: AtomicU64,
    /// Held while the list changes.
    changing: Mutex<()>,
    tree: RwLock<Arc<FileTree>>,
}

/// The files that clients keep in a session. Changes of names are durable on return.
pub struct ClientFiles {
    session_created_at_ms: u64,
    shared: Arc<Shared>,
    open: Mutex<HashMap<FileId, Arc<ClientFile>>>,
}

impl ClientFiles {
    pub(crate) fn open(
        folder: FilesFolder,
        document: &SessionDocument,
        poison: Poison,
        writing: Arc<FileLock>,
    ) -> Result<ClientFiles> {
        let tree = match folder.read_tree()? {
            Some(tree) => tree,
            None if document.files.is_some() => return Err(lost_list()),
            // A version without client files published the session.
            None => {
                folder.create()?;
                FileTree::default()
            }
        };
        folder.remove_unlisted(&tree)?;
        let shared = Shared {
            folder,
            poison,
            writing,
            resident_bytes: AtomicU64::new(0),
            changing: Mutex::new(()),
            tree: RwLock::new(Arc::new(tree)),
        };
        Ok(ClientFiles {
            session_created_at_ms: document.created_at_ms,
            shared: Arc::new(shared),
            open: Mutex::default(),
        })
    }

    /// Time of the session's publish. It distinguishes sessions of the same name.
    pub fn session_created_at_ms(&self) -> u64 {
        self.session_created_at_ms
    }

    /// The current list.
    pub fn tree(&self) -> Arc<FileTree> {
        self.shared.tree()
    }

    /// The open file with this id. All callers share one instance.
    ///
    /// # Errors
    /// `NotFound` if it was removed, `IsAFolder`, `Corrupt` if its content is missing or damaged.
    pub fn file(&self, id: FileId) -> Result<Arc<ClientFile>> {
        let mut open = self.open.lock();
        if let Some(file) = open.get(&id) {
            return Ok(Arc::clone(file));
        }
        let tree = self.tree();
        let file = Arc::new(ClientFile::open(&self.shared, tree.get(id).ok_or_else(removed)?)?);
        open.insert(id, Arc::clone(&file));
        Ok(file)
    }

    /// Creates an empty file, or finds the existing one. Also returns which of the two happened.
    ///
    /// # Errors
    /// `AlreadyExists`; `IsAFolder`; `NotFound` if the folder no longer exists; `NotAFolder`;
    /// `InvalidInput` or `NameTooLong` for an invalid name; `NoSpace`, also if the session has
    /// [`MAX_CLIENT_FILES`](super::MAX_CLIENT_FILES).
    pub fn create(
        &self,
        folder: FileId,
        name: &str,
        how: Creation,
        mode: u32,
    ) -> Result<(Arc<FileEntry>, bool)> {
        let _changing = self.shared.changing.lock();
        let tree = self.tree();
        if let Some(there) = tree.find(folder, name) {
            return match how {
                _ if there.kind == FileKind::Folder && how == Creation::Unchecked => {
                    Err(Error::new(ErrorKind::IsAFolder, format!("{name:?} is a folder")))
                }
                Creation::Unchecked => Ok((Arc::clone(there), false)),
                Creation::Exclusive(by) if there.verifier == Some(by) => {
                    Ok((Arc::clone(there), false))
                }
                _ => Err(taken(name)),
            };
        }
        let verifier = match how {
            Creation::Exclusive(by) => Some(by),
            _ => None,
        };
        let modified_ns = now_ns();
        let kind = FileKind::Listed { modified_ns };
        let (tree, entry) = tree.with_new(folder, name, kind, mode, verifier, modified_ns)?;
        self.shared.store(tree)?;
        Ok((entry, true))
    }

    /// Creates a folder.
    ///
    /// # Errors
    /// As for [`ClientFiles::create`], guarded.
    pub fn make_folder(&self, folder: FileId, name: &str, mode: u32) -> Result<Arc<FileEntry>> {
        let _changing = self.shared.changing.lock();
        let tree = self.tree();
        if tree.find(folder, name).is_some() {
            return Err(taken(name));
        }
        let (tree, entry) = tree.with_new(folder, name, FileKind::Folder, mode, None, now_ns())?;
        self.shared.store(tree)?;
        Ok(entry)
    }

    /// Removes a file or an empty folder. Calls on an open file that was removed fail.
    ///
    /// # Errors
    /// `NotFound`, `NotEmpty`, `IsAFolder`, `NotAFolder`, `NoSpace`.
    pub fn remove(&self, folder: FileId, name: &str, what: Removal) -> Result<()> {
        let gone = {
            let _changing = self.shared.changing.lock();
            let (tree, gone) = self.tree().without(folder, name, what, now_ns())?;
            self.shared.store(tree)?;
            gone
        };
        self.forget(&gone);
        Ok(())
    }

    /// Renames an entry. This atomically removes an entry that had the new name.
    ///
    /// # Errors
    /// `NotFound`, `NotEmpty`, `IsAFolder`, `NotAFolder`, `InvalidInput`, `NameTooLong`, `NoSpace`.
    pub fn rename(&self, from: (FileId, &str), to: (FileId, &str)) -> Result<()> {
        let replaced = {
            let _changing = self.shared.changing.lock();
            let Some((tree, replaced)) = self.tree().renamed(from, to, now_ns())? else {
                return Ok(());
            };
            self.shared.store(tree)?;
            replaced
        };
        if let Some(gone) = replaced {
            self.forget(&gone);
        }
        Ok(())
    }

    /// Removes the stored content of an entry that is in no list. If this fails, the next opening
    /// of the session removes it.
    fn forget(&self, gone: &FileEntry) {
        // Holding the lock keeps other threads from opening it in between.
        let open = self.open.lock().remove(&gone.id);
        if let Some(file) = open {
            file.end();
        }
        if let Err(error) = self.shared.folder.remove(gone.id) {
            tracing::warn!(error = %error.full_message(), "a removed file's content stays for now");
        }
    }

    /// Sets permissions and the time of the content's last change, durably. Either one counts as a
    /// change of the entry.
    ///
    /// # Errors
    /// `NotFound` if it was removed; `NoSpace`.
    pub fn set(&self, id: FileId, mode: Option<u32>, modified: Option<SystemTime>) -> Result<()> {
        self.shared.change_entry(id, |entry| {
            entry.mode = mode.unwrap_or(entry.mode);
            entry.verifier = None;
            if let (FileKind::Listed { modified_ns }, Some(to)) = (&mut entry.kind, modified) {
                *modified_ns = ns_since_1970(to);
            }
        })?;
        let entry = self.tree().get(id).map(Arc::clone).ok_or_else(removed)?;
        let Some(modified) = modified.filter(|_| entry.kind != FileKind::Folder) else {
            return Ok(());
        };
        let file = self.file(id)?;
        file.flush()?;
        // The file may have become large meanwhile.
        let kind = self.tree().get(id).ok_or_else(removed)?.kind;
        file.note_modified(modified);
        if let FileKind::Listed { modified_ns } = kind {
            // A flush may have stored another time in between.
            if modified_ns == ns_since_1970(modified) {
                return Ok(());
            }
            return self.shared.change_entry(id, |entry| {
                entry.kind = FileKind::Listed { modified_ns: ns_since_1970(modified) };
            });
        }
        self.shared.folder.set_modified(id, kind, modified)?;
        Ok(())
    }

    /// Time of the last change of a file's content.
    ///
    /// # Errors
    /// `Corrupt` if the content is missing.
    pub(crate) fn modified(&self, entry: &FileEntry) -> Result<SystemTime> {
        self.file(entry.id).map(|file| file.modified())
    }

    /// Time of the last change of a file's stored content, and the space it takes, in bytes.
    ///
    /// # Errors
    /// `Corrupt` if the content is missing.
    pub fn looks(&self, entry: &FileEntry) -> Result<(SystemTime, u64)> {
        looks(&self.shared.folder, entry)
    }

    /// Makes all written bytes durable.
    ///
    /// # Errors
    /// The error of the first file that fails. The other files are flushed all the same.
    pub(crate) fn flush(&self) -> Result<()> {
        let files: Vec<_> = self.open.lock().values().map(Arc::clone).collect();
        let mut result = Ok(());
        for file in files.iter().filter(|file| file.is_dirty()) {
            result = result.and(file.flush());
        }
        result
    }
}

impl Shared {
    pub(super) fn tree(&self) -> Arc<FileTree> {
        Arc::clone(&self.tree.read())
    }

    /// Makes another list the current one. The caller holds `changing`.
    fn store(&self, tree: FileTree) -> Result<()> {
        self.poison.check()?;
        match self.folder.write_tree(&tree) {
            Ok(()) => {
                *self.tree.write() = Arc::new(tree);
                Ok(())
            }
            Err(ReplaceError::Unchanged(error)) => Err(error),
            Err(ReplaceError::Unknown(error)) => {
                self.poison.set();
                Err(error)
            }
        }
    }

    /// Changes the list's entry of one file, but neither its name nor its folder.
    pub(super) fn change_entry(
        &self,
        id: FileId,
        change: impl FnOnce(&mut FileEntry),
    ) -> Result<()> {
        let _changing = self.changing.lock();
        let tree = self.tree();
        let mut entry = FileEntry::clone(tree.get(id).ok_or_else(removed)?);
        entry.changed_ns = now_ns().max(entry.changed_ns + 1);
        change(&mut entry);
        self.store(tree.with_changed(entry))
    }
}

pub(super) fn looks(folder: &FilesFolder, entry: &FileEntry) -> Result<(SystemTime, u64)> {
    if let FileKind::Listed { modified_ns } = entry.kind {
        return Ok((UNIX_EPOCH + Duration::from_nanos(modified_ns), entry.content.len() as u64));
    }
    folder.looks(entry.id, entry.kind)?.ok_or_else(|| {
        Error::new(ErrorKind::Corrupt, format!("the content of {:?} is missing", entry.name))
    })
}

pub(super) fn lost_list() -> Error {
    Error::new(ErrorKind::Corrupt, "the list of the session's files is missing")
}

pub(super) fn removed() -> Error {
    Error::new(ErrorKind::NotFound, "the file was removed")
}

fn taken(name: &str) -> Error {
    Error::new(ErrorKind::AlreadyExists, format!("there is already a file {name:?}"))
}

fn now_ns() -> u64 {
    ns_since_1970(SystemTime::now())
}

pub(super) fn ns_since_1970(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
