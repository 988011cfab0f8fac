//! Small files of a host's machines and firmware.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use coldrise_block::{Context, Error, ErrorKind, Result, read_at_most, replace_file};
use rustix::fs::OFlags;

use crate::disk_file::is_device;
use crate::messages::{FileKind, FoundFile};

/// Maximum size of a file that is read, in bytes.
pub(crate) const MAX_FILE_BYTES: u64 = 16 << 20;
/// Maximum number of files of a folder.
const MAX_FILES: usize = 1000;
/// The mode of a folder that others can go through.
const ENTERED: u32 = 0o711;
/// libvirt's folder of TPMs has this name in each place where it may be.
const TPMS: &str = "swtpm";

/// Opens a regular file. A folder of a machine is not trusted: a link in it could name any file of root, and another
/// kind of file could block.
fn open(path: &Path) -> Result<File> {
    let what = || format!("reading {}", path.display());
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).context(what)?;
    if !file.metadata().context(what)?.is_file() {
        let text = format!("{} is not a regular file", path.display());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(file)
}

/// Reads a regular file.
pub(crate) fn read_file(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    read_at_most(open(path)?, path, max_bytes.min(MAX_FILE_BYTES))
}

/// Reads a part of a regular file.
pub(crate) fn read_from(path: &Path, offset: u64, max_bytes: u64) -> Result<Vec<u8>> {
    let mut file = open(path)?;
    let mut content = Vec::new();
    let read = file
        .seek(SeekFrom::Start(offset))
        .and_then(|_| file.take(max_bytes.min(MAX_FILE_BYTES)).read_to_end(&mut content));
    read.context(|| format!("reading {}", path.display()))?;
    Ok(content)
}

/// Names and contents of the files of a folder, as base64.
pub(crate) fn read_folder(path: &Path, max_bytes: u64) -> Result<Vec<(String, String)>> {
    let entries = match std::fs::read_dir(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.context(|| format!("reading {}", path.display()))?,
    };
    // Firmware descriptors may be links.
    let read = |path: &Path| {
        let file = File::open(path).ok()?;
        let is_file = file.metadata().ok()?.is_file();
        is_file.then(|| read_at_most(file, path, max_bytes.min(MAX_FILE_BYTES)).ok())?
    };
    let files = entries.flatten().take(MAX_FILES).filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        Some((name, STANDARD.encode(read(&entry.path())?)))
    });
    Ok(files.collect())
}

/// What is at a path; `None` if there is nothing.
pub(crate) fn look(path: &Path) -> Option<FoundFile> {
    path.symlink_metadata().ok()?;
    // A link that leads nowhere is something, too.
    let found = path.metadata().ok();
    let kind = match &found {
        Some(found) if found.is_file() => FileKind::File,
        Some(found) if found.is_dir() => FileKind::Folder,
        Some(found) if is_device(found) => FileKind::BlockDevice,
        Some(_) | None => FileKind::Other,
    };
    Some(FoundFile { kind, size_bytes: found.map_or(0, |found| found.len()) })
}

/// Writes a file durably. After a kill it is whole or not there: a part of a TPM's state would be taken for the machine's.
pub(crate) fn write_file(path: &Path, content: &[u8], is_private: bool) -> Result<()> {
    let what = || format!("writing {}", path.display());
    let folder = path.parent().unwrap_or(path);
    make_folder(folder, if is_private { 0o700 } else { ENTERED }).context(what)?;
    replace_file(path, content)
}

/// Makes a folder with that mode, whatever this process's umask is, and those above it, which others can go through.
fn make_folder(folder: &Path, mode: u32) -> std::io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    folder.parent().map_or(Ok(()), |parent| make_folder(parent, ENTERED))?;
    DirBuilder::new().mode(mode).create(folder)?;
    std::fs::set_permissions(folder, Permissions::from_mode(mode))
}

/// Removes libvirt's folder of a TPM.
pub(crate) fn remove_tpm(folder: &Path) -> Result<()> {
    let is_uuid = |name: &str| {
        name.len() == 36 && name.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
    };
    let name = folder.file_name().and_then(|name| name.to_str());
    let parent = folder.parent().and_then(Path::file_name);
    if !name.is_some_and(is_uuid) || parent.is_none_or(|parent| parent != TPMS) {
        let text = format!("{} is not the folder of a TPM", folder.display());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed.context(|| format!("removing {}", folder.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vars");
        std::fs::write(&path, vec![7; 100]).unwrap();
        assert_eq!(read_file(&path, 100).unwrap(), vec![7; 100]);
        assert_eq!(read_file(&path, 99).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(read_from(&path, 90, 99).unwrap().len(), 10);
        assert!(read_from(&path, 101, 99).unwrap().is_empty());
        for other in [folder.path(), Path::new("/dev/zero")] {
            assert!(read_file(other, 100).is_err());
        }
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(read_file(&link, 100).is_err() && read_from(&link, 0, 100).is_err());
        let absent = folder.path().join("no");
        assert_eq!(read_file(&absent, 1).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!((look(&absent), look(&link).unwrap().size_bytes), (None, 100));
        assert_eq!(look(folder.path()).unwrap().kind, FileKind::Folder);
        assert_eq!(read_folder(folder.path(), 100).unwrap().len(), 2);
        assert_eq!(read_folder(folder.path(), 99).unwrap(), []);
        assert_eq!(read_folder(&absent, 99).unwrap(), []);
    }

    #[test]
    fn only_the_folder_of_a_tpm_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let uuid = "6a1f0b62-1111-4222-8333-abcdefabcdef";
        let file = folder.path().join("swtpm").join(uuid).join("tpm2/state");
        write_file(&file, b"x", true).unwrap();
        for other in [folder.path().join("swtpm"), file.clone(), folder.path().join("x").join(uuid)]
        {
            assert_eq!(remove_tpm(&other).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"x");
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        let inner = file.parent().unwrap();
        assert_eq!((mode(inner), mode(inner.parent().unwrap())), (0o700, 0o711));
        remove_tpm(&folder.path().join("swtpm").join(uuid)).unwrap();
        assert!(!file.exists());
    }
}
