//! Copies that have begun: what has arrived of a point from another site.
//!
//! A copy over a slow line takes days, and lines break. The receiver makes durable what has arrived, and notes the maps
//! here: gcs keep them, and the next copy continues behind them. There are two files per point:
//!
//! ```text
//!   begun/HASH         the note: what has arrived. Replaced every few seconds
//!   begun/HASH.point   the point as the source announced it: see `IncomingContent`
//! ```
//!
//! # Order of writes
//!
//! A map is durable before a note names it. A point is in the catalog before its note is removed, and a gc reads the
//! notes before the catalog: one of the two names the map. The note is written before the announcement and removed after
//! it: an announcement without a note does not stay.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use coldrise_block::{
    Context, Error, ErrorKind, Result, remove_if_present, replace_file, sync_directory,
};
use coldrise_store::{DiskName, MachineName, MadeIn, MapRoot, PointName, Repository};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{ByteRanges, IncomingContent};
use crate::session_folder::document::SessionDocument;

/// A gc forgets older notes that no session needs, by the time of the file.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(30 * 24 * 3600);
/// Older notes are not used: a gc may be about to forget them.
const USED_FOR: Duration = Duration::from_secs(29 * 24 * 3600);
/// The extension of announcements.
const POINT: &str = "point";

/// A point that has arrived in part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartialCopy {
    /// The machine here.
    pub machine: MachineName,
    /// Where the point was made.
    pub made_in: MadeIn,
    /// Its name.
    pub point: PointName,
    /// Its time, in milliseconds since 1970.
    pub created_at_ms: u64,
    /// Its disks.
    pub disks: Vec<PartialDisk>,
}

/// A disk that has arrived in part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartialDisk {
    /// Its name.
    pub name: DiskName,
    /// Its size, in bytes.
    pub size_bytes: u64,
    /// The map from which its changes count.
    pub base: Option<MapRoot>,
    /// The map with what has arrived, over the base.
    pub root: MapRoot,
    /// Everything before this offset has arrived, in bytes.
    pub end_bytes: u64,
    /// The map with the pieces that were fetched out of turn. It has no base: what it stores is the disk's.
    pub fetched: MapRoot,
    /// Pieces of zeroes among these: a map does not tell them from nothing.
    pub fetched_zeroes: ByteRanges,
}

impl PartialDisk {
    /// A disk of which nothing has arrived.
    pub fn new(name: DiskName, size_bytes: u64, base: Option<MapRoot>) -> PartialDisk {
        PartialDisk {
            name,
            size_bytes,
            base,
            root: base.unwrap_or(MapRoot::EMPTY),
            end_bytes: 0,
            fetched: MapRoot::EMPTY,
            fetched_zeroes: ByteRanges::default(),
        }
    }
}

impl PartialCopy {
    /// Whether both are the same point.
    pub(crate) fn is_same_point(&self, other: &PartialCopy) -> bool {
        (&self.machine, &self.made_in, &self.point, self.created_at_ms)
            == (&other.machine, &other.made_in, &other.point, other.created_at_ms)
    }

    /// The note about the same point as `incoming`, if there is one that can be used. A damaged one counts as none.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn known(repository: &Repository, incoming: &PartialCopy) -> Result<Option<PartialCopy>> {
        let path = incoming.path(repository);
        match age(&path)? {
            Some(age) if age < USED_FOR => {
                let known: Option<PartialCopy> = read(repository, &path)?;
                Ok(known.filter(|known| known.is_same_point(incoming)))
            }
            _ => Ok(None),
        }
    }

    /// The note about a point of a session, whatever its age: it stays as long as the session.
    ///
    /// # Errors
    /// Errors of the drive.
    pub(crate) fn of_session(
        repository: &Repository,
        session: &SessionDocument,
    ) -> Result<Option<PartialCopy>> {
        match PartialCopy::path_of_session(repository, session) {
            Some(path) => read(repository, &path),
            None => Ok(None),
        }
    }

    /// The file of the note about a session's point; `None` if the point is complete.
    pub(crate) fn path_of_session(
        repository: &Repository,
        session: &SessionDocument,
    ) -> Option<PathBuf> {
        let created_at_ms = session.incoming_created_at_ms?;
        Some(path(repository, &session.machine, &session.point, created_at_ms))
    }

    /// All notes that can be used.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn all(repository: &Repository) -> Result<Vec<PartialCopy>> {
        let mut found: Vec<PartialCopy> = Vec::new();
        for path in notes(repository)? {
            if age(&path)?.is_some_and(|age| age < USED_FOR) {
                found.extend(read(repository, &path)?);
            }
        }
        found.sort_by(|a, b| (&a.machine, &a.point).cmp(&(&b.machine, &b.point)));
        Ok(found)
    }

    /// When a file beside the notes was made, replaced or removed last.
    pub(super) fn stamp(repository: &Repository) -> Result<Option<SystemTime>> {
        let folder = folder(repository);
        match folder.metadata().and_then(|facts| facts.modified()) {
            Ok(time) => Ok(Some(time)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context(|| format!("reading {}", folder.display())),
        }
    }

    /// Replaces the note about the point.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn save(&self, repository: &Repository) -> Result<()> {
        let folder = folder(repository);
        match std::fs::create_dir(&folder) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(error).context(|| format!("making {}", folder.display()));
            }
            _ => {}
        }
        write(repository, &self.path(repository), self)
    }

    /// Stores the point as it was announced. The note is there already.
    ///
    /// # Errors
    /// `InvalidInput` if it is too large; errors of the drive.
    pub fn announce(&self, repository: &Repository, point: &IncomingContent) -> Result<()> {
        let path = self.path(repository).with_extension(POINT);
        match read::<IncomingContent>(repository, &path)? {
            Some(known) if known == *point => Ok(()),
            _ => write(repository, &path, point),
        }
    }

    /// The point as it was announced.
    ///
    /// # Errors
    /// Errors of the drive.
    pub(crate) fn announced(&self, repository: &Repository) -> Result<Option<IncomingContent>> {
        read(repository, &self.path(repository).with_extension(POINT))
    }

    /// Removes the note and the announcement, if they are there.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn remove(&self, repository: &Repository) -> Result<()> {
        remove(&self.path(repository))
    }

    /// The file of the note.
    pub(crate) fn path(&self, repository: &Repository) -> PathBuf {
        path(repository, &self.machine, &self.point, self.created_at_ms)
    }

    /// Removes the notes about other points of the machine, unless a session needs them.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn forget_others(&self, repository: &Repository) -> Result<()> {
        for other in PartialCopy::all(repository)? {
            if other.machine == self.machine
                && !other.is_same_point(self)
                && !other.is_published(repository)?
            {
                other.remove(repository)?;
            }
        }
        Ok(())
    }

    fn is_published(&self, repository: &Repository) -> Result<bool> {
        let is_over = |session: &SessionDocument| {
            !session.is_ended
                && session.incoming_created_at_ms == Some(self.created_at_ms)
                && (&session.machine, &session.point) == (&self.machine, &self.point)
        };
        match SessionDocument::all(repository) {
            // One that cannot be read may need it.
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(true),
            sessions => Ok(sessions?.iter().any(|(_, session)| is_over(session))),
        }
    }

    /// The maps of all notes.
    pub(crate) fn roots(repository: &Repository) -> Result<Vec<MapRoot>> {
        let mut roots = Vec::new();
        for path in notes(repository)? {
            let partial: Option<PartialCopy> = read(repository, &path)?;
            let disks = partial.iter().flat_map(|partial| &partial.disks);
            roots.extend(disks.flat_map(|disk| [disk.root, disk.fetched]));
        }
        Ok(roots)
    }

    /// Forgets old copies that no process continued and no session needs, before a gc. Durable when this returns.
    pub(crate) fn forget_old(repository: &Repository) -> Result<()> {
        for path in notes(repository)? {
            if age(&path)?.is_none_or(|age| age < FORGOTTEN_AFTER) {
                continue;
            }
            let partial: Option<PartialCopy> = read(repository, &path)?;
            let is_published =
                partial.map(|partial| partial.is_published(repository)).transpose()?;
            if is_published != Some(true) {
                remove(&path)?;
                sync_directory(&folder(repository))?;
            }
        }
        Ok(())
    }
}

/// The folder of the notes.
pub(crate) fn folder(repository: &Repository) -> PathBuf {
    repository.path().join("begun")
}

/// The file's name reveals no machine.
fn path(
    repository: &Repository,
    machine: &MachineName,
    point: &PointName,
    created_at_ms: u64,
) -> PathBuf {
    let name = format!("{machine}/{point} {created_at_ms}");
    let hash = repository.derive_key("begun copy", name.as_bytes());
    let name: String = coldrise_block::hex::encode(&hash[..16]);
    folder(repository).join(name)
}

fn notes(repository: &Repository) -> Result<Vec<PathBuf>> {
    let folder = folder(repository);
    let what = || format!("reading {}", folder.display());
    let entries = match std::fs::read_dir(&folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.context(what)?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.context(what)?.path();
        // Announcements, sockets, and files that are being written have an extension.
        if path.extension().is_none() {
            paths.push(path);
        }
    }
    Ok(paths)
}

fn remove(note: &Path) -> Result<()> {
    remove_if_present(&note.with_extension(POINT))?;
    remove_if_present(note).map(drop)
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

fn write(repository: &Repository, path: &Path, document: &impl Serialize) -> Result<()> {
    let json = serde_json::to_vec(document)
        .map_err(|error| Error::with_source(ErrorKind::Internal, "writing a note", error))?;
    replace_file(path, &repository.encrypt_document(&purpose(path), &json)?)
}

fn read<T: DeserializeOwned>(repository: &Repository, path: &Path) -> Result<Option<T>> {
    let sealed = match std::fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        sealed => sealed.context(|| format!("reading {}", path.display()))?,
    };
    let json = repository.decrypt_document(&purpose(path), &sealed);
    let partial = json.ok().and_then(|json| serde_json::from_slice(&json).ok());
    if partial.is_none() {
        tracing::warn!("{} is damaged: that copy starts from the beginning", path.display());
    }
    Ok(partial)
}
