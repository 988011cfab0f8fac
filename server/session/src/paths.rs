//! Paths of the parts of a session.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Result, remove_if_present};
use coldrise_store::{LayerId, PendingMarker, Repository, SessionName};

/// The name of the socket of the process that writes a session.
pub(crate) const CONTROL: &str = "control";
/// The name of the socket that tells what clients do with the session; see `activity`.
pub(crate) const ACTIVITY: &str = "activity";

/// Prefix of the names of block maps in shared memory.
pub(crate) const MAP_PREFIX: &str = "coldrise-map-";

/// The folder of one session.
#[derive(Clone, Debug)]
pub(crate) struct SessionPaths {
    directory: PathBuf,
}

impl SessionPaths {
    /// The folder of the session with this name, existing or not.
    pub(crate) fn of(repository: &Repository, name: &SessionName) -> SessionPaths {
        let hash = repository.derive_key("session directory", name.as_str().as_bytes());
        let hex: String = coldrise_block::hex::encode(&hash[..16]);
        SessionPaths { directory: repository.live_dir().join(hex) }
    }

    /// All existing folders.
    pub(crate) fn all(repository: &Repository) -> Result<Vec<SessionPaths>> {
        let live = repository.live_dir();
        let what = || format!("reading {}", live.display());
        let mut places = Vec::new();
        for entry in std::fs::read_dir(&live).context(what)? {
            let entry = entry.context(what)?;
            if entry.file_type().context(what)?.is_dir() {
                places.push(SessionPaths { directory: entry.path() });
            }
        }
        Ok(places)
    }

    /// The encryption purpose of the document. It is bound to the folder, so that documents cannot
    /// be swapped.
    pub(crate) fn purpose(&self) -> String {
        let name = self.directory.file_name().unwrap_or_default();
        format!("session {}", name.to_string_lossy())
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn document(&self) -> PathBuf {
        self.directory.join("session.json")
    }

    /// The session's progress, in two copies; see `session_folder::rollback_guard`.
    pub(crate) fn progress(&self) -> [PathBuf; 2] {
        ["progress", "progress-copy"].map(|name| self.directory.join(name))
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.directory.join("lock")
    }

    /// Locked by the process with which the session ends; see `sessions::owned`.
    pub(crate) fn owner(&self) -> PathBuf {
        self.directory.join("owner")
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.directory.join(CONTROL)
    }

    /// Writes of clients into image files around the disks; see `side_file`.
    pub(crate) fn side_files(&self) -> PathBuf {
        self.directory.join("side")
    }

    /// Files of clients; see `client_files`.
    pub(crate) fn client_files(&self) -> PathBuf {
        self.directory.join("files")
    }

    /// The files that sealed points carry, until the points are in the catalog.
    pub(crate) fn sealed_files(&self) -> PathBuf {
        self.directory.join("sealed")
    }

    /// Notes of other crates; see `session_folder::notes`.
    pub(crate) fn notes(&self) -> PathBuf {
        self.directory.join("notes")
    }

    /// Creates the folder if it does not exist.
    pub(crate) fn create(&self) -> Result<()> {
        SessionPaths::make_folder(&self.directory)
    }

    /// Creates a private folder if it does not exist.
    pub(crate) fn make_folder(path: &Path) -> Result<()> {
        let made = std::fs::DirBuilder::new().mode(0o700).recursive(true).create(path);
        made.context(|| format!("creating {}", path.display()))
    }

    /// Removes the files of clients from an ended session, its notes, and its owner.
    pub(crate) fn remove_files(&self) -> Result<()> {
        remove_if_present(&self.owner())?;
        remove_folder(&self.notes())?;
        remove_folder(&self.side_files())?;
        remove_folder(&self.client_files())
    }

    /// Removes the folder. The document is removed first: without it there is no session.
    pub(crate) fn remove(&self) -> Result<()> {
        remove_if_present(&self.document())?;
        std::fs::remove_dir_all(&self.directory)
            .context(|| format!("removing {}", self.directory.display()))
    }
}

/// The file of a layer.
pub(crate) fn layer_path(repository: &Repository, id: &LayerId) -> PathBuf {
    repository.layers_dir().join(id.to_string())
}

/// The path of the block map that the writer of a layer publishes. It is in memory, not on the
/// repository's disk.
pub(crate) fn map_path(id: &LayerId) -> PathBuf {
    PathBuf::from(format!("/dev/shm/{MAP_PREFIX}{id}"))
}

/// Prepares the marker of a session that is about to be stored. If this fails, the next writer
/// creates the marker.
pub(crate) fn prepare_mark(repository: &Repository, name: &str) -> Option<PendingMarker> {
    let prepared = repository.prepare_marker(name);
    if let Err(error) = &prepared {
        tracing::warn!(error = %error.full_message(), "a marker is left to the next writer");
    }
    prepared.ok()
}

/// Removes a folder with all its content, if it exists.
pub(crate) fn remove_folder(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}
