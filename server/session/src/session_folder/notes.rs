//! Notes about a session that another crate keeps in its folder: small encrypted documents, a lock for those
//! who change them, and a link to the monitor of the machine that runs on the session.
//!
//! A note is replaced whole and is durable when `write` returns. Notes end with the session: a new session of the
//! same name begins without them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{
    Context, Error, ErrorKind, Result, remove_if_present, replace_file, sync_directory,
};
use coldrise_store::{Repository, SessionName};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::locks::file_lock::{FileLock, PROBE_PATIENCE};
use crate::paths::SessionPaths;
use crate::session_folder::document::SessionDocument;

/// Largest stored note that is read, in bytes.
const MAX_NOTE_BYTES: u64 = 1 << 20;
const LOCK: &str = "lock";
const MONITOR: &str = "monitor";

/// The notes of one session.
pub struct SessionNotes {
    repository: Arc<Repository>,
    place: SessionPaths,
}

/// Held by the one process that changes the notes. It ends with the process.
pub struct NotesLock {
    _lock: FileLock,
}

impl SessionNotes {
    /// The notes of an existing session.
    ///
    /// # Errors
    /// `NotFound`, naming the existing sessions.
    pub fn of(repository: &Arc<Repository>, name: &SessionName) -> Result<SessionNotes> {
        SessionDocument::of(repository, name)?;
        Ok(SessionNotes::at(repository, &SessionPaths::of(repository, name)))
    }

    /// The notes in the folder of an existing session.
    pub(crate) fn at(repository: &Arc<Repository>, place: &SessionPaths) -> SessionNotes {
        SessionNotes { repository: Arc::clone(repository), place: place.clone() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.notes().join(name)
    }

    fn purpose(&self, name: &str) -> String {
        format!("note {name} of {}", self.place.purpose())
    }

    fn make_folder(&self) -> Result<()> {
        SessionPaths::make_folder(&self.place.notes())?;
        sync_directory(self.place.directory())
    }

    /// A note; `None` if there is none.
    ///
    /// # Errors
    /// `Corrupt` if it does not authenticate.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(name);
        let what = || format!("reading {}", path.display());
        match std::fs::metadata(&path) {
            Ok(found) if found.len() > MAX_NOTE_BYTES => {
                let text = format!("{} is too large", path.display());
                return Err(Error::new(ErrorKind::Corrupt, text));
            }
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).context(what),
        }
        match std::fs::read(&path) {
            Ok(stored) => {
                let purpose = self.purpose(name);
                self.repository.decrypt_document(&purpose, &stored).context(what).map(Some)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context(what),
        }
    }

    /// A note that is a document in JSON; `None` if there is none.
    ///
    /// # Errors
    /// `Corrupt` if it does not authenticate, or has another form.
    pub fn read_json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let Some(text) = self.read(name)? else { return Ok(None) };
        serde_json::from_slice(&text).map(Some).map_err(|error| {
            let text = format!("the note {name} of a session has an unknown form");
            Error::with_source(ErrorKind::Corrupt, text, error)
        })
    }

    /// Replaces a note by a document in JSON, durably.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn write_json<T: Serialize>(&self, name: &str, document: &T) -> Result<()> {
        let text = serde_json::to_vec(document).map_err(|error| {
            let text = format!("writing the note {name} of a session");
            Error::with_source(ErrorKind::Internal, text, error)
        })?;
        self.write(name, &text)
    }

    /// Replaces a note, durably.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn write(&self, name: &str, text: &[u8]) -> Result<()> {
        self.make_folder()?;
        let stored = self.repository.encrypt_document(&self.purpose(name), text)?;
        replace_file(&self.path(name), &stored)
    }

    /// The names of the notes that end with `suffix`, in their order.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn names(&self, suffix: &str) -> Result<Vec<String>> {
        let folder = self.place.notes();
        let entries = match std::fs::read_dir(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.context(|| format!("reading {}", folder.display()))?,
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<String> = names.filter(|name| name.ends_with(suffix)).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Removes a note, if there is one.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn remove(&self, name: &str) -> Result<()> {
        remove_if_present(&self.path(name)).map(drop)
    }

    /// Takes the lock for changes; `None` if another process holds it for a second.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn lock(&self) -> Result<Option<NotesLock>> {
        self.make_folder()?;
        let taken = FileLock::take_within(&self.path(LOCK), || Duration::from_secs(1))?;
        Ok(taken.map(|lock| NotesLock { _lock: lock }))
    }

    /// Takes the lock of work with this name; `None` if another process holds it.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn lock_of(&self, work: &str) -> Result<Option<NotesLock>> {
        self.make_folder()?;
        let taken = FileLock::take_within(&self.lock_path(work), || PROBE_PATIENCE)?;
        Ok(taken.map(|lock| NotesLock { _lock: lock }))
    }

    /// Whether another process holds the lock of work with this name.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub(crate) fn is_working(&self, work: &str) -> Result<bool> {
        FileLock::is_held(&self.lock_path(work))
    }

    fn lock_path(&self, work: &str) -> PathBuf {
        self.path(&format!("{work}.{LOCK}"))
    }

    /// Whether a process holds the lock.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn is_locked(&self) -> Result<bool> {
        let path = self.path(LOCK);
        if path.exists() { FileLock::is_held(&path) } else { Ok(false) }
    }

    /// Remembers the socket of the monitor of the machine that runs on the session. A stale one stays until the
    /// next machine: nothing answers there.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn set_monitor(&self, socket: &Path) -> Result<()> {
        self.make_folder()?;
        let path = self.path(MONITOR);
        remove_if_present(&path)?;
        std::os::unix::fs::symlink(socket, &path).context(|| format!("linking {}", path.display()))
    }

    /// That socket; `None` if no machine has been started on the session.
    pub fn monitor(&self) -> Option<PathBuf> {
        std::fs::read_link(self.path(MONITOR)).ok()
    }
}
