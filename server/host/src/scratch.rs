//! Scratch files that cannot become full.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, Permissions};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coldrise_block::{
    Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind, read_small_file,
};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;
use serde_json::json;

use crate::image_files::{self, FilesState};
use crate::programs::{Program, ProgramStart};
use crate::watched_file::WatchedFile;

/// Longest path of a socket, in bytes.
const MAX_SOCKET_BYTES: usize = 107;
/// Maximum number of programs that run in a folder.
const MAX_PROGRAMS: usize = 300;
/// qcow2's own tables, in bytes, beyond a thousandth of the content.
pub const TABLES_BYTES: u64 = 4 << 20;

/// The folder of scratch files if none is named. Not /tmp: it may be memory.
pub fn default_scratch() -> PathBuf {
    std::env::var_os("TMPDIR").filter(|path| !path.is_empty()).unwrap_or("/var/tmp".into()).into()
}

/// A private folder of [`crate::ScratchSpace`], on the host itself.
pub(crate) struct Space {
    /// By their numbers. They end before the folder is removed.
    programs: Mutex<HashMap<u64, Arc<Program>>>,
    watched: Mutex<Vec<WatchedFile>>,
    claimed: Mutex<Vec<UnixListener>>,
    folder: ScratchFolder,
    parent: PathBuf,
    group: Option<u32>,
}

impl Space {
    pub(crate) fn new(parent: &Path, group: Option<u32>) -> Result<Space> {
        let parent = std::path::absolute(parent).context(|| parent.display().to_string())?;
        let folder = ScratchFolder::new_in(&parent, ScratchKind::Backup)
            .map_err(|error| error.advise("name another folder with --scratch DIR or TMPDIR"))?;
        let space = Space {
            programs: Mutex::default(),
            watched: Mutex::default(),
            claimed: Mutex::default(),
            folder,
            parent,
            group,
        };
        let inner = space.folder().join("qemu");
        std::fs::create_dir(&inner).context(|| format!("making {}", inner.display()))?;
        space.share(space.folder(), 0o710)?;
        space.share(&inner, 0o770)?;
        let socket = inner.join("nbd");
        if socket.as_os_str().len() > MAX_SOCKET_BYTES {
            let text = format!("{} is too long for a socket", socket.display());
            let error = Error::new(ErrorKind::InvalidInput, text);
            return Err(
                error.advise("name a folder with a shorter path with --scratch DIR or TMPDIR")
            );
        }
        Ok(space)
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The path of a file in it.
    fn path(&self, name: &str) -> Result<PathBuf> {
        let mut parts = Path::new(name).components();
        match (parts.next(), parts.next()) {
            (Some(Component::Normal(_)), None) => Ok(self.folder().join(name)),
            _ => Err(Error::new(ErrorKind::InvalidInput, format!("{name:?} is not a file's name"))),
        }
    }

    fn programs(&self) -> MutexGuard<'_, HashMap<u64, Arc<Program>>> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a program. Returns its number.
    pub(crate) fn start(&self, start: &ProgramStart) -> Result<u64> {
        start.socket.as_ref().map(|socket| self.path(socket)).transpose()?;
        let mut programs = self.programs();
        if programs.len() >= MAX_PROGRAMS {
            let text = format!("{MAX_PROGRAMS} programs run for this backup already");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let program = Program::start(start, self.folder())?;
        let number = programs.keys().max().map_or(1, |number| number + 1);
        programs.insert(number, Arc::new(program));
        Ok(number)
    }

    pub(crate) fn program(&self, number: u64) -> Result<Arc<Program>> {
        self.programs().get(&number).cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("no program {number} runs for this backup"))
        })
    }

    pub(crate) fn stop(&self, number: u64) -> Result<()> {
        let program = self.programs().remove(&number);
        // Another task may wait for its end.
        program.inspect(|program| program.kill());
        Ok(())
    }

    /// Holds a name on this host. The kernel frees it when the process ends.
    ///
    /// # Errors
    /// `Busy` if another process holds it.
    pub(crate) fn claim(&self, name: &str) -> Result<()> {
        let what = || format!("taking the lock {name}");
        let address = SocketAddr::from_abstract_name(name).context(what)?;
        let held = UnixListener::bind_addr(&address).map_err(|error| match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                Error::new(ErrorKind::Busy, format!("another process holds the lock {name}"))
            }
            _ => Error::io(what(), error),
        })?;
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).push(held);
        Ok(())
    }

    /// Watches files from now on, in place of those before.
    pub(crate) fn watch(&self, paths: &[PathBuf]) -> Result<()> {
        let files = paths.iter().map(|path| WatchedFile::open(path)).collect::<Result<_>>()?;
        *self.watched.lock().unwrap_or_else(PoisonError::into_inner) = files;
        Ok(())
    }

    pub(crate) fn files_state(&self) -> Result<FilesState> {
        image_files::state(&self.watched.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends all programs.
    pub(crate) fn stop_programs(&self) {
        let programs = std::mem::take(&mut *self.programs());
        programs.values().for_each(|program| program.kill());
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path(name)?;
        std::fs::write(&path, text).context(|| format!("writing {}", path.display()))
    }

    /// Converts a small qcow2 image; a backing file counts as none. Returns the raw image, of at most `max_bytes`.
    pub(crate) fn raw_of_qcow2(&self, image: &[u8], max_bytes: u64) -> Result<Vec<u8>> {
        let (image_path, raw) = (self.path("small.qcow2")?, self.path("small.raw")?);
        let what = || format!("writing {}", image_path.display());
        std::fs::write(&image_path, image).context(what)?;
        let mut convert = Command::new("qemu-img");
        let file = json!({ "driver": "file", "filename": image_path });
        let source = json!({ "driver": "qcow2", "backing": null, "file": file });
        convert.args(["convert", "-O", "raw"]).arg(format!("json:{source}"));
        run(convert.arg(&raw))?;
        read_small_file(&raw, max_bytes)
    }

    /// Gives a file to QEMU's group.
    fn share(&self, path: &Path, mode: u32) -> Result<()> {
        let what = || format!("giving {} to QEMU's group", path.display());
        if let Some(group) = self.group {
            chown(path, None, Some(group)).context(what).map_err(|error| {
                let advice = format!("run the command as root, or as a member of group {group}");
                error.advise(advice)
            })?;
        }
        std::fs::set_permissions(path, Permissions::from_mode(mode)).context(what)
    }

    pub(crate) fn add(
        &self,
        name: &str,
        size_bytes: u64,
        cluster_bytes: u64,
        bitmap: Option<&str>,
    ) -> Result<()> {
        let path = self.path(name)?;
        let cluster = cluster_bytes.to_string();
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-o", &format!("cluster_size={cluster}")]);
        run(create.arg(&path).arg(size_bytes.to_string()))?;
        if let Some(bitmap) = bitmap {
            let mut add = Command::new("qemu-img");
            run(add.args(["bitmap", "--add", "-g", &cluster]).arg(&path).arg(bitmap))?;
        }
        let what = || format!("opening {}", path.display());
        let file = OpenOptions::new().write(true).open(&path).context(what)?;
        self.allocate(&file, size_bytes)?;
        self.share(&path, 0o660)
    }

    fn allocate(&self, file: &File, content_bytes: u64) -> Result<()> {
        let bytes = content_bytes.saturating_add(content_bytes / 1000).saturating_add(TABLES_BYTES);
        match fallocate(file, FallocateFlags::KEEP_SIZE, 0, bytes) {
            Ok(()) => Ok(()),
            Err(Errno::NOSPC | Errno::DQUOT) => Err(no_space(&self.parent, bytes)),
            Err(Errno::OPNOTSUPP) => {
                let text = format!(
                    "the file system of {} cannot allocate space ahead, and libvirt stops the machine if a \
                     scratch file becomes full",
                    self.parent.display()
                );
                let advice = "name a folder on ext4, XFS, Btrfs or tmpfs with --scratch DIR";
                Err(Error::new(ErrorKind::Unsupported, text).advise(advice))
            }
            Err(error) => Err(std::io::Error::from(error))
                .context(|| format!("allocating a scratch file in {}", self.parent.display())),
        }
    }
}

/// The free space of a folder's file system, in bytes.
///
/// # Errors
/// Errors of the operating system.
pub fn free_bytes(folder: &Path) -> Result<u64> {
    let what = || format!("looking at the free space of {}", folder.display());
    let system = statvfs(folder).map_err(std::io::Error::from).context(what)?;
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

/// The error if a folder has no space for `wanted_bytes`.
pub fn no_space(folder: &Path, wanted_bytes: u64) -> Error {
    let mib = |bytes: u64| bytes >> 20;
    let free_bytes = match free_bytes(folder) {
        Ok(bytes) => bytes,
        Err(error) => return error,
    };
    let text = format!(
        "{} has {} MiB free, and the scratch files of this backup may need {} MiB",
        folder.display(),
        mib(free_bytes),
        mib(wanted_bytes)
    );
    Error::new(ErrorKind::NoSpace, text).advise("name another folder with --scratch DIR")
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().map_err(|error| {
        let text = "starting qemu-img (Debian: apt install qemu-utils)";
        Error::with_source(ErrorKind::ToolFailed, text, error)
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said: String = String::from_utf8_lossy(&output.stderr).chars().take(300).collect();
    Err(Error::new(ErrorKind::ToolFailed, format!("making a scratch image: {}", said.trim())))
}
