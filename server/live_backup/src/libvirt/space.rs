//! Scratch files that cannot become full.

use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{chown, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use coldrise_block::{Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind};
use rustix::fs::{fallocate, FallocateFlags};
use rustix::io::Errno;
use serde_json::json;

use super::disks::DomainDisk;
use crate::qemu::{no_space, TABLES_BYTES};

/// Longest path of a socket, in bytes.
const MAX_SOCKET_BYTES: usize = 107;

/// A private folder, which QEMU's group can enter.
///
/// ```text
///   coldrise-backup-RANDOM/      0710
///     vda …                      0660  scratch files
///     backup.xml checkpoint.xml  what virsh reads
///     qemu/nbd                   0770  QEMU makes its socket in this folder
/// ```
pub(super) struct ScratchSpace {
    folder: ScratchFolder,
    parent: PathBuf,
    group: Option<u32>,
}

impl ScratchSpace {
    /// # Errors
    /// With advice if the folder cannot be given to QEMU's `group`.
    pub(super) fn new(parent: &Path, group: Option<u32>) -> Result<ScratchSpace> {
        let parent = std::path::absolute(parent).context(|| parent.display().to_string())?;
        let folder = ScratchFolder::new_in(&parent, ScratchKind::Backup)
            .map_err(|error| error.advise("name another folder with --scratch DIR"))?;
        let space = ScratchSpace { folder, parent, group };
        let inner = space.path("qemu");
        std::fs::create_dir(&inner).context(|| format!("making {}", inner.display()))?;
        space.share(space.folder.path(), 0o710)?;
        space.share(&inner, 0o770)?;
        if space.socket().as_os_str().len() > MAX_SOCKET_BYTES {
            let text = format!("{} is too long for a socket", space.socket().display());
            let error = Error::new(ErrorKind::InvalidInput, text);
            return Err(error.advise("name a folder with a shorter path with --scratch DIR"));
        }
        Ok(space)
    }

    /// The folder, absolute.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Where QEMU offers the disks.
    pub(super) fn socket(&self) -> PathBuf {
        self.path("qemu/nbd")
    }

    /// The scratch file of a disk.
    pub(super) fn file(&self, disk: &DomainDisk) -> PathBuf {
        self.path(&format!("disk-{}", disk.name))
    }

    /// Writes a document for virsh. Returns its path.
    pub(super) fn write(&self, name: &str, text: impl AsRef<[u8]>) -> Result<PathBuf> {
        let path = self.path(name);
        std::fs::write(&path, text).context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// Converts a qcow2 image; a backing file counts as none. Returns the raw image.
    ///
    /// # Errors
    /// `ToolFailed` if it is not one.
    pub(super) fn convert_to_raw(&self, image: &Path) -> Result<PathBuf> {
        let raw = image.with_extension("raw");
        let mut convert = Command::new("qemu-img");
        let file = json!({ "driver": "file", "filename": image });
        let source = json!({ "driver": "qcow2", "backing": null, "file": file });
        convert.args(["convert", "-O", "raw"]).arg(format!("json:{source}"));
        run(convert.arg(&raw)).map(|()| raw)
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

    /// Makes an empty qcow2 image for a disk and allocates all space that it can ever need. With `bitmap`
    /// the image records in a bitmap of that name what is written to it.
    ///
    /// # Errors
    /// `NoSpace`; `Unsupported` if the file system cannot allocate ahead.
    pub(super) fn add(
        &self,
        disk: &DomainDisk,
        cluster_bytes: u64,
        bitmap: Option<&str>,
    ) -> Result<()> {
        let path = self.file(disk);
        let cluster = cluster_bytes.to_string();
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-o", &format!("cluster_size={cluster}")]);
        run(create.arg(&path).arg(disk.size_bytes.to_string()))?;
        if let Some(bitmap) = bitmap {
            let mut add = Command::new("qemu-img");
            run(add.args(["bitmap", "--add", "-g", &cluster]).arg(&path).arg(bitmap))?;
        }
        let what = || format!("opening {}", path.display());
        let file = OpenOptions::new().write(true).open(&path).context(what)?;
        self.allocate(&file, disk.size_bytes)?;
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
