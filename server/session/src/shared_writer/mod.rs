//! The one writer of a repository, shared by the backups of several processes.
//!
//! ```text
//! backup A: host ── RepositoryWriter ── the database
//!            ▲ writer.control
//!            ├── backup B: guest      reads its own source, sends what it has read
//!            └── backup C: guest
//! ```
//!
//! The first backup opens the repository for writing and listens: it is the *host*. Each later
//! one is its *guest*. Sources are read by the process that was asked to back them up, with the
//! rights of its user and in its confinement; the host never opens a file for a guest. It stores
//! the bytes as those of its own disks, so content is shared among all of them.
//!
//! # Who is the host
//!
//! `backups.lock` (flock) says that a backup holds the writer, or is about to open it or to close
//! it. Whoever gets it becomes the host; the others connect, or look again in a moment. Where
//! `writer.lock` belongs to another command the backup ends with `Busy`, as every writer does.
//! `leases/backup-HASH` belongs to one backup of a machine, guest or host, as long as it runs
//! ([`Repository::claim_machine`]).
//!
//! # Ends, in order, and kills
//!
//! A host whose own backup has ended does not wait for its guests. It
//!
//! 1. stops listening and ends the gcs that it does for others;
//! 2. tells its guests to move. Each ends the disk that is open: the map of what it has sent so
//!    far is committed, over what it builds upon;
//! 3. each guest leases the maps that it needs, then goes away;
//! 4. closes the database, gives up `writer.lock`, then `backups.lock`.
//!
//! The guests go on where they stopped: one of them becomes the host, and each starts its disk
//! over the map that it got. Nothing is read twice.
//!
//! - A **guest is killed** at any time: its connection ends, the host cancels its disk. Pages of
//!   its map are deleted; chunks stay, for the next backup or a gc.
//! - The **host is killed**: its locks go, every guest sees the end of its connection, begins again
//!   from the start of its sources and finds what was committed in the dedup index. Where that
//!   happens while it waits for its point, it looks first whether the point is there.
//! - Killed **between 2 and 4**: a guest that has its map goes on; one that has not begins again.
//!   A guest that is killed then takes its lease with it, and the next gc takes its chunks.
//! - A guest that does not answer is given up after 30 s, and begins again when it wakes.
//!
//! A failed commit (a full drive) ends every backup of the host with the same error, because
//! nobody knows any more what is on the drive; any other failure ends one backup.

mod disk;
mod host;
mod kept;
mod link;
mod messages;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    BackupTarget, DiskTarget, MapRoot, PointDocument, Repository, RepositoryWriter, WriteCounts,
    WriteOptions,
};
use parking_lot::Mutex;

use crate::lock::FileLock;
use disk::SharedDisk;
use host::Host;
use kept::Kept;
use link::{Broken, Link};
pub(crate) use messages::Request;

/// The socket's name in the repository's folder.
pub(crate) const SOCKET: &str = "writer.control";
const LOCK: &str = "backups.lock";
/// Between two looks whether the next host listens.
const PAUSE: Duration = Duration::from_millis(20);
/// Between two attempts to open the repository while another command writes it.
const BUSY_PAUSE: Duration = Duration::from_millis(500);

/// How a repository is opened.
pub struct Openers<'a> {
    /// For writing.
    pub writer: &'a (dyn Fn() -> Result<RepositoryWriter> + Sync),
    /// For reading.
    pub reader: &'a (dyn Fn() -> Result<Arc<Repository>> + Sync),
}

/// The writer of a repository, of this process or of another one, for one backup.
pub struct SharedWriter<'a> {
    path: PathBuf,
    openers: Openers<'a>,
    cancel: &'a AtomicBool,
    role: Mutex<Option<Role>>,
    kept: Mutex<Option<Arc<Kept>>>,
    is_lost: AtomicBool,
}

#[derive(Clone)]
enum Role {
    Host(Arc<Hosting>),
    Guest(Arc<Link>),
}

/// Dropped in this order.
struct Hosting {
    _host: Option<Host>,
    writer: Arc<RepositoryWriter>,
    _lock: FileLock,
}

impl<'a> SharedWriter<'a> {
    /// Becomes the host, or a guest.
    ///
    /// # Errors
    /// `Busy` where another command than a backup writes the repository; as of opening it;
    /// `Interrupted` once `cancel` is set.
    pub fn join(
        path: &Path,
        openers: Openers<'a>,
        cancel: &'a AtomicBool,
    ) -> Result<SharedWriter<'a>> {
        // Nothing is to be made where none is.
        Repository::check(path)?;
        let (role, kept, is_lost) = Default::default();
        let shared = SharedWriter { path: path.to_owned(), openers, cancel, role, kept, is_lost };
        shared.enter(false)?;
        Ok(shared)
    }

    /// The same after the host was killed: waits where another command is quicker.
    ///
    /// # Errors
    /// As of [`SharedWriter::join`], but never `Busy`.
    pub fn join_again(&self) -> Result<()> {
        *self.role.lock() = None;
        self.is_lost.store(false, Ordering::Relaxed);
        self.enter(true).map(|_| ())
    }

    /// Whether the host was killed: the backup is to begin again.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// The repository as of now, for documents.
    ///
    /// # Errors
    /// As of opening it.
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

    /// Keeps what `base` refers to until this ends, whoever holds the writer then.
    pub fn keep(&self, base: &PointDocument) {
        // A host keeps it: nobody else forgets points meanwhile.
        if let Some(kept) = &*self.kept.lock() {
            base.disks.iter().for_each(|disk| kept.add(disk.root));
        }
    }

    fn kept(&self) -> Result<Arc<Kept>> {
        let mut kept = self.kept.lock();
        if let Some(kept) = &*kept {
            return Ok(Arc::clone(kept));
        }
        let opened = Arc::new(Kept::new((self.openers.reader)()?));
        *kept = Some(Arc::clone(&opened));
        Ok(opened)
    }

    /// The present role, or the next one.
    fn role(&self) -> Result<Role> {
        let role = self.role.lock().clone();
        match role {
            Some(role) => Ok(role),
            None => self.enter(true),
        }
    }

    fn enter(&self, is_patient: bool) -> Result<Role> {
        let lock_path = self.path.join(LOCK);
        let role = loop {
            self.check_cancel()?;
            match FileLock::try_take(&lock_path)? {
                Some(lock) => match (self.openers.writer)() {
                    Ok(writer) => break Role::Host(Arc::new(Hosting::start(writer, lock))),
                    Err(error) if error.kind() == ErrorKind::Busy && is_patient => {
                        drop(lock);
                        std::thread::sleep(BUSY_PAUSE);
                    }
                    Err(error) => return Err(error),
                },
                None => {
                    let kept = self.kept()?;
                    if let Some(link) = Link::connect(&self.path, kept.reader(), &kept)? {
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
        match self.cancel.load(Ordering::Relaxed) {
            true => Err(Error::new(ErrorKind::Interrupted, "cancelled")),
            false => Ok(()),
        }
    }

    /// What is to be done about a host that takes nothing more: go on elsewhere, with the map
    /// of what it has taken, or give up.
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

impl Hosting {
    fn start(writer: RepositoryWriter, lock: FileLock) -> Hosting {
        let writer = Arc::new(writer);
        let host = Host::listen(&writer).inspect_err(|error| {
            tracing::warn!(
                error = %error.full_message(),
                "no other backup and no gc can run meanwhile"
            );
        });
        Hosting { _host: host.ok(), writer, _lock: lock }
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

    fn put_point(&self, document: &PointDocument) -> Result<()> {
        loop {
            let broken = match self.role()? {
                Role::Host(hosting) => return hosting.writer.put_point(document),
                Role::Guest(link) => match link.put_point(document, self.cancel) {
                    Ok(()) => return Ok(()),
                    Err(broken) => broken,
                },
            };
            self.moved(broken)?;
        }
    }
}
