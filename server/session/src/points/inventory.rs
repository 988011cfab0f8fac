//! Verify: the content of the catalog and the sessions, and its damage.
//!
//! Documents are read one by one, so that a damaged one hides no other. `verify_layers` reads the
//! captured blocks.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Disk, Error, ErrorKind, ExtentKind, Result};
use coldrise_store::{
    CatalogDamage, MachineName, PointDocument, PointName, Repository, SessionName, VerifiedDisk,
};

use crate::client_files::{ClientFilesReader, FileKind};
use crate::paths::SessionPaths;
use crate::points::catalog::Catalog;
use crate::session_folder::addresses::{point_disk, point_name, session_disk, session_name};
use crate::session_folder::document::{self, SessionDocument};
use crate::session_folder::rollback_guard::{SessionDamage, session_damage};

/// Size of one read of a client's file, in bytes.
const PIECE_BYTES: usize = 1 << 20;
/// Number of looks at a missing session or marker. Between two of them a session may be unpublished and published
/// again, or a point be sealed and removed.
const LOOKS: usize = 3;

/// Everything that can be verified.
#[derive(Debug, Default)]
pub struct Inventory {
    /// The restore points whose documents are readable.
    pub points: Vec<PointDocument>,
    /// The sessions whose documents are readable.
    pub(crate) sessions: Vec<SessionDocument>,
    /// Unreadable documents.
    pub damaged: Vec<CatalogDamage>,
    /// Markers and other guards that are missing or unreadable. Nothing is lost, but a loss would
    /// not be detected.
    pub damaged_markers: Vec<CatalogDamage>,
    /// Files of clients that only the process that writes the session can read: see
    /// [`LayerReport::unread`](crate::LayerReport::unread).
    pub(crate) unread: Vec<CatalogDamage>,
}

impl Inventory {
    /// Reads every document of the catalog and of the sessions.
    ///
    /// # Errors
    /// `Corrupt` if the catalog cannot be walked; `Interrupted` once `cancel` is set; the operating
    /// system's error.
    pub fn take(repository: &Arc<Repository>, cancel: &AtomicBool) -> Result<Inventory> {
        // Read the markers before the points and sessions that they stand for.
        let marked = repository.marked()?;
        let mut inventory = Inventory::default();
        let mut sealed = Vec::new();
        for place in SessionPaths::all(repository)? {
            match SessionDocument::read(repository, &place) {
                Ok(None) => {}
                Ok(Some(mut document)) => {
                    sealed.append(&mut document.sealed);
                    if !document.is_ended {
                        inventory.sessions.push(document);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    inventory.damaged.push(document::damage(repository, &place, &error));
                }
                Err(error) => return Err(error),
            }
        }
        for session in &inventory.sessions {
            let unread = &mut inventory.unread;
            inventory.damaged.extend(damaged_files(repository, session, unread, cancel)?);
            let SessionDamage { older, guards } = session_damage(repository, session)?;
            inventory.damaged.extend(older);
            inventory.damaged_markers.extend(guards);
        }
        let (points, damaged) = repository.verify_catalog()?;
        inventory.points = points;
        inventory.damaged.extend(damaged);
        // A point that is moving into the catalog is listed twice.
        let mut waiting = HashSet::new();
        for point in sealed {
            let is_same = |known: &PointDocument| {
                known.machine == point.machine && known.point == point.point
            };
            if !inventory.points.iter().any(is_same) {
                waiting.insert(point_name(&point));
                inventory.points.push(point);
            }
        }
        let markers = inventory.find_damaged_markers(repository, &waiting)?;
        inventory.damaged_markers.extend(markers);
        let mut found: HashSet<String> = inventory.points.iter().map(point_name).collect();
        found.extend(inventory.sessions.iter().map(session_name));
        found.extend(inventory.damaged.iter().map(|damaged| damaged.what.clone()));
        inventory.damaged.extend(lost(repository, &marked, &found)?);
        let catalog = Catalog::new(repository);
        for point in inventory.points.iter().filter(|point| point.files.is_some()) {
            check_cancel(cancel)?;
            let what = || format!("the files that {}/{} carries", point.machine, point.point);
            match catalog.files(point) {
                // The point was removed meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => inventory.damaged.extend(damage(what(), error)?),
                Ok(_) => {}
            }
        }
        for point in &inventory.points {
            let (machine, point) = (&point.machine, &point.point);
            if let Err(error) = repository.boot_check(machine, point) {
                let what = format!("the boot check of {machine}/{point}");
                inventory.damaged.extend(damage(what, error)?);
            }
        }
        inventory.points.sort_by(|a, b| (&a.machine, &a.point).cmp(&(&b.machine, &b.point)));
        inventory.sessions.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(inventory)
    }

    /// Damaged markers of points and sessions that still exist. A marker whose owner was just
    /// removed is not damaged. The files with the markers of `waiting` points count, too: the
    /// writer that enters such a point makes them again.
    fn find_damaged_markers(
        &self,
        repository: &Arc<Repository>,
        waiting: &HashSet<String>,
    ) -> Result<Vec<CatalogDamage>> {
        let mut damaged = Vec::new();
        for point in &self.points {
            let name = point_name(point);
            let has_files = point.files.is_some() && waiting.contains(&name);
            let mut damage = None;
            for _ in 0..LOOKS {
                damage = repository.marker_damage(&name, has_files);
                if damage.is_none() {
                    break;
                }
                repository.catch_up()?;
                let found = repository.point(&point.machine, &point.point);
                let is_gone = found.is_err_and(|error| error.kind() == ErrorKind::NotFound);
                // It was removed meanwhile, or it waits in its session: a crash leaves such a point
                // without a marker, and the writer that enters it makes one.
                if is_gone && !(point.point.is_synthetic() && repository.is_marked(&name)) {
                    damage = None;
                    break;
                }
                // Its marker may have been made just now.
            }
            damaged.extend(damage);
        }
        for session in &self.sessions {
            let Some(damage) = repository.marker_damage(&session_name(session), false) else {
                continue;
            };
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

/// The sessions that are lost, or whose document is damaged.
///
/// # Errors
/// The operating system's error.
pub fn damaged_sessions(repository: &Arc<Repository>) -> Result<Vec<CatalogDamage>> {
    let mut marked = repository.marked()?;
    marked.retain(|name| name.starts_with("live/"));
    let (mut found, mut damaged) = (HashSet::new(), Vec::new());
    for place in SessionPaths::all(repository)? {
        match SessionDocument::read(repository, &place) {
            Ok(document) => found.extend(document.as_ref().map(session_name)),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let damage = document::damage(repository, &place, &error);
                found.insert(damage.what.clone());
                damaged.push(damage);
            }
            Err(error) => return Err(error),
        }
    }
    damaged.extend(lost(repository, &marked, &found)?);
    Ok(damaged)
}

/// The unreadable files of clients in a session. A file that failed is checked again, so that a
/// file that is just being removed does not count as damaged. Files that only the writing process
/// can read go to `unread`.
fn damaged_files(
    repository: &Arc<Repository>,
    session: &SessionDocument,
    unread: &mut Vec<CatalogDamage>,
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
            if error.kind() == ErrorKind::NoSpace {
                unread.push(CatalogDamage::new(what, error.full_message()));
            } else {
                damaged.extend(damage(what, error)?);
            }
        }
    }
    Ok(damaged)
}

/// Reads all stored bytes of a file.
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
    if cancel.load(Ordering::Relaxed) {
        Err(Error::new(ErrorKind::Interrupted, "cancelled"))
    } else {
        Ok(())
    }
}

/// Returns damage. Any other failure is an error, which ends the work.
fn damage(what: String, error: Error) -> Result<Option<CatalogDamage>> {
    match error.kind() {
        ErrorKind::Corrupt | ErrorKind::NotFound => {
            Ok(Some(CatalogDamage::new(what, error.full_message())))
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

/// The points and sessions in `marked` that are not `found`, and are still missing after another look.
fn lost(
    repository: &Arc<Repository>,
    marked: &[String],
    found: &HashSet<String>,
) -> Result<Vec<CatalogDamage>> {
    let catalog = Catalog::new(repository);
    let mut lost = Vec::new();
    for missing in repository.missing(marked, found) {
        if is_lost(repository, &catalog, &missing.what)? {
            lost.push(missing);
        }
    }
    Ok(lost)
}

/// Whether a point or session with a marker is lost, and not one that was made under the name of a removed one
/// meanwhile.
pub(crate) fn is_lost(repository: &Arc<Repository>, catalog: &Catalog, name: &str) -> Result<bool> {
    match name.split_once('/') {
        Some(("live", session)) => {
            let Ok(session) = SessionName::parse(session) else { return Ok(true) };
            let place = SessionPaths::of(repository, &session);
            for _ in 0..LOOKS {
                let document = SessionDocument::read(repository, &place)?;
                if document.is_some_and(|document| !document.is_ended)
                    || !repository.is_marked(name)
                {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        Some((machine, point)) => match (MachineName::parse(machine), PointName::parse(point)) {
            (Ok(machine), Ok(point)) => catalog.is_lost(&machine, &point),
            _ => Ok(true),
        },
        None => Ok(true),
    }
}

pub(crate) fn has_ended(repository: &Repository, session: &SessionDocument) -> Result<bool> {
    let now = SessionDocument::read(repository, &SessionPaths::of(repository, &session.name))?;
    Ok(now.is_none_or(|now| now.is_ended))
}
