//! Copies that have begun: what has arrived of a point from another site.
//!
//! A copy over a slow line takes days, and lines break. The receiver makes durable what has arrived, and notes the maps
//! here: gcs keep them, and the next copy goes on behind them. There is one note per machine.
//!
//! # Order of writes
//!
//! A map is durable before a note names it. A point is in the catalog before its note is removed, and a gc reads the
//! notes before the catalog: one of the two names the map.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use coldrise_block::{
    remove_if_present, replace_file, sync_directory, Context, Error, ErrorKind, Result,
};
use coldrise_store::{DiskName, MachineName, MadeIn, MapRoot, PointName, Repository};
use serde::{Deserialize, Serialize};

/// A gc forgets older notes, by the time of the file.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(30 * 24 * 3600);
/// Older notes are not used: a gc may be about to forget them.
const USED_FOR: Duration = Duration::from_secs(29 * 24 * 3600);

/// A point that has arrived in part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BegunCopy {
    /// Where the point was made.
    pub made_in: MadeIn,
    /// Its name.
    pub point: PointName,
    /// Its time, in milliseconds since 1970.
    pub created_at_ms: u64,
    /// The disks that have begun.
    pub disks: Vec<BegunDisk>,
}

/// A disk that has arrived in part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BegunDisk {
    /// Its name.
    pub name: DiskName,
    /// Its size, in bytes.
    pub size_bytes: u64,
    /// The map from which its changes count.
    pub base: Option<MapRoot>,
    /// The map with what has arrived.
    pub root: MapRoot,
    /// Everything before this offset has arrived, in bytes.
    pub end_bytes: u64,
}

impl BegunCopy {
    /// The note about a machine, if there is one that can be used. A damaged one counts as none.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn of(repository: &Repository, machine: &MachineName) -> Result<Option<BegunCopy>> {
        let path = path(repository, machine);
        match age(&path)? {
            Some(age) if age < USED_FOR => read(repository, &path),
            _ => Ok(None),
        }
    }

    /// Replaces the note about a machine.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn save(&self, repository: &Repository, machine: &MachineName) -> Result<()> {
        let path = path(repository, machine);
        let json = serde_json::to_vec(self)
            .map_err(|error| Error::with_source(ErrorKind::Internal, "writing a note", error))?;
        let folder = folder(repository);
        match std::fs::create_dir(&folder) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(error).context(|| format!("making {}", folder.display()))
            }
            _ => {}
        }
        replace_file(&path, &repository.encrypt_document(&purpose(&path), &json)?)
    }

    /// Removes the note about a machine, if there is one.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn remove(repository: &Repository, machine: &MachineName) -> Result<()> {
        remove_if_present(&path(repository, machine)).map(|_| ())
    }

    /// The maps of all notes.
    pub(crate) fn roots(repository: &Repository) -> Result<Vec<MapRoot>> {
        let mut roots = Vec::new();
        for path in all(repository)? {
            let begun = read(repository, &path)?;
            roots.extend(begun.iter().flat_map(|begun| &begun.disks).map(|disk| disk.root));
        }
        Ok(roots)
    }

    /// Forgets what nobody has gone on with, before a gc. Durable when this returns.
    pub(crate) fn forget_old(repository: &Repository) -> Result<()> {
        for path in all(repository)? {
            if age(&path)?.is_some_and(|age| age > FORGOTTEN_AFTER) {
                remove_if_present(&path)?;
                sync_directory(&folder(repository))?;
            }
        }
        Ok(())
    }
}

fn folder(repository: &Repository) -> PathBuf {
    repository.path().join("begun")
}

/// The file's name reveals no machine.
fn path(repository: &Repository, machine: &MachineName) -> PathBuf {
    let hash = repository.derive_key("begun copy", machine.as_str().as_bytes());
    let name: String = hash[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    folder(repository).join(name)
}

fn all(repository: &Repository) -> Result<Vec<PathBuf>> {
    let folder = folder(repository);
    let what = || format!("reading {}", folder.display());
    let entries = match std::fs::read_dir(&folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.context(what)?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.context(what)?.path();
        // A file that is being written has an extension.
        if path.extension().is_none() {
            paths.push(path);
        }
    }
    Ok(paths)
}

/// `None` if there is no such file. A file of the future is new.
fn age(path: &Path) -> Result<Option<Duration>> {
    match path.metadata().and_then(|file| file.modified()) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        time => {
            let time = time.context(|| format!("reading {}", path.display()))?;
            Ok(Some(SystemTime::now().duration_since(time).unwrap_or_default()))
        }
    }
}

fn purpose(path: &Path) -> String {
    format!("begun copy {}", path.file_name().unwrap_or_default().to_string_lossy())
}

fn read(repository: &Repository, path: &Path) -> Result<Option<BegunCopy>> {
    let sealed = match std::fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        sealed => sealed.context(|| format!("reading {}", path.display()))?,
    };
    let json = repository.decrypt_document(&purpose(path), &sealed);
    let begun = json.ok().and_then(|json| serde_json::from_slice(&json).ok());
    if begun.is_none() {
        tracing::warn!("{} is damaged: that copy begins anew", path.display());
    }
    Ok(begun)
}
