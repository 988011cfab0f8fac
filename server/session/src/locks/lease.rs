//! Leases protect everything that running front ends serve from deletion.
//!
//! `REPO/leases/lease-ID` is one file per front end process. The process holds it with an exclusive
//! flock(2) as long as it runs. An unlocked file belongs to a dead process; the next process that
//! takes a lease removes it. The content is a [`LeaseDocument`] as JSON, encrypted by the
//! repository because it holds names. Other names in the directory are foreign files.
//!
//! To change a lease, a process writes a second file, locks it, and renames it over the first. On a
//! full disk, or if a document cannot hold everything, the lease becomes an empty file: an
//! unreadable lease means that nothing may be deleted. All changes and all reading happen under the
//! lock of `leases/lock`, so no process sees a lease before it is locked. Nothing is synced: no
//! front end outlives a power cut.
//!
//! A deletion first makes durable that a point is removed, then calls [`read_leases`], then deletes
//! only the parts that no lease names. A server of a point first leases it, then checks (again)
//! that the point exists.

use coldrise_block::{Context, Error, ErrorKind, Result, path_exists};
use coldrise_store::{DiskDocument, Repository};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::locks::file_lock::FileLock;

const PREFIX: &str = "lease-";
/// The lock file, held for every change and every reading of leases.
const LOCK: &str = "lock";
const NEW_SUFFIX: &str = ".new";
const PURPOSE: &str = "lease";
const FORMAT_VERSION: u32 = 1;

/// Largest lease that is read, in bytes. It holds tens of thousands of exports, and is as large as
/// a document that the repository encrypts.
const MAX_LEASE_BYTES: u64 = 17 << 20;

/// Most leases that are read: far more than the number of processes on a machine.
const MAX_LEASES: usize = 1 << 16;

/// Content of a lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeaseDocument {
    /// Always 1.
    pub(crate) format_version: u32,
    /// The serving program, for people: `nbdkit`, `ganesha`.
    pub program: String,
    /// Process id of the holder, for people.
    pub process_id: u32,
    /// The open exports.
    pub served: Vec<Served>,
}

/// One open export.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Served {
    /// Exact name of the export.
    pub name: String,
    /// The served disk. Its chunk map and layers are in use even if the restore point is no longer
    /// in the catalog, or the session has ended. `None` if they are protected by other means.
    pub disk: Option<DiskDocument>,
}

/// The lease of this process.
pub struct Lease {
    repository: Arc<Repository>,
    program: String,
    directory: PathBuf,
    path: PathBuf,
    state: Mutex<State>,
}

struct State {
    /// Open for its lock. `None` if no lease could be written: see [`go_without`].
    file: Option<File>,
    served: Vec<Entry>,
}

struct Entry {
    served: Served,
    holds: usize,
    /// True if it was seen to exist after the lease named it.
    is_confirmed: bool,
}

impl Lease {
    /// Takes an empty lease, and removes those of dead processes. If no lease can be written,
    /// continues without one and warns: see [`go_without`].
    pub fn take(repository: &Arc<Repository>, program: &str) -> Result<Arc<Lease>> {
        let directory = repository.leases_dir();
        let path = directory.join(format!("{PREFIX}{}", random_name()?));
        let file = match write_first(repository, program, &path) {
            Err(error) => go_without(error).map(|()| None)?,
            Ok(file) => Some(file),
        };
        Ok(Arc::new(Lease {
            repository: Arc::clone(repository),
            program: program.to_owned(),
            directory,
            path,
            state: Mutex::new(State { file, served: Vec::new() }),
        }))
    }

    /// Adds an export to the lease, or shares an equal entry. On an error the lease is unchanged.
    pub fn hold(self: &Arc<Self>, served: Served) -> Result<LeaseHold> {
        self.hold_all(vec![served])
    }

    /// Like [`Lease::hold`], for several exports at once.
    pub(crate) fn hold_all(self: &Arc<Self>, served: Vec<Served>) -> Result<LeaseHold> {
        let mut state = self.state.lock();
        let known = state.served.len();
        for served in &served {
            match state.served[..known].iter_mut().find(|entry| entry.served == *served) {
                Some(entry) => entry.holds += 1,
                None => {
                    let served = served.clone();
                    state.served.push(Entry { served, holds: 1, is_confirmed: false });
                }
            }
        }
        if state.served.len() > known {
            if let Err(error) = self.rewrite(&mut state) {
                state.release(&served);
                return Err(error);
            }
        }
        Ok(LeaseHold { lease: Arc::clone(self), served })
    }

    fn rewrite(&self, state: &mut State) -> Result<()> {
        if state.file.is_none() {
            return Ok(());
        }
        let _locked = lock_leases(&self.directory)?;
        match write(&self.repository, &self.path, &document(&self.program, &state.served)) {
            Ok(file) => state.file = Some(file),
            Err(error) => {
                go_without(error)?;
                // An empty lease takes no space and protects everything.
                let _ = state.file.as_ref().map(|file| file.set_len(0));
            }
        }
        Ok(())
    }

    fn release(&self, served: &[Served]) {
        let mut state = self.state.lock();
        if state.release(served) {
            // A lease that names too much is harmless. The next change rewrites it completely.
            let _ = self.rewrite(&mut state);
        }
    }
}

impl State {
    /// Removes one hold of each. Returns true if it was the last hold of any of them.
    fn release(&mut self, served: &[Served]) -> bool {
        for served in served {
            let mut held = self.served.iter_mut().filter(|entry| entry.holds > 0);
            if let Some(entry) = held.find(|entry| entry.served == *served) {
                entry.holds -= 1;
            }
        }
        let before = self.served.len();
        self.served.retain(|entry| entry.holds > 0);
        self.served.len() < before
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // If this fails, closing the file releases the lock, and the next front end removes the
        // lease when it starts.
        let locked = lock_leases(&self.directory);
        let _ = std::fs::remove_file(&self.path);
        drop(locked);
    }
}

/// A hold on one or several exports in the lease of this process.
pub struct LeaseHold {
    lease: Arc<Lease>,
    served: Vec<Served>,
}

impl LeaseHold {
    /// False until the caller has checked, after the lease was written, that the named parts still
    /// exist: until then a deletion may be running.
    pub fn is_confirmed(&self) -> bool {
        let state = self.lease.state.lock();
        let mut own = self.served.iter();
        own.all(|own| state.served.iter().any(|entry| entry.served == *own && entry.is_confirmed))
    }

    /// Records that the named parts were seen to exist.
    pub fn confirm(&self) {
        let mut state = self.lease.state.lock();
        for entry in state.served.iter_mut().filter(|entry| self.served.contains(&entry.served)) {
            entry.is_confirmed = true;
        }
    }
}

impl Drop for LeaseHold {
    fn drop(&mut self) {
        self.lease.release(&self.served);
    }
}

fn write_first(repository: &Repository, program: &str, path: &Path) -> Result<File> {
    let directory = Repository::leases_folder(repository.path())?;
    let _locked = lock_leases(&directory)?;
    remove_stale(&directory)?;
    write(repository, path, &document(program, &[]))
}

/// A full or read-only disk does not prevent reading from it. If another process deletes at the
/// same time, reads fail, but no byte is wrong.
fn go_without(error: Error) -> Result<()> {
    if !matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::ReadOnly) {
        return Err(error);
    }
    tracing::warn!(
        error = %error.full_message(),
        "no lease could be written: a gc at the same time may delete what is being read"
    );
    Ok(())
}

/// The leases of all running front ends. An unreadable lease is an error: nothing may be deleted
/// then.
pub fn read_leases(repository: &Repository) -> Result<Vec<LeaseDocument>> {
    let directory = repository.leases_dir();
    if !path_exists(&directory)? {
        return Ok(Vec::new());
    }
    let _locked = lock_leases(&directory)?;
    let mut leases = Vec::new();
    for path in lease_files(&directory)? {
        let mut file = File::open(&path).context(|| format!("opening {}", path.display()))?;
        if try_lock(&file, &path)? {
            continue; // no process holds it
        }
        leases.push(read(repository, &mut file, &path)?);
    }
    Ok(leases)
}

fn read(repository: &Repository, file: &mut File, path: &Path) -> Result<LeaseDocument> {
    let mut bytes = Vec::new();
    let mut limited = file.take(MAX_LEASE_BYTES + 1);
    limited.read_to_end(&mut bytes).context(|| format!("reading {}", path.display()))?;
    if bytes.len() as u64 > MAX_LEASE_BYTES {
        return Err(Error::new(
            ErrorKind::Corrupt,
            format!("{} is larger than a lease can be", path.display()),
        ));
    }
    let plaintext = repository
        .decrypt_document(PURPOSE, &bytes)
        .context(|| format!("reading {}", path.display()))?;
    let document: LeaseDocument = serde_json::from_slice(&plaintext).map_err(|error| {
        Error::with_source(ErrorKind::Corrupt, format!("reading {}", path.display()), error)
    })?;
    if document.format_version != FORMAT_VERSION {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("{} is of version {}", path.display(), document.format_version),
        ));
    }
    Ok(document)
}

fn document(program: &str, served: &[Entry]) -> LeaseDocument {
    LeaseDocument {
        format_version: FORMAT_VERSION,
        program: program.to_owned(),
        process_id: std::process::id(),
        served: served.iter().map(|entry| entry.served.clone()).collect(),
    }
}

/// Writes a lease at `path`, and locks it before any other process can see it. The caller holds the
/// lock of the leases.
fn write(repository: &Repository, path: &Path, document: &LeaseDocument) -> Result<File> {
    let json = serde_json::to_vec(document).map_err(|error| {
        Error::with_source(ErrorKind::Internal, "encoding a lease".to_owned(), error)
    })?;
    // One document cannot name this much: an empty lease protects everything.
    let bytes = match repository.encrypt_document(PURPOSE, &json) {
        Err(error) if error.kind() == ErrorKind::InvalidInput => Vec::new(),
        sealed => sealed?,
    };
    let mut new = path.as_os_str().to_owned();
    new.push(NEW_SUFFIX);
    let new = PathBuf::from(new);
    let written = (|| {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)
            .context(|| format!("creating {}", new.display()))?;
        if !try_lock(&file, &new)? {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("{} is locked by another process", new.display()),
            ));
        }
        match file.write_all(&bytes) {
            // An empty file takes no space. Like every unreadable lease it means that nothing may
            // be deleted, so serving continues.
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => {
                file.set_len(0).context(|| format!("emptying {} on a full disk", new.display()))?
            }
            result => result.context(|| format!("writing {}", new.display()))?,
        }
        std::fs::rename(&new, path).context(|| format!("renaming {}", new.display()))?;
        Ok(file)
    })();
    if written.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    written
}

/// Removes leases of dead processes. The caller holds the lock of the leases.
fn remove_stale(directory: &Path) -> Result<()> {
    for path in lease_files(directory)? {
        let Ok(file) = File::open(&path) else { continue };
        if try_lock(&file, &path)? {
            std::fs::remove_file(&path).context(|| format!("removing {}", path.display()))?;
        }
    }
    Ok(())
}

fn lease_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(directory).context(|| listing(directory))?;
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.context(|| listing(directory))?;
        if !is_lease(&entry.file_name()) {
            continue;
        }
        if files.len() == MAX_LEASES {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("{} holds more than {MAX_LEASES} leases", directory.display()),
            ));
        }
        files.push(entry.path());
    }
    Ok(files)
}

fn listing(directory: &Path) -> String {
    format!("listing {}", directory.display())
}

fn is_lease(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with(PREFIX))
}

/// Tries to take the exclusive lock of an open lease file. Returns false if another process has it.
fn try_lock(file: &File, path: &Path) -> Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(Error::io(format!("locking {}", path.display()), error.into())),
    }
}

/// Locks all leases until the lock is dropped. It is held only for a few small file operations, so
/// waits are short. The lock is on a file, because the lock of a directory may not reach other
/// hosts.
fn lock_leases(directory: &Path) -> Result<FileLock> {
    FileLock::wait(&directory.join(LOCK))
}

fn random_name() -> Result<String> {
    let mut bytes = [0u8; 8];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => continue,
            Err(error) => {
                return Err(Error::io("asking for random bytes".to_owned(), error.into()));
            }
        }
    }
    Ok(format!("{:016x}", u64::from_ne_bytes(bytes)))
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
