//! A mount from start to end.

use crate::filesystem::Filesystem;
use crate::folder::{self, FUSERMOUNT, SOURCE};
use crate::served::{Owner, Served, Tree};
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_export::{Folders, TreeOptions};
use coldrise_store::Repository;
use fuser::{Config, MountOption, Session, SessionACL};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{getgid, getuid};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Minimum and maximum of requests served in parallel. Decoding takes most of
/// their time, so more threads than processors help only while some wait for the
/// disk.
const THREADS: (usize, usize) = (8, 32);
/// Read-ahead of the kernel in KiB, where we may set it.
const READ_AHEAD_KIB: u32 = 1024;
const FUSE_DEVICE: &str = "/dev/fuse";

/// The options of a mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// An empty directory.
    pub folder: PathBuf,
    /// Sessions are read-only, too.
    pub is_read_only: bool,
    /// Other users see the files, too: read-only, except root.
    pub allows_others: bool,
    /// The kernel caches sessions, too: one file of a disk at a time is open for writing, and opening
    /// another one is EBUSY. For a mount with one program.
    pub caches_sessions: bool,
    /// Size in bytes of the repository's cache of decoded chunks.
    pub cache_bytes: u64,
}

/// A mounted repository. Dropping it does not unmount: see [`Mount::finish`].
pub struct Mount {
    folder: PathBuf,
    /// Its device number in the list of mounts.
    device: Option<String>,
    connection: OwnedFd,
    served: Arc<Served>,
}

/// The result of an unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmounted {
    /// The mount was unused and is gone.
    Done,
    /// A file or a folder of it is in use.
    Busy,
}

impl Mount {
    /// Mounts a repository and serves it with its own threads. Calls `on_end` when
    /// the mount is gone and unused, and when serving it fails.
    ///
    /// # Errors
    /// `NotFound` if the directory is missing, `AlreadyExists` if it is not empty,
    /// `Busy` if a repository is mounted there, `ToolFailed` if the system refuses
    /// the mount; the message names what is missing.
    pub fn start(
        repository: &Arc<Repository>,
        options: &MountOptions,
        on_end: impl FnOnce() + Send + Sync + 'static,
    ) -> Result<Mount> {
        let folder = folder::prepare(&options.folder)?;
        let tree_options = TreeOptions {
            program: "mount",
            cache_bytes: options.cache_bytes,
            folder: Some(&folder),
        };
        let folders = Folders::new(repository, &tree_options, options.is_read_only)?;
        let owner = Owner { user: getuid().as_raw(), group: getgid().as_raw() };
        let served = Arc::new(Served::new(Tree::new(folders, owner, options.caches_sessions)));
        let filesystem = Filesystem::new(Arc::clone(&served), Box::new(on_end));
        let session = Session::new(filesystem, &folder, &config(options))
            .map_err(|error| refused(error, &folder))?;
        let what = || format!("serving {}", folder.display());
        let connection = session.as_fd().try_clone_to_owned().context(what)?;
        let device = folder::device_at(&folder)?;
        // Leaked on purpose: on drop it would unmount whatever is mounted there by
        // then, perhaps another program's mount (fuser 0.18 does not notice that
        // ours is gone).
        std::mem::forget(session.spawn().context(what)?);
        if let Some(device) = &device {
            read_further_ahead(device);
        }
        Ok(Mount { folder, device, connection, served })
    }

    /// The absolute path of the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Open files, by path in the tree.
    pub fn open_paths(&self) -> Vec<String> {
        self.served.open_paths()
    }

    /// Unmounts. If a file or a folder is in use, the tree is detached from the
    /// directory, and its open files are still served.
    ///
    /// # Errors
    /// `ToolFailed` or `Io` if the system refuses.
    pub fn unmount(&self) -> Result<Unmounted> {
        if !self.is_there()? {
            // It is detached already and still in use.
            return Ok(Unmounted::Busy);
        }
        if folder::unmount(&self.folder)? {
            return Ok(Unmounted::Done);
        }
        folder::detach(&self.folder)?;
        Ok(Unmounted::Busy)
    }

    /// Flushes and closes all files, also those in use: their later requests fail.
    /// Call it when the mount has ended or must end.
    ///
    /// # Errors
    /// The error of a flush or of the unmount.
    pub fn finish(self) -> Result<()> {
        self.served.end()?;
        if !self.is_there()? {
            return Ok(());
        }
        folder::detach(&self.folder)?;
        Err(Error::new(
            ErrorKind::Internal,
            format!(
                "{} was still mounted after its server had ended; mount it again",
                self.folder.display()
            ),
        ))
    }

    /// Whether our mount is the one on the folder. While the kernel has our
    /// connection, no other mount gets our device number.
    fn is_there(&self) -> Result<bool> {
        let mut polled = [PollFd::new(&self.connection, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&at_once))
            .map_err(std::io::Error::from)
            .context(|| format!("checking the connection of {}", self.folder.display()))?;
        if polled[0].revents().contains(PollFlags::ERR) {
            return Ok(false);
        }
        Ok(self.device.is_some() && folder::device_at(&self.folder)? == self.device)
    }
}

fn config(options: &MountOptions) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(SOURCE.to_owned()),
        MountOption::Subtype(SOURCE.to_owned()),
        // The kernel knows the modes and checks them, which saves requests.
        MountOption::DefaultPermissions,
        MountOption::NoDev,
        MountOption::NoSuid,
        MountOption::NoExec,
        MountOption::NoAtime,
        if options.is_read_only { MountOption::RO } else { MountOption::RW },
    ];
    config.acl = if options.allows_others { SessionACL::All } else { SessionACL::Owner };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    config.n_threads = Some((2 * processors).clamp(THREADS.0, THREADS.1));
    config.clone_fd = true;
    config
}

/// Names the missing prerequisite, as far as it is known.
fn refused(error: std::io::Error, folder: &Path) -> Error {
    let text = error.to_string();
    let what_to_do = if !Path::new(FUSE_DEVICE).exists() {
        format!("the kernel offers no FUSE, {FUSE_DEVICE} is missing: modprobe fuse")
    } else if text.contains("user_allow_other") {
        "--allow-other needs the line user_allow_other in /etc/fuse.conf, or root".to_owned()
    } else {
        match error.kind() {
            std::io::ErrorKind::NotFound => format!(
                "users other than root mount with {FUSERMOUNT}, which is not installed (Debian: \
                 apt install fuse3)"
            ),
            std::io::ErrorKind::PermissionDenied => format!(
                "no permission: the directory must belong to this user, and {FUSE_DEVICE} has \
                 to be readable and writable for all (mode 666), as it mostly is"
            ),
            _ => "the directory must belong to this user".to_owned(),
        }
    };
    let what = format!("mounting on {}: {what_to_do}", folder.display());
    Error::with_source(ErrorKind::ToolFailed, what, error)
}

/// Raises the kernel's read-ahead for sequential readers from 128 KiB, which is
/// little more than one request. Only root may change it; otherwise reads are
/// slower but correct.
fn read_further_ahead(device: &str) {
    let setting = format!("/sys/class/bdi/{device}/read_ahead_kb");
    if let Err(error) = std::fs::write(&setting, READ_AHEAD_KIB.to_string()) {
        tracing::debug!("{setting} stays as it is: {error}");
    }
}
