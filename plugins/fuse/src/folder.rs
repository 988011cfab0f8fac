//! The folder that the tree is mounted on.

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The device name in the list of mounts.
pub(crate) const SOURCE: &str = "coldrise";
const MOUNTS: &str = "/proc/self/mountinfo";
/// The program that mounts and unmounts for users other than root.
pub(crate) const FUSERMOUNT: &str = "fusermount3";

/// The absolute path of an empty folder to mount on. First ends a mount whose
/// process was killed.
pub(crate) fn prepare(folder: &Path) -> Result<PathBuf> {
    let path = resolve(folder)?;
    match std::fs::read_dir(&path) {
        Ok(mut entries) => {
            if is_ours(&path)? {
                return Err(mounted_already(&path));
            }
            if entries.next().is_some() {
                return Err(Error::new(
                    ErrorKind::AlreadyExists,
                    format!("{} is not empty: mount on an empty directory", path.display()),
                ));
            }
            Ok(path)
        }
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {
            clear(&path)?;
            Ok(path)
        }
        // Another user's mount rejects even root.
        Err(_) if is_ours(&path)? => Err(mounted_already(&path)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(Error::with_source(
            ErrorKind::NotFound,
            format!("{} does not exist: make the directory first", path.display()),
            error,
        )),
        Err(error) => Err(error).context(|| format!("reading the directory {}", path.display())),
    }
}

/// The absolute path without links. The folder itself may be a killed mount,
/// which cannot be examined; its parent can.
fn resolve(folder: &Path) -> Result<PathBuf> {
    let what = || format!("finding {}", folder.display());
    match folder.canonicalize() {
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {
            let absolute = std::path::absolute(folder).context(what)?;
            match (absolute.parent(), absolute.file_name()) {
                (Some(parent), Some(name)) => Ok(parent.canonicalize().context(what)?.join(name)),
                _ => Err(error).context(what),
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(Error::new(
            ErrorKind::NotFound,
            format!("{} does not exist: make the directory first", folder.display()),
        )),
        found => found.context(what),
    }
}

fn mounted_already(path: &Path) -> Error {
    let path = path.display();
    Error::new(
        ErrorKind::Busy,
        format!("a repository is mounted on {path} already: end it first (umount {path})"),
    )
}

/// Unmounts the remains of a killed process of ours.
fn clear(path: &Path) -> Result<()> {
    if !is_ours(path)? {
        let path = path.display();
        return Err(Error::new(
            ErrorKind::Busy,
            format!(
                "{path} holds a dead mount of another program; end it first (umount -l {path})"
            ),
        ));
    }
    tracing::warn!("{}: ending a mount whose process was killed", path.display());
    detach(path)
}

/// Unmounts an unused mount; returns false if it is in use.
pub(crate) fn unmount(path: &Path) -> Result<bool> {
    match rustix::mount::unmount(path, UnmountFlags::empty()) {
        Ok(()) => Ok(true),
        Err(Errno::BUSY) => Ok(false),
        // Only root may unmount; other users need a program.
        Err(Errno::PERM) => Ok(ask_fusermount(&["-u"], path).is_ok()),
        Err(error) => Err(std::io::Error::from(error)).context(|| unmounting(path)),
    }
}

/// Detaches a mount even if its files are open.
pub(crate) fn detach(path: &Path) -> Result<()> {
    match rustix::mount::unmount(path, UnmountFlags::DETACH) {
        Err(Errno::PERM) => ask_fusermount(&["-u", "-z"], path),
        detached => detached.map_err(std::io::Error::from).context(|| unmounting(path)),
    }
}

/// Ends our dead mounts in private folders of killed programs (`TMP/coldrise-…/NAME`), so that those
/// folders can be removed. Returns their number. The rest stays for the next call.
pub fn end_abandoned_mounts() -> usize {
    let parent = std::env::temp_dir();
    let Ok(parent) = parent.canonicalize() else { return 0 };
    let Ok(mounts) = std::fs::read(MOUNTS) else { return 0 };
    let places = mounts.split(|byte| *byte == b'\n').filter_map(|line| {
        Some(PathBuf::from(unescaped(line.split(|byte| *byte == b' ').nth(4)?)))
    });
    let is_private = |path: &PathBuf| {
        let folder = path.parent().filter(|folder| folder.parent() == Some(&parent));
        let name = folder.and_then(Path::file_name).and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("coldrise-"))
    };
    let is_dead = |path: &PathBuf| {
        let error = std::fs::read_dir(path).err().and_then(|error| error.raw_os_error());
        error == Some(libc::ENOTCONN) && is_ours(path).unwrap_or(false)
    };
    places.filter(is_private).filter(is_dead).filter(|path| detach(path).is_ok()).count()
}

fn ask_fusermount(options: &[&str], path: &Path) -> Result<()> {
    let mut command = Command::new(FUSERMOUNT);
    command.args(options).arg("--").arg(path).stdin(Stdio::null());
    let done = command.output().context(|| format!("{} with {FUSERMOUNT}", unmounting(path)))?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    Err(Error::new(ErrorKind::ToolFailed, format!("{}: {}", unmounting(path), said.trim())))
}

fn unmounting(path: &Path) -> String {
    format!("unmounting {}", path.display())
}

/// Whether a Coldrise tree is mounted there.
fn is_ours(path: &Path) -> Result<bool> {
    Ok(mounted_at(path)?.is_some_and(|mounted| mounted.is_ours))
}

/// The device number of the mount at that path, such as `0:39`; `None` if there
/// is not a mount.
pub(crate) fn device_at(path: &Path) -> Result<Option<String>> {
    Ok(mounted_at(path)?.map(|mounted| mounted.device))
}

struct Mounted {
    device: String,
    is_ours: bool,
}

fn mounted_at(path: &Path) -> Result<Option<Mounted>> {
    let mounts = std::fs::read(MOUNTS).context(|| format!("reading {MOUNTS}"))?;
    Ok(look_up(&mounts, path))
}

/// Finds a mount in a `mountinfo` file, see proc(5). If mounts are stacked, the
/// last one counts.
fn look_up(mounts: &[u8], path: &Path) -> Option<Mounted> {
    mounts.split(|byte| *byte == b'\n').rev().find_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        let device = String::from_utf8_lossy(fields.nth(2)?).into_owned();
        let place = unescaped(fields.nth(1)?);
        if place != path.as_os_str() {
            return None;
        }
        let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
        let (file_system, source) = (rest.next()?, rest.next()?);
        let is_ours = file_system.starts_with(b"fuse") && source == SOURCE.as_bytes();
        Some(Mounted { device, is_ours })
    })
}

/// Decodes escapes such as `\040` for a blank.
fn unescaped(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let code = code.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (first, code) {
            (b'\\', Some(code)) => {
                bytes.push(code);
                rest = &after[3..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"\
22 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw
90 22 0:40 / /mnt/a\\040b rw,nosuid,nodev shared:5 - fuse.coldrise coldrise rw,user_id=0
91 22 0:41 / /mnt/c rw - fuse coldrise rw,user_id=0
92 22 0:42 / /mnt/c rw - tmpfs none rw
93 22 0:43 / /mnt/d rw - fuse.sshfs host: rw
94 22 0:44 / /mnt/e\\x rw - fuse coldrise rw
";

    #[test]
    fn our_mounts_are_found_among_others() {
        for (path, is_ours) in [
            ("/mnt/a b", true),
            ("/mnt/a", false),
            ("/mnt/c", false),
            ("/mnt/d", false),
            ("/mnt/e\\x", true),
            ("/", false),
        ] {
            let found = look_up(TABLE, Path::new(path));
            assert_eq!(found.is_some_and(|mounted| mounted.is_ours), is_ours, "{path}");
        }
        let last = look_up(TABLE, Path::new("/mnt/c")).map(|mounted| mounted.device);
        assert_eq!(last.as_deref(), Some("0:42"));
    }

    #[test]
    fn a_folder_has_to_be_there_and_empty() {
        let folder = std::env::temp_dir().join(format!("coldrise-fuse-{}", std::process::id()));
        assert_eq!(prepare(&folder).unwrap_err().kind(), ErrorKind::NotFound);
        std::fs::create_dir(&folder).unwrap();
        assert_eq!(prepare(&folder.join(".")).unwrap(), folder.canonicalize().unwrap());
        std::fs::write(folder.join("file"), b"").unwrap();
        assert_eq!(prepare(&folder).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert!(prepare(&folder.join("file")).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
