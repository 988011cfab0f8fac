//! Where commands find the machine of a point.
//!
//! ```text
//! $XDG_RUNTIME_DIR/coldrise-files/HASH/     mode 0700; else /run for root, else TMPDIR
//!   lock          held (flock) by the background process while it lives
//!   use           held by the command that talks to the machine
//!   machine.json  written by the background process before it is found
//!   end           made by a command: the machine is not to stay
//!   reason.json   written by the background process when its machine has ended by itself, for the command that talks to it
//! $XDG_RUNTIME_DIR/coldrise-files/slot-N    held (flock) by one machine while it lives
//! ```
//!
//! Locks are freed by the kernel, so a kill at any moment leaves nothing that misleads: without the lock
//! `lock` the other files mean nothing, and the next background process writes them again.

use std::fs::{DirBuilder, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use coldrise_block::{Context, Error, ErrorKind, HeldLock, Result};
use coldrise_files::point_with_disks;
use coldrise_store::{DiskName, PointDocument};
use rustix::process::getuid;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::caller::Caller;

const REASON: &str = "reason.json";

/// The machine of one point, or of some of its disks.
#[derive(Clone, Debug)]
pub(super) struct Place {
    folder: PathBuf,
    /// The input of the hash in the folder's name.
    identity: String,
}

/// What commands have to know about a machine.
#[derive(Serialize, Deserialize)]
pub(super) struct MachineDescription {
    identity: String,
    pub(super) port: PathBuf,
    pub(super) disks: Vec<String>,
    pub(super) disk_bytes: u64,
}

impl Place {
    /// # Errors
    /// `Io`; `Forbidden` if another user could have made the folder.
    pub(super) fn new(caller: &Caller, point: &PointDocument, only: &[DiskName]) -> Result<Place> {
        let repository = caller.repository_path();
        let repository = repository.canonicalize().context(|| "finding the repository")?;
        let point = point_with_disks(&format!("{}/{}", point.machine, point.point), only);
        let identity = format!("{} {point}", repository.display());
        let mut hasher = DefaultHasher::new();
        identity.hash(&mut hasher);
        let parent = parent_folder();
        make_private(&parent)?;
        let folder = parent.join(format!("{:016x}", hasher.finish()));
        make_private(&folder)?;
        Ok(Place { folder, identity })
    }

    /// The lock of the background process.
    pub(super) fn try_keep(&self) -> Result<Option<HeldLock>> {
        try_lock(&self.folder.join("lock"))
    }

    /// The lock of the command that talks to the machine.
    pub(super) fn try_use(&self) -> Result<Option<HeldLock>> {
        try_lock(&self.folder.join("use"))
    }

    /// Describes the machine to commands.
    pub(super) fn describe(&self, port: &Path, disks: &[String], disk_bytes: u64) -> Result<()> {
        let identity = self.identity.clone();
        let described = MachineDescription {
            identity,
            port: port.to_owned(),
            disks: disks.to_vec(),
            disk_bytes,
        };
        for name in ["end", REASON] {
            let _ = std::fs::remove_file(self.folder.join(name));
        }
        let bytes = serde_json::to_vec(&described).map_err(|error| {
            Error::with_source(ErrorKind::Internal, "describing a machine", error)
        })?;
        let new = self.folder.join("machine.json.new");
        std::fs::write(&new, bytes)
            .and_then(|()| std::fs::rename(&new, self.folder.join("machine.json")))
            .context(|| format!("writing to {}", self.folder.display()))
    }

    /// The living background process's answer; `None` if there is none.
    pub(super) fn description(&self) -> Result<Option<MachineDescription>> {
        if self.try_keep()?.is_some() {
            return Ok(None);
        }
        let bytes = std::fs::read(self.folder.join("machine.json")).ok();
        let described: Option<MachineDescription> =
            bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Ok(described.filter(|described| described.identity == self.identity))
    }

    /// The background process ends: commands no longer find it.
    pub(super) fn clear(&self) {
        for name in ["machine.json", "end"] {
            let _ = std::fs::remove_file(self.folder.join(name));
        }
    }

    /// Tells the command that talks to the machine why it has ended.
    pub(super) fn tell_reason(&self, error: &Error) {
        let reason = json!({ "kind": error.kind().word(), "message": error.full_message() });
        let new = self.folder.join("reason.json.new");
        // A command that finds none says that the machine is gone.
        let _ = std::fs::write(&new, reason.to_string())
            .and_then(|()| std::fs::rename(&new, self.folder.join(REASON)));
    }

    /// Why the machine has ended by itself, if it has.
    pub(super) fn reason(&self) -> Option<Error> {
        let stored = std::fs::read(self.folder.join(REASON)).ok()?;
        let stored: serde_json::Value = serde_json::from_slice(&stored).ok()?;
        let kind = ErrorKind::from_word(stored.get("kind")?.as_str()?)?;
        Some(Error::new(kind, stored.get("message")?.as_str()?.to_owned()))
    }

    /// Asks the background process to end.
    pub(super) fn ask_to_end(&self) {
        let _ = std::fs::write(self.folder.join("end"), b"");
    }

    /// Whether the background process was asked to end.
    pub(super) fn is_asked_to_end(&self) -> bool {
        self.folder.join("end").exists()
    }
}

/// Takes a lock if it is free.
fn try_lock(path: &Path) -> Result<Option<HeldLock>> {
    let locking = || format!("locking {}", path.display());
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(path).context(locking)?;
    HeldLock::take(file).context(locking)
}

/// The lock of one of the machines that may run at one time.
pub(super) fn try_slot(number: usize) -> Result<Option<HeldLock>> {
    let parent = parent_folder();
    make_private(&parent)?;
    try_lock(&parent.join(format!("slot-{number}")))
}

/// Asks the machine to end that is unused longest, if there is one.
pub(super) fn end_unused() -> Result<()> {
    let mut oldest: Option<(SystemTime, Place, HeldLock)> = None;
    for folder in std::fs::read_dir(parent_folder()).context(|| "listing machines")?.flatten() {
        let place = Place { folder: folder.path(), identity: String::new() };
        if !place.folder.is_dir() || place.try_keep()?.is_some() {
            continue;
        }
        let Some(in_use) = place.try_use()? else { continue };
        // The time of the last use: each command sets it.
        let used = in_use.file().metadata().and_then(|file| file.modified()).unwrap_or(UNIX_EPOCH);
        if oldest.as_ref().is_none_or(|(time, ..)| used < *time) {
            oldest = Some((used, place, in_use));
        }
    }
    // No command takes it before it is asked: its lock is held here.
    if let Some((_, place, _in_use)) = oldest {
        place.ask_to_end();
    }
    Ok(())
}

fn parent_folder() -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let uid = getuid();
    let of_root = || uid.is_root().then(|| PathBuf::from("/run"));
    match own.filter(|path| path.is_dir()).or_else(of_root).filter(|path| path.is_dir()) {
        Some(folder) => folder.join("coldrise-files"),
        None => std::env::temp_dir().join(format!("coldrise-files-of-{}", uid.as_raw())),
    }
}

/// Makes a folder that only this user can reach.
fn make_private(folder: &Path) -> Result<()> {
    let making = || format!("making the private folder {}", folder.display());
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(error).context(making);
        }
        _ => {}
    }
    let found = folder.symlink_metadata().context(making)?;
    if found.is_dir() && found.uid() == getuid().as_raw() && found.mode() & 0o077 == 0 {
        return Ok(());
    }
    let text = format!("{} is open to other users, or belongs to one", folder.display());
    Err(Error::new(ErrorKind::Forbidden, text).advise("remove it"))
}
