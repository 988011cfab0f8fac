//! What is in use, wherever it is named: in the catalog, in sessions, in leases.
//!
//! Whoever starts to read a point first names it in a lease, then catches up and looks
//! whether the point is still there, and does not read it where it is not. Whoever
//! publishes one does both under the documents' lock. Whoever deletes first makes
//! durable that the point is gone, then reads the sessions (under that lock) and the
//! leases, then deletes only what neither they nor the catalog name. So one of both
//! always sees the other.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{
    DiskDocument, LayerId, MachineName, MapRoot, PointName, Repository, RepositoryWriter,
};

use crate::document::SessionDocument;
use crate::lease::read_leases;
use crate::lock::FileLock;
use crate::place::{layer_path, remove_file, unfinished, Place};
use crate::verify::{point_name, session_name};

/// The chunk maps and layers that somebody needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InUse {
    /// Roots of chunk maps.
    pub roots: HashSet<MapRoot>,
    /// Layers, those that take a session's writes included.
    pub layers: HashSet<LayerId>,
    /// The points and sessions that need them, by the names of their markers.
    found: HashSet<String>,
}

impl InUse {
    /// Everything that a restore point, a session or a running program needs.
    ///
    /// # Errors
    /// As of [`InUse::without`].
    pub fn collect(repository: &Repository) -> Result<InUse> {
        InUse::without(repository, |_, _| false)
    }

    /// The same, as if the points for which `is_gone` says so were not there. What a
    /// session or a running program needs of them stays.
    ///
    /// # Errors
    /// `Corrupt` where a document of the catalog, of a session or of a lease does not
    /// open: what it names is then not known, and nothing may be deleted.
    pub fn without(
        repository: &Repository,
        is_gone: impl Fn(&MachineName, &PointName) -> bool,
    ) -> Result<InUse> {
        let marked = repository.marked()?;
        let documents = FileLock::documents(repository)?;
        let sessions = of_sessions(repository, &documents, &is_gone)?;
        drop(documents);
        sessions.with_the_rest(repository, &marked, &is_gone)
    }

    /// The layers that are there and not among these: how many, and the space that
    /// they take on the repository's disk, in bytes.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn unneeded_layers(&self, repository: &Repository) -> Result<(u64, u64)> {
        let (mut layers, mut bytes) = (0, 0);
        for id in unneeded(repository, self)? {
            let path = layer_path(repository, &id);
            match path.symlink_metadata() {
                Ok(metadata) => {
                    layers += 1;
                    bytes += metadata.blocks() * 512;
                }
                // It was removed just now.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).context(|| format!("reading {}", path.display())),
            }
        }
        Ok((layers, bytes))
    }

    /// Adds what the catalog and the leases name.
    fn with_the_rest(
        mut self,
        repository: &Repository,
        marked: &[String],
        is_gone: &dyn Fn(&MachineName, &PointName) -> bool,
    ) -> Result<InUse> {
        // Entry by entry: a point counts even where its machine's entry is lost.
        let (points, mut damaged) = repository.verify_catalog()?;
        self.found.extend(points.iter().map(point_name));
        damaged.extend(repository.missing(marked, &self.found));
        if let Some(damaged) = damaged.first() {
            return Err(Error::new(ErrorKind::Corrupt, damaged.message())).context(unknown);
        }
        for point in points.iter().filter(|point| !is_gone(&point.machine, &point.point)) {
            point.disks.iter().for_each(|disk| self.add(disk));
        }
        for lease in read_leases(repository).context(unknown)? {
            lease.served.iter().filter_map(|s| s.disk.as_ref()).for_each(|disk| self.add(disk));
        }
        Ok(self)
    }

    fn add(&mut self, disk: &DiskDocument) {
        self.roots.insert(disk.root);
        self.layers.extend(disk.layers.iter().map(|layer| layer.id));
    }
}

fn unknown() -> &'static str {
    "not all that is in use can be told, so nothing may be deleted (coldrise verify names what is \
     damaged)"
}

/// What the sessions need. The documents' lock is held.
fn of_sessions(
    repository: &Repository,
    _documents: &FileLock,
    is_gone: &dyn Fn(&MachineName, &PointName) -> bool,
) -> Result<InUse> {
    let mut found = InUse::default();
    for (_, session) in SessionDocument::all(repository).context(unknown)? {
        if !session.is_ended {
            found.found.insert(session_name(&session));
        }
        for disk in &session.disks {
            found.add(&disk.sealed());
            found.layers.insert(disk.top);
        }
        found.found.extend(session.sealed.iter().map(point_name));
        for point in session.sealed.iter().filter(|p| !is_gone(&p.machine, &p.point)) {
            point.disks.iter().for_each(|disk| found.add(disk));
        }
    }
    Ok(found)
}

/// Removes the layers that nothing needs any more: of points that are gone, and what
/// a crash left of a publish or a seal. Returns how many there were.
///
/// # Errors
/// As of [`InUse::without`].
pub fn reclaim_layers(writer: &RepositoryWriter) -> Result<u64> {
    let repository = writer.repository();
    remove_layers(repository, &FileLock::documents(repository)?)
}

/// The same for who holds the documents' lock, under which layers get their owners:
/// a layer that is there when a document is written is there afterwards.
pub(crate) fn remove_layers(repository: &Repository, documents: &FileLock) -> Result<u64> {
    remove_unfinished(repository, documents)?;
    let marked = repository.marked()?;
    let mut needed = of_sessions(repository, documents, &|_, _| false)?;
    if unneeded(repository, &needed)?.is_empty() {
        return Ok(0);
    }
    needed = needed.with_the_rest(repository, &marked, &|_, _| false)?;
    let mut removed = 0;
    for id in unneeded(repository, &needed)? {
        remove_file(&layer_path(repository, &id))?;
        removed += 1;
    }
    Ok(removed)
}

/// Removes what a killed process left of documents of sessions: they are written under the
/// documents' lock, which is held.
fn remove_unfinished(repository: &Repository, _documents: &FileLock) -> Result<()> {
    for place in Place::all(repository)? {
        for path in place.progress().into_iter().chain([place.document()]) {
            remove_file(&unfinished(&path))?;
        }
    }
    Ok(())
}

fn unneeded(repository: &Repository, needed: &InUse) -> Result<Vec<LayerId>> {
    let folder = repository.layers_dir();
    let what = || format!("reading {}", folder.display());
    let mut ids = Vec::new();
    for entry in std::fs::read_dir(&folder).context(what)? {
        let name = entry.context(what)?.file_name();
        // A file that is not ours is left alone.
        if let Some(Ok(id)) = name.to_str().map(LayerId::parse) {
            if !needed.layers.contains(&id) {
                ids.push(id);
            }
        }
    }
    Ok(ids)
}
