//! Disks of sessions for reading, also while other processes write them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{
    Disk, Error, ErrorKind, Extent, ReadContext, Result, Waiting, path_exists, would_wait,
};
use coldrise_store::{DiskName, Repository, SessionName};
use parking_lot::RwLock;

use crate::disks::layered_disk::{LayeredDisk, Stack};
use crate::disks::point_disk::sealed_layers;
use crate::incoming::session_base;
use crate::layer::{Layer, LayerKeys, ReadMode, layer_damage};
use crate::locks::file_lock::{FileLock, PASSING_PATIENCE};
use crate::paths::{SessionPaths, layer_path, map_path};
use crate::session_folder::document::SessionDocument;
use crate::session_folder::rollback_guard::check_for_reader;
use crate::session_folder::side_file::SideFileKey;

/// Opens a disk of a session for reading, also while another process writes it. That process's
/// writes are visible at once.
///
/// # Errors
/// `NotFound`; `Busy` if a writer is opening the session and does not finish, or if the session follows a machine; `Corrupt`
/// for an older version of the session that was put back.
pub fn open_live_disk(
    repository: &Arc<Repository>,
    session: &SessionName,
    disk: &DiskName,
) -> Result<Arc<dyn Disk>> {
    check_for_reader(repository, session)?;
    let document = SessionDocument::of(repository, session)?;
    document.check_readable_now()?;
    open_live(repository, session, ReaderTarget::Disk(disk.clone()))
}

/// Opens for reading the writes of clients into an image file of a session's disk; see
/// [`Session::side_file`](crate::Session::side_file).
///
/// # Errors
/// As for [`open_live_disk`].
pub fn open_live_side_file(
    repository: &Arc<Repository>,
    session: &SessionName,
    name: &str,
    size_bytes: u64,
    below: Arc<dyn Disk>,
) -> Result<Arc<dyn Disk>> {
    let document = SessionDocument::of(repository, session)?;
    let key = SideFileKey::new(repository, &document, name, size_bytes);
    open_live(repository, session, ReaderTarget::SideFile { key, below })
}

/// Like [`open_live_side_file`], for a layer of the session that belongs to no image.
pub(crate) fn open_live_layer(
    repository: &Arc<Repository>,
    session: &SessionName,
    key: SideFileKey,
    below: Arc<dyn Disk>,
) -> Result<Arc<dyn Disk>> {
    open_live(repository, session, ReaderTarget::SideFile { key, below })
}

/// Lets `check` examine the layer that takes a session's writes. Repeats this if a writer came,
/// went or sealed meanwhile: the damage found may only have been an unfinished change.
pub(crate) fn check_top(
    repository: &Arc<Repository>,
    session: &SessionName,
    disk: &DiskName,
    mut check: impl FnMut(&Layer) -> Result<()>,
) -> Result<()> {
    let live = LiveDisk::open(repository, session, ReaderTarget::Disk(disk.clone()))?;
    live.with_current(|view| view.top().map_or(Ok(()), |top| check(&top)))
}

fn open_live(
    repository: &Arc<Repository>,
    session: &SessionName,
    shown: ReaderTarget,
) -> Result<Arc<dyn Disk>> {
    Ok(Arc::new(LiveDisk::open(repository, session, shown)?))
}

/// A reader's view of a disk or file that the session's writer writes. It is reopened whenever a
/// writer comes, goes or seals.
struct LiveDisk {
    size_bytes: u64,
    view: RwLock<Arc<LayeredDisk>>,
    repository: Arc<Repository>,
    session: SessionName,
    shown: ReaderTarget,
}

impl LiveDisk {
    fn open(
        repository: &Arc<Repository>,
        session: &SessionName,
        shown: ReaderTarget,
    ) -> Result<LiveDisk> {
        let view = shown.open(repository, session)?;
        Ok(LiveDisk {
            size_bytes: view.size_bytes(),
            view: RwLock::new(view),
            repository: Arc::clone(repository),
            session: session.clone(),
            shown,
        })
    }

    /// Calls `look` with a view that was still current after the call.
    fn with_current<T>(&self, mut look: impl FnMut(&LayeredDisk) -> Result<T>) -> Result<T> {
        loop {
            let view = Arc::clone(&self.view.read());
            let result = look(&view);
            // A writer that was killed during a write leaves a block that only a scan can
            // distinguish from damage. Its session is then no longer locked.
            let is_orphaned = matches!(&result, Err(e) if e.kind() == ErrorKind::Corrupt)
                && view.is_attached()
                && !FileLock::is_held(&SessionPaths::of(&self.repository, &self.session).lock())?;
            if self.shown.is_current(&view) && !is_orphaned {
                return result;
            }
            *self.view.write() = self.shown.open(&self.repository, &self.session)?;
        }
    }
}

impl Disk for LiveDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()> {
        if context.waiting() == Waiting::Allowed {
            return self.with_current(|view| view.read_at(buffer, offset_bytes));
        }
        // If the view must be replaced, the caller must wait.
        let view = Arc::clone(&*self.view.try_read().ok_or_else(would_wait)?);
        let result = view.read_in_memory(buffer, offset_bytes);
        let is_corrupt = matches!(&result, Err(e) if e.kind() == ErrorKind::Corrupt);
        if self.shown.is_current(&view) && !is_corrupt { result } else { Err(would_wait()) }
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        self.with_current(|view| view.extents(offset_bytes, length_bytes, limit))
    }
}

const OPENING_PAUSE: Duration = Duration::from_millis(5);

/// The object that a reader reads.
enum ReaderTarget {
    Disk(DiskName),
    SideFile { key: SideFileKey, below: Arc<dyn Disk> },
}

impl ReaderTarget {
    fn is_current(&self, view: &LayeredDisk) -> bool {
        let has_appeared = match self {
            ReaderTarget::Disk(_) => false,
            ReaderTarget::SideFile { key, .. } => {
                // If the drive returns an error here, reopening reports the reason.
                view.is_bare() && key.path().try_exists().unwrap_or(true)
            }
        };
        view.is_current() && !has_appeared
    }

    fn open(
        &self,
        repository: &Arc<Repository>,
        session: &SessionName,
    ) -> Result<Arc<LayeredDisk>> {
        let start = Instant::now();
        loop {
            let is_served = FileLock::is_held(&SessionPaths::of(repository, session).lock())?;
            let opened = match self {
                ReaderTarget::Disk(name) => open_disk_view(repository, session, name, is_served),
                ReaderTarget::SideFile { key, below } => open_side_view(key, below, is_served),
            };
            match opened {
                Ok(view) => return Ok(Arc::new(view)),
                Err(Failed::Passing(_)) if start.elapsed() < PASSING_PATIENCE => {
                    std::thread::sleep(OPENING_PAUSE);
                }
                // No writer is about to create the file.
                Err(Failed::Passing(error)) if !is_served => return Err(layer_damage(error)),
                Err(Failed::Passing(error) | Failed::QuarantineReport(error)) => return Err(error),
            }
        }
    }
}

/// The reason why a view could not be opened.
enum Failed {
    /// The map does not exist yet, or the session was just sealed: a retry will succeed.
    Passing(Error),
    QuarantineReport(Error),
}

impl Failed {
    fn of_layer(error: Error) -> Failed {
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::Busy => Failed::Passing(error),
            _ => Failed::QuarantineReport(error),
        }
    }
}

fn open_disk_view(
    repository: &Arc<Repository>,
    session: &SessionName,
    name: &DiskName,
    is_served: bool,
) -> std::result::Result<LayeredDisk, Failed> {
    let document = SessionDocument::of(repository, session).map_err(Failed::QuarantineReport)?;
    let disk = document.disk(name).map_err(Failed::QuarantineReport)?;
    let map = map_path(&disk.top);
    let top = Layer::open_for_reading(
        &layer_path(repository, &disk.top),
        &disk.top_superblock(),
        LayerKeys::of(repository, &disk.top),
        if is_served { ReadMode::Attached(&map) } else { ReadMode::Idle(disk.least_sequence) },
    );
    let top = top.map_err(|error| match error.kind() {
        // Without a server no process is about to create the file. It is lost, unless the session
        // was sealed or ended meanwhile.
        ErrorKind::NotFound if !is_served => match SessionDocument::of(repository, session) {
            Ok(now) if now.disks == document.disks => Failed::QuarantineReport(layer_damage(error)),
            Ok(_) => Failed::Passing(error),
            Err(error) => Failed::QuarantineReport(error),
        },
        _ => Failed::of_layer(error),
    })?;
    // From here on the layer announces changes. Earlier changes are visible in the document.
    let now = SessionDocument::of(repository, session).map_err(Failed::QuarantineReport)?;
    if now.disks != document.disks {
        let message = format!("session {session} is being changed; try again in a moment");
        return Err(Failed::Passing(Error::new(ErrorKind::Busy, message)));
    }
    let layers = sealed_layers(repository, &disk.layers, disk.size_bytes);
    let mut layers = layers.map_err(Failed::QuarantineReport)?;
    layers.push(top);
    let base = session_base(repository, &document, disk).map_err(Failed::QuarantineReport)?;
    Ok(LayeredDisk::new(disk.size_bytes, true, Stack { base, layers }))
}

fn open_side_view(
    key: &SideFileKey,
    below: &Arc<dyn Disk>,
    is_served: bool,
) -> std::result::Result<LayeredDisk, Failed> {
    let mut layers = Vec::new();
    if path_exists(key.path()).map_err(Failed::QuarantineReport)? {
        layers.push(key.open_for_reading(is_served).map_err(Failed::of_layer)?);
    }
    let stack = Stack { base: Arc::clone(below), layers };
    Ok(LayeredDisk::new(key.size_bytes(), true, stack))
}
