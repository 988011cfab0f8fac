//! Moves points and sessions from folded layers to the new chunk map.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use coldrise_block::{ErrorKind, Result};
use coldrise_store::{
    DiskDocument, LayerId, LayerReference, MachineName, MapRoot, PointDocument, Repository,
    RepositoryWriter,
};
use serde::{Deserialize, Serialize};

use crate::layer::Layer;
use crate::locks::file_lock::{FileLock, PASSING_PATIENCE};
use crate::paths::{SessionPaths, layer_path};
use crate::session_folder::document::{SessionDisk, SessionDocument};
use crate::sessions::control::ask_for_rebase;

/// Folded disks. Each names the map and the layers that it had, and its new map.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(from = "Message", into = "Message")]
pub(crate) struct FoldedDisks {
    /// By the lowest layer.
    disks: HashMap<LayerId, Vec<(DiskDocument, MapRoot)>>,
}

#[derive(Serialize, Deserialize)]
struct Message {
    disks: Vec<(DiskDocument, MapRoot)>,
}

impl From<Message> for FoldedDisks {
    fn from(message: Message) -> FoldedDisks {
        let mut folded = FoldedDisks::default();
        message.disks.iter().for_each(|(disk, root)| folded.add(disk, *root));
        folded
    }
}

impl From<FoldedDisks> for Message {
    fn from(folded: FoldedDisks) -> Message {
        Message { disks: folded.disks.into_values().flatten().collect() }
    }
}

impl FoldedDisks {
    pub(crate) fn add(&mut self, disk: &DiskDocument, root: MapRoot) {
        if let Some(lowest) = disk.layers.first() {
            self.disks.entry(lowest.id).or_default().push((disk.clone(), root));
        }
    }

    /// Moves a disk that starts with a folded map and its layers, as far up as it can. Returns the number of its
    /// layers that are in the new map, 0 for any other disk. The layers above stay: they hold later writes.
    fn apply(
        &self,
        size_bytes: u64,
        root: &mut MapRoot,
        layers: &mut Vec<LayerReference>,
    ) -> usize {
        let mut count = 0;
        while let Some(lowest) = layers.get(count) {
            let steps = self.disks.get(&lowest.id).into_iter().flatten().filter(|(disk, _)| {
                disk.size_bytes == size_bytes
                    && disk.root == *root
                    && layers[count..].starts_with(&disk.layers)
            });
            let Some((disk, new)) = steps.max_by_key(|(disk, _)| disk.layers.len()) else { break };
            *root = *new;
            count += disk.layers.len();
        }
        layers.drain(..count);
        count
    }

    /// Moves the disks of a point. Returns false if none was moved.
    pub(crate) fn apply_to_point(&self, point: &mut PointDocument) -> bool {
        let mut is_moved = false;
        for disk in &mut point.disks {
            is_moved |= self.apply(disk.size_bytes, &mut disk.root, &mut disk.layers) > 0;
        }
        is_moved
    }

    /// Moves the disks of a session. Returns false if none was moved.
    pub(crate) fn apply_to_session(&self, disks: &mut [SessionDisk]) -> bool {
        let mut is_moved = false;
        for disk in disks {
            is_moved |= self.apply(disk.size_bytes, &mut disk.root, &mut disk.layers) > 0;
        }
        is_moved
    }

    /// What concerns one session, in one step for each disk: a small message.
    fn of_session(&self, document: &SessionDocument) -> FoldedDisks {
        let mut of_session = FoldedDisks::default();
        let own = document.disks.iter().map(|disk| DiskDocument {
            name: disk.name.clone(),
            size_bytes: disk.size_bytes,
            root: disk.root,
            layers: disk.layers.clone(),
        });
        let waiting = document.sealed.iter().flat_map(|point| point.disks.iter().cloned());
        for mut disk in own.chain(waiting) {
            let (mut root, mut rest) = (disk.root, disk.layers.clone());
            let count = self.apply(disk.size_bytes, &mut root, &mut rest);
            disk.layers.truncate(count);
            of_session.add(&disk, root);
        }
        of_session
    }

    /// Moves the points of a machine that are over folded layers, in one batch. Returns their number.
    pub(crate) fn move_points(
        &self,
        writer: &RepositoryWriter,
        machine: &MachineName,
    ) -> Result<u64> {
        let mut points = writer.repository().points(machine)?;
        points.retain_mut(|point| self.apply_to_point(point));
        if !points.is_empty() {
            writer.replace_points(&points)?;
        }
        Ok(points.len() as u64)
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
            match is_concerned.then(|| self.move_disks(repository, &place, &document)).transpose() {
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
        document: &SessionDocument,
    ) -> Result<bool> {
        let (name, folded) = (&document.name, self.of_session(document));
        let start = Instant::now();
        loop {
            if let Some(is_moved) = ask_for_rebase(repository, place, name, &folded)? {
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
