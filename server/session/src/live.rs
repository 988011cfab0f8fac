//! Disks for reading: of points, and of sessions that others may be writing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Disk, Error, ErrorKind, Extent, Result};
use coldrise_store::{DiskName, LayerReference, MapRoot, PointDocument, Repository, SessionName};
use parking_lot::RwLock;

use crate::disk::{LayeredDisk, Stack};
use crate::document::SessionDocument;
use crate::layer::{Layer, ReadMode, SealFacts, Superblock};
use crate::lock::{FileLock, PASSING_PATIENCE};
use crate::place::{layer_keys, layer_path, map_path, Place};

/// The chunk map of a disk, as the bottom of a disk view.
pub(crate) fn base_disk(
    repository: &Arc<Repository>,
    root: MapRoot,
    size_bytes: u64,
) -> Arc<dyn Disk> {
    Arc::new(repository.disk(root, size_bytes))
}

pub(crate) fn sealed_layers(
    repository: &Arc<Repository>,
    references: &[LayerReference],
    disk_size_bytes: u64,
) -> Result<Vec<Arc<Layer>>> {
    let open = |reference: &LayerReference| {
        Layer::open_for_reading(
            &layer_path(repository, &reference.id),
            &Superblock { id: reference.id.0, disk_size_bytes },
            layer_keys(repository, &reference.id),
            ReadMode::Sealed(SealFacts {
                sequence: reference.sealed_sequence,
                slots: reference.sealed_slots,
            }),
        )
    };
    references.iter().map(open).collect()
}

/// Opens a disk of a restore point, read-only.
///
/// # Errors
/// `NotFound` for an unknown disk, `Corrupt` when a sealed layer is not what the
/// point says.
pub fn open_point_disk(
    repository: &Arc<Repository>,
    point: &PointDocument,
    name: &DiskName,
) -> Result<Arc<dyn Disk>> {
    let Some(disk) = point.disk(name) else {
        let names: Vec<&str> = point.disks.iter().map(|disk| disk.name.as_str()).collect();
        return Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "{}/{} has no disk {name}, only {}",
                point.machine,
                point.point,
                names.join(", ")
            ),
        ));
    };
    let base = base_disk(repository, disk.root, disk.size_bytes);
    if disk.layers.is_empty() {
        return Ok(base);
    }
    let layers = sealed_layers(repository, &disk.layers, disk.size_bytes)
        .context(|| format!("{}/{}/{name}", point.machine, point.point))?;
    Ok(Arc::new(LayeredDisk::new(disk.size_bytes, true, Stack { base, layers })))
}

/// Opens a disk of a session for reading, also while another process writes it:
/// what that process has written is seen at once.
///
/// # Errors
/// `NotFound`; `Busy` when the writer is just opening the session and does not finish.
pub fn open_live_disk(
    repository: &Arc<Repository>,
    session: &SessionName,
    disk: &DiskName,
) -> Result<Arc<dyn Disk>> {
    let view = open_view(repository, session, disk)?;
    Ok(Arc::new(LiveDisk {
        size_bytes: view.size_bytes(),
        view: RwLock::new(view),
        repository: Arc::clone(repository),
        session: session.clone(),
        disk: disk.clone(),
    }))
}

/// A session's disk as a reader sees it: opened anew whenever a writer comes,
/// goes or seals.
struct LiveDisk {
    size_bytes: u64,
    view: RwLock<Arc<LayeredDisk>>,
    repository: Arc<Repository>,
    session: SessionName,
    disk: DiskName,
}

impl LiveDisk {
    /// Calls `look` with a view that was current when `look` had finished.
    fn with_current<T>(&self, mut look: impl FnMut(&LayeredDisk) -> Result<T>) -> Result<T> {
        loop {
            let view = Arc::clone(&self.view.read());
            let result = look(&view);
            // A writer that was killed half way leaves a block that only a scan
            // can tell from damage; its session is then no longer locked.
            let is_orphaned = matches!(&result, Err(e) if e.kind() == ErrorKind::Corrupt)
                && view.is_attached()
                && !FileLock::is_held(&Place::of(&self.repository, &self.session).lock())?;
            if view.is_current() && !is_orphaned {
                return result;
            }
            *self.view.write() = open_view(&self.repository, &self.session, &self.disk)?;
        }
    }
}

impl Disk for LiveDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.with_current(|view| view.read_at(buffer, offset_bytes))
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        self.with_current(|view| view.extents(offset_bytes, length_bytes, limit))
    }
}

const OPENING_PAUSE: Duration = Duration::from_millis(5);

fn open_view(
    repository: &Arc<Repository>,
    session: &SessionName,
    name: &DiskName,
) -> Result<Arc<LayeredDisk>> {
    let start = Instant::now();
    loop {
        let document = SessionDocument::of(repository, session)?;
        let disk = document.disk(name)?;
        let is_served = FileLock::is_held(&Place::of(repository, session).lock())?;
        let map = map_path(&disk.top);
        let mode = if is_served { ReadMode::Attached(&map) } else { ReadMode::Idle };
        let top = Layer::open_for_reading(
            &layer_path(repository, &disk.top),
            &disk.top_superblock(),
            layer_keys(repository, &disk.top),
            mode,
        );
        match top {
            Ok(top) => {
                let mut layers = sealed_layers(repository, &disk.layers, disk.size_bytes)?;
                layers.push(top);
                let base = base_disk(repository, disk.root, disk.size_bytes);
                let view = LayeredDisk::new(disk.size_bytes, true, Stack { base, layers });
                return Ok(Arc::new(view));
            }
            // The map is not there yet, or the session was just sealed.
            Err(error)
                if error.kind() == ErrorKind::NotFound && start.elapsed() < PASSING_PATIENCE =>
            {
                std::thread::sleep(OPENING_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
}
