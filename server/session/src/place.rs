//! Where the parts of a session lie.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Result};
use coldrise_store::{LayerId, PendingMarker, Repository, SessionName};

use crate::layer::LayerKeys;

/// The name of the socket of the process that writes a session.
pub(crate) const CONTROL: &str = "control";

/// What the names of block maps in shared memory begin with.
pub(crate) const MAP_PREFIX: &str = "coldrise-map-";

/// The folder of one session.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    directory: PathBuf,
}

impl Place {
    /// The folder of the session of that name, whether it exists or not.
    pub(crate) fn of(repository: &Repository, name: &SessionName) -> Place {
        let hash = repository.derive_key("session directory", name.as_str().as_bytes());
        let hex: String = hash[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        Place { directory: repository.live_dir().join(hex) }
    }

    /// Every folder that is there.
    pub(crate) fn all(repository: &Repository) -> Result<Vec<Place>> {
        let live = repository.live_dir();
        let what = || format!("reading {}", live.display());
        let mut places = Vec::new();
        for entry in std::fs::read_dir(&live).context(what)? {
            let entry = entry.context(what)?;
            if entry.file_type().context(what)?.is_dir() {
                places.push(Place { directory: entry.path() });
            }
        }
        Ok(places)
    }

    /// What seals the document: bound to the folder, so that documents cannot be swapped.
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

    /// How far the session had come, twice; see `progress_mark`.
    pub(crate) fn progress(&self) -> [PathBuf; 2] {
        ["progress", "progress-copy"].map(|name| self.directory.join(name))
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.directory.join("lock")
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.directory.join(CONTROL)
    }

    /// What clients wrote into image files around the disks; see `side_file`.
    pub(crate) fn side_files(&self) -> PathBuf {
        self.directory.join("side")
    }

    /// Files that clients made; see `client_files`.
    pub(crate) fn client_files(&self) -> PathBuf {
        self.directory.join("files")
    }

    /// The files that sealed points carry until those are in the catalog.
    pub(crate) fn sealed_files(&self) -> PathBuf {
        self.directory.join("sealed")
    }

    /// Makes the folder, if it is not there.
    pub(crate) fn create(&self) -> Result<()> {
        Place::make_folder(&self.directory)
    }

    /// Makes a folder that is nobody else's business, if it is not there.
    pub(crate) fn make_folder(path: &Path) -> Result<()> {
        let made = std::fs::DirBuilder::new().mode(0o700).recursive(true).create(path);
        made.context(|| format!("creating {}", path.display()))
    }

    /// Removes what clients left in a session that has ended.
    pub(crate) fn remove_files(&self) -> Result<()> {
        remove_folder(&self.side_files())?;
        remove_folder(&self.client_files())
    }

    /// Removes the folder; the document first, so that a half-removed session is none.
    pub(crate) fn remove(&self) -> Result<()> {
        remove_file(&self.document())?;
        std::fs::remove_dir_all(&self.directory)
            .context(|| format!("removing {}", self.directory.display()))
    }
}

/// The file of a layer.
pub(crate) fn layer_path(repository: &Repository, id: &LayerId) -> PathBuf {
    repository.layers_dir().join(id.to_string())
}

/// Where the writer of a layer publishes its block map: in memory, not on the
/// repository's disk.
pub(crate) fn map_path(id: &LayerId) -> PathBuf {
    PathBuf::from(format!("/dev/shm/{MAP_PREFIX}{id}"))
}

/// The keys of a layer.
pub(crate) fn layer_keys(repository: &Repository, id: &LayerId) -> LayerKeys {
    LayerKeys::derive(|purpose| repository.derive_key(purpose, id.as_bytes()))
}

/// Makes the marker of what is stored by now; a failure leaves it to the next writer.
pub(crate) fn mark(repository: &Repository, name: &str) {
    if let Err(error) = repository.mark(name) {
        tracing::warn!(error = %error.full_message(), "a marker is left to the next writer");
    }
}

/// The same in two steps, for what is to be stored between them.
pub(crate) fn prepare_mark(repository: &Repository, name: &str) -> Option<PendingMarker> {
    let prepared = repository.prepare_marker(name);
    if let Err(error) = &prepared {
        tracing::warn!(error = %error.full_message(), "a marker is left to the next writer");
    }
    prepared.ok()
}

/// Removes a file that may be gone already.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Whether something is there. A drive that cannot say is an error: what lies there would
/// be passed over, or replaced.
pub(crate) fn is_there(path: &Path) -> Result<bool> {
    path.try_exists().context(|| format!("looking for {}", path.display()))
}

/// Removes a folder with all that is in it, if it is there.
pub(crate) fn remove_folder(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Makes the entries of a folder durable.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|folder| folder.sync_all())
        .context(|| format!("syncing {}", path.display()))
}

/// What a file is called while it is written.
pub(crate) fn unfinished(path: &Path) -> PathBuf {
    path.with_extension("new")
}

/// Replaces a file so that a crash leaves the old one or the new one.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let what = || format!("writing {}", path.display());
    let temporary = unfinished(path);
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)
        .context(what)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    let renamed = written.and_then(|()| std::fs::rename(&temporary, path));
    if renamed.is_err() {
        // It may take space that is needed.
        let _ = std::fs::remove_file(&temporary);
    }
    renamed.context(what)?;
    path.parent().map_or(Ok(()), sync_directory)
}
