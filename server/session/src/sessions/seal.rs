//! Seal: the writes captured by a session become a restore point.
//!
//! Order of writes: flush the layers; make the new, empty layers (synced); store the files that the
//! point carries (synced); then one atomic, synced replacement of `session.json`, which names the
//! new point with all its disks and the new layers. Before that rename nothing has happened. After
//! it the point exists completely. A crash before it leaves unreferenced empty layers and files;
//! the next writer removes them. Then the point's marker is made, with its document and its files:
//! if `session.json` is lost, a repair restores the point from the marker. `live/lock` is held
//! until then.

use coldrise_block::now_ms;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result, path_exists, remove_if_present};
use coldrise_store::{
    LayerReference, PointDocument, PointName, PointOrigin, PointSelector, Repository, SessionName,
    SessionTime,
};

use crate::client_files::sealed;
use crate::client_files::{Carried, carry_idle};
use crate::incoming::{check_arrived, finish_arrival};
use crate::layer::{Layer, LayerKeys, Poison, SealFacts, Superblock, layer_damage};
use crate::locks::file_lock::{FileLock, PASSING_PATIENCE};
use crate::paths::{SessionPaths, layer_path, map_path};
use crate::points::catalog::Catalog;
use crate::session_folder::document::{SessionDisk, SessionDocument, SessionFiles};
use crate::session_folder::rollback_guard::check_not_older;
use crate::session_folder::top_layers::with_new_tops;
use crate::sessions::control;
use crate::sessions::follow::newest;
use crate::sessions::marks::{SessionMark, check_there, choose, marks_in_layers, session_marks};
use crate::sessions::publish::RECEIVED_NUMBERS;
use crate::sessions::seal_report::SealReport;

/// Seals a session through the process that serves it, or in this process if none does. After the
/// flush the cost does not depend on the captured data. Waits at most `patience` for the process
/// that serves it, and logs after two seconds that it waits.
///
/// # Errors
/// `NotFound`; `Busy` if the process that holds the session did not begin the commit within
/// `patience`: then this seal never happens; `Corrupt` if the file of a layer is missing or damaged.
/// A session that follows a machine is sealed as of its newest mark: `NotFound` if it has none.
pub fn seal(
    repository: &Arc<Repository>,
    name: &SessionName,
    patience: Duration,
) -> Result<SealReport> {
    if SessionDocument::of(repository, name)?.follows.is_none() {
        return seal_mark(repository, name, None, patience);
    }
    let marks = session_marks(repository, name)?.marks;
    Ok(seal_once(repository, name, newest(&marks, name)?, patience)?.report)
}

/// Seals a session as it was at the mark that `time` means. A point that shows this mark already is
/// returned instead of a new one.
///
/// # Errors
/// As for [`seal`]; `NotFound` if there is no such mark, naming the nearest ones.
pub fn seal_at(
    repository: &Arc<Repository>,
    name: &SessionName,
    time: &SessionTime,
    patience: Duration,
) -> Result<SealReport> {
    let marks = session_marks(repository, name)?;
    Ok(seal_once(repository, name, choose(&marks.marks, time, name)?, patience)?.report)
}

/// The point that shows a mark.
pub(crate) struct SealedMark {
    pub(crate) report: SealReport,
    /// It did not exist before.
    pub(crate) is_new: bool,
}

/// Seals a session as it was at this mark, as [`seal_at`] does.
///
/// # Errors
/// As for [`seal`]; `NotFound` if the mark is gone.
pub fn seal_mark_of(
    repository: &Arc<Repository>,
    name: &SessionName,
    mark: &SessionMark,
    patience: Duration,
) -> Result<SealReport> {
    Ok(seal_once(repository, name, mark, patience)?.report)
}

pub(crate) fn seal_once(
    repository: &Arc<Repository>,
    name: &SessionName,
    mark: &SessionMark,
    patience: Duration,
) -> Result<SealedMark> {
    let known = SessionDocument::of(repository, name)?.point_of_mark(mark.time_ns);
    if let Some((machine, point)) = known {
        let selector = PointSelector::Exact(point);
        match Catalog::new(repository).point(&machine, &selector) {
            Ok(point) => {
                let report = SealReport { point, left_out: Vec::new() };
                return Ok(SealedMark { report, is_new: false });
            }
            // It was forgotten meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    let report = seal_mark(repository, name, Some(mark), patience)?;
    Ok(SealedMark { report, is_new: true })
}

pub(crate) fn seal_mark(
    repository: &Arc<Repository>,
    name: &SessionName,
    mark: Option<&SessionMark>,
    patience: Duration,
) -> Result<SealReport> {
    SessionDocument::of(repository, name)?;
    // The commit checks this, too; here it is the first error on a full drive.
    repository.keep_room_for_gc()?;
    let place = SessionPaths::of(repository, name);
    let start = Instant::now();
    // Clients connect and disconnect, so the session may be served at one moment and idle at the
    // next. Ask first, because taking a held lock waits.
    let writing = loop {
        if let Some(sealed) = control::ask_for_seal(repository, &place, name, mark, patience)? {
            return Ok(sealed);
        }
        if let Some(writing) = FileLock::take(&place)? {
            break writing;
        }
        if start.elapsed() >= PASSING_PATIENCE {
            let process = coldrise_store::lock_holder(&place.lock());
            let process = process.map_or("another process".to_owned(), |p| format!("process {p}"));
            let message = format!(
                "session {name} is being opened or closed by {process}; try again in a moment"
            );
            return Err(Error::new(ErrorKind::Busy, message));
        }
    };
    // The session may have been sealed or ended before this process got the lock.
    let document = SessionDocument::of(repository, name)?;
    check_not_older(repository, &document)?;
    let document = finish_arrival(repository, &place, document)?;
    check_arrived(&document)?;
    let writing = Arc::new(writing);
    check_layers(repository, &document)?;
    let carried = carry_idle(repository, &document)?;
    if mark.is_some_and(|mark| mark.is_sealed(&document)) {
        let committed = commit_sealed(repository, &place, &document, &carried, mark, &|| Ok(()))?;
        let (point, _) = committed.mark(repository, &carried);
        return Ok(SealReport { point, left_out: carried.left_out });
    }
    if let Some(mark) = mark {
        // A process may have served it since the mark was chosen, and removed the mark.
        check_there(mark, &marks_in_layers(repository, &document)?)?;
    }
    let facts = idle_facts(repository, &document, &writing)?;
    let committed = with_new_tops(repository, &document, |tops| {
        let sealed = Sealed { facts: &facts, carried: &carried, mark };
        commit(repository, &place, &sealed, Some(tops), &|| Ok(()))
    })?;
    let (point, _) = committed.mark(repository, &carried);
    for (disk, facts) in document.disks.iter().zip(&facts) {
        Layer::announce_change(&layer_path(repository, &disk.top));
        if facts.sequence == 0 {
            // Nothing was captured: the empty layer is in no point.
            remove_if_present(&layer_path(repository, &disk.top))?;
        }
    }
    Ok(SealReport { point, left_out: carried.left_out })
}

/// Checks the files of the sealed layers that the next point would name: without one of them the
/// point could not be read. The cost does not depend on the captured data. The caller holds the
/// session, so that no fold moves it meanwhile.
///
/// # Errors
/// `Corrupt`, naming the file.
pub(crate) fn check_layers(repository: &Repository, document: &SessionDocument) -> Result<()> {
    let name = &document.name;
    for disk in &document.disks {
        for layer in &disk.layers {
            let path = layer_path(repository, &layer.id);
            let superblock = Superblock { id: layer.id.0, disk_size_bytes: disk.size_bytes };
            let keys = LayerKeys::of(repository, &layer.id);
            Layer::check_sealed(&path, &superblock, &keys, layer.sealed_slots).map_err(
                |error| {
                    let error = error.context(format!("session {name}, disk {}", disk.name));
                    layer_damage(error.advise(format!(
                    "nothing was sealed. Put the file back from a copy of the repository, or end \
                     the session without its last writes: coldrise unpublish {name} --discard"
                )))
                },
            )?;
        }
    }
    Ok(())
}

/// The extents of the closed top layers. A layer that a crash left is recovered first.
pub(crate) fn idle_facts(
    repository: &Repository,
    document: &SessionDocument,
    writing: &Arc<FileLock>,
) -> Result<Vec<SealFacts>> {
    let facts = document.disks.iter().map(|disk| {
        let path = layer_path(repository, &disk.top);
        let superblock = disk.top_superblock();
        let keys = LayerKeys::of(repository, &disk.top);
        let clean = Layer::clean_facts(&path, &superblock, &keys, disk.least_sequence);
        if let Some(facts) = clean.map_err(layer_damage)? {
            return Ok(facts);
        }
        let (map, poison) = (map_path(&disk.top), Poison::default());
        let writing = Some(Arc::clone(writing));
        let layer = Layer::open_for_writing(&path, &superblock, keys, &map, poison, writing)?;
        layer.check_not_older(disk.least_sequence)?;
        layer.seal_facts()
    });
    facts.collect()
}

/// A committed seal: the point exists, and its marker is still to be made.
pub(crate) struct Committed {
    pub(crate) point: PointDocument,
    pub(crate) document: SessionDocument,
    /// Prevents writers from entering the point and removing it before it has its marker.
    documents: FileLock,
}

impl Committed {
    /// Makes the point's marker, durably. A failure is logged: the writer that enters the point
    /// into the catalog then makes the marker. Returns the point and the session's new document.
    pub(crate) fn mark(
        self,
        repository: &Repository,
        carried: &Carried,
    ) -> (PointDocument, SessionDocument) {
        let files = carried.set.as_ref().map(|(_, files)| files.as_slice());
        if let Err(error) = repository.mark_point(&self.point, files) {
            tracing::warn!(error = %error.full_message(), "a marker is left to the next writer");
        }
        drop(self.documents);
        (self.point, self.document)
    }
}

/// What is sealed.
pub(crate) struct Sealed<'a> {
    /// The extents of the top layers, in the disks' order. An empty one is in no point.
    pub(crate) facts: &'a [SealFacts],
    pub(crate) carried: &'a Carried,
    /// The point shows the disks at this mark. Otherwise it shows them as they are.
    pub(crate) mark: Option<&'a SessionMark>,
}

/// Commits a point at a mark whose layers are sealed already: the top layers stay.
pub(crate) fn commit_sealed(
    repository: &Repository,
    place: &SessionPaths,
    document: &SessionDocument,
    carried: &Carried,
    mark: Option<&SessionMark>,
    may_commit: &dyn Fn() -> Result<()>,
) -> Result<Committed> {
    let facts = vec![SealFacts::default(); document.disks.len()];
    let sealed = Sealed { facts: &facts, carried, mark };
    commit(repository, place, &sealed, Some(&document.disks), may_commit)
}

/// The commit: names the point and replaces the document. `tops` are the new top layers in the
/// disks' order; without them the session ends. The caller holds the session and keeps writes out.
/// `may_commit` is called last, under the documents' lock. If it fails, nothing was sealed.
pub(crate) fn commit(
    repository: &Repository,
    place: &SessionPaths,
    sealed: &Sealed<'_>,
    tops: Option<&[SessionDisk]>,
    may_commit: &dyn Fn() -> Result<()>,
) -> Result<Committed> {
    repository.keep_room_for_gc()?;
    let Sealed { facts, carried, mark } = *sealed;
    let documents = FileLock::documents(repository)?;
    // Another process may have entered sealed points since the caller read the document.
    let Some(mut document) = SessionDocument::read(repository, place)? else {
        return Err(Error::new(ErrorKind::NotFound, "the session is gone"));
    };
    for disk in tops.unwrap_or_default() {
        // No document names them yet: another process may have removed them.
        if !path_exists(&layer_path(repository, &disk.top))? {
            let message = "a gc or a fold removed a new layer of the session before the commit; \
                           nothing was sealed, try again";
            return Err(Error::new(ErrorKind::Busy, message));
        }
    }
    let rules = document.mark_rules();
    let longest_ms = u64::try_from(rules.longest().as_millis()).unwrap_or(u64::MAX);
    for (i, disk) in document.disks.iter_mut().enumerate() {
        let sealed = facts[i];
        // An empty layer adds nothing, so the point does not name it.
        if sealed.sequence > 0 {
            disk.layers.push(LayerReference {
                id: disk.top,
                sealed_sequence: sealed.sequence,
                sealed_slots: sealed.slots,
                sealed_cells: sealed.cells,
                layer_sequence: None,
                marks_until_ms: (tops.is_some() && sealed.cells > 0 && !rules.is_off())
                    .then(|| now_ms().saturating_add(longest_ms)),
            });
        }
        if let Some(tops) = tops.filter(|tops| tops[i].top != disk.top) {
            disk.top = tops[i].top;
            disk.least_sequence = 0;
        }
    }
    let disks = match mark {
        Some(mark) => mark.disks(&document.disks)?,
        None => document.disks.iter().map(SessionDisk::sealed).collect(),
    };
    let point = PointDocument {
        machine: document.machine.clone(),
        point: free_point_name(repository, &document)?,
        created_at_ms: now_ms(),
        origin: PointOrigin::Synthetic {
            base: document.point.clone(),
            session: document.name.clone(),
            marked_at_ms: mark.map(|mark| mark.time_ns / 1_000_000),
        },
        disks,
        configuration: document.configuration.clone(),
        parts: document.parts.clone(),
        is_protected: false,
        quarantine: None,
        made_in: None,
        display_name: document.display_name.clone(),
        came_by: Vec::new(),
        files: carried.set.as_ref().map(|(facts, _)| facts.clone()),
    };
    point.check()?;
    may_commit()?;
    if let Some((_, files)) = &carried.set {
        sealed::write(repository, place, &point, files)?;
    }
    if document.files.is_some() || carried.set.is_some() {
        document.files = Some(SessionFiles { hash: carried.hash() });
    }
    document.highest_number = Some(point.point.lineage().1);
    document.has_new_parts = false;
    document.has_unsealed_writes = match mark {
        None => false,
        // They may be later than the mark.
        Some(_) => document.has_unsealed_writes || facts.iter().any(|facts| facts.sequence > 0),
    };
    if let Some(mark) = mark {
        document.note_mark_point(mark.time_ns, &point.point);
    }
    document.sealed.push(point.clone());
    document.is_ended = tops.is_none();
    document.write(repository, place)?;
    Ok(Committed { point, document, documents })
}

/// The next `+N` of the published point's time that no point ever had, including forgotten ones.
/// The caller holds the documents' lock, so the name stays free.
fn free_point_name(repository: &Repository, document: &SessionDocument) -> Result<PointName> {
    let (time, _) = document.point.lineage();
    let mut highest = if document.received.is_some() { RECEIVED_NUMBERS } else { 0 };
    for (_, session) in SessionDocument::readable(repository)? {
        let points = session.sealed.iter().filter(|point| point.machine == document.machine);
        let lineages = points.map(|point| point.point.lineage());
        let numbers = lineages.filter(|(its_time, _)| *its_time == time).map(|(_, number)| number);
        highest = highest.max(numbers.max().unwrap_or(0));
    }
    repository.catch_up()?;
    highest = highest.max(repository.highest_number(&document.machine, &document.point)?);
    loop {
        highest += 1;
        let point = document.point.synthetic(highest)?;
        // Markers still know the points of a session whose document is damaged.
        if !repository.is_marked(&format!("{}/{point}", document.machine)) {
            return Ok(point);
        }
    }
}

#[cfg(test)]
#[path = "seal_tests.rs"]
mod tests;
