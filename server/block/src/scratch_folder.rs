//! Private folders for the files of a running program. They vanish with it.
//!
//! ```text
//! TMP/coldrise-WORD-RANDOM/     mode 0700
//!   scratch-lock                held (flock) by the process while it lives
//! ```
//!
//! A killed process leaves its folder. The kernel has freed the lock then, and
//! [`remove_abandoned_folders`] removes the folder. The lock is removed last, so that a kill during a
//! removal leaves a folder that is removed later. A new folder gets its lock locked, by a rename. For a moment
//! it has none: a folder without one is removed only if it is old and empty.

use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, fstat, openat};
use rustix::io::Errno;

use crate::{Context, Result};

const LOCK: &str = "scratch-lock";
/// The same before it is locked.
const NEW_LOCK: &str = "scratch-lock.new";
/// A folder without a lock counts as new for this long.
const NEW: Duration = Duration::from_secs(3600);

/// The purpose of a folder, a part of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScratchKind {
    /// For a backup: a running machine, a foreign image.
    Backup,
    /// For a machine that a user boots.
    Boot,
    /// For a boot check.
    Check,
    /// For a machine that reads file systems.
    Files,
    /// For a connection to a hypervisor's host.
    Host,
    /// Of nbdkit.
    Nbdkit,
    /// Of nfs-ganesha.
    Nfs,
    /// Of Samba's smbd, with a mount.
    Smb,
    /// Of tgtd, with a mount.
    Iscsi,
}

impl ScratchKind {
    const ALL: [ScratchKind; 9] = [
        ScratchKind::Backup,
        ScratchKind::Boot,
        ScratchKind::Check,
        ScratchKind::Files,
        ScratchKind::Host,
        ScratchKind::Nbdkit,
        ScratchKind::Nfs,
        ScratchKind::Smb,
        ScratchKind::Iscsi,
    ];

    fn prefix(self) -> &'static str {
        match self {
            ScratchKind::Backup => "coldrise-backup-",
            ScratchKind::Boot => "coldrise-boot-",
            ScratchKind::Check => "coldrise-check-",
            ScratchKind::Files => "coldrise-files-",
            ScratchKind::Host => "coldrise-host-",
            ScratchKind::Nbdkit => "coldrise-nbdkit-",
            ScratchKind::Nfs => "coldrise-nfs-",
            ScratchKind::Smb => "coldrise-smb-",
            ScratchKind::Iscsi => "coldrise-iscsi-",
        }
    }
}

/// A private folder among the temporary files. Dropping it removes it.
#[derive(Debug)]
pub struct ScratchFolder {
    path: PathBuf,
    _lock: File,
}

impl ScratchFolder {
    /// Creates a folder in $TMPDIR, else /tmp.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn new(kind: ScratchKind) -> Result<ScratchFolder> {
        ScratchFolder::new_in(&std::env::temp_dir(), kind)
    }

    /// Creates a folder in `parent`.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn new_in(parent: &Path, kind: ScratchKind) -> Result<ScratchFolder> {
        let what = || format!("making a private folder in {}", parent.display());
        let mut builder = tempfile::Builder::new();
        builder.prefix(kind.prefix()).permissions(Permissions::from_mode(0o700));
        let folder = builder.tempdir_in(parent).context(what)?;
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        // Locked first: another program takes an unlocked one for that of a killed process.
        let new = folder.path().join(NEW_LOCK);
        let lock = options.open(&new).context(what)?;
        let locked = flock(&lock, FlockOperation::NonBlockingLockExclusive);
        locked.map_err(std::io::Error::from).context(what)?;
        std::fs::rename(&new, folder.path().join(LOCK)).context(what)?;
        Ok(ScratchFolder { path: folder.keep(), _lock: lock })
    }

    /// Whether a living process holds the folder. A lock that cannot be opened counts as held.
    pub fn is_in_use(path: &Path) -> bool {
        let lock = match File::open(path.join(LOCK)) {
            Err(error) => return error.kind() != std::io::ErrorKind::NotFound,
            Ok(lock) => lock,
        };
        flock(&lock, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        // If this fails, a later program removes the folder.
        let _ = remove(&self.path);
    }
}

/// Removes the folders of this user's killed processes. Returns their number. What cannot be removed
/// now stays for the next call.
pub fn remove_abandoned_folders() -> usize {
    remove_abandoned_folders_in(&std::env::temp_dir())
}

/// The same as [`remove_abandoned_folders`], in `parent`.
pub fn remove_abandoned_folders_in(parent: &Path) -> usize {
    let is_ours = |name: &str| ScratchKind::ALL.iter().any(|kind| name.starts_with(kind.prefix()));
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_ours));
    named.filter(|entry| remove_if_abandoned(&entry.path()).unwrap_or(false)).count()
}

fn remove_if_abandoned(path: &Path) -> std::io::Result<bool> {
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = openat(CWD, path, flags | OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty())?;
    if fstat(&folder)?.st_uid != rustix::process::geteuid().as_raw() {
        return Ok(false);
    }
    let flags = flags | OFlags::RDWR | OFlags::NONBLOCK;
    let lock = match openat(&folder, LOCK, flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            let age = SystemTime::now().duration_since(File::from(folder).metadata()?.modified()?);
            if !age.is_ok_and(|age| age > NEW) {
                return Ok(false);
            }
            let _ = std::fs::remove_file(path.join(NEW_LOCK));
            // Fails if there is anything else in it.
            return Ok(std::fs::remove_dir(path).is_ok());
        }
        lock => File::from(lock?),
    };
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(false),
        locked => locked?,
    }
    // While the lock is held: another program may look for abandoned folders, too.
    remove(path).map(|()| true)
}

/// Removes a folder, its lock last. Links in it are removed, not followed.
fn remove(path: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            std::fs::remove_dir_all(entry.path())?;
        } else if entry.file_name() != LOCK {
            std::fs::remove_file(entry.path())?;
        }
    }
    std::fs::remove_file(path.join(LOCK))?;
    std::fs::remove_dir(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Leaves the same as a kill: the folder, and no holder of its lock.
    fn abandon(folder: ScratchFolder) -> PathBuf {
        let path = folder.path().to_owned();
        let ScratchFolder { _lock, .. } = &folder;
        flock(_lock, FlockOperation::Unlock).unwrap();
        std::mem::forget(folder);
        path
    }

    #[test]
    fn a_folder_is_removed_with_its_owner() {
        let parent = tempfile::tempdir().unwrap();
        let folder = ScratchFolder::new_in(parent.path(), ScratchKind::Check).unwrap();
        let path = folder.path().to_owned();
        std::fs::create_dir(path.join("machine")).unwrap();
        std::fs::write(path.join("machine/disk"), "x").unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(remove_abandoned_folders_in(parent.path()), 0);
        assert!(ScratchFolder::is_in_use(&path));
        assert!(path.join("machine/disk").exists());
        drop(folder);
        assert!(!path.exists());
    }

    #[test]
    fn an_abandoned_folder_is_removed_without_following_links() {
        let parent = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir().unwrap();
        std::fs::write(other.path().join("kept"), "x").unwrap();
        let path = abandon(ScratchFolder::new_in(parent.path(), ScratchKind::Nbdkit).unwrap());
        std::os::unix::fs::symlink(other.path(), path.join("link")).unwrap();
        let link = parent.path().join("coldrise-check-link");
        let target = abandon(ScratchFolder::new_in(other.path(), ScratchKind::Check).unwrap());
        std::os::unix::fs::symlink(&target, &link).unwrap();
        assert_eq!(remove_abandoned_folders_in(parent.path()), 1);
        assert!(!path.exists() && other.path().join("kept").exists());
        assert!(link.exists() && target.exists());
    }

    #[test]
    fn a_folder_without_a_lock_may_be_a_new_one() {
        let parent = tempfile::tempdir().unwrap();
        let make = |name: &str, is_old: bool| {
            let path = parent.path().join(name);
            std::fs::create_dir(&path).unwrap();
            if is_old {
                let past = SystemTime::now() - 2 * NEW;
                File::open(&path).unwrap().set_modified(past).unwrap();
            }
            path
        };
        let (new, old) = (make("coldrise-check-new", false), make("coldrise-check-old", true));
        let foreign = make("coldrise-state", true);
        let full = parent.path().join("coldrise-boot-full");
        std::fs::create_dir_all(full.join("file")).unwrap();
        // Killed before it was locked.
        let begun = parent.path().join("coldrise-boot-begun");
        std::fs::create_dir(&begun).unwrap();
        std::fs::write(begun.join(NEW_LOCK), "").unwrap();
        for path in [&full, &begun] {
            File::open(path).unwrap().set_modified(SystemTime::now() - 2 * NEW).unwrap();
        }
        assert_eq!(remove_abandoned_folders_in(parent.path()), 2);
        assert!(new.exists() && !old.exists() && foreign.exists() && full.exists());
        assert!(!begun.exists());
    }

    #[test]
    fn a_new_folder_is_never_taken_for_an_abandoned_one() {
        let parent = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            let making = scope.spawn(|| {
                for _ in 0..3000 {
                    let folder = ScratchFolder::new_in(parent.path(), ScratchKind::Files);
                    assert!(folder.unwrap().path().join(LOCK).exists());
                }
            });
            while !making.is_finished() {
                assert_eq!(remove_abandoned_folders_in(parent.path()), 0);
            }
        });
    }
}
