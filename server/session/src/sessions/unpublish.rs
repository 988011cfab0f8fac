//! Unpublish: ends a session, sealed or discarded.

use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result, path_exists};
use coldrise_store::{Repository, SessionName};

use crate::client_files::carry_idle;
use crate::incoming::{check_arrived, finish_arrival};
use crate::layer::{Layer, LayerKeys, ReadMode, SealFacts, layer_damage};
use crate::locks::file_lock::FileLock;
use crate::locks::owner_lock::check_not_owned;
use crate::paths::{SessionPaths, layer_path};
use crate::session_folder::addresses::{point_name, session_name};
use crate::session_folder::document::{SessionDisk, SessionDocument};
use crate::session_folder::ended::remove_remains;
use crate::session_folder::rollback_guard::check_not_older;
use crate::session_folder::side_file::forget_old_maps;
use crate::sessions::follow::SEAL_PATIENCE;
use crate::sessions::seal::{Sealed, check_layers, commit, idle_facts, seal};
use crate::sessions::seal_report::SealReport;

/// The slots of a layer that can have time marks only: one is made after a seal, and its cell fits into a slot.
const MOST_SLOTS_OF_MARKS: u32 = 4;

/// Whether a block was written. A time mark that is made after a seal does not count.
fn has_writes(repository: &Repository, disk: &SessionDisk, facts: &SealFacts) -> Result<bool> {
    if facts.sequence == 0 || facts.slots > MOST_SLOTS_OF_MARKS {
        return Ok(facts.sequence > 0);
    }
    let top = Layer::open_for_reading(
        &layer_path(repository, &disk.top),
        &disk.top_superblock(),
        LayerKeys::of(repository, &disk.top),
        ReadMode::Idle(disk.least_sequence),
    );
    Ok(top.map_err(layer_damage)?.next_captured(0).is_some())
}

/// Ends a session. The writes captured since its last seal become a restore point, which is
/// returned. With `discard` they are thrown away. There is no new point if nothing was captured and
/// neither a file of a client that the point would carry nor a part beside the disks has changed. Points sealed earlier stay.
///
/// # Errors
/// `NotFound`; `Busy` while a process has the session open, or owns it; `Corrupt` if a new point could not be
/// read, because the file of a layer is missing or damaged.
pub fn unpublish(
    repository: &Arc<Repository>,
    name: &SessionName,
    discard: bool,
) -> Result<Option<SealReport>> {
    let place = SessionPaths::of(repository, name);
    let found = match SessionDocument::of(repository, name) {
        Err(error) if discard && is_lost(repository, &place, name, &error)? => {
            return give_up(repository, &place, name).map(|()| None);
        }
        found => found?,
    };
    if !discard && found.follows.is_some() {
        // What comes after the newest mark is not a state of the machine.
        drop(take(&place, name, Some(&found))?);
        let sealed = seal(repository, name, SEAL_PATIENCE)?;
        return unpublish(repository, name, true).map(|_| Some(sealed));
    }
    let writing = take(&place, name, Some(&found))?;
    // The session may have been sealed or ended before this process got the lock.
    let mut document = SessionDocument::of(repository, name)?;
    check_not_owned(&place, name)?;
    if !discard {
        check_not_older(repository, &document)?;
        document = finish_arrival(repository, &place, document)?;
    }
    let writing = Arc::new(writing);
    let mut captured = None;
    if !discard {
        let facts = idle_facts(repository, &document, &writing)?;
        let carried = carry_idle(repository, &document)?;
        let before = document.files.as_ref().and_then(|files| files.hash.clone());
        let has_changed =
            carried.hash() != before || document.has_new_parts || document.has_unsealed_writes;
        let writes = document.disks.iter().zip(&facts);
        let mut writes = writes.map(|(disk, facts)| has_writes(repository, disk, facts));
        if has_changed || writes.try_fold(false, |found, one| one.map(|one| found | one))? {
            check_arrived(&document)?;
            check_layers(repository, &document)?;
            captured = Some((facts, carried));
        }
    }
    let marker = session_name(&document);
    repository.suspend_markers(std::slice::from_ref(&marker))?;
    let sealed = if let Some((facts, carried)) = captured {
        let sealed = Sealed { facts: &facts, carried: &carried, mark: None };
        let committed = commit(repository, &place, &sealed, None, &|| Ok(()))?;
        let (point, _) = committed.mark(repository, &carried);
        Some(SealReport { point, left_out: carried.left_out })
    } else {
        let _documents = FileLock::documents(repository)?;
        let mut ended = SessionDocument::of(repository, name)?;
        ended.is_ended = true;
        ended.write(repository, &place)?;
        None
    };
    // From here on the session has ended. The rest is cleanup that the next writer would also do.
    let _documents = FileLock::documents(repository)?;
    let ended = SessionDocument::read(repository, &place)?;
    if ended.as_ref().is_none_or(|ended| ended.is_ended) {
        // A writer may have created the marker again before the session ended.
        repository.unmark(&marker)?;
    }
    if let Some(ended) = ended {
        remove_remains(repository, &place, &ended)?;
    }
    Ok(sealed)
}

fn take(
    place: &SessionPaths,
    name: &SessionName,
    document: Option<&SessionDocument>,
) -> Result<FileLock> {
    FileLock::take(place)?.ok_or_else(|| {
        let process = coldrise_store::lock_holder(&place.lock());
        let by = process.map(|process| format!(" by process {process}")).unwrap_or_default();
        let received = document.and_then(|document| document.received.as_ref());
        let follows = document.is_some_and(|document| document.follows.is_some());
        let what = match received {
            Some(from) => {
                format!("end coldrise protect-live at site {}, or remove its link here,", from.link)
            }
            None if follows => "end coldrise protect-live".to_owned(),
            None => "shut the machine down, or disconnect its disks,".to_owned(),
        };
        let message = format!("session {name} is in use{by}: {what} and try again");
        Error::new(ErrorKind::Busy, message)
    })
}

/// True if a session whose document failed with this error must exist and cannot be read.
fn is_lost(
    repository: &Repository,
    place: &SessionPaths,
    name: &SessionName,
    error: &Error,
) -> Result<bool> {
    Ok(match error.kind() {
        ErrorKind::Corrupt => path_exists(place.directory())?,
        ErrorKind::NotFound => repository.is_marked(&format!("live/{name}")),
        _ => false,
    })
}

/// Removes a session whose document is damaged or missing. Its last writes are lost: the next gc
/// removes their layer.
///
/// # Errors
/// `Corrupt` while the catalog lacks points that were sealed from it, because only a repair knows
/// their layers; `Busy` while a process has the session open.
fn give_up(repository: &Repository, place: &SessionPaths, name: &SessionName) -> Result<()> {
    let _writing =
        if path_exists(place.directory())? { Some(take(place, name, None)?) } else { None };
    let _documents = FileLock::documents(repository)?;
    let sealed = repository.lost_points_of(name)?;
    if !sealed.is_empty() {
        let points: Vec<_> = sealed.iter().map(point_name).collect();
        let message = format!(
            "session {name} is damaged, and only markers still have the points sealed from it \
             ({}): run coldrise repair first, which restores them",
            points.join(", ")
        );
        return Err(Error::new(ErrorKind::Corrupt, message));
    }
    let marker = format!("live/{name}");
    repository.suspend_markers(std::slice::from_ref(&marker))?;
    if path_exists(place.directory())? {
        forget_old_maps(place)?;
        place.remove()?;
    }
    repository.unmark(&marker).map(|_| ())
}
