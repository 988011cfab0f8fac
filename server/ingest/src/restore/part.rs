//! The hidden files of an unfinished image, or another large file.
//!
//! For the target `DIR/NAME` they lie in `DIR/.NAME.coldrise-part/`, each under its final
//! name. The folder is locked during a restore. The next restore to the same target
//! removes the remains of a killed one.

use std::ffi::OsString;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, OFlags, RenameFlags};
use rustix::io::Errno;

/// The unfinished files: the image and, in some formats, the file with its data.
pub struct PartFiles {
    folder_path: PathBuf,
    /// Holds the lock.
    folder: File,
    target: PathBuf,
    companion: Option<OsString>,
    replaces: bool,
}

fn taken(target: &Path) -> Error {
    Error::new(
        ErrorKind::AlreadyExists,
        format!("{} exists: choose another name, or use --force to replace it", target.display()),
    )
}

impl PartFiles {
    /// Prepares `target` and, beside it, `companion`. [`PartFiles::folder`] is still
    /// empty.
    ///
    /// # Errors
    /// `AlreadyExists` unless it `replaces`; `Busy` while another command writes it; `InvalidInput` if it has no name.
    pub fn create(target: &Path, companion: Option<&str>, replaces: bool) -> Result<PartFiles> {
        let what = || format!("preparing to write {}", target.display());
        let Some(name) = target.file_name() else {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("'{}' is not a file name", target.display()),
            ));
        };
        let companion = companion.map(OsString::from);
        let beside = companion.as_ref().map(|name| target.with_file_name(name));
        for file in std::iter::once(target).chain(beside.as_deref()) {
            if !replaces && file.symlink_metadata().is_ok() {
                return Err(taken(file));
            }
        }
        let mut folder_name = OsString::from(".");
        folder_name.push(name);
        folder_name.push(".coldrise-part");
        let folder_path = target.with_file_name(folder_name);
        match DirBuilder::new().mode(0o700).create(&folder_path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(Error::io(what(), error));
            }
            _ => {}
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let folder = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(flags.bits() as i32)
            .open(&folder_path)
            .context(what)?;
        match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!("another command is writing {}: wait until it ends", target.display()),
                ));
            }
            Err(error) => return Err(Error::io(what(), error.into())),
        }
        let target = target.to_path_buf();
        let part = PartFiles { folder_path, folder, target, companion, replaces };
        part.empty().context(|| format!("preparing to write {}", part.target.display()))?;
        Ok(part)
    }

    /// The folder for the unfinished files.
    pub(super) fn folder(&self) -> &Path {
        &self.folder_path
    }

    /// The unfinished path of the file that will get the target's name.
    pub fn image(&self) -> PathBuf {
        // A target without a name was refused earlier.
        self.folder_path.join(self.target.file_name().unwrap_or_default())
    }

    /// Makes the files durable and then renames them, so that after a crash a name stands
    /// for the complete file or for the old one. The image follows the file that it
    /// names, and an old image is removed before that file is replaced: all files that
    /// open under the target's name are from one restore.
    ///
    /// # Errors
    /// `AlreadyExists` if the name was taken meanwhile, and errors of the operating system. Nothing is left then.
    pub fn publish(self) -> Result<()> {
        let what = || format!("writing {}", self.target.display());
        let image = (self.image(), self.target.clone());
        let data = self
            .companion
            .as_ref()
            .map(|name| (self.folder_path.join(name), self.target.with_file_name(name)));
        for (from, _) in std::iter::once(&image).chain(&data) {
            File::open(from).and_then(|file| file.sync_all()).context(what)?;
        }
        if let Some((from, to)) = &data {
            if self.replaces {
                remove(&self.target).context(what)?;
            }
            self.put(from, to)?;
            self.sync_parent().context(what)?;
        }
        let put = self.put(&image.0, &image.1);
        if let (Err(_), Some((_, data)), false) = (&put, &data, self.replaces) {
            // It was renamed just now and is useless without the image. Report the error
            // that led here.
            let _ = remove(data);
        }
        put?;
        self.sync_parent().context(what)
    }

    fn sync_parent(&self) -> std::io::Result<()> {
        let parent = match self.target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        File::open(parent).and_then(|folder| folder.sync_all())
    }

    fn put(&self, from: &Path, to: &Path) -> Result<()> {
        let what = || format!("writing {}", to.display());
        if self.replaces {
            return std::fs::rename(from, to).context(what);
        }
        let (here, flag) = (rustix::fs::CWD, RenameFlags::NOREPLACE);
        match rustix::fs::renameat_with(here, from, here, to, flag) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(taken(to)),
            // The file system lacks that flag. A hard link also fails if the name is
            // taken.
            Err(Errno::INVAL | Errno::NOSYS) => match std::fs::hard_link(from, to) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Err(taken(to)),
                result => result.context(what),
            },
            Err(error) => Err(Error::io(what(), error.into())),
        }
    }

    /// Removes the content of the folder.
    fn empty(&self) -> std::io::Result<()> {
        for entry in std::fs::read_dir(&self.folder_path)? {
            remove(&entry?.path())?;
        }
        Ok(())
    }
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Drop for PartFiles {
    fn drop(&mut self) {
        // A restore that waits for the lock finds the folder empty or gone. If a removal
        // fails now, the next restore to this target repeats it.
        let _ = self.empty();
        let _ = std::fs::remove_dir(&self.folder_path);
        let _ = rustix::fs::flock(&self.folder, FlockOperation::Unlock);
    }
}
