//! Seal: what a session captured becomes a restore point.
//!
//! Order of writes: flush the layers; make the new, empty layers (synced); store the
//! files that the point carries (synced); then one atomic, synced replacement of
//! `session.json`, which names the new point with all its disks and the new layers.
//! Before that rename nothing has happened; after it the point is there, whole. A
//! crash before it leaves empty layers and files that nothing refers to; the next
//! writer removes them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    LayerId, LayerReference, PointDocument, PointName, PointOrigin, Repository, SessionName,
};
use serde::{Deserialize, Serialize};

use crate::client_files::{carry_idle, Carried, LeftOut};
use crate::control;
use crate::document::{now_ms, SessionDisk, SessionDocument, SessionFiles};
use crate::layer::{Layer, Poison, SealFacts};
use crate::lock::{FileLock, PASSING_PATIENCE};
use crate::place::{layer_keys, layer_path, map_path, mark, remove_file, Place};
use crate::publish::create_tops;
use crate::sealed_files;
use crate::verify::point_name;

/// What a seal has made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealed {
    /// The restore point.
    pub point: PointDocument,
    /// Files of clients that are not in it because they are too large.
    #[serde(default)]
    pub left_out: Vec<LeftOut>,
}

/// Seals a session: through the process that serves it, or right here where
/// none does. Costs the same whatever was captured, once it is flushed. Waits at most
/// `patience` for the process that serves it, and logs after two seconds that it waits.
///
/// # Errors
/// `NotFound`; `Busy` when the process that holds the session did not begin the commit
/// within `patience`: then this seal never happens.
pub fn seal(
    repository: &Arc<Repository>,
    name: &SessionName,
    patience: Duration,
) -> Result<Sealed> {
    SessionDocument::of(repository, name)?;
    let place = Place::of(repository, name);
    let start = Instant::now();
    // Clients that come and go open and close it: then it is served at one moment
    // and idle at the next. Asking comes first, because a held lock is waited for.
    let writing = loop {
        if let Some(sealed) = control::ask_for_seal(repository, &place, name, patience)? {
            return Ok(sealed);
        }
        if let Some(writing) = FileLock::take(&place)? {
            break writing;
        }
        if start.elapsed() >= PASSING_PATIENCE {
            let process = FileLock::holder(&place.lock());
            let process = process.map_or("another process".to_owned(), |p| format!("process {p}"));
            let message = format!(
                "session {name} is being opened or closed by {process}; try again in a moment"
            );
            return Err(Error::new(ErrorKind::Busy, message));
        }
    };
    // It may have been sealed or ended until the lock was ours.
    let document = SessionDocument::of(repository, name)?;
    let writing = Arc::new(writing);
    let facts = idle_facts(repository, &document, &writing)?;
    let carried = carry_idle(repository, &document)?;
    let tops = new_tops(&document)?;
    create_tops(repository, tops.iter())?;
    let (point, _) = commit(repository, &place, &facts, &carried, Some(&tops), &|| Ok(()))?;
    mark(repository, &point_name(&point));
    for (disk, facts) in document.disks.iter().zip(&facts) {
        Layer::announce_change(&layer_path(repository, &disk.top));
        if facts.sequence == 0 {
            // Nothing was captured: the empty layer is in no point.
            remove_file(&layer_path(repository, &disk.top))?;
        }
    }
    Ok(Sealed { point, left_out: carried.left_out })
}

/// What the closed top layers hold; a layer that a crash left is put in order first.
pub(crate) fn idle_facts(
    repository: &Repository,
    document: &SessionDocument,
    writing: &Arc<FileLock>,
) -> Result<Vec<SealFacts>> {
    let facts = document.disks.iter().map(|disk| {
        let path = layer_path(repository, &disk.top);
        let superblock = disk.top_superblock();
        let keys = layer_keys(repository, &disk.top);
        if let Some(facts) = Layer::clean_facts(&path, &superblock, &keys, disk.least_sequence)? {
            return Ok(facts);
        }
        let (map, poison) = (map_path(&disk.top), Poison::default());
        let writing = Some(Arc::clone(writing));
        let layer = Layer::open_for_writing(&path, &superblock, keys, &map, poison, writing)?;
        layer.check_not_older(disk.least_sequence)?;
        let facts = layer.seal_facts();
        layer.stop_ahead();
        facts
    });
    facts.collect()
}

/// The disks as they will be, with new ids for the top layers.
pub(crate) fn new_tops(document: &SessionDocument) -> Result<Vec<SessionDisk>> {
    let mut tops = document.disks.clone();
    for disk in &mut tops {
        disk.top = LayerId::random()?;
        disk.least_sequence = 0;
    }
    Ok(tops)
}

/// The commit: names the point and replaces the document. `tops` are the new
/// top layers in the disks' order; without them the session ends. The caller
/// holds the session and lets no write in. `may_commit` has the last word, under the
/// documents' lock; where it fails nothing was sealed.
pub(crate) fn commit(
    repository: &Repository,
    place: &Place,
    facts: &[SealFacts],
    carried: &Carried,
    tops: Option<&[SessionDisk]>,
    may_commit: &dyn Fn() -> Result<()>,
) -> Result<(PointDocument, SessionDocument)> {
    let _documents = FileLock::documents(repository)?;
    // Another process may have entered sealed points since the caller read it.
    let Some(mut document) = SessionDocument::read(repository, place)? else {
        return Err(Error::new(ErrorKind::NotFound, "the session is gone"));
    };
    for disk in tops.unwrap_or_default() {
        // Until now nothing named them: somebody may have tidied them away.
        let path = layer_path(repository, &disk.top);
        path.symlink_metadata().map_err(|error| {
            let context = "a new layer is gone; nothing was sealed, try again";
            Error::with_source(ErrorKind::Busy, context, error)
        })?;
    }
    for (i, disk) in document.disks.iter_mut().enumerate() {
        let sealed = facts[i];
        // An empty layer adds nothing: it is left out, and never kept.
        if sealed.sequence > 0 {
            disk.layers.push(LayerReference {
                id: disk.top,
                sealed_sequence: sealed.sequence,
                sealed_slots: sealed.slots,
                sealed_records: sealed.records,
            });
        }
        if let Some(tops) = tops {
            disk.top = tops[i].top;
        }
    }
    let point = PointDocument {
        machine: document.machine.clone(),
        point: free_point_name(repository, &document)?,
        created_at_ms: now_ms(),
        origin: PointOrigin::Synthetic {
            base: document.point.clone(),
            session: document.name.clone(),
        },
        disks: document.disks.iter().map(SessionDisk::sealed).collect(),
        configuration: document.configuration.clone(),
        is_protected: false,
        quarantine: None,
        files: carried.set.as_ref().map(|(facts, _)| facts.clone()),
    };
    point.check()?;
    may_commit()?;
    if let Some((_, files)) = &carried.set {
        sealed_files::write(repository, place, &point, files)?;
    }
    if document.files.is_some() || carried.set.is_some() {
        document.files = Some(SessionFiles { hash: carried.hash() });
    }
    document.sealed.push(point.clone());
    document.is_ended = tops.is_none();
    document.write(repository, place)?;
    Ok((point, document))
}

/// The next `+N` of the published point's time that no point ever had, one that was
/// forgotten included. The documents' lock is held, so it stays free.
fn free_point_name(repository: &Repository, document: &SessionDocument) -> Result<PointName> {
    let (time, _) = document.point.lineage();
    let mut highest = 0;
    for (_, session) in SessionDocument::all(repository)? {
        let points = session.sealed.iter().filter(|point| point.machine == document.machine);
        let lineages = points.map(|point| point.point.lineage());
        let numbers = lineages.filter(|(its_time, _)| *its_time == time).map(|(_, number)| number);
        highest = highest.max(numbers.max().unwrap_or(0));
    }
    repository.catch_up()?;
    highest = highest.max(repository.highest_number(&document.machine, &document.point)?);
    document.point.synthetic(highest + 1)
}

#[cfg(test)]
#[path = "seal_tests.rs"]
mod tests;
