//! Detects older versions of a session's files that were put back.
//!
//! A session's document is replaced, and the layers that take its writes grow. An older version of
//! one of them would otherwise appear sound.
//!
//! | put back | noticed by |
//! |---|---|
//! | a layer | the document names the last sequence number when the session was closed |
//! | `session.json` | `progress`: each document has a higher revision |
//! | both progress files | the document: they are at most one revision behind it |
//! | the whole session | the catalog or the marker of a point sealed later: its number is higher than all that the document knows |
//!
//! `live/HASH/progress` and `progress-copy` have the same content. The first one is synced. They
//! are written after the document is durable and before the next one, so a crash leaves them one
//! document behind. Damage to one copy heals with the next document, and with the next writer.
//! Without either copy an older version cannot be detected: that is damage to the session, except
//! for a session whose first document a crash left without them.

use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{CatalogDamage, PointDocument, PointOrigin, Repository, SessionName};

use crate::layer::{Layer, LayerKeys};
use crate::locks::file_lock::FileLock;
use crate::paths::{SessionPaths, layer_path};
use crate::session_folder::addresses::{session_disk, session_name};
use crate::session_folder::document::SessionDocument;
use crate::session_folder::progress::{SessionProgress, read_copy};

/// Writes both copies if one is damaged. The caller holds the documents' lock. If this fails, the
/// next document repairs them.
pub(crate) fn heal_progress(
    repository: &Repository,
    place: &SessionPaths,
    document: &SessionDocument,
) {
    let healed = damaged_progress(repository, place, document).and_then(|damaged| {
        damaged.map_or(Ok(()), |_| SessionProgress::note(repository, place, document.revision))
    });
    if let Err(error) = healed {
        tracing::warn!(error = %error.full_message(), "a copy of a session's progress stays damaged");
    }
}

/// The damaged one of the two progress files.
fn damaged_progress(
    repository: &Repository,
    place: &SessionPaths,
    document: &SessionDocument,
) -> Result<Option<CatalogDamage>> {
    for path in place.progress() {
        let reason = match read_copy(repository, place, &path) {
            // A crash may leave the first document with one copy.
            Ok(None) if document.revision > 1 => "it is missing".to_owned(),
            Err(error) if error.kind() == ErrorKind::Corrupt => error.full_message(),
            copy => {
                copy?;
                continue;
            }
        };
        let what = format!("{}: {}", session_name(document), path.display());
        let reason = format!(
            "{reason}; the other copy is sound, and the next command that writes to the \
             repository writes both"
        );
        return Ok(Some(CatalogDamage::new(what, reason)));
    }
    Ok(None)
}

/// Damage to a session's protection against older versions of itself.
#[derive(Debug, Default)]
pub struct SessionDamage {
    /// Set if a point was sealed from a later version of the session.
    pub older: Option<CatalogDamage>,
    /// Damage to one of two copies. Nothing is lost, and the copies heal.
    pub guards: Vec<CatalogDamage>,
}

/// Compares a session with the points sealed from it, and reads both copies of all duplicated files and marks.
///
/// # Errors
/// The operating system's error.
pub fn session_damage(
    repository: &Arc<Repository>,
    document: &SessionDocument,
) -> Result<SessionDamage> {
    let place = SessionPaths::of(repository, &document.name);
    let mut damage = SessionDamage::default();
    let Some(document) = ({
        // Under this lock no change is unfinished.
        let _documents = FileLock::documents(repository)?;
        let now = SessionDocument::read(repository, &place)?.filter(|now| !now.is_ended);
        if let Some(now) = &now {
            let error = check_not_older(repository, now).err();
            damage.older =
                error.map(|error| CatalogDamage::new(session_name(document), error.full_message()));
            damage.guards.extend(damaged_progress(repository, &place, now)?);
        }
        now
    }) else {
        return Ok(damage);
    };
    for disk in &document.disks {
        let path = layer_path(repository, &disk.top);
        if let Some(reason) = Layer::damaged_mark(&path, &LayerKeys::of(repository, &disk.top)) {
            let what = format!("a layer of {}", session_disk(&document, disk));
            let reason = format!(
                "{reason}; the other one is sound, and the next flush or opening of the session \
                 writes both"
            );
            damage.guards.push(CatalogDamage::new(what, reason));
        }
    }
    Ok(damage)
}

/// Refuses a reader of a session that is older than a point sealed from it.
///
/// # Errors
/// As [`check_not_older`]; `NotFound`.
pub(crate) fn check_for_reader(repository: &Repository, name: &SessionName) -> Result<()> {
    if check_not_older(repository, &SessionDocument::of(repository, name)?).is_ok() {
        return Ok(());
    }
    // A seal writes its point before the session's document. Under this lock none is between them.
    let _documents = FileLock::documents(repository)?;
    check_not_older(repository, &SessionDocument::of(repository, name)?)
}

/// Compares a session with the catalog and with the markers of points that are not in it yet: a
/// point that was sealed from this session, and that its document does not know, was sealed from a
/// later version. The caller holds the session's lock or the documents' lock.
///
/// # Errors
/// `Corrupt`, naming the last such point.
pub(crate) fn check_not_older(repository: &Repository, document: &SessionDocument) -> Result<()> {
    let Some(highest) = document.highest_number else { return Ok(()) };
    let is_later = |point: &PointDocument| {
        let PointOrigin::Synthetic { session, .. } = &point.origin else { return false };
        point.point.lineage().1 > highest && *session == document.name
    };
    let last = |points: Vec<PointDocument>| {
        points.into_iter().filter(is_later).max_by_key(|point| point.point.lineage().1)
    };
    let (machine, base) = (&document.machine, &document.point);
    // Without the catalog only the markers are known. Commands that need the catalog report its
    // damage.
    let caught_up = repository.catch_up();
    let points = caught_up.and_then(|()| repository.points_after(machine, base, highest));
    let points = points.unwrap_or_default();
    let known = repository.highest_number(machine, base).unwrap_or(0);
    // Points that no writer has entered have the next numbers, without a gap.
    let waiting = repository.marked_after(machine, base, known.max(highest)).unwrap_or_default();
    let (later, first) = match (last(waiting), last(points)) {
        (Some(later), _) => (later, "run coldrise repair, which restores that point, "),
        (None, Some(later)) => (later, ""),
        (None, None) => return Ok(()),
    };
    let message = format!(
        "session {name} is older than it was: {machine}/{point} was sealed from a later version of \
         it. Put back a newer copy of its files, or {first}discard it with coldrise unpublish \
         {name} --discard and publish that point",
        name = document.name,
        point = later.point
    );
    Err(Error::new(ErrorKind::Corrupt, message))
}
