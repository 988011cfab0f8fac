//! Publish: a restore point becomes a writable session.
//!
//! Order of writes: first the empty layers and their folder, the pending marker, the session's
//! folder and its initial files (all synced, and in parallel: none refers to another). Then
//! `session.json` (synced, renamed, synced). Then the marker appears. A crash before the document
//! leaves unreferenced empty layers; the next writer removes them. It may also leave files: without
//! a document they belong to no session, and the next publish of that name replaces them.

use coldrise_block::now_ms;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result, sync_directory};
use coldrise_store::{LATEST, LayerId, MarkRules, PointDocument, Repository, SessionName};

use crate::client_files::{CarriedFiles, begin_files};
use crate::incoming::IncomingPoint;
use crate::locks::file_lock::FileLock;
use crate::paths::{SessionPaths, prepare_mark};
use crate::points::catalog::Catalog;
use crate::session_folder::addresses::session_name;
use crate::session_folder::document::{
    ReceivedFrom, SessionDisk, SessionDocument, SessionFiles, damage,
};
use crate::session_folder::ended::remove_remains;
use crate::session_folder::top_layers::create_tops;

/// Publishes a point under a name. Without a name, uses the machine's name and the first free
/// number. The cost does not depend on the point's size.
///
/// # Errors
/// `AlreadyExists` if a session has the name; `Corrupt` if a lost session has it; `NotFound` if the
/// point was forgotten meanwhile.
pub fn publish(
    repository: &Arc<Repository>,
    point: &PointDocument,
    name: Option<SessionName>,
) -> Result<SessionDocument> {
    publish_with_files(repository, point, name, |_, files| Ok(files))
}

/// Like [`publish`]. `arrange` receives the files that the point carries, and returns those with
/// which the session begins.
///
/// # Errors
/// As for [`publish`], and the errors of `arrange`.
pub fn publish_with_files(
    repository: &Arc<Repository>,
    point: &PointDocument,
    name: Option<SessionName>,
    arrange: impl FnOnce(&SessionDocument, CarriedFiles) -> Result<CarriedFiles>,
) -> Result<SessionDocument> {
    publish_bounded(repository, point, name, None, arrange)
}

/// Like [`publish_with_files`], for a point that is still on its way here. If it has arrived meanwhile, publishes it as
/// usual.
///
/// # Errors
/// As for [`publish_with_files`]; `NotFound` if it is not on its way any more.
pub fn publish_incoming(
    repository: &Arc<Repository>,
    incoming: &IncomingPoint,
    name: Option<SessionName>,
    arrange: impl FnOnce(&SessionDocument, CarriedFiles) -> Result<CarriedFiles>,
) -> Result<SessionDocument> {
    let point = &incoming.point.document;
    match Catalog::new(repository).confirm(point) {
        Ok(arrived) => publish_with_files(repository, &arrived, name, arrange),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let how = How { incoming: Some(incoming), ..How::default() };
            publish_subject(repository, point, name, how, arrange)
        }
        Err(error) => Err(error),
    }
}

/// Like [`publish_with_files`]. Each disk captures at most `limit` bytes.
pub(crate) fn publish_bounded(
    repository: &Arc<Repository>,
    point: &PointDocument,
    name: Option<SessionName>,
    limit: Option<u64>,
    arrange: impl FnOnce(&SessionDocument, CarriedFiles) -> Result<CarriedFiles>,
) -> Result<SessionDocument> {
    let how = How { limit, ..How::default() };
    publish_subject(repository, point, name, how, arrange)
}

/// Like [`publish`], as a session that follows the machine at `source`.
pub(crate) fn publish_following(
    repository: &Arc<Repository>,
    point: &PointDocument,
    name: Option<SessionName>,
    source: &str,
    rules: MarkRules,
) -> Result<SessionDocument> {
    let how = How { follows: Some((source, rules)), ..How::default() };
    publish_subject(repository, point, name, how, |_, files| Ok(files))
}

/// Like [`publish_following`], as a session that holds the marks of a session at another site. Points that are sealed
/// from it get numbers that none there has.
pub(crate) fn publish_received(
    repository: &Arc<Repository>,
    point: &PointDocument,
    received: &ReceivedFrom,
    after_ms: u64,
) -> Result<SessionDocument> {
    let source = format!("live/{} of site {}", received.session, received.link);
    let follows = Some((&*source, MarkRules::default()));
    let how = How { follows, received: Some(received), after_ms, ..How::default() };
    publish_subject(repository, point, None, how, |_, files| Ok(files))
}

/// The numbers of points that are sealed from received sessions are higher: the other site's may be copied here later.
pub(crate) const RECEIVED_NUMBERS: u32 = 1_000_000;

/// What distinguishes sessions when they are published.
#[derive(Default)]
struct How<'a> {
    /// The point is on its way here.
    incoming: Option<&'a IncomingPoint>,
    /// The most that each disk captures, in bytes.
    limit: Option<u64>,
    /// Where the machine is that the session follows, and which of its marks are kept.
    follows: Option<(&'a str, MarkRules)>,
    /// The session at another site whose marks come here.
    received: Option<&'a ReceivedFrom>,
    /// It is newer than what was published then, in milliseconds since 1970, whatever the clock says.
    after_ms: u64,
}

/// Publishes a point of the catalog, or one that is incoming.
fn publish_subject(
    repository: &Arc<Repository>,
    point: &PointDocument,
    name: Option<SessionName>,
    how: How<'_>,
    arrange: impl FnOnce(&SessionDocument, CarriedFiles) -> Result<CarriedFiles>,
) -> Result<SessionDocument> {
    let How { incoming, limit, follows, received, after_ms } = how;
    let (follows, rules) = follows.unzip();
    let carried = match incoming {
        Some(incoming) if incoming.point.files.is_empty() => CarriedFiles::default(),
        Some(incoming) => CarriedFiles::decode(&incoming.point.files)?,
        None => Catalog::new(repository).files(point)?,
    };
    repository.keep_room_for_gc()?;
    let _documents = FileLock::documents(repository)?;
    // A deletion reads the sessions under this lock, after it has removed the point.
    let point = &match incoming {
        Some(incoming) => incoming.confirm(repository).map(|()| point.clone())?,
        None => Catalog::new(repository).confirm(point)?,
    };
    let name = match name {
        // As for machines. Older sessions of this name remain usable.
        Some(name) if name.as_str() == LATEST => {
            let message =
                format!("{LATEST:?} is not a session name: it addresses the newest point");
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        Some(name) => name,
        None => free_name(repository, point)?,
    };
    let place = SessionPaths::of(repository, &name);
    let mut sealed = Vec::new();
    if let Some(there) = read_unless_lost(repository, &place, &name)? {
        if !there.is_ended {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("there is already a session {name}: choose another name"),
            ));
        }
        // The ended session exists only for its restore points, until they are in the catalog: they
        // move to the new document.
        remove_remains(repository, &place, &there)?;
        sealed = there.sealed;
    }
    // An ended session of this name may have points that the catalog does not have yet.
    let known = sealed.iter().filter(|sealed| sealed.point.lineage().0 == point.point.lineage().0);
    let known = known.map(|sealed| sealed.point.lineage().1).max();
    // If the catalog is damaged the number is unknown, and the next seal records it.
    let highest = repository.highest_number(&point.machine, &point.point).ok();
    let highest = highest.max(received.map(|_| RECEIVED_NUMBERS));
    let mut disks = Vec::with_capacity(point.disks.len());
    for disk in &point.disks {
        disks.push(SessionDisk {
            name: disk.name.clone(),
            size_bytes: disk.size_bytes,
            root: disk.root,
            layers: disk.layers.clone(),
            top: LayerId::random()?,
            least_sequence: 0,
            captured_bytes_limit: limit,
        });
    }
    let mut document = SessionDocument {
        name,
        machine: point.machine.clone(),
        point: point.point.clone(),
        created_at_ms: now_ms().max(after_ms.saturating_add(1)),
        disks,
        configuration: point.configuration.clone(),
        parts: point.parts.clone(),
        has_new_parts: false,
        has_unsealed_writes: false,
        display_name: point.display_name.clone(),
        files: Some(SessionFiles::default()),
        sealed,
        // A session that is bounded lives as long as its command.
        marks: limit.is_none().then(|| rules.unwrap_or_default()),
        follows: follows.map(str::to_owned),
        received: received.cloned(),
        mark_points: Vec::new(),
        highest_number: highest.map(|highest| highest.max(known.unwrap_or(0))),
        incoming_created_at_ms: incoming.map(|_| point.created_at_ms),
        is_ended: false,
        revision: 0,
    };
    let marker_name = session_name(&document);
    let tops = document.disks.clone();
    let prepare_files = || {
        place.create()?;
        sync_directory(&repository.live_dir())?;
        // This becomes durable with the document: a seal need not sync the folder again.
        SessionPaths::make_folder(&place.sealed_files())?;
        place.remove_files()?;
        let files = arrange(&document, carried)?;
        let hash = begin_files(repository, &document, &files)?;
        document.files = Some(SessionFiles { hash });
        Ok(())
    };
    let (prepared, marker) = std::thread::scope(|scope| {
        let marker = scope.spawn(|| prepare_mark(repository, &marker_name));
        let layers = scope.spawn(|| create_tops(repository, tops.iter()));
        let prepared = prepare_files();
        let made = layers.join().unwrap_or_else(|_| Err(panicked()));
        (prepared.and(made.map(drop)), marker.join().map_err(|_| panicked()))
    });
    let marker = marker?;
    if let Err(error) = prepared {
        if let Some(marker) = marker {
            marker.discard();
        }
        return Err(error);
    }
    document.write(repository, &place)?;
    if let Some(marker) = marker {
        marker.commit();
    }
    Ok(document)
}

/// The document under a session's name; `None` if the name is free. The caller holds the documents'
/// lock.
///
/// # Errors
/// `Corrupt` if a session of that name must exist, and its document is missing or damaged. Points
/// sealed from that session would later be taken for points of the new one.
fn read_unless_lost(
    repository: &Repository,
    place: &SessionPaths,
    name: &SessionName,
) -> Result<Option<SessionDocument>> {
    let marker = format!("live/{name}");
    let damage = match SessionDocument::read(repository, place) {
        Ok(None) if repository.is_marked(&marker) => repository.lost(marker),
        Err(error) if error.kind() == ErrorKind::Corrupt => damage(repository, place, &error),
        found => return found,
    };
    let message = format!(
        "live/{name} is lost: {}. Choose another name, or run coldrise repair, which restores the \
         points that were sealed from it, and then coldrise unpublish {name} --discard",
        damage.reason
    );
    Err(Error::new(ErrorKind::Corrupt, message))
}

fn panicked() -> Error {
    Error::new(ErrorKind::Internal, "a thread of publish panicked")
}

fn free_name(repository: &Repository, point: &PointDocument) -> Result<SessionName> {
    for number in 1..10_000 {
        let mut machine = point.machine.as_str();
        machine = &machine[..machine.len().min(56)];
        let name = SessionName::parse(&format!("{machine}-{number}"))?;
        match read_unless_lost(repository, &SessionPaths::of(repository, &name), &name) {
            Ok(None) => return Ok(name),
            Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
            _ => {}
        }
    }
    Err(Error::new(ErrorKind::AlreadyExists, "no free session name: give one with --name"))
}
