//! A file that is being written, out of sight until it is whole.
//!
//! For the target `DIR/NAME` that is `DIR/.NAME.coldrise-part/NAME`: a folder of its
//! own, so that the file carries its final base name from the start (a VMDK writes
//! its own name into itself). The folder is locked while a restore is at work; what a
//! killed restore left behind is removed by the next one to the same target.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, OFlags, RenameFlags};
use rustix::io::Errno;

/// A file on its way.
pub(super) struct PartFile {
    folder_path: PathBuf,
    /// Holds the lock.
    folder: File,
    path: PathBuf,
    target: PathBuf,
    replaces: bool,
}

fn taken(target: &Path) -> Error {
    Error::new(
        ErrorKind::AlreadyExists,
        format!("{} exists: choose another name, or say --force to replace it", target.display()),
    )
}

impl PartFile {
    /// Prepares the way to `target`. Nothing is at [`PartFile::path`] yet.
    pub(super) fn create(target: &Path, replaces: bool) -> Result<PartFile> {
        let what = || format!("preparing to write {}", target.display());
        let Some(name) = target.file_name() else {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("'{}' names no file", target.display()),
            ));
        };
        if !replaces && target.symlink_metadata().is_ok() {
            return Err(taken(target));
        }
        let mut folder_name = std::ffi::OsString::from(".");
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
                    format!("another restore is writing {}: wait for it", target.display()),
                ));
            }
            Err(error) => return Err(Error::io(what(), error.into())),
        }
        let path = folder_path.join(name);
        let part = PartFile { folder_path, folder, path, target: target.to_path_buf(), replaces };
        match std::fs::remove_file(&part.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io(what(), error))
            }
            _ => Ok(part),
        }
    }

    /// Where the file is to be made.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the file durable and moves it to its name, in this order: after a crash
    /// the name stands for the whole file or for what was there before.
    pub(super) fn publish(self) -> Result<()> {
        let what = || format!("writing {}", self.target.display());
        File::open(&self.path).and_then(|file| file.sync_all()).context(what)?;
        if self.replaces {
            std::fs::rename(&self.path, &self.target).context(what)?;
        } else {
            self.rename_unless_taken()?;
        }
        let parent = match self.target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        File::open(parent).and_then(|folder| folder.sync_all()).context(what)
    }

    fn rename_unless_taken(&self) -> Result<()> {
        let (from, to) = (&self.path, &self.target);
        let renamed = rustix::fs::renameat_with(
            rustix::fs::CWD,
            from,
            rustix::fs::CWD,
            to,
            RenameFlags::NOREPLACE,
        );
        let what = || format!("writing {}", to.display());
        match renamed {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(taken(to)),
            // A file system without that flag. A hard link refuses a taken name too.
            Err(Errno::INVAL | Errno::NOSYS) => match std::fs::hard_link(from, to) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Err(taken(to)),
                result => result.context(what),
            },
            Err(error) => Err(Error::io(what(), error.into())),
        }
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        // Whoever waits for the lock finds the folder empty or gone; what cannot be
        // removed now is removed by the next restore to this target.
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_dir(&self.folder_path);
        let _ = rustix::fs::flock(&self.folder, FlockOperation::Unlock);
    }
}
