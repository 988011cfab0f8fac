//! The end of the way: a session over a point that has arrived becomes an ordinary one.
//!
//! Order of writes: the point is in the catalog; then one synced replacement of `session.json` names its maps. A crash
//! leaves the old document or the new one, and both read the same bytes: [`super::disk::IncomingDisk`] reads the catalog's
//! point, too, once it is there.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{PointDocument, Repository};

use super::partial::PartialCopy;
use crate::locks::file_lock::FileLock;
use crate::paths::SessionPaths;
use crate::session_folder::document::SessionDocument;

/// The point of the catalog that a note is about, if it is complete.
pub(super) fn cataloged(
    repository: &Repository,
    partial: &PartialCopy,
) -> Result<Option<PointDocument>> {
    match repository.point(&partial.machine, &partial.point) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        found => Ok(Some(found?).filter(|point| point.created_at_ms == partial.created_at_ms)),
    }
}

/// The complete point of a session that was published before it was complete; `None` if it is still on its way.
pub(crate) fn arrived(
    repository: &Repository,
    session: &SessionDocument,
) -> Result<Option<PointDocument>> {
    let Some(created_at_ms) = session.incoming_created_at_ms else { return Ok(None) };
    repository.catch_up()?;
    match repository.point(&session.machine, &session.point) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        found => Ok(Some(found?).filter(|point| point.created_at_ms == created_at_ms)),
    }
}

/// Lets the session's document name the maps of its point, if that has arrived. Returns the current document. The
/// caller holds the session.
pub(crate) fn finish_arrival(
    repository: &Repository,
    place: &SessionPaths,
    document: SessionDocument,
) -> Result<SessionDocument> {
    let Some(point) = arrived(repository, &document)? else { return Ok(document) };
    let _documents = FileLock::documents(repository)?;
    let Some(mut now) = SessionDocument::read(repository, place)? else { return Ok(document) };
    if now.incoming_created_at_ms.is_none() {
        return Ok(now);
    }
    for disk in &mut now.disks {
        let arrived = point.disk(&disk.name).filter(|found| found.size_bytes == disk.size_bytes);
        let Some(arrived) = arrived else {
            let text = format!(
                "{}/{} has arrived without the disk {} that session {} has",
                point.machine, point.point, disk.name, now.name
            );
            return Err(Error::new(ErrorKind::Corrupt, text));
        };
        (disk.root, disk.layers) = (arrived.root, arrived.layers.clone());
    }
    now.incoming_created_at_ms = None;
    now.write(repository, place)?;
    Ok(now)
}

/// # Errors
/// `Busy` while the session's point is on its way: what it captured has no whole point below it.
pub(crate) fn check_arrived(document: &SessionDocument) -> Result<()> {
    if document.incoming_created_at_ms.is_none() {
        return Ok(());
    }
    let SessionDocument { name, machine, point, .. } = document;
    let text = format!(
        "the copy of {machine}/{point} has not ended: session {name} cannot become a restore point before"
    );
    let advice = format!(
        "wait for the copy (coldrise show {machine}/{point}), or discard the writes: \
         coldrise unpublish {name} --discard"
    );
    Err(Error::new(ErrorKind::Busy, text).advise(advice))
}
