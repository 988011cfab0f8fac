//! Markers: small files that say which points and sessions there are.
//!
//! The database may lose what it stored last without a trace: a truncated log or
//! manifest reads as one that ends there, and a file that is missing as a database of
//! before that file. A session may lose its document. A marker lies beside both, in
//! `markers/`, one file for each point and session, and says that it has to be there.
//!
//! Order: the marker is written under another name (`.new`), durably; what it stands for is
//! made durable; the marker is renamed, durably. Back: the marker is renamed to `.new`,
//! durably; what it stands for goes; then the rest of the marker. So a crash leaves a
//! point or session with a `.new`, which the next writer makes a marker, and never a
//! marker without what it stands for. And what has neither has lost it. Whether
//! it is there never changes, so it cannot be old.
//!
//! The marker of a point carries its document, and a file `.files` beside it what the point
//! carries: a catalog that has lost them gets them back from here. They are of the time when the point was
//! entered, or folded: what changes otherwise has a flag. A document that is replaced stands for
//! the same content, and the marker follows before anything goes that only the old one named.
//!
//! A point that a session has sealed and no writer has entered into the catalog may have
//! neither: its marker is made when it is there.

mod flags;
mod lost;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};

use crate::catalog::{self, CatalogEntry};
use crate::description::sync_directory;
use crate::verify::CatalogDamage;
use crate::{hex, PointDocument, Repository};

pub(crate) use flags::Flag;
use flags::{PROTECTED_EXTENSION, QUARANTINED_EXTENSION};
pub(crate) use lost::point_of;

const DIRECTORY: &str = "markers";
const TEMPORARY_EXTENSION: &str = "new";
/// A name is filled up to so many bytes, so that its length does not show.
const PLAINTEXT_BYTES: usize = 192;
const FILES_EXTENSION: &str = "files";
/// Largest file that is read: a document, and what the point carries, has 16 MiB at most.
const MAX_STORED_BYTES: u64 = 17 << 20;

/// What a marker says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Content {
    /// `live/SESSION` or `MACHINE/POINT`.
    name: String,
    /// Of a point, as JSON; of a session, and of what no writer has entered yet, none.
    document: Vec<u8>,
}

/// A marker on its way: it appears with [`PendingMarker::commit`].
pub struct PendingMarker {
    /// Where it lies, where it will, and what it is; `None` where it is there already.
    file: Option<(PathBuf, PathBuf, Vec<u8>)>,
}

impl PendingMarker {
    /// Makes the marker visible, durably. What it stands for is stored by now, so a
    /// failure is only told: the next writer makes the marker.
    pub fn commit(self) {
        let Some((temporary, path, stored)) = self.file else { return };
        let what = || format!("making {}", path.display());
        let renamed = match std::fs::rename(&temporary, &path) {
            // A writer took it for what a crash had left.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                write_synced(&temporary, &stored).and_then(|()| std::fs::rename(&temporary, &path))
            }
            renamed => renamed,
        };
        let made =
            renamed.context(what).and_then(|()| path.parent().map_or(Ok(()), sync_directory));
        if let Err(error) = made {
            tracing::warn!(error = %error.full_message(), "a marker is left to the next writer");
        }
    }

    /// Removes it: what it was to stand for has not come about. A failure leaves it to the
    /// next writer.
    pub fn discard(self) {
        if let Some((temporary, ..)) = self.file {
            let _ = remove(&temporary);
        }
    }
}

impl Repository {
    /// Says, durably, that a session or point is there. `name` is `live/SESSION` or
    /// `MACHINE/POINT`. Returns whether its marker had to be made.
    ///
    /// # Errors
    /// `NoSpace`, and what else the operating system says.
    pub fn mark(&self, name: &str) -> Result<bool> {
        let marker = self.prepare_marker(name)?;
        let is_new = marker.file.is_some();
        marker.commit();
        Ok(is_new)
    }

    /// The same in two steps, so that all that takes space comes before what the marker
    /// stands for, and a crash between them shows.
    ///
    /// # Errors
    /// `NoSpace`, and what else the operating system says.
    pub fn prepare_marker(&self, name: &str) -> Result<PendingMarker> {
        self.prepare_marker_with(name, Vec::new())
    }

    /// The same of a point that is about to be stored with its document and its files.
    pub(crate) fn prepare_point_marker(
        &self,
        document: &PointDocument,
        files: Option<&[u8]>,
    ) -> Result<PendingMarker> {
        let name = format!("{}/{}", document.machine, document.point);
        if let Some(files) = files {
            let path = self.marker_path(&name).with_extension(FILES_EXTENSION);
            let stored = self.seal_document(&purpose(&path), files)?;
            write_synced(&path, &stored).context(|| format!("writing {}", path.display()))?;
        }
        // These two change, and are told by flags.
        let plain = PointDocument { is_protected: false, quarantine: None, ..document.clone() };
        let text = serde_json::to_vec(&plain)
            .map_err(|e| Error::with_source(ErrorKind::Internal, "writing a marker", e))?;
        self.prepare_marker_with(&name, text)
    }

    /// Makes the marker of a point that is there say so, with its document: whether it did not.
    ///
    /// # Errors
    /// `NoSpace`, and what else the operating system says.
    pub(crate) fn mark_point(&self, document: &PointDocument) -> Result<bool> {
        let marker = self.prepare_point_marker(document, None)?;
        let is_new = marker.file.is_some();
        marker.commit();
        Ok(is_new)
    }

    fn prepare_marker_with(&self, name: &str, document: Vec<u8>) -> Result<PendingMarker> {
        let path = self.marker_path(name);
        // One that cannot be read is replaced.
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
        let stored = self.seal_document(&purpose(&path), &plaintext)?;
        write_synced(&temporary, &stored).context(|| format!("writing {}", temporary.display()))?;
        sync_directory(&directory)?;
        Ok(PendingMarker { file: Some((temporary, path, stored)) })
    }

    /// Takes back, durably, that a session or point is there. Returns whether it was
    /// said.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn unmark(&self, name: &str) -> Result<bool> {
        let removed = self.remove_marker(name)?;
        if removed {
            sync_directory(&self.path().join(DIRECTORY))?;
        }
        Ok(removed)
    }

    fn remove_marker(&self, name: &str) -> Result<bool> {
        let path = self.marker_path(name);
        let removed = remove(&path)?;
        let _ = remove(&path.with_extension(TEMPORARY_EXTENSION));
        Ok(removed)
    }

    /// Takes back, durably, that these sessions or points are there, and that they are
    /// about to go. Afterwards comes [`Repository::forget_markers`].
    ///
    /// # Errors
    /// What the operating system says.
    pub fn suspend_markers(&self, names: &[String]) -> Result<()> {
        let mut renamed = false;
        for path in names.iter().map(|name| self.marker_path(name)) {
            match std::fs::rename(&path, path.with_extension(TEMPORARY_EXTENSION)) {
                Ok(()) => renamed = true,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).context(|| format!("removing {}", path.display())),
            }
        }
        match renamed {
            true => sync_directory(&self.path().join(DIRECTORY)),
            false => Ok(()),
        }
    }

    /// Removes what [`Repository::suspend_markers`] has left of these, once they are gone.
    /// A failure leaves it to the next writer.
    pub fn forget_markers(&self, names: &[String]) {
        for path in names.iter().map(|name| self.marker_path(name)) {
            for extension in
                [PROTECTED_EXTENSION, QUARANTINED_EXTENSION, FILES_EXTENSION, TEMPORARY_EXTENSION]
            {
                let _ = remove(&path.with_extension(extension));
            }
        }
    }

    /// What is wrong with the marker of a session or point that is there; `None` for a
    /// sound one, and for one that is being made or taken back at this moment, or was
    /// when a process was killed.
    pub fn marker_damage(&self, name: &str) -> Option<CatalogDamage> {
        let path = self.marker_path(name);
        // In the order in which it comes; and it may go the other way, so looked at twice.
        let is_sound = || self.read_marker(path.clone()).is_some();
        let is_pending = || path.with_extension(TEMPORARY_EXTENSION).exists();
        if is_sound() || is_pending() || is_sound() || is_pending() {
            return None;
        }
        let why = match path.exists() {
            true => "it cannot be read",
            false => "it is missing",
        };
        Some(CatalogDamage {
            what: format!("the marker of {name}"),
            reason: format!(
                "{why}: should the database lose {name}, nothing would tell; coldrise repair \
                 makes it anew, and so does the next backup"
            ),
        })
    }

    /// True where something says that this session or point is there, and where the drive
    /// cannot tell: nothing may be deleted then.
    pub fn is_marked(&self, name: &str) -> bool {
        self.marker_path(name).try_exists().unwrap_or(true)
    }

    /// True where something says that it is there, or was about to come or to go.
    pub(crate) fn may_be_there(&self, name: &str) -> bool {
        let path = self.marker_path(name);
        self.is_marked(name) || path.with_extension(TEMPORARY_EXTENSION).exists()
    }

    /// The names that say so; markers that do not open are passed over, because they
    /// say nothing.
    ///
    /// # Errors
    /// What the operating system says of the directory.
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
        // A copy under another name says nothing.
        (self.marker_path(&name) == path).then_some(Content { name, document })
    }

    fn read_sealed(&self, path: &Path) -> Option<Vec<u8>> {
        let is_small = path.metadata().is_ok_and(|found| found.len() <= MAX_STORED_BYTES);
        let stored = is_small.then(|| std::fs::read(path).ok())??;
        self.open_document(&purpose(path), &stored).ok()
    }

    /// The documents of points that markers carry, with the files of those.
    ///
    /// # Errors
    /// What the operating system says of the directory.
    pub(crate) fn marked_points(&self) -> Result<Vec<(PointDocument, Option<Vec<u8>>)>> {
        let mut points = Vec::new();
        for path in self.marker_paths()? {
            let Some(content) = self.read_marker(path.clone()) else { continue };
            let Ok(document) = serde_json::from_slice::<PointDocument>(&content.document) else {
                continue;
            };
            let files = document.files.is_some().then(|| path.with_extension(FILES_EXTENSION));
            points.push((document, files.and_then(|path| self.read_sealed(&path))));
        }
        Ok(points)
    }

    /// Makes the markers of the catalog's points that have none or one that cannot be
    /// read: a crash came between, or they were lost. A catalog that cannot be read is
    /// left as it is. Returns how many were made.
    ///
    /// # Errors
    /// `NoSpace`, and what else the operating system says.
    pub fn mark_points(&self) -> Result<u64> {
        let mut made = 0;
        let marked = catalog::for_each_entry(self, |name, entry| {
            made += u64::from(match entry {
                Ok(CatalogEntry::Point(document)) => self.mark_point(&document)?,
                // What its key tells.
                Err(_) if point_of(&name).is_some() => self.mark(&name)?,
                _ => false,
            });
            Ok(())
        });
        match marked {
            Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(made),
            marked => marked?,
        }
        // Last: until then they tell that a crash came between.
        self.remove_unfinished_markers();
        Ok(made)
    }

    /// What a crash left of what is not there. That of a point which is being sealed at
    /// this moment goes as well, and is left to the writer who enters the point.
    fn remove_unfinished_markers(&self) {
        let Ok(entries) = std::fs::read_dir(self.path().join(DIRECTORY)) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.extension().is_some_and(|extension| extension == TEMPORARY_EXTENSION) {
                let _ = std::fs::remove_file(path);
            }
        }
    }

    fn marker_path(&self, name: &str) -> PathBuf {
        let hash = self.derive_key("marker", name.as_bytes());
        self.path().join(DIRECTORY).join(hex::encode(&hash[..16]))
    }
}

fn write_synced(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(path)?;
    file.write_all(content).and_then(|()| file.sync_all())
}

/// Whether it was there.
fn remove(path: &Path) -> Result<bool> {
    match std::fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).context(|| format!("removing {}", path.display())),
    }
}

fn purpose(path: &Path) -> String {
    format!("marker {}", path.file_name().unwrap_or_default().to_string_lossy())
}

/// Whether a repository that cannot be opened has ever held anything.
pub(crate) fn are_there(repository: &Path) -> bool {
    std::fs::read_dir(repository.join(DIRECTORY)).is_ok_and(|mut entries| entries.next().is_some())
}
