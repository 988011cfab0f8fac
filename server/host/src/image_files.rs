//! What an image's files are, and whether something writes them.

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::watched_file::WatchedFile;

/// Length of [`FileFacts::head`], in bytes.
const HEAD_BYTES: usize = 104;

/// Facts of a file or block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFacts {
    /// Whether it is a block device.
    pub is_device: bool,
    /// Its length, in bytes.
    pub length_bytes: u64,
    /// The space that it occupies, in bytes.
    pub allocated_bytes: u64,
    /// Its first 104 bytes, or all if it is shorter.
    pub head: Vec<u8>,
}

/// Whether watched files are as they were when the watch began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesState {
    /// They are, and no QEMU may write one.
    Unchanged,
    /// A program has opened this one for writing.
    Opened(PathBuf),
    /// This one has changed.
    Changed(PathBuf),
}

/// Looks at a file.
pub(crate) fn look_at(path: &Path) -> Result<FileFacts> {
    let what = || format!("opening {}", path.display());
    let kind = path.metadata().context(what)?.file_type();
    let is_device = kind.is_block_device();
    // Not even opened: a backing file may be named after anything.
    if !is_device && !kind.is_file() {
        let text = format!("{} is neither a file nor a block device", path.display());
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    // It may have become a pipe meanwhile, which must not block.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path).context(what)?;
    let metadata = file.metadata().context(what)?;
    let length_bytes = match is_device {
        true => file.seek(SeekFrom::End(0)).context(what)?,
        false => metadata.len(),
    };
    // Some network file systems do not report allocated blocks.
    let allocated_bytes = match metadata.blocks() {
        _ if is_device => length_bytes,
        0 => length_bytes,
        blocks => blocks.saturating_mul(512),
    };
    let mut head = vec![0; HEAD_BYTES.min(usize::try_from(length_bytes).unwrap_or(HEAD_BYTES))];
    file.read_exact_at(&mut head, 0).context(|| format!("reading {}", path.display()))?;
    Ok(FileFacts { is_device, length_bytes, allocated_bytes, head })
}

/// Looks whether watched files are as they were.
pub(crate) fn state(files: &[WatchedFile]) -> Result<FilesState> {
    for file in files {
        if file.has_writer()? {
            return Ok(FilesState::Opened(file.path().to_owned()));
        }
        if !file.is_unchanged()? {
            return Ok(FilesState::Changed(file.path().to_owned()));
        }
    }
    Ok(FilesState::Unchanged)
}
