//! Markers: small files that record which points and sessions exist.
//!
//! The database may lose its newest entries without a trace: a truncated log or manifest reads as
//! one that ends there, and a missing file reads as a database from before that file. A session may
//! lose its document. A marker lies apart from both, in `markers/`, one file for each point and
//! session, and records that the point or session must exist.
//!
//! Order of adding: (1) the marker is written durably as `.new`; (2) its point or session is made
//! durable; (3) the marker is renamed, durably. Order of removing: (1) the marker is renamed to
//! `.new`, durably; (2) the point or session is removed; (3) the other marker files are removed. So
//! a crash can leave a point or session with a `.new`, which the next writer turns into a marker,
//! but never a marker without its point or session. A point or session with neither file has lost
//! its marker. A marker only says that something exists, so it cannot be out of date.
//!
//! The marker of a point carries the point's document, and a file `.files` beside it carries the
//! point's files. A catalog that has lost them restores them from here. Both date from the time
//! when the point was entered or folded; later changes are stored as flags. If a document is
//! replaced, the new one has the same content, and the marker follows before anything that only the
//! old document names is removed.
//!
//! The marker of a sealed point is made when the session's document names the point, under the
//! documents' lock. No writer can enter or remove the point in between, so no marker outlives its
//! point. A crash in between leaves a sealed point without a marker until a writer enters it into
//! the catalog.

mod boot_check;
mod flags;
mod lost;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use coldrise_block::{
    Context, Error, ErrorKind, Result, remove_if_present, rename_over, sync_directory, write_synced,
};

use crate::catalog;
use crate::documents::CatalogDamage;
use crate::{PointDocument, PointName, Repository};
use coldrise_block::hex;

use boot_check::BOOT_EXTENSION;
pub use boot_check::{BootCheckDocument, BootVerdict, ReachedStage};
use flags::{PROTECTED_EXTENSION, QUARANTINED_EXTENSION};
pub(crate) use lost::point_of;

use crate::repository_config::MARKERS_NAME as DIRECTORY;
const TEMPORARY_EXTENSION: &str = "new";
/// Names are padded to this many bytes, so that their length does not show.
const PLAINTEXT_BYTES: usize = 192;
const FILES_EXTENSION: &str = "files";
/// Largest file that is read. A document, and the files of a point, have at most 16 MiB.
const MAX_STORED_BYTES: u64 = 17 << 20;

/// The content of a marker.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Content {
    /// `live/SESSION` or `MACHINE/POINT`.
    name: String,
    /// The point's document as JSON; empty for a session.
    document: Vec<u8>,
}

impl Content {
    /// The point's document, if the marker has one.
    fn point(&self) -> Option<PointDocument> {
        serde_json::from_slice(&self.document).ok()
    }
}

/// A marker written as `.new`. [`PendingMarker::commit`] makes it visible.
pub struct PendingMarker {
    /// Present path, final path and content; `None` if the marker exists already.
    file: Option<(PathBuf, PathBuf, Vec<u8>)>,
}

impl PendingMarker {
    /// Makes the `.new` durable before its point or session is stored, so that a crash in between
    /// shows.
    fn durable(self) -> Result<PendingMarker> {
        if let Some((_, path, _)) = &self.file {
            path.parent().map_or(Ok(()), sync_directory)?;
        }
        Ok(self)
    }

    /// Makes the marker visible, durably. Its point or session is stored by now, so a failure is
    /// only logged: the next writer makes the marker.
    pub fn commit(self) {
        let Some((temporary, path, stored)) = self.file else { return };
        let what = || format!("making {}", path.display());
        let renamed = match rename_over(&temporary, &path) {
            // A writer took it for the remains of a crash.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                write_synced(&temporary, &stored).and_then(|()| rename_over(&temporary, &path))
            }
            renamed => renamed,
        };
        let made =
            renamed.context(what).and_then(|()| path.parent().map_or(Ok(()), sync_directory));
        if let Err(error) = made {
            tracing::warn!(error = %error.full_message(), "a marker is left to the next writer");
        }
    }

    /// Removes the `.new`, because its point or session was not stored. After a failure the next
    /// writer removes it.
    pub fn discard(self) {
        if let Some((temporary, ..)) = self.file {
            let _ = remove_if_present(&temporary);
        }
    }
}

/// A keyed hash of a point's or session's name.
pub type MarkerId = [u8; 16];

/// A file of a marker that shows a state without being opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkerFile {
    Marker,
    Protected,
    Quarantined,
    BootCheck,
}

impl MarkerFile {
    /// The part of a file's name before its extension, and what the file is; `None` for other
    /// files.
    pub(crate) fn of_name(name: &str) -> (&str, Option<MarkerFile>) {
        let Some((stem, extension)) = name.split_once('.') else {
            return (name, Some(MarkerFile::Marker));
        };
        let file = match extension {
            PROTECTED_EXTENSION => Some(MarkerFile::Protected),
            QUARANTINED_EXTENSION => Some(MarkerFile::Quarantined),
            BOOT_EXTENSION => Some(MarkerFile::BootCheck),
            _ => None,
        };
        (stem, file)
    }
}

impl Repository {
    /// Records durably that a session or point exists. `name` is `live/SESSION` or `MACHINE/POINT`.
    /// Returns whether the marker had to be made.
    ///
    /// # Errors
    /// `NoSpace` and other errors of the operating system.
    pub fn mark(&self, name: &str) -> Result<bool> {
        let marker = self.prepare_marker_with(name, Vec::new())?;
        let is_new = marker.file.is_some();
        marker.commit();
        Ok(is_new)
    }

    /// [`Repository::mark`] in two steps. Everything that takes space comes before the point or
    /// session is stored, and a crash between the steps shows.
    ///
    /// # Errors
    /// `NoSpace` and other errors of the operating system.
    pub fn prepare_marker(&self, name: &str) -> Result<PendingMarker> {
        self.prepare_marker_with(name, Vec::new())?.durable()
    }

    /// [`Repository::prepare_marker`] for a point that is about to be stored, with its document and
    /// its files.
    pub(crate) fn prepare_point_marker(
        &self,
        document: &PointDocument,
        files: Option<&[u8]>,
    ) -> Result<PendingMarker> {
        self.point_marker(document, files)?.durable()
    }

    fn point_marker(
        &self,
        document: &PointDocument,
        files: Option<&[u8]>,
    ) -> Result<PendingMarker> {
        let name = format!("{}/{}", document.machine, document.point);
        if let Some(files) = files {
            let path = self.marker_path(&name).with_extension(FILES_EXTENSION);
            // A verify may be reading a sound one.
            if self.read_sealed(&path).as_deref() != Some(files) {
                let stored = self.encrypt_document(&purpose(&path), files)?;
                write_synced(&path, &stored).context(|| format!("writing {}", path.display()))?;
            }
        }
        // These two change and are stored as flags.
        let plain = PointDocument { is_protected: false, quarantine: None, ..document.clone() };
        let text = serde_json::to_vec(&plain)
            .map_err(|e| Error::with_source(ErrorKind::Internal, "writing a marker", e))?;
        self.prepare_marker_with(&name, text)
    }

    /// Makes the marker of a stored or sealed point, with its document and, if given, the `files`
    /// that it carries. Returns whether the marker was missing or different.
    ///
    /// # Errors
    /// `NoSpace` and other errors of the operating system.
    pub fn mark_point(&self, document: &PointDocument, files: Option<&[u8]>) -> Result<bool> {
        let marker = self.point_marker(document, files)?;
        let is_new = marker.file.is_some();
        marker.commit();
        Ok(is_new)
    }

    fn prepare_marker_with(&self, name: &str, document: Vec<u8>) -> Result<PendingMarker> {
        let path = self.marker_path(name);
        // An unreadable one is replaced.
        let is_there = |found: Content| document.is_empty() || found.document == document;
        if self.read_marker(path.clone()).is_some_and(is_there) {
            return Ok(PendingMarker { file: None });
        }
        let directory = self.path().join(DIRECTORY);
        std::fs::DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(&directory)
            .context(|| format!("making the directory {}", directory.display()))?;
        let temporary = path.with_extension(TEMPORARY_EXTENSION);
        let mut plaintext = name.as_bytes().to_vec();
        plaintext.resize(plaintext.len().max(PLAINTEXT_BYTES), 0);
        plaintext.extend_from_slice(&document);
        let stored = self.encrypt_document(&purpose(&path), &plaintext)?;
        write_synced(&temporary, &stored).context(|| format!("writing {}", temporary.display()))?;
        Ok(PendingMarker { file: Some((temporary, path, stored)) })
    }

    /// Removes, durably, the marker of a session or point. Returns whether there was one.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn unmark(&self, name: &str) -> Result<bool> {
        let removed = self.remove_marker(name)?;
        if removed {
            sync_directory(&self.path().join(DIRECTORY))?;
        }
        Ok(removed)
    }

    fn remove_marker(&self, name: &str) -> Result<bool> {
        let path = self.marker_path(name);
        let removed = remove_if_present(&path)?;
        let _ = remove_if_present(&path.with_extension(TEMPORARY_EXTENSION));
        Ok(removed)
    }

    /// Renames the markers of sessions or points that are about to be removed to `.new`, durably.
    /// [`Repository::forget_markers`] comes afterwards.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn suspend_markers(&self, names: &[String]) -> Result<()> {
        let mut renamed = false;
        for path in names.iter().map(|name| self.marker_path(name)) {
            match std::fs::rename(&path, path.with_extension(TEMPORARY_EXTENSION)) {
                Ok(()) => renamed = true,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).context(|| format!("removing {}", path.display())),
            }
        }
        if renamed { sync_directory(&self.path().join(DIRECTORY)) } else { Ok(()) }
    }

    /// Removes the files that [`Repository::suspend_markers`] left, once the points or sessions are
    /// removed. After a failure the next writer removes them.
    pub fn forget_markers(&self, names: &[String]) {
        for path in names.iter().map(|name| self.marker_path(name)) {
            for extension in [
                PROTECTED_EXTENSION,
                QUARANTINED_EXTENSION,
                BOOT_EXTENSION,
                FILES_EXTENSION,
                TEMPORARY_EXTENSION,
            ] {
                let _ = remove_if_present(&path.with_extension(extension));
            }
        }
    }

    /// The damage of the marker of an existing session or point. `None` for a sound marker, and for
    /// one that is being made or removed, or was when a process was killed. With `has_files` the
    /// files beside the marker are read, too.
    pub fn marker_damage(&self, name: &str, has_files: bool) -> Option<CatalogDamage> {
        let path = self.marker_path(name);
        let files = path.with_extension(FILES_EXTENSION);
        // Checked in the order in which a marker appears. It may also be removed meanwhile, so
        // checked twice.
        let has_marker = || self.read_marker(path.clone()).is_some();
        let is_sound = || has_marker() && (!has_files || self.read_sealed(&files).is_some());
        let is_pending = || path.with_extension(TEMPORARY_EXTENSION).exists();
        if is_sound() || is_pending() || is_sound() || is_pending() {
            return None;
        }
        let (what, loss, path) = if has_marker() {
            ("the files with the marker", "its files would be lost, too", files)
        } else {
            ("the marker", "nothing would tell", path)
        };
        let why = match (path.is_dir(), path.exists()) {
            (true, _) => "it is a folder (move it away if it is not empty)",
            (_, true) => "it cannot be read",
            _ => "it is missing",
        };
        Some(CatalogDamage::new(
            format!("{what} of {name}"),
            format!(
                "{why}: should the database lose {name}, {loss}; coldrise repair recreates it, and so \
                 does coldrise gc"
            ),
        ))
    }

    /// True if a marker of this session or point exists, and if the drive cannot tell: then nothing
    /// may be deleted.
    pub fn is_marked(&self, name: &str) -> bool {
        self.marker_path(name).try_exists().unwrap_or(true)
    }

    /// True if a marker or a `.new` exists.
    pub(crate) fn may_be_there(&self, name: &str) -> bool {
        let path = self.marker_path(name);
        self.is_marked(name) || path.with_extension(TEMPORARY_EXTENSION).exists()
    }

    /// The names that have a marker. Markers that do not open are skipped, because their names are
    /// unknown.
    ///
    /// # Errors
    /// Errors of the operating system on the directory.
    pub fn marked(&self) -> Result<Vec<String>> {
        let paths = self.marker_paths()?.into_iter();
        let mut names: Vec<_> =
            paths.filter_map(|path| self.read_marker(path)).map(|content| content.name).collect();
        names.sort_unstable();
        Ok(names)
    }

    fn marker_paths(&self) -> Result<Vec<PathBuf>> {
        let directory = self.path().join(DIRECTORY);
        let what = || format!("reading {}", directory.display());
        let mut paths = Vec::new();
        let entries = match std::fs::read_dir(&directory) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(paths),
            entries => entries.context(what)?,
        };
        for entry in entries {
            let path = entry.context(what)?.path();
            if path.extension().is_none() {
                paths.push(path);
            }
        }
        Ok(paths)
    }

    fn read_marker(&self, path: PathBuf) -> Option<Content> {
        let mut plaintext = self.read_sealed(&path)?;
        let document = plaintext.split_off(plaintext.len().min(PLAINTEXT_BYTES));
        let length = plaintext.iter().position(|byte| *byte == 0).unwrap_or(plaintext.len());
        plaintext.truncate(length);
        let name = String::from_utf8(plaintext).ok()?;
        // A copy under another name does not count.
        (self.marker_path(&name) == path).then_some(Content { name, document })
    }

    fn read_sealed(&self, path: &Path) -> Option<Vec<u8>> {
        let is_small = path.metadata().is_ok_and(|found| found.len() <= MAX_STORED_BYTES);
        let stored = is_small.then(|| std::fs::read(path).ok())??;
        self.decrypt_document(&purpose(path), &stored).ok()
    }

    /// The documents of points that markers carry, with the points' files.
    ///
    /// # Errors
    /// Errors of the operating system on the directory.
    pub(crate) fn marked_points(&self) -> Result<Vec<(PointDocument, Option<Vec<u8>>)>> {
        let mut points = Vec::new();
        for path in self.marker_paths()? {
            let Some(content) = self.read_marker(path.clone()) else { continue };
            let Some(document) = content.point() else { continue };
            let files = document.files.is_some().then(|| path.with_extension(FILES_EXTENSION));
            points.push((document, files.and_then(|path| self.read_sealed(&path))));
        }
        Ok(points)
    }

    /// Makes the markers of catalog points that have none, because of a crash or a loss. Of the others it reads at most
    /// `most`, beginning at a random one, and replaces those that are unreadable or have an older document. Leaves an
    /// unreadable catalog alone. Returns how many were made.
    ///
    /// # Errors
    /// `NoSpace` and other errors of the operating system.
    pub fn mark_points(&self, most: usize) -> Result<u64> {
        let there = self.marker_files()?;
        let count = there.len().max(1);
        let mut random = [0; 8];
        crate::aead::random(&mut random)?;
        let first = usize::from_le_bytes(random) % count;
        let (mut made, mut number) = (0, 0);
        let mut machines = HashMap::new();
        let marked = catalog::for_each_document(self, |document| {
            let Some((hash, key)) = document.place() else { return Ok(()) };
            let Some(key) = key else {
                machines.extend(document.machine().map(|(machine, _)| (hash, machine)));
                return Ok(());
            };
            let named = machines.get(&hash).zip(PointName::from_sort_key(&key));
            let name = named.map(|(machine, point)| format!("{machine}/{point}"));
            let found = name.as_ref().and_then(|name| there.get(&self.marker_id(name)));
            let is_skipped = (number + count - first) % count >= most;
            number += 1;
            if is_skipped && found.is_some_and(|files| files.is_marked) {
                return Ok(());
            }
            made += u64::from(match (document.point(), name) {
                (Ok(point), _) => self.mark_point(&point, None)?,
                // The key still names the point.
                (Err(_), Some(name)) => self.mark(&name)?,
                (Err(_), None) => false,
            });
            Ok(())
        });
        match marked {
            Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(made),
            marked => marked?,
        }
        // Last: until then the `.new` files show that there was a crash.
        self.remove_unfinished_markers();
        Ok(made)
    }

    /// Removes the `.new` files of points and sessions that do not exist, and what a crash left of
    /// removed points: their flags, boot checks and files. This includes the files of a point that is being
    /// sealed now; the writer that enters the point makes its marker with all of them.
    fn remove_unfinished_markers(&self) {
        let Ok(entries) = std::fs::read_dir(self.path().join(DIRECTORY)) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let Some(extension) = path.extension().and_then(|text| text.to_str()) else { continue };
            let is_left = match extension {
                TEMPORARY_EXTENSION => true,
                PROTECTED_EXTENSION | QUARANTINED_EXTENSION | BOOT_EXTENSION | FILES_EXTENSION => {
                    matches!(path.with_extension("").try_exists(), Ok(false))
                }
                _ => false,
            };
            if is_left {
                let _ = std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir(&path));
            }
        }
    }

    /// The hash of a session's or point's name under which its marker is found.
    pub fn marker_id(&self, name: &str) -> MarkerId {
        let hash = self.derive_key("marker", name.as_bytes());
        hash.first_chunk().copied().unwrap_or_default()
    }

    pub(crate) fn markers_dir(&self) -> PathBuf {
        self.path().join(DIRECTORY)
    }

    fn marker_path(&self, name: &str) -> PathBuf {
        self.markers_dir().join(hex::encode(&self.marker_id(name)))
    }
}

fn purpose(path: &Path) -> String {
    format!("marker {}", path.file_name().unwrap_or_default().to_string_lossy())
}
