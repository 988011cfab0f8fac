//! A mount from its beginning to its end.

use crate::filesystem::Filesystem;
use crate::folder::{self, FUSERMOUNT, SOURCE};
use crate::served::{Owner, Served, Tree};
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_export::{Folders, TreeOptions};
use coldrise_store::Repository;
use fuser::{Config, MountOption, Session, SessionACL};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::process::{getgid, getuid};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Requests served side by side, at least and at most. Most of their time goes to
/// decoding, so more than processors are of use only while some wait for the disk.
const THREADS: (usize, usize) = (8, 32);
/// What the kernel reads ahead, where it can be told, in KiB.
const READ_AHEAD_KIB: u32 = 1024;
const FUSE_DEVICE: &str = "/dev/fuse";

/// What to mount, and for whom.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// An empty directory.
    pub folder: PathBuf,
    /// Sessions cannot be written either.
    pub is_read_only: bool,
    /// Other users than the one who mounts see the files, too: read-only, unless
    /// they are root.
    pub allows_others: bool,
    /// Size of the cache of decoded chunks that the repository was opened with,
    /// in bytes.
    pub cache_bytes: u64,
}

/// A mounted repository. Dropping it does not unmount: see [`Mount::finish`].
pub struct Mount {
    folder: PathBuf,
    /// Its number in the list of mounts.
    device: Option<String>,
    connection: OwnedFd,
    served: Arc<Served>,
}

/// Whether a mount has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmounted {
    /// It has: nobody used it.
    Done,
    /// Somebody uses a file or a folder of it.
    Busy,
}

impl Mount {
    /// Mounts a repository and serves it with threads of its own. `on_end` is
    /// called when it was unmounted and nobody uses it any more, and where serving
    /// it fails.
    ///
    /// # Errors
    /// `NotFound` where the directory is missing, `AlreadyExists` where it is not
    /// empty, `Busy` where a repository is mounted there, `ToolFailed` where the
    /// system does not let us mount, saying what is missing.
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
        let served = Arc::new(Served::new(Tree::new(folders, owner)));
        let filesystem = Filesystem::new(Arc::clone(&served), Box::new(on_end));
        let session = Session::new(filesystem, &folder, &config(options))
            .map_err(|error| refused(error, &folder))?;
        let what = || format!("serving {}", folder.display());
        let connection = session.as_fd().try_clone_to_owned().context(what)?;
        let device = folder::device_at(&folder)?;
        // Kept for ever: dropped, it would unmount what lies there then, and that
        // may be somebody else's (fuser 0.18 does not see that ours has gone).
        std::mem::forget(session.spawn().context(what)?);
        if let Some(device) = &device {
            read_further_ahead(device);
        }
        Ok(Mount { folder, device, connection, served })
    }

    /// The whole path of the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Files that somebody has open, by path in the tree.
    pub fn open_paths(&self) -> Vec<String> {
        self.served.open_paths()
    }

    /// Unmounts. Where somebody uses a file or a folder, the tree is taken out of
    /// everybody's sight all the same, and those go on being served.
    ///
    /// # Errors
    /// `ToolFailed` or `Io` where the system refuses.
    pub fn unmount(&self) -> Result<Unmounted> {
        if !self.is_there()? {
            // Somebody took it away, and it is used nevertheless.
            return Ok(Unmounted::Busy);
        }
        if folder::unmount(&self.folder)? {
            return Ok(Unmounted::Done);
        }
        folder::detach(&self.folder)?;
        Ok(Unmounted::Busy)
    }

    /// Flushes and closes everything, whoever still has it open: their requests
    /// fail from now on. To be called when the mount has ended or is to end.
    ///
    /// # Errors
    /// What a flush or the unmounting ended with.
    pub fn finish(self) -> Result<()> {
        self.served.end()?;
        if !self.is_there()? {
            return Ok(());
        }
        folder::detach(&self.folder)?;
        Err(Error::new(
            ErrorKind::Internal,
            format!(
                "{} was still mounted when nobody served it any more; mount it again",
                self.folder.display()
            ),
        ))
    }

    /// Whether our mount is what lies on the folder. As long as the kernel has our
    /// connection nobody else has our device's number.
    fn is_there(&self) -> Result<bool> {
        let mut polled = [PollFd::new(&self.connection, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&at_once))
            .map_err(std::io::Error::from)
            .context(|| format!("looking at the connection of {}", self.folder.display()))?;
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
        // The kernel checks modes, which it knows, and asks us less.
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

/// What is missing, as far as it can be told.
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
                "no permission: the directory has to belong to this user, and {FUSE_DEVICE} has \
                 to be readable and writable for all (mode 666), as it mostly is"
            ),
            _ => "the directory has to belong to this user".to_owned(),
        }
    };
    let what = format!("mounting on {}: {what_to_do}", folder.display());
    Error::with_source(ErrorKind::ToolFailed, what, error)
}

/// The kernel reads 128 KiB ahead of a program that reads on and on, which here is
/// little more than one request. Only root may change that; without, reading is
/// slower and otherwise the same.
fn read_further_ahead(device: &str) {
    let setting = format!("/sys/class/bdi/{device}/read_ahead_kb");
    if let Err(error) = std::fs::write(&setting, READ_AHEAD_KIB.to_string()) {
        tracing::debug!("{setting} stays as it is: {error}");
    }
}
