//! Publish: a restore point becomes a writable session.
//!
//! Order of writes: the empty layers and their folder, the marker on its way, the session's
//! folder and the files that it begins with (all synced, and side by side: none refers to
//! another), then `session.json` (synced, renamed, synced), then the marker appears. A
//! crash before the document leaves empty layers that nothing refers to; the next writer
//! removes them. It may leave files, too: without a document they are no session's, and
//! the next publish of that name replaces them.

use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{LayerId, PointDocument, Repository, SessionName};

use crate::catalog::Catalog;
use crate::client_files::{begin_files, CarriedFiles};
use crate::document::{now_ms, SessionDisk, SessionDocument, SessionFiles};
use crate::layer::Layer;
use crate::lock::FileLock;
use crate::place::{layer_keys, layer_path, prepare_mark, sync_directory, Place};
use crate::unpublish::tidy;
use crate::verify::session_name;

/// Publishes a point under a name; without one the machine's name and the
/// first free number are taken. Costs the same whatever the point holds.
///
/// # Errors
/// `AlreadyExists` when a session has the name; `NotFound` when the point was
/// forgotten meanwhile.
pub fn publish(
    repository: &Arc<Repository>,
    point: &PointDocument,
    name: Option<SessionName>,
) -> Result<SessionDocument> {
    publish_with_files(repository, point, name, |_, files| Ok(files))
}

/// The same; `arrange` says with which files the session begins, from those that the
/// point carries.
///
/// # Errors
/// As of [`publish`], and those of `arrange`.
pub fn publish_with_files(
    repository: &Arc<Repository>,
    point: &PointDocument,
    name: Option<SessionName>,
    arrange: impl FnOnce(&SessionDocument, CarriedFiles) -> Result<CarriedFiles>,
) -> Result<SessionDocument> {
    let carried = Catalog::new(repository).files(point)?;
    let _documents = FileLock::documents(repository)?;
    // Who deletes reads the sessions under the lock, after the point is gone.
    let point = &Catalog::new(repository).confirm(point)?;
    let name = match name {
        Some(name) => name,
        None => free_name(repository, point)?,
    };
    let place = Place::of(repository, &name);
    let mut sealed = Vec::new();
    if let Some(there) = SessionDocument::read(repository, &place)? {
        if !there.is_ended {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("there is already a session {name}: choose another name"),
            ));
        }
        // It stays only for its restore points, until they are in the catalog: they
        // move to the new document.
        tidy(repository, &place, &there)?;
        sealed = there.sealed;
    }
    let mut disks = Vec::with_capacity(point.disks.len());
    for disk in &point.disks {
        disks.push(SessionDisk {
            name: disk.name.clone(),
            size_bytes: disk.size_bytes,
            root: disk.root,
            layers: disk.layers.clone(),
            top: LayerId::random()?,
            least_sequence: 0,
        });
    }
    let mut document = SessionDocument {
        name,
        machine: point.machine.clone(),
        point: point.point.clone(),
        created_at_ms: now_ms(),
        disks,
        configuration: point.configuration.clone(),
        files: Some(SessionFiles::default()),
        sealed,
        is_ended: false,
        revision: 0,
    };
    let marker_name = session_name(&document);
    let tops = document.disks.clone();
    let prepare_files = || {
        place.create()?;
        sync_directory(&repository.live_dir())?;
        // Durable with the document: a seal need not sync the folder once more.
        Place::make_folder(&place.sealed_files())?;
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
        (prepared.and(made), marker.join().map_err(|_| panicked()))
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

fn panicked() -> Error {
    Error::new(ErrorKind::Internal, "a thread of publish panicked")
}

/// Makes the empty top layers of these disks, durably.
pub(crate) fn create_tops<'a>(
    repository: &Repository,
    disks: impl Iterator<Item = &'a SessionDisk>,
) -> Result<()> {
    for disk in disks {
        let keys = layer_keys(repository, &disk.top);
        Layer::create(&layer_path(repository, &disk.top), &disk.top_superblock(), &keys)
            .context(|| format!("disk {}", disk.name))?;
    }
    sync_directory(&repository.layers_dir())
}

fn free_name(repository: &Repository, point: &PointDocument) -> Result<SessionName> {
    for number in 1..10_000 {
        let mut machine = point.machine.as_str();
        machine = &machine[..machine.len().min(56)];
        let name = SessionName::parse(&format!("{machine}-{number}"))?;
        if SessionDocument::read(repository, &Place::of(repository, &name))?.is_none() {
            return Ok(name);
        }
    }
    Err(Error::new(ErrorKind::AlreadyExists, "no free session name: give one with --name"))
}
