//! The one writer of a repository, shared by the backups of several processes.
//!
//! ```text
//! backup A: host ── RepositoryWriter ── the database
//!            ▲ writer.control
//!            ├── backup B: guest      reads its own source, sends what it has read
//!            └── backup C: guest
//! ```
//!
//! The first backup opens the repository for writing and listens: it is the *host*. Each later one
//! is its *guest*. Each process reads the sources that it was asked to back up, with the rights of
//! its user and in its confinement. The host never opens a file for a guest. It stores a guest's
//! bytes like those of its own disks, so all backups share content.
//!
//! # Which backup is the host
//!
//! A backup that holds `backups.lock` (flock) holds the writer, or is about to open or close it.
//! The backup that gets the lock becomes the host. The others connect, or try again after a short
//! time. If another command holds `writer.lock` for more than 5 s, the backup ends with `Busy`.
//! `leases/backup-HASH` belongs to one backup of a machine, guest or host, as long as it runs
//! ([`Repository::claim_machine`]).
//!
//! # Ends, in order, and kills
//!
//! A host whose own backup has ended does not wait for its guests:
//!
//! 1. It stops listening and ends the gcs that it does for others.
//! 2. It tells its guests to move. Each finishes the open disk: the map of the data sent so far is
//!    committed, over the map on which it is based.
//! 3. Each guest leases the maps that it needs, then disconnects.
//! 4. The host closes the database, releases `writer.lock`, then `backups.lock`.
//!
//! The guests continue from there: one of them becomes the host, and each starts its disk over the
//! map that it got. No data is read twice.
//!
//! - A **guest is killed** at any time: its connection ends, and the host cancels its disk. The
//!   pages of its map are deleted. Its chunks stay, for the next backup or a gc.
//! - The **host is killed**: its locks are released, and every guest sees the end of its
//!   connection. It begins again from the start of its sources and finds the committed data in the
//!   dedup index. If it was waiting for its point, it first checks whether the point exists.
//! - A kill **between 2 and 4**: a guest that has its map continues; a guest without it begins
//!   again. A guest that is killed then loses its lease, and the next gc deletes its chunks.
//! - A guest that does not answer is disconnected after 30 s, and begins again when it runs again.
//!
//! A failed commit (a full drive) ends every backup of the host with the same error, because the
//! content of the drive is unknown then. Any other failure ends one backup.

mod change;
mod disk;
mod host;
mod link;
mod map_lease;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    BackupTarget, DiskTarget, MapRoot, PointDocument, Repository, RepositoryWriter, WriteCounts,
    WriteOptions,
};
use parking_lot::Mutex;

use crate::locks::file_lock::FileLock;
use crate::locks::lease::{Lease, LeaseHold, Served};
use crate::sockets::point_change::PointChange;
use crate::writer::access::RepositoryAccess;
use disk::SharedDisk;
use host::Host;
use link::{Broken, Link};
use map_lease::MapLease;

const LOCK: &str = "backups.lock";
/// Interval between two checks whether the next host listens.
const PAUSE: Duration = Duration::from_millis(20);
/// Interval between two attempts to open the repository while another command writes it.
const BUSY_PAUSE: Duration = Duration::from_millis(200);

/// How long a new backup waits for another command's writes: removing points takes less.
const BUSY_PATIENCE: Duration = Duration::from_secs(5);

/// The writer of a repository for one backup. This process or another one holds it.
pub struct SharedWriter<'a> {
    access: &'a RepositoryAccess,
    cancel: &'a AtomicBool,
    role: Mutex<Option<Role>>,
    kept: Mutex<Option<Arc<MapLease>>>,
    is_lost: AtomicBool,
}

#[derive(Clone)]
enum Role {
    Host(Arc<Hosting>),
    Guest(Arc<Link>),
}

/// Fields are dropped in this order.
struct Hosting {
    /// Leases the point on which the host's own backup is based.
    base: Mutex<Option<LeaseHold>>,
    _host: Option<Host>,
    writer: Arc<RepositoryWriter>,
    _lock: FileLock,
}

impl<'a> SharedWriter<'a> {
    /// Becomes the host, or a guest.
    ///
    /// # Errors
    /// `Busy` if a command other than a backup writes the repository for more than 5 s; the errors of opening it;
    /// `Interrupted` once `cancel` is set.
    pub fn join(access: &'a RepositoryAccess, cancel: &'a AtomicBool) -> Result<SharedWriter<'a>> {
        let (role, kept, is_lost) = Default::default();
        let shared = SharedWriter { access, cancel, role, kept, is_lost };
        shared.enter(false)?;
        Ok(shared)
    }

    /// Joins again after the host was killed. If another command takes the writer first, waits for
    /// it.
    ///
    /// # Errors
    /// As for [`SharedWriter::join`], but never `Busy`.
    pub fn join_again(&self) -> Result<()> {
        *self.role.lock() = None;
        self.is_lost.store(false, Ordering::Relaxed);
        self.enter(true).map(|_| ())
    }

    /// True if the host was killed: the backup must begin again.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// The current repository, for reading documents.
    ///
    /// # Errors
    /// The errors of opening it.
    pub fn repository(&self) -> Result<Arc<Repository>> {
        match self.role()? {
            Role::Host(hosting) => Ok(Arc::clone(hosting.writer.repository())),
            Role::Guest(_) => {
                let kept = self.kept()?;
                kept.reader().catch_up()?;
                Ok(Arc::clone(kept.reader()))
            }
        }
    }

    /// Protects the data of `base` until this is dropped, whichever process holds the writer:
    /// another process may forget the point. Returns false if that has already happened.
    ///
    /// # Errors
    /// As for [`Lease::take`], and the errors of reading the catalog.
    pub fn keep(&self, base: &PointDocument) -> Result<bool> {
        match self.role()? {
            Role::Host(hosting) => {
                let lease = Lease::take(hosting.writer.repository(), "backup")?;
                let served = base
                    .disks
                    .iter()
                    .map(|disk| Served { name: "backup".to_owned(), disk: Some(disk.clone()) });
                *hosting.base.lock() = Some(lease.hold_all(served.collect())?);
            }
            Role::Guest(_) => {
                let kept = self.kept()?;
                base.disks.iter().for_each(|disk| kept.add(disk.root));
                kept.lease()?;
            }
        }
        match self.repository()?.point(&base.machine, &base.point) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            found => found.map(|_| true),
        }
    }

    fn kept(&self) -> Result<Arc<MapLease>> {
        let mut kept = self.kept.lock();
        if let Some(kept) = &*kept {
            return Ok(Arc::clone(kept));
        }
        let opened = Arc::new(MapLease::new(self.access.open(0)?));
        *kept = Some(Arc::clone(&opened));
        Ok(opened)
    }

    /// The current role, or the next one.
    fn role(&self) -> Result<Role> {
        let role = self.role.lock().clone();
        match role {
            Some(role) => Ok(role),
            None => self.enter(true),
        }
    }

    fn enter(&self, is_patient: bool) -> Result<Role> {
        let lock_path = self.access.path().join(LOCK);
        let started = Instant::now();
        let role = loop {
            self.check_cancel()?;
            // Create no files where no repository is, or no longer is.
            Repository::check(self.access.path())?;
            match FileLock::try_take(&lock_path)? {
                Some(lock) => match self.access.open_for_writing() {
                    Ok(writer) => break Role::Host(Arc::new(Hosting::start(writer, lock))),
                    Err(error)
                        if error.kind() == ErrorKind::Busy
                            && (is_patient || started.elapsed() < BUSY_PATIENCE) =>
                    {
                        drop(lock);
                        std::thread::sleep(BUSY_PAUSE);
                    }
                    Err(error) => return Err(error),
                },
                None => {
                    let kept = self.kept()?;
                    if let Some(link) = Link::connect(self.access.path(), kept.reader(), &kept)? {
                        break Role::Guest(Arc::new(link));
                    }
                }
            }
            std::thread::sleep(PAUSE);
        };
        *self.role.lock() = Some(role.clone());
        Ok(role)
    }

    fn check_cancel(&self) -> Result<()> {
        if self.cancel.load(Ordering::Relaxed) {
            Err(Error::new(ErrorKind::Interrupted, "cancelled"))
        } else {
            Ok(())
        }
    }

    /// Reacts to a host that takes no more data: continues elsewhere, with the map of the stored
    /// data, or fails.
    fn moved(&self, broken: Broken) -> Result<Option<(MapRoot, WriteCounts)>> {
        match broken {
            Broken::Moved(finished) => {
                *self.role.lock() = None;
                Ok(finished)
            }
            Broken::Failed(error) => Err(error),
            Broken::Lost => {
                self.is_lost.store(true, Ordering::Relaxed);
                let message = "the process that wrote the repository has ended unexpectedly";
                Err(Error::new(ErrorKind::Incomplete, message))
            }
        }
    }
}

/// Changes points through the backup that holds the writer of `repository`. Returns false if there
/// is none, or if it is about to end.
///
/// # Errors
/// As for [`crate::change_points`]; `Interrupted` once `cancel` is set.
pub fn change_through_backup(
    repository: &Arc<Repository>,
    change: &PointChange,
    cancel: &AtomicBool,
) -> Result<bool> {
    let kept = Arc::new(MapLease::new(Arc::clone(repository)));
    let Some(link) = Link::connect(repository.path(), repository, &kept)? else {
        return Ok(false);
    };
    match link.change(change, cancel) {
        Ok(()) => Ok(true),
        Err(Broken::Failed(error)) => Err(error),
        Err(Broken::Moved(_) | Broken::Lost) => Ok(false),
    }
}

impl Hosting {
    fn start(writer: RepositoryWriter, lock: FileLock) -> Hosting {
        let writer = Arc::new(writer);
        let host = Host::listen(&writer).inspect_err(|error| {
            tracing::warn!(
                error = %error.full_message(),
                "no other backup and no gc can run meanwhile"
            );
        });
        Hosting { base: Mutex::default(), _host: host.ok(), writer, _lock: lock }
    }
}

impl BackupTarget for SharedWriter<'_> {
    fn chunk_size_bytes(&self) -> u32 {
        match &*self.role.lock() {
            Some(Role::Host(hosting)) => hosting.writer.repository().chunk_size_bytes(),
            _ => self.kept.lock().as_ref().map_or(0, |kept| kept.reader().chunk_size_bytes()),
        }
    }

    fn start_disk(
        &self,
        base: Option<MapRoot>,
        size_bytes: u64,
        options: WriteOptions,
    ) -> Result<Box<dyn DiskTarget + '_>> {
        let mut disk = SharedDisk {
            shared: self,
            size_bytes,
            options,
            base,
            before: WriteCounts::default(),
            place: None,
            buffers: Vec::new(),
        };
        disk.store(|_| Ok(()), |_, _| Ok(()))?;
        Ok(Box::new(disk))
    }

    fn put_point(&self, document: &PointDocument, files: Option<&[u8]>) -> Result<()> {
        loop {
            let broken = match self.role()? {
                Role::Host(hosting) => {
                    return BackupTarget::put_point(&*hosting.writer, document, files);
                }
                Role::Guest(link) => match link.put_point(document, files, self.cancel) {
                    Ok(()) => return Ok(()),
                    Err(broken) => broken,
                },
            };
            self.moved(broken)?;
        }
    }
}
