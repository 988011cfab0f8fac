//! A file of an image that nothing may write while it is read.

use std::fs::File;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Result};
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, major, minor, statx};
use rustix::process::{Flock, FlockType, fcntl_getlk};

/// QEMU locks the byte 100 + N of an image while it has permission N: 1 to write, 2 to write without a change of content,
/// 3 to change the length.
const FIRST_WRITER_BYTE: u64 = 101;
const WRITER_BYTES: u64 = 3;
/// The numbers of a block device's statistics that count the sectors that were written and discarded, from 0. The number of
/// writes counts flushes, too.
const WRITE_COUNTS: [usize; 2] = [6, 13];

/// A file or block device and its state when the watch began. It stays open.
pub(crate) struct WatchedFile {
    path: PathBuf,
    file: File,
    before: FileState,
}

/// All that a write changes. The times of two writes may be equal if less than a tick of the kernel's clock (10 ms at
/// most) is between them: the reader starts later than that.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileState {
    device: (u32, u32),
    inode: u64,
    length_bytes: u64,
    modified: (i64, u32),
    changed: (i64, u32),
    /// What was written to a block device; its times do not change.
    writes: Option<Vec<u64>>,
}

impl WatchedFile {
    /// # Errors
    /// Errors of the operating system.
    pub(crate) fn open(path: &Path) -> Result<WatchedFile> {
        let file = File::open(path).context(|| format!("opening {}", path.display()))?;
        let before = FileState::of(path, &file)?;
        Ok(WatchedFile { path: path.to_owned(), file, before })
    }

    /// The path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a QEMU may write it, by QEMU's own locks.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub(crate) fn has_writer(&self) -> Result<bool> {
        let wanted = Flock {
            start: FIRST_WRITER_BYTE,
            length: WRITER_BYTES,
            ..Flock::from(FlockType::WriteLock)
        };
        let found = fcntl_getlk(&self.file, &wanted).map_err(std::io::Error::from);
        Ok(found.context(|| format!("looking for locks of {}", self.path.display()))?.is_some())
    }

    /// Whether the path leads to the same file, to which nothing was written since.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub(crate) fn is_unchanged(&self) -> Result<bool> {
        Ok(FileState::of(&self.path, &self.file)? == self.before)
    }
}

impl FileState {
    fn of(path: &Path, file: &File) -> Result<FileState> {
        let what = || format!("looking at {}", path.display());
        // A network file system must ask its server.
        let found = statx(CWD, path, AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS);
        let found = found.map_err(std::io::Error::from).context(what)?;
        let mode = found.stx_mode.into();
        let is_device = FileType::from_raw_mode(mode) == FileType::BlockDevice;
        let number = (found.stx_rdev_major, found.stx_rdev_minor);
        let writes = is_device.then(|| device_writes(file, number)).transpose().context(what)?;
        Ok(FileState {
            device: if is_device { number } else { (found.stx_dev_major, found.stx_dev_minor) },
            inode: found.stx_ino,
            length_bytes: found.stx_size,
            modified: (found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec),
            changed: (found.stx_ctime.tv_sec, found.stx_ctime.tv_nsec),
            writes,
        })
    }
}

/// What was written to an open block device since the host started, with all that its cache held.
fn device_writes(
    file: &File,
    (major_number, minor_number): (u32, u32),
) -> std::io::Result<Vec<u64>> {
    let invalid = |why: &str| std::io::Error::new(std::io::ErrorKind::InvalidData, why.to_owned());
    let opened = rustix::fs::fstat(file)?.st_rdev;
    if (major(opened), minor(opened)) != (major_number, minor_number) {
        return Err(invalid("it is another device now"));
    }
    file.sync_all()?;
    let text =
        std::fs::read_to_string(format!("/sys/dev/block/{major_number}:{minor_number}/stat"))?;
    let numbers: Vec<&str> = text.split_whitespace().collect();
    let count = |at: &usize| numbers.get(*at).and_then(|number| number.parse().ok());
    let counts = WRITE_COUNTS.iter().map(count).collect::<Option<_>>();
    counts.ok_or_else(|| invalid("the kernel does not report what was written"))
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::FileExt;

    use super::WatchedFile;

    #[test]
    fn a_write_a_new_length_and_another_file_are_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let changes: [&dyn Fn(); 3] = [
            &|| {
                let file = OpenOptions::new().write(true).open(&path).unwrap();
                // Until the clock has advanced.
                let before = file.metadata().unwrap().modified().unwrap();
                while file.metadata().unwrap().modified().unwrap() == before {
                    file.write_all_at(b"x", 7).unwrap();
                }
            },
            &|| OpenOptions::new().write(true).open(&path).unwrap().set_len(99).unwrap(),
            &|| {
                std::fs::copy(&path, folder.path().join("new")).unwrap();
                std::fs::rename(folder.path().join("new"), &path).unwrap();
            },
        ];
        for change in changes {
            std::fs::write(&path, [0; 4096]).unwrap();
            let watched = WatchedFile::open(&path).unwrap();
            assert!(watched.is_unchanged().unwrap() && !watched.has_writer().unwrap());
            change();
            assert!(!watched.is_unchanged().unwrap());
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        let watched = WatchedFile::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(watched.is_unchanged().is_err());
    }
}
