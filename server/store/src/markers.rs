//! Markers: small files that say which points and sessions there are.
//!
//! The database may lose what it stored last without a trace: a truncated log or
//! manifest reads as one that ends there, and a file that is missing as a database of
//! before that file. A session may lose its document. A marker lies beside both, in
//! `markers/`, one file for each point and session, and says that it has to be there.
//!
//! Order: what it stands for is made durable, then the marker; the marker is removed,
//! durably, before what it stands for. So a crash leaves a point or session without a
//! marker, which the next writer adds, and never a marker without what it stands for.
//! A marker never changes, so it cannot be old.

use std::collections::HashSet;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, ErrorKind, Result};

use crate::description::sync_directory;
use crate::verify::CatalogDamage;
use crate::{catalog, hex, MachineName, PointName, Repository};

const MISSING: &str =
    "it is missing: the repository was told to keep it, and has lost its document";
const DIRECTORY: &str = "markers";
const TEMPORARY_EXTENSION: &str = "new";
/// A name is filled up to so many bytes, so that its length does not show.
const PLAINTEXT_BYTES: usize = 192;
/// Largest file that is read.
const MAX_STORED_BYTES: u64 = 1024;

/// A marker on its way: it appears with [`PendingMarker::commit`].
pub(crate) struct PendingMarker {
    /// Where it lies, and where it will; `None` where it is there already.
    paths: Option<(PathBuf, PathBuf)>,
}

impl PendingMarker {
    /// Makes the marker visible, durably. What it stands for is stored by now, so a
    /// failure is only told: the next writer makes the marker.
    pub(crate) fn commit(self) {
        let Some((temporary, path)) = self.paths else { return };
        let what = || format!("making {}", path.display());
        let made = std::fs::rename(&temporary, &path)
            .context(what)
            .and_then(|()| path.parent().map_or(Ok(()), sync_directory));
        if let Err(error) = made {
            tracing::warn!(error = %error.full_message(), "a marker is left to the next writer");
        }
    }
}

impl CatalogDamage {
    /// The command by which the repository goes on without a point or session that it
    /// has lost; none for what is there and damaged.
    pub fn way_out(&self) -> Option<String> {
        let what = &self.what;
        (self.reason == MISSING).then(|| match what.strip_prefix("live/") {
            Some(session) => format!("coldrise unpublish {session} --discard"),
            None => format!("coldrise forget {what}"),
        })
    }
}

impl Repository {
    /// Says, durably, that a session or point is there. `name` is `live/SESSION` or
    /// `MACHINE/POINT`.
    ///
    /// # Errors
    /// `NoSpace`, and what else the operating system says.
    pub fn mark(&self, name: &str) -> Result<()> {
        self.prepare_marker(name)?.commit();
        Ok(())
    }

    /// The same in two steps, so that all that takes space comes before what the marker
    /// stands for.
    pub(crate) fn prepare_marker(&self, name: &str) -> Result<PendingMarker> {
        let path = self.marker_path(name);
        if path.exists() {
            return Ok(PendingMarker { paths: None });
        }
        let directory = self.path().join(DIRECTORY);
        std::fs::DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(&directory)
            .context(|| format!("making the directory {}", directory.display()))?;
        let temporary = path.with_extension(TEMPORARY_EXTENSION);
        let what = || format!("writing {}", temporary.display());
        let mut plaintext = name.as_bytes().to_vec();
        plaintext.resize(plaintext.len().max(PLAINTEXT_BYTES), 0);
        let stored = self.seal_document(&purpose(&path), &plaintext)?;
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&temporary).context(what)?;
        file.write_all(&stored).and_then(|()| file.sync_all()).context(what)?;
        Ok(PendingMarker { paths: Some((temporary, path)) })
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

    /// The same for several, with one sync.
    pub(crate) fn unmark_points(&self, points: &[(MachineName, PointName)]) -> Result<()> {
        let mut removed = false;
        for (machine, point) in points {
            removed |= self.remove_marker(&format!("{machine}/{point}"))?;
        }
        match removed {
            true => sync_directory(&self.path().join(DIRECTORY)),
            false => Ok(()),
        }
    }

    fn remove_marker(&self, name: &str) -> Result<bool> {
        let path = self.marker_path(name);
        match std::fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error).context(|| format!("removing {}", path.display())),
        }
    }

    /// True where something says that this session or point is there.
    pub fn is_marked(&self, name: &str) -> bool {
        self.marker_path(name).exists()
    }

    /// The names that say so; markers that do not open are passed over, because they
    /// say nothing.
    ///
    /// # Errors
    /// What the operating system says of the directory.
    pub fn marked(&self) -> Result<Vec<String>> {
        let directory = self.path().join(DIRECTORY);
        let what = || format!("reading {}", directory.display());
        let mut names = Vec::new();
        let entries = match std::fs::read_dir(&directory) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(names),
            entries => entries.context(what)?,
        };
        for entry in entries {
            let path = entry.context(what)?.path();
            if path.extension().is_none() {
                names.extend(self.read_marker(path));
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn read_marker(&self, path: PathBuf) -> Option<String> {
        let is_small = path.metadata().is_ok_and(|found| found.len() <= MAX_STORED_BYTES);
        let stored = is_small.then(|| std::fs::read(&path).ok())??;
        let mut plaintext = self.open_document(&purpose(&path), &stored).ok()?;
        let length = plaintext.iter().position(|byte| *byte == 0).unwrap_or(plaintext.len());
        plaintext.truncate(length);
        let name = String::from_utf8(plaintext).ok()?;
        // A copy under another name says nothing.
        (self.marker_path(&name) == path).then_some(name)
    }

    /// What has to be there and was not `found`: of the names that [`Repository::marked`]
    /// gave before it was looked for. What went meanwhile is left out.
    pub fn missing<'a>(&self, marked: &'a [String], found: &HashSet<String>) -> Vec<CatalogDamage> {
        let is_missing = |name: &&'a String| !found.contains(*name) && self.is_marked(name);
        let damage =
            |name: &String| CatalogDamage { what: name.clone(), reason: MISSING.to_owned() };
        marked.iter().filter(is_missing).map(damage).collect()
    }

    /// The points of a machine that have to be there and are not in the catalog.
    ///
    /// # Errors
    /// `Corrupt` where a document does not authenticate; what the operating system says.
    pub fn lost_points(&self, machine: &MachineName) -> Result<Vec<PointName>> {
        let marked = self.marked()?;
        let there: HashSet<_> = self.points(machine)?.into_iter().map(|it| it.point).collect();
        let of_machine = marked.iter().filter_map(|name| Some((name, point_of(name)?)));
        let lost = of_machine.filter(|(name, (of, point))| {
            of == machine && !there.contains(point) && self.is_marked(name)
        });
        Ok(lost.map(|(_, (_, point))| point).collect())
    }

    /// Makes the markers of the catalog's points that have none: a crash came between,
    /// or they were lost. A catalog that cannot be read is left as it is.
    ///
    /// # Errors
    /// `NoSpace`, and what else the operating system says.
    pub fn mark_points(&self) -> Result<()> {
        self.remove_unfinished_markers();
        let names = match catalog::point_names(self) {
            Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(()),
            names => names?,
        };
        for (machine, point) in names {
            self.mark(&format!("{machine}/{point}"))?;
        }
        Ok(())
    }

    /// What a crash left. One that is being made at this moment goes as well, and is left
    /// to the next writer.
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

fn purpose(path: &Path) -> String {
    format!("marker {}", path.file_name().unwrap_or_default().to_string_lossy())
}

/// Whether a repository that cannot be opened has ever held anything.
pub(crate) fn are_there(repository: &Path) -> bool {
    repository.join(DIRECTORY).is_dir()
}

/// The point of a marker's name; `None` for a session.
pub(crate) fn point_of(name: &str) -> Option<(MachineName, PointName)> {
    let (machine, point) = name.split_once('/')?;
    match machine {
        "live" => None,
        machine => Some((MachineName::parse(machine).ok()?, PointName::parse(point).ok()?)),
    }
}
