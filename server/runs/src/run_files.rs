//! Safe access to the files of one run.

use std::fs::{File, Permissions};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, HeldLock, Result};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, openat};
use rustix::io::Errno;
use serde::de::DeserializeOwned;

use crate::documents::MachineRecord;

/// Maximum size of machine.json, in bytes. A longer one is not read.
const MAX_RECORD_BYTES: u64 = 16 << 10;
/// Its name.
pub(crate) const MACHINE_RECORD: &str = "machine.json";

/// The open folder of a run.
pub(crate) struct RunFiles(OwnedFd);

impl RunFiles {
    pub(crate) fn open(path: &Path) -> Result<RunFiles> {
        RunFiles::open_with(path, OFlags::NOFOLLOW)
    }

    /// Opens a folder that may be a symlink: the folder of all runs.
    pub(crate) fn open_any(path: &Path) -> Result<RunFiles> {
        RunFiles::open_with(path, OFlags::empty())
    }

    fn open_with(path: &Path, flags: OFlags) -> Result<RunFiles> {
        let flags = flags | OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let folder = openat(rustix::fs::CWD, path, flags, Mode::empty());
        let folder = folder.map_err(std::io::Error::from);
        folder.map(RunFiles).context(|| format!("opening {}", path.display()))
    }

    /// Opens a folder in this one. Does not follow symlinks.
    pub(crate) fn folder(&self, name: &str) -> std::io::Result<RunFiles> {
        let flags = OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(RunFiles(openat(&self.0, name, flags, Mode::empty())?))
    }

    /// Opens a regular file for reading. Does not wait for FIFOs or follow symlinks.
    pub(crate) fn file(&self, name: &str) -> Result<File> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::RDONLY | OFlags::CLOEXEC;
        let opened = openat(&self.0, name, flags, Mode::empty()).map(File::from);
        let opened = match opened {
            Err(Errno::LOOP) => return Err(no_file("a symbolic link")),
            opened => opened.map_err(std::io::Error::from).context(|| "opening it")?,
        };
        match opened.metadata().context(|| "reading it")?.is_file() {
            true => Ok(opened),
            false => Err(no_file("not a regular file")),
        }
    }

    pub(crate) fn document<T: DeserializeOwned>(&self, name: &str, max_bytes: u64) -> Result<T> {
        let mut text = Vec::new();
        let mut file = self.file(name)?.take(max_bytes + 1);
        file.read_to_end(&mut text).context(|| "reading it")?;
        if text.len() as u64 > max_bytes {
            return Err(no_file(&format!("longer than {max_bytes} bytes")));
        }
        serde_json::from_slice(&text)
            .map_err(|error| Error::with_source(ErrorKind::Corrupt, "it is damaged", error))
    }

    /// Whether a process holds the lock. A run whose lock file is missing is not locked.
    pub(crate) fn is_locked(&self) -> Result<bool> {
        let lock = match self.file("lock") {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            lock => lock?,
        };
        HeldLock::is_held(lock).context(|| "testing it")
    }

    /// Opens a file for writing at its end, and creates it if it is missing.
    pub(crate) fn append_to(&self, name: &str) -> std::io::Result<File> {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC;
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        Ok(File::from(openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)?))
    }

    /// Takes the lock. `None` if another process holds it.
    pub(crate) fn take_lock(&self) -> Result<Option<HeldLock>> {
        let lock = self.append_to("lock").context(|| "opening it")?;
        HeldLock::take(lock).context(|| "taking it")
    }

    /// Whether both are one folder.
    pub(crate) fn is_same(&self, other: &RunFiles) -> Result<bool> {
        let number = |run: &RunFiles| {
            let found = rustix::fs::fstat(&run.0).map_err(std::io::Error::from);
            found.map(|found| (found.st_dev, found.st_ino)).context(|| "reading a folder")
        };
        Ok(number(self)? == number(other)?)
    }

    /// A short path of the control socket, whatever the length of the folder's: addresses of
    /// sockets have at most 107 bytes. Valid while this is open.
    pub(crate) fn control_path(&self) -> PathBuf {
        self.own_path().join("control")
    }

    /// A path of the open folder itself, whatever its name is now. Valid while this is open.
    pub(crate) fn own_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }

    /// Lets only the owner connect.
    pub(crate) fn keep_control_private(&self) -> std::io::Result<()> {
        std::fs::set_permissions(self.control_path(), Permissions::from_mode(0o600))
    }

    /// Whether `control` is a socket, and no link to another one.
    pub(crate) fn has_control(&self) -> bool {
        rustix::fs::statat(&self.0, "control", AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Socket)
    }
}

impl AsFd for RunFiles {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<RunFiles> for OwnedFd {
    fn from(run: RunFiles) -> OwnedFd {
        run.0
    }
}

pub(crate) fn no_file(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("it is {what}"))
}

/// The machine in the folder of a run.
pub(crate) fn machine_of(run: &RunFiles) -> Option<MachineRecord> {
    run.document(MACHINE_RECORD, MAX_RECORD_BYTES).ok()
}
