//! Unpublish: a session ends, sealed or discarded.

use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{Repository, SessionName};

use crate::client_files::carry_idle;
use crate::document::SessionDocument;
use crate::lock::FileLock;
use crate::place::{layer_path, map_path, mark, remove_file, Place};
use crate::seal::{commit, idle_facts, Sealed};
use crate::side_file::forget_old_maps;
use crate::verify::{point_name, session_name};

/// Ends a session. What it captured since its last seal becomes a restore point,
/// which is returned, or is thrown away with `discard`; where nothing was captured, and
/// no file of a client changed that it would carry, there is no new point. Points
/// sealed earlier stay.
///
/// # Errors
/// `NotFound`; `Busy` while a process has the session open.
pub fn unpublish(
    repository: &Arc<Repository>,
    name: &SessionName,
    discard: bool,
) -> Result<Option<Sealed>> {
    match SessionDocument::of(repository, name) {
        // It is lost, and nobody is to look for it any more.
        Err(error)
            if error.kind() == ErrorKind::NotFound
                && discard
                && repository.unmark(&format!("live/{name}"))? =>
        {
            return Ok(None);
        }
        found => found.map(|_| ())?,
    }
    let place = Place::of(repository, name);
    let Some(writing) = FileLock::take(&place)? else {
        let process = FileLock::holder(&place.lock());
        let by = process.map(|process| format!(" by process {process}")).unwrap_or_default();
        return Err(Error::new(
            ErrorKind::Busy,
            format!(
                "session {name} is in use{by}: shut the machine down, or disconnect its disks, \
                 and try again"
            ),
        ));
    };
    // It may have been sealed or ended until the lock was ours.
    let document = SessionDocument::of(repository, name)?;
    let writing = Arc::new(writing);
    let marker = session_name(&document);
    repository.suspend_markers(std::slice::from_ref(&marker))?;
    let mut sealed = None;
    if !discard {
        let facts = idle_facts(repository, &document, &writing)?;
        let carried = carry_idle(repository, &document)?;
        let before = document.files.as_ref().and_then(|files| files.hash.clone());
        let has_changed = carried.hash() != before;
        if has_changed || facts.iter().any(|facts| facts.sequence > 0) {
            let (point, _) = commit(repository, &place, &facts, &carried, None, &|| Ok(()))?;
            mark(repository, &point_name(&point));
            sealed = Some(Sealed { point, left_out: carried.left_out });
        }
    }
    if sealed.is_none() {
        let _documents = FileLock::documents(repository)?;
        let mut ended = SessionDocument::of(repository, name)?;
        ended.is_ended = true;
        ended.write(repository, &place)?;
    }
    // From here on the session is gone; the rest is tidying that the next
    // writer would do as well.
    let _documents = FileLock::documents(repository)?;
    let ended = SessionDocument::read(repository, &place)?;
    if ended.as_ref().is_none_or(|ended| ended.is_ended) {
        // A writer may have made it anew before the session had ended.
        repository.unmark(&marker)?;
    }
    if let Some(ended) = ended {
        tidy(repository, &place, &ended)?;
    }
    Ok(sealed)
}

/// Removes what an ended session no longer needs: top layers that are in no
/// point, what clients wrote beside the disks, and the folder once every point is in the catalog. The
/// documents' lock is held.
pub(crate) fn tidy(
    repository: &Repository,
    place: &Place,
    document: &SessionDocument,
) -> Result<()> {
    if !document.is_ended {
        return Ok(());
    }
    for disk in &document.disks {
        if !disk.layers.iter().any(|layer| layer.id == disk.top) {
            remove_file(&layer_path(repository, &disk.top))?;
        }
        // Left by a writer that was killed.
        remove_file(&map_path(&disk.top))?;
    }
    forget_old_maps(place)?;
    if document.sealed.is_empty() {
        return place.remove();
    }
    place.remove_files()
}
