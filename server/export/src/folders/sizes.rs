//! Computes the sizes of image files and their stored bytes.
//!
//! The stored bytes of a file are the stored bytes of its disk plus the metadata of the
//! format. The first are found once for all files of a disk, by walking its extents; the
//! second follow from the layout. Only the size of a point's compact image depends on the
//! disk's content: the image must be opened.

use super::Folders;
use super::node::{Node, NodeKey};
use super::open_file::{OpenFile, sum_stored};
use super::stored_map::StoredMap;
use crate::image;
use crate::image_file::ImageFile;
use crate::image_name::ImagePart;
use coldrise_block::{Disk, Error, ErrorKind, Holes, Result};
use coldrise_session::{SessionDisk, SessionDocument, open_live_side_file, open_point_disk};
use coldrise_store::{DiskName, PointDocument, PointSelector};
use parking_lot::Mutex;
use quick_cache::sync::Cache;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Number of points' files and disks in the cache. They never change.
const REMEMBERED: usize = 1 << 16;
/// Number of points' disks with a cached map of stored ranges.
const REMEMBERED_MAPS: usize = 16;
/// Number of sessions' files and disks in the cache.
const REMEMBERED_LIVE: usize = 1 << 12;
/// While a session's disk changes, walking its extents may take at most one part in this number of the
/// time: programs ask for a file's size all the time.
const PART_OF_TIME: u32 = 100;

#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) size_bytes: u64,
    pub(super) stored_bytes: u64,
}

/// The caches.
pub(super) struct Measured {
    files_of_points: Cache<NodeKey, Sizes>,
    disks_of_points: Cache<NodeKey, u64>,
    /// For the last few disks only: clients ask for all files of a disk in a row.
    maps_of_points: Cache<NodeKey, Arc<StoredMap>>,
    of_sessions: Mutex<HashMap<NodeKey, LiveStored>>,
}

/// The stored bytes of a session's file or disk at the last walk.
#[derive(Clone, Copy)]
struct LiveStored {
    bytes: u64,
    /// If the layer still has this state, nothing was written since.
    layer: Option<LayerLooks>,
    looked_at: Instant,
    look_took: Duration,
}

/// The state that tells whether a layer was written, without opening it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct LayerLooks {
    inode: u64,
    blocks: u64,
    pub(super) modified: SystemTime,
}

impl Default for Measured {
    fn default() -> Measured {
        Measured {
            files_of_points: Cache::new(REMEMBERED),
            disks_of_points: Cache::new(REMEMBERED),
            maps_of_points: Cache::new(REMEMBERED_MAPS),
            of_sessions: Mutex::default(),
        }
    }
}

impl Measured {
    fn live(
        &self,
        key: &NodeKey,
        layer: Option<LayerLooks>,
        measure: impl FnOnce() -> Result<u64>,
    ) -> Result<u64> {
        if let Some(known) = self.of_sessions.lock().get(key) {
            let is_unchanged = layer.is_some() && known.layer == layer;
            if is_unchanged || known.looked_at.elapsed() < known.look_took * PART_OF_TIME {
                return Ok(known.bytes);
            }
        }
        let start = Instant::now();
        let bytes = measure()?;
        let look_took = start.elapsed();
        let found = LiveStored { bytes, layer, looked_at: Instant::now(), look_took };
        let mut known = self.of_sessions.lock();
        if known.len() >= REMEMBERED_LIVE {
            known.clear();
        }
        known.insert(key.clone(), found);
        Ok(bytes)
    }
}

impl Folders {
    /// Other callers for the same file or disk wait instead of walking it too.
    pub(super) fn point_sizes(
        &self,
        node: &Node,
        point: &PointDocument,
        disk: &DiskName,
        part: ImagePart,
    ) -> Result<Sizes> {
        self.measured.files_of_points.get_or_insert_with(&node.key, || {
            let document = point.disk(disk).ok_or_else(gone)?;
            let shape = image::point_shape(&self.repository, point, document);
            if part.format.is_compact() {
                return self.look_at_point_disk(point, disk, |seen| {
                    let layout = image::lay_out(part, disk, &shape, &*seen, None)?;
                    let image = ImageFile::read_only(layout, seen);
                    let stored_bytes = sum_stored(&image)?;
                    Ok(Sizes { size_bytes: image.size_bytes(), stored_bytes })
                });
            }
            let holes = Arc::new(Holes(document.size_bytes));
            let layout = image::lay_out(part, disk, &shape, &*holes, None)?;
            let shows_disk = layout.place_of(0).is_some();
            let image = ImageFile::read_only(layout, holes);
            let mut stored_bytes = sum_stored(&image)?;
            if shows_disk {
                stored_bytes += self.point_disk_stored(point, disk)?;
            }
            Ok(Sizes { size_bytes: image.size_bytes(), stored_bytes })
        })
    }

    fn point_disk_stored(&self, point: &PointDocument, disk: &DiskName) -> Result<u64> {
        let path = format!("{}/{}/{disk}", point.machine, point.point);
        let key = NodeKey { path: Arc::from(path), made_at_ms: point.created_at_ms };
        self.measured.disks_of_points.get_or_insert_with(&key, || {
            self.look_at_point_disk(point, disk, |seen| sum_stored(&*seen))
        })
    }

    /// Finds the stored bytes of a point's disk without a lease: a listing of many points
    /// would take as many leases. If the point is deleted during the walk, pages or layers
    /// are missing but never wrong, because their numbers are never reused. Then the point
    /// is looked up again: it may be gone, or its layers may have been folded into chunks.
    fn look_at_point_disk<T>(
        &self,
        point: &PointDocument,
        disk: &DiskName,
        look: impl Fn(Arc<dyn Disk>) -> Result<T>,
    ) -> Result<T> {
        let path = format!("{}/{}/{disk}", point.machine, point.point);
        let key = NodeKey { path: Arc::from(path), made_at_ms: point.created_at_ms };
        if let Some(map) = self.measured.maps_of_points.get(&key) {
            return look(map);
        }
        let look_at = |point: &PointDocument| {
            let opened = open_point_disk(&self.repository, point, disk)?;
            match StoredMap::of(&*opened)? {
                None => look(opened),
                Some(map) => {
                    let map = Arc::new(map);
                    self.measured.maps_of_points.insert(key.clone(), Arc::clone(&map));
                    look(map)
                }
            }
        };
        look_at(point).or_else(|error| {
            self.repository.catch_up()?;
            let name = PointSelector::Exact(point.point.clone());
            let now = self.catalog.point(&point.machine, &name)?;
            if now.disk(disk) == point.disk(disk) {
                return Err(error);
            }
            look_at(&now)
        })
    }

    /// For an open file: the current state, up to a moment old.
    pub(super) fn open_live_sizes(&self, node: &Node, open: &OpenFile) -> Result<Sizes> {
        let stored_bytes = self.measured.live(&node.key, None, || open.stored_bytes())?;
        Ok(Sizes { size_bytes: open.size_bytes(), stored_bytes })
    }

    /// For a file that is not open: opens the disk only if it was written since the last
    /// walk, because opening reads the index of its whole layer.
    pub(super) fn closed_live_sizes(
        &self,
        session: &SessionDocument,
        disk: &SessionDisk,
        name: &str,
        part: ImagePart,
    ) -> Result<Sizes> {
        self.check_same(session)?;
        let shape = image::session_shape(&self.repository, session, disk);
        let holes = Arc::new(Holes(disk.size_bytes));
        let layout = image::lay_out(part, &disk.name, &shape, &*holes, None)?;
        let shows_disk = layout.place_of(0).is_some();
        let image = ImageFile::live(layout, holes, |size_bytes, below| {
            open_live_side_file(&self.repository, &session.name, name, size_bytes, below)
        })?;
        let mut stored_bytes = sum_stored(&image)?;
        if shows_disk {
            let key = NodeKey::of_disk(session, &disk.name);
            // Taken before the walk: a write during the walk changes it.
            let layer = self.layer_looks(disk);
            stored_bytes += self.measured.live(&key, layer, || {
                let export = self.tree.open(&key.path, true)?;
                sum_stored(export.disk())
            })?;
        }
        Ok(Sizes { size_bytes: image.size_bytes(), stored_bytes })
    }

    /// `None` if the layer does not exist: a seal may have removed it since the look-up of
    /// the session.
    pub(super) fn layer_looks(&self, disk: &SessionDisk) -> Option<LayerLooks> {
        let layer = self.repository.layers_dir().join(disk.top.to_string());
        let found = std::fs::metadata(layer).ok()?;
        let (inode, blocks) = (found.ino(), found.blocks());
        Some(LayerLooks { inode, blocks, modified: found.modified().ok()? })
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::NotFound, "the disk no longer exists")
}
