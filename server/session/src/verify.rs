//! Verify: what the catalog and the sessions hold, and what of it is damaged.
//!
//! Documents are read one by one, so that a damaged one hides no other. Captured blocks
//! are read by `verify_layers`.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use coldrise_block::{Disk, Error, ErrorKind, ExtentKind, Result};
use coldrise_store::{CatalogDamage, PointDocument, Repository, VerifiedDisk};

use crate::catalog::Catalog;
use crate::client_files::{ClientFilesReader, FileKind};
use crate::document::{SessionDisk, SessionDocument};
use crate::place::Place;

/// Files of clients are read in pieces of this size.
const PIECE_BYTES: usize = 1 << 20;

/// Everything that is there to be verified.
#[derive(Debug, Default)]
pub struct Inventory {
    /// The restore points whose documents are readable.
    pub points: Vec<PointDocument>,
    /// The sessions whose documents are readable.
    pub sessions: Vec<SessionDocument>,
    /// The documents that are not.
    pub damaged: Vec<CatalogDamage>,
    /// Markers that are missing or cannot be read: nothing is lost, but nothing would tell
    /// if it were.
    pub damaged_markers: Vec<CatalogDamage>,
}

impl Inventory {
    /// Reads every document of the catalog and of the sessions.
    ///
    /// # Errors
    /// `Corrupt` where the catalog cannot be walked; `Interrupted` once `cancel` is set; what
    /// the operating system says.
    pub fn take(repository: &Arc<Repository>, cancel: &AtomicBool) -> Result<Inventory> {
        // Before all that they stand for.
        let marked = repository.marked()?;
        let mut inventory = Inventory::default();
        let mut sealed = Vec::new();
        for place in Place::all(repository)? {
            match SessionDocument::read(repository, &place) {
                Ok(None) => {}
                Ok(Some(mut document)) => {
                    sealed.append(&mut document.sealed);
                    if !document.is_ended {
                        inventory.sessions.push(document);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    let what = format!("the session in {}", place.directory().display());
                    inventory.damaged.push(CatalogDamage { what, reason: error.full_message() });
                }
                Err(error) => return Err(error),
            }
        }
        for session in &inventory.sessions {
            inventory.damaged.extend(damaged_files(repository, session, cancel)?);
        }
        let (points, damaged) = repository.verify_catalog()?;
        inventory.points = points;
        inventory.damaged.extend(damaged);
        // Before sealed points are added: those have one once they are in the catalog.
        inventory.damaged_markers = inventory.find_damaged_markers(repository)?;
        // A point on its way into the catalog stands in both.
        for point in sealed {
            let is_same = |known: &PointDocument| {
                known.machine == point.machine && known.point == point.point
            };
            if !inventory.points.iter().any(is_same) {
                inventory.points.push(point);
            }
        }
        let mut found: HashSet<String> = inventory.points.iter().map(point_name).collect();
        found.extend(inventory.sessions.iter().map(session_name));
        found.extend(inventory.damaged.iter().map(|damaged| damaged.what.clone()));
        inventory.damaged.extend(repository.missing(&marked, &found));
        let catalog = Catalog::new(repository);
        for point in inventory.points.iter().filter(|point| point.files.is_some()) {
            check_cancel(cancel)?;
            let what = || format!("the files that {}/{} carries", point.machine, point.point);
            match catalog.files(point) {
                // The point is gone by now.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => inventory.damaged.extend(damage(what(), error)?),
                Ok(_) => {}
            }
        }
        inventory.points.sort_by(|a, b| (&a.machine, &a.point).cmp(&(&b.machine, &b.point)));
        inventory.sessions.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(inventory)
    }

    /// What is there still, once its marker was found wanting, and was not only on its way
    /// out.
    fn find_damaged_markers(&self, repository: &Arc<Repository>) -> Result<Vec<CatalogDamage>> {
        let mut damaged = Vec::new();
        // A sealed point's may be taken for a crash's leftover by a writer, and comes with the
        // next one.
        for point in self.points.iter().filter(|point| !point.point.is_synthetic()) {
            let Some(damage) = repository.marker_damage(&point_name(point)) else { continue };
            repository.catch_up()?;
            match repository.point(&point.machine, &point.point) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                _ => damaged.push(damage),
            }
        }
        for session in &self.sessions {
            let Some(damage) = repository.marker_damage(&session_name(session)) else { continue };
            if !has_ended(repository, session)? {
                damaged.push(damage);
            }
        }
        Ok(damaged)
    }

    /// The chunk map of every disk.
    pub fn disks(&self) -> Vec<VerifiedDisk> {
        let of_points = self.points.iter().flat_map(disks_of_point);
        let of_sessions = self.sessions.iter().flat_map(|session| {
            session.disks.iter().map(|disk| VerifiedDisk {
                name: session_disk(session, disk),
                root: disk.root,
                size_bytes: disk.size_bytes,
            })
        });
        of_points.chain(of_sessions).collect()
    }
}

/// What clients keep in a session and cannot be read. What changes meanwhile is looked
/// at again, so that nothing is taken for damaged that is only being removed.
fn damaged_files(
    repository: &Arc<Repository>,
    session: &SessionDocument,
    cancel: &AtomicBool,
) -> Result<Vec<CatalogDamage>> {
    let files = Arc::new(ClientFilesReader::new(repository, session));
    let mut damaged = Vec::new();
    let tree = match files.tree() {
        Ok(tree) => tree,
        Err(_) if has_ended(repository, session)? => return Ok(damaged),
        Err(error) => {
            let what = format!("the list of files in live/{}", session.name);
            return Ok(damage(what, error)?.into_iter().collect());
        }
    };
    for entry in tree.all().filter(|entry| entry.kind != FileKind::Folder) {
        let read = files.file(entry.id).and_then(|file| read_through(&*file, cancel));
        let Err(error) = read else { continue };
        check_cancel(cancel)?;
        let is_there = files.tree().is_ok_and(|tree| tree.get(entry.id).is_some());
        if is_there && !has_ended(repository, session)? {
            let what = format!("live/{}/{}", session.name, tree.path(entry));
            damaged.extend(damage(what, error)?);
        }
    }
    Ok(damaged)
}

/// Reads all that is stored of a file.
fn read_through(file: &dyn Disk, cancel: &AtomicBool) -> Result<()> {
    let (mut at, size_bytes) = (0, file.size_bytes());
    let mut piece = vec![0; PIECE_BYTES];
    while at < size_bytes {
        check_cancel(cancel)?;
        let extents = file.extents(at, size_bytes - at, 1)?;
        let Some(extent) = extents.first() else { return Ok(()) };
        let end = extent.offset_bytes + extent.length_bytes;
        while extent.kind == ExtentKind::Stored && at < end {
            check_cancel(cancel)?;
            let length = (end - at).min(PIECE_BYTES as u64);
            file.read_at(&mut piece[..length as usize], at)?;
            at += length;
        }
        at = end;
    }
    Ok(())
}

pub(crate) fn check_cancel(cancel: &AtomicBool) -> Result<()> {
    match cancel.load(Ordering::Relaxed) {
        true => Err(Error::new(ErrorKind::Interrupted, "cancelled")),
        false => Ok(()),
    }
}

/// Damage is reported; any other failure ends the work.
fn damage(what: String, error: Error) -> Result<Option<CatalogDamage>> {
    match error.kind() {
        ErrorKind::Corrupt | ErrorKind::NotFound => {
            Ok(Some(CatalogDamage { what, reason: error.full_message() }))
        }
        _ => Err(error),
    }
}

/// The chunk map of every disk of a point.
pub(crate) fn disks_of_point(point: &PointDocument) -> impl Iterator<Item = VerifiedDisk> + '_ {
    point.disks.iter().map(|disk| VerifiedDisk {
        name: point_disk(point, disk.name.as_str()),
        root: disk.root,
        size_bytes: disk.size_bytes,
    })
}

/// What its marker says.
pub(crate) fn point_name(point: &PointDocument) -> String {
    format!("{}/{}", point.machine, point.point)
}

/// What its marker says.
pub(crate) fn session_name(session: &SessionDocument) -> String {
    format!("live/{}", session.name)
}

pub(crate) fn point_disk(point: &PointDocument, disk: &str) -> String {
    format!("{}/{}/{disk}", point.machine, point.point)
}

pub(crate) fn session_disk(session: &SessionDocument, disk: &SessionDisk) -> String {
    format!("live/{}/{}", session.name, disk.name)
}

pub(crate) fn has_ended(repository: &Repository, session: &SessionDocument) -> Result<bool> {
    let now = SessionDocument::read(repository, &Place::of(repository, &session.name))?;
    Ok(now.is_none_or(|now| now.is_ended))
}
