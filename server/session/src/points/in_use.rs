//! Chunk maps and layers in use, as named by the catalog, the sessions and the leases.
//!
//! A reader of a point first names the point in a lease. Then it catches up and checks that the
//! point still exists; if not, it does not read it. A publish does both under the documents' lock.
//! A deletion first makes durable that the point is removed, then reads the sessions (under that
//! lock) and the leases, then deletes only the parts that neither they nor the catalog name. So one
//! of the two always sees the other.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;

use coldrise_block::{Context, Error, ErrorKind, Result, remove_if_present, temporary_path};
use coldrise_store::{
    DiskDocument, LayerId, MachineName, MapRoot, PointName, Repository, RepositoryWriter,
};

use crate::incoming::PartialCopy;
use crate::locks::file_lock::FileLock;
use crate::locks::lease::read_leases;
use crate::paths::{SessionPaths, layer_path};
use crate::session_folder::addresses::{point_name, session_name};
use crate::session_folder::document::SessionDocument;

/// The chunk maps and layers in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InUse {
    /// Roots of chunk maps.
    pub roots: HashSet<MapRoot>,
    /// Layers, including those that take a session's writes.
    pub(crate) layers: HashSet<LayerId>,
    /// The points and sessions that need them, by the names of their markers.
    found: HashSet<String>,
}

impl InUse {
    /// Everything that a restore point, a session, a running program or a partial copy needs.
    ///
    /// # Errors
    /// As for [`InUse::without`].
    pub fn collect(repository: &Repository) -> Result<InUse> {
        InUse::without(repository, |_, _| false)
    }

    /// Like [`InUse::collect`], but ignores the points for which `is_gone` returns true. Parts that
    /// a session or a running program needs stay.
    ///
    /// # Errors
    /// `Corrupt` if a document of the catalog, of a session or of a lease cannot be decrypted: then
    /// the parts that it names are unknown, and nothing may be deleted.
    pub fn without(
        repository: &Repository,
        is_gone: impl Fn(&MachineName, &PointName) -> bool,
    ) -> Result<InUse> {
        // Before the catalog: a point is there before its note is removed.
        let partial = PartialCopy::roots(repository)?;
        let marked = repository.marked()?;
        let documents = FileLock::documents(repository)?;
        let sessions = of_sessions(repository, &documents, &is_gone)?;
        drop(documents);
        let mut in_use = sessions.with_the_rest(repository, &marked, &is_gone)?;
        in_use.roots.extend(partial);
        Ok(in_use)
    }

    /// Number of existing layers that are not in use, and the space that they take on the
    /// repository's disk, in bytes.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn unneeded_layers(&self, repository: &Repository) -> Result<(u64, u64)> {
        let (mut layers, mut bytes) = (0, 0);
        for id in unneeded(repository, self)? {
            let path = layer_path(repository, &id);
            match path.symlink_metadata() {
                Ok(metadata) => {
                    layers += 1;
                    bytes += metadata.blocks() * 512;
                }
                // The layer was removed just now.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).context(|| format!("reading {}", path.display())),
            }
        }
        Ok((layers, bytes))
    }

    /// Adds the parts that the catalog and the leases name.
    fn with_the_rest(
        mut self,
        repository: &Repository,
        marked: &[String],
        is_gone: &dyn Fn(&MachineName, &PointName) -> bool,
    ) -> Result<InUse> {
        // Read entry by entry: a point counts even if its machine's entry is lost.
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
    "cannot determine everything that is in use, so nothing may be deleted (coldrise verify names \
     the damage)"
}

/// The parts that the sessions need. The caller holds the documents' lock.
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

/// Removes unused layers: those of removed points, and those that a crash left of a publish or a
/// seal. Returns their number.
///
/// # Errors
/// As for [`InUse::without`].
pub fn remove_unused_layers(writer: &RepositoryWriter) -> Result<u64> {
    let repository = writer.repository();
    remove_layers(repository, &FileLock::documents(repository)?)
}

/// Like [`remove_unused_layers`], for a caller that holds the documents' lock. Layers get their
/// owners under this lock: a layer that exists when a document is written still exists afterwards.
pub(crate) fn remove_layers(repository: &Repository, documents: &FileLock) -> Result<u64> {
    remove_unfinished(repository, documents)?;
    // No session changes meanwhile: its document is replaced under the lock.
    let needed = of_sessions(repository, documents, &|_, _| false)?;
    if unneeded(repository, &needed)?.is_empty() {
        return Ok(0);
    }
    let marked = repository.marked()?;
    let needed = needed.with_the_rest(repository, &marked, &|_, _| false)?;
    let unneeded = unneeded(repository, &needed)?;
    if !unneeded.is_empty() {
        // After a crash a marker may still name them.
        repository.mark_points(usize::MAX)?;
    }
    let mut removed = 0;
    for id in unneeded {
        let path = layer_path(repository, &id);
        // A seal that is under way holds the lock of its new layers.
        if let Some(_lock) = FileLock::of_existing(&path)? {
            remove_if_present(&path)?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Removes unfinished session documents of a killed process. Documents are written under the
/// documents' lock, which the caller holds.
fn remove_unfinished(repository: &Repository, _documents: &FileLock) -> Result<()> {
    for place in SessionPaths::all(repository)? {
        for path in place.progress().into_iter().chain([place.document()]) {
            remove_if_present(&temporary_path(&path))?;
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
        // Ignore foreign files.
        if let Some(Ok(id)) = name.to_str().map(LayerId::parse) {
            if !needed.layers.contains(&id) {
                ids.push(id);
            }
        }
    }
    Ok(ids)
}
