//! Moves points and sessions from folded layers to the new chunk map.

use std::sync::Arc;
use std::time::Instant;

use coldrise_block::{ErrorKind, Result};
use coldrise_store::{
    DiskDocument, LayerId, LayerReference, MapRoot, PointDocument, Repository, RepositoryWriter,
    SessionName,
};
use serde::{Deserialize, Serialize};

use crate::layer::Layer;
use crate::locks::file_lock::{FileLock, PASSING_PATIENCE};
use crate::paths::{layer_path, SessionPaths};
use crate::session_folder::document::{SessionDisk, SessionDocument};
use crate::sessions::control::ask_for_rebase;

/// Folded disks, each with its old description and its new map.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct FoldedDisks {
    disks: Vec<(DiskDocument, MapRoot)>,
}

impl FoldedDisks {
    pub(crate) fn add(&mut self, disk: &DiskDocument, root: MapRoot) {
        self.disks.push((disk.clone(), root));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.disks.is_empty()
    }

    /// The layers that were folded.
    pub(crate) fn layers(&self) -> Vec<LayerId> {
        self.disks.iter().flat_map(|(disk, _)| disk.layers.iter().map(|layer| layer.id)).collect()
    }

    /// Moves a disk that starts with exactly the folded map and layers. Returns false for any other
    /// disk. The layers above stay: they hold later writes.
    fn apply(&self, size_bytes: u64, root: &mut MapRoot, layers: &mut Vec<LayerReference>) -> bool {
        let found = self.disks.iter().find(|(disk, _)| {
            disk.size_bytes == size_bytes && disk.root == *root && layers.starts_with(&disk.layers)
        });
        let Some((disk, new)) = found else { return false };
        layers.drain(..disk.layers.len());
        *root = *new;
        true
    }

    fn apply_to_point(&self, point: &mut PointDocument) -> bool {
        let mut is_moved = false;
        for disk in &mut point.disks {
            is_moved |= self.apply(disk.size_bytes, &mut disk.root, &mut disk.layers);
        }
        is_moved
    }

    /// Moves the disks of a session. Returns false if none was moved.
    pub(crate) fn apply_to_session(&self, disks: &mut [SessionDisk]) -> bool {
        let mut is_moved = false;
        for disk in disks {
            is_moved |= self.apply(disk.size_bytes, &mut disk.root, &mut disk.layers);
        }
        is_moved
    }

    /// Moves the folded point, and all other points of its machine over the same layers, in one
    /// batch. Returns the number of other points.
    pub(crate) fn move_points(
        &self,
        writer: &RepositoryWriter,
        folded: &PointDocument,
    ) -> Result<u64> {
        let mut points = writer.repository().points(&folded.machine)?;
        points.retain_mut(|point| self.apply_to_point(point));
        writer.replace_points(&points)?;
        let others = points.iter().filter(|point| point.point != folded.point);
        Ok(others.count() as u64)
    }

    /// Moves every session over the folded layers, and the waiting points of any session. A served
    /// session moves through its process. Returns the number of moved sessions, and of those that
    /// stay over the layers.
    pub(crate) fn move_sessions(&self, repository: &Arc<Repository>) -> Result<(u64, u64)> {
        let (mut moved, mut left) = (0, 0);
        for (place, document) in SessionDocument::all(repository)? {
            let is_concerned = self.apply_to_session(&mut document.disks.clone());
            let is_waiting =
                document.sealed.iter().any(|point| self.apply_to_point(&mut point.clone()));
            if !is_concerned && !is_waiting {
                continue;
            }
            match is_concerned
                .then(|| self.move_disks(repository, &place, &document.name))
                .transpose()
            {
                // The session has ended, and its folder was removed.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
                Ok(Some(true)) => moved += 1,
                Ok(is_moved) => {
                    left += u64::from(is_moved.is_some());
                    let _documents = FileLock::documents(repository)?;
                    self.move_document(repository, &place, false)?;
                }
            }
        }
        Ok((moved, left))
    }

    /// Moves the disks of one session. Returns false if it stays over the layers. As for a seal,
    /// ask the process that serves it first: clients connect and disconnect at any time.
    fn move_disks(
        &self,
        repository: &Arc<Repository>,
        place: &SessionPaths,
        name: &SessionName,
    ) -> Result<bool> {
        let start = Instant::now();
        loop {
            if let Some(is_moved) = ask_for_rebase(repository, place, name, self)? {
                return Ok(is_moved);
            }
            if let Some(_writing) = FileLock::take(place)? {
                let _documents = FileLock::documents(repository)?;
                let moved = self.move_document(repository, place, true)?;
                for disk in moved.iter().flat_map(|document| &document.disks) {
                    Layer::announce_change(&layer_path(repository, &disk.top));
                }
                return Ok(moved.is_some());
            }
            if start.elapsed() >= PASSING_PATIENCE {
                return Ok(false);
            }
        }
    }

    /// Moves one session's document. The caller holds the documents' lock. With `is_ours` it also
    /// holds the session's lock, and the session's disks may move. Returns the document if its
    /// disks moved.
    pub(crate) fn move_document(
        &self,
        repository: &Repository,
        place: &SessionPaths,
        is_ours: bool,
    ) -> Result<Option<SessionDocument>> {
        // The session may have been sealed or ended meanwhile.
        let Some(mut document) = SessionDocument::read(repository, place)? else {
            return Ok(None);
        };
        let mut is_changed = false;
        for point in &mut document.sealed {
            is_changed |= self.apply_to_point(point);
        }
        let is_moved = is_ours && !document.is_ended && self.apply_to_session(&mut document.disks);
        if is_changed || is_moved {
            document.write(repository, place)?;
        }
        Ok(is_moved.then_some(document))
    }
}
