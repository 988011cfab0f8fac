//! Whatever lay over folded layers lies over the new chunk map instead.

use std::sync::Arc;

use coldrise_block::{ErrorKind, Result};
use coldrise_store::{
    DiskDocument, LayerId, LayerReference, MapRoot, PointDocument, Repository, RepositoryWriter,
};

use crate::document::{SessionDisk, SessionDocument};
use crate::layer::Layer;
use crate::lock::FileLock;
use crate::place::{layer_path, Place};

/// Disks that were folded: what stood for them, and the map that does now.
#[derive(Default)]
pub(super) struct Moved {
    disks: Vec<(DiskDocument, MapRoot)>,
}

impl Moved {
    pub(super) fn add(&mut self, disk: &DiskDocument, root: MapRoot) {
        self.disks.push((disk.clone(), root));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.disks.is_empty()
    }

    /// The layers that were folded.
    pub(super) fn layers(&self) -> Vec<LayerId> {
        self.disks.iter().flat_map(|(disk, _)| disk.layers.iter().map(|layer| layer.id)).collect()
    }

    /// Moves a disk that starts with exactly what was folded; false for any other. The
    /// layers above stay: they hold what was written after it.
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

    fn apply_to_session(&self, disks: &mut [SessionDisk]) -> bool {
        let mut is_moved = false;
        for disk in disks {
            is_moved |= self.apply(disk.size_bytes, &mut disk.root, &mut disk.layers);
        }
        is_moved
    }

    /// Moves the folded point and all others of its machine that lie over the same
    /// layers, in one batch; how many others.
    pub(super) fn move_points(
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

    /// Moves sessions that nobody writes, and points that wait in any session. How
    /// many sessions were moved, and how many are served and stay over the layers.
    pub(super) fn move_sessions(&self, repository: &Arc<Repository>) -> Result<(u64, u64)> {
        let (mut moved, mut served) = (0, 0);
        for (place, document) in SessionDocument::all(repository)? {
            let is_concerned = self.apply_to_session(&mut document.disks.clone());
            let is_waiting =
                document.sealed.iter().any(|point| self.apply_to_point(&mut point.clone()));
            if !is_concerned && !is_waiting {
                continue;
            }
            let writing = match is_concerned.then(|| FileLock::take(&place)).transpose() {
                // It has ended, and its folder went with it.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                taken => taken?.flatten(),
            };
            match self.move_session(repository, &place, writing.is_some())? {
                _ if !is_concerned => {}
                true => moved += 1,
                false => served += 1,
            }
        }
        Ok((moved, served))
    }

    /// Moves one session; with `is_ours` its lock is held and its disks may move.
    /// True where they did.
    fn move_session(
        &self,
        repository: &Arc<Repository>,
        place: &Place,
        is_ours: bool,
    ) -> Result<bool> {
        let _documents = FileLock::documents(repository)?;
        // It may have been sealed or ended meanwhile.
        let Some(mut document) = SessionDocument::read(repository, place)? else {
            return Ok(false);
        };
        let mut is_changed = false;
        for point in &mut document.sealed {
            is_changed |= self.apply_to_point(point);
        }
        let is_moved = is_ours && self.apply_to_session(&mut document.disks);
        if is_changed || is_moved {
            document.write(repository, place)?;
        }
        if is_moved && !document.is_ended {
            for disk in &document.disks {
                Layer::announce_change(&layer_path(repository, &disk.top));
            }
        }
        Ok(is_moved)
    }
}
