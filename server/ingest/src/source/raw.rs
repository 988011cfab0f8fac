//! Raw image files and block devices.

use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Extent, ExtentKind, Result, push_extent};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::kept_out::open_named;
use super::raw_signs::{refuse_fixed_vhd, remark_on_start};
use super::{DirtyRun, Reader, Source};

/// Bytes of one read.
const READ_BYTES: u64 = 1 << 20;
/// Maximum number of extents in one answer.
const MAX_EXTENTS: usize = 1024;

/// A raw image file or a block device.
pub(crate) struct RawSource {
    file: File,
    path: PathBuf,
    size_bytes: u64,
    /// The file's state when it was opened; `None` for a block device.
    opened: Option<Stamp>,
    /// A remark from opening the file.
    remark: Option<String>,
}

/// Detects that a file was written or removed.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    modified: (i64, i64),
    links: u64,
}

impl Stamp {
    fn of(metadata: &std::fs::Metadata) -> Stamp {
        Stamp { modified: (metadata.mtime(), metadata.mtime_nsec()), links: metadata.nlink() }
    }
}

impl RawSource {
    pub(crate) fn open(path: &Path) -> Result<RawSource> {
        let what = || format!("opening {}", path.display());
        let file = open_named(path)?;
        let metadata = file.metadata().context(what)?;
        let kind = metadata.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{} is neither a file nor a block device", path.display()),
            ));
        }
        let size_bytes = file_length(&file).context(what)?;
        let opened = kind.is_file().then(|| Stamp::of(&metadata));
        Ok(RawSource { file, path: path.to_path_buf(), size_bytes, opened, remark: None })
    }

    /// Opens a file that the user declared a raw disk. Refuses a fixed VHD and
    /// remarks on other images.
    pub(crate) fn open_disk(path: &Path) -> Result<RawSource> {
        let mut source = RawSource::open(path)?;
        if source.opened.is_some() {
            refuse_fixed_vhd(&source.file, path, source.size_bytes)?;
            source.remark = remark_on_start(&source.file, path)?;
        }
        Ok(source)
    }

    fn changed(&self, how: &str) -> Error {
        Error::new(
            ErrorKind::Incomplete,
            format!(
                "{} changed while it was read ({how}): back it up again while nothing writes to it",
                self.path.display()
            ),
        )
    }

    /// The next data or hole at or after `offset`; `None` if there is none, or if the
    /// file system does not report holes.
    fn seek(&self, to: SeekFrom) -> Result<Option<u64>> {
        match rustix::fs::seek(&self.file, to) {
            Ok(offset) => Ok(Some(offset)),
            // NXIO: no data up to the end. The others: the file system does not
            // report holes.
            Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => Ok(None),
            Err(error) => Err(Error::io(
                format!("searching for holes in {}", self.path.display()),
                error.into(),
            )),
        }
    }
}

impl Source for RawSource {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn alignment_bytes(&self) -> u64 {
        1
    }

    fn useful_readers(&self) -> usize {
        2
    }

    fn useful_read_bytes(&self) -> u64 {
        READ_BYTES
    }

    fn reader(&self) -> Result<Box<dyn Reader + '_>> {
        Ok(Box::new(RawReader { source: self }))
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<Extent>> {
        let end = (offset_bytes + length_bytes).min(self.size_bytes);
        let mut extents = Vec::new();
        let mut at = offset_bytes;
        let mut push = |from: u64, to: u64, kind| {
            let length_bytes = to - from;
            push_extent(&mut extents, Extent { offset_bytes: from, length_bytes, kind });
            extents.len()
        };
        if self.opened.is_none() {
            // A block device does not report its stored ranges.
            push(at, end, ExtentKind::Stored);
            return Ok(extents);
        }
        while at < end {
            let Some(data) = self.seek(SeekFrom::Data(at))? else {
                // Either a hole up to the end, or the file was truncated or does not
                // report holes: one more query decides.
                let kind = match self.seek(SeekFrom::Hole(at))? {
                    Some(hole) if hole == at => ExtentKind::Hole,
                    _ => ExtentKind::Stored,
                };
                push(at, end, kind);
                break;
            };
            let data = data.clamp(at, end);
            let hole = match self.seek(SeekFrom::Hole(data))? {
                // A hole that does not advance would never end.
                Some(hole) if hole > data => hole.min(end),
                _ => end,
            };
            push(at, data, ExtentKind::Hole);
            if push(data, hole, ExtentKind::Stored) >= MAX_EXTENTS {
                break;
            }
            at = hole;
        }
        Ok(extents)
    }

    fn dirty_runs(&self, _offset_bytes: u64, _length_bytes: u64) -> Result<Vec<DirtyRun>> {
        Err(Error::new(ErrorKind::Unsupported, "a raw image keeps no dirty bitmap"))
    }

    fn remark(&self) -> Option<String> {
        self.remark.clone()
    }

    fn check_after_reading(&self) -> Result<Option<String>> {
        let Some(opened) = self.opened else { return Ok(None) };
        let metadata =
            self.file.metadata().context(|| format!("looking at {}", self.path.display()))?;
        if metadata.len() < self.size_bytes {
            return Err(self.changed("it became smaller"));
        }
        let now = Stamp::of(&metadata);
        if now.links == 0 && opened.links > 0 {
            return Err(self.changed("it was removed"));
        }
        Ok((now.modified != opened.modified).then(|| {
            format!(
                "{} was written to while it was read: the point may mix older and newer blocks",
                self.path.display()
            )
        }))
    }
}

/// The length of a file or a block device, in bytes.
pub(super) fn file_length(file: &File) -> std::io::Result<u64> {
    let metadata = file.metadata()?;
    if metadata.file_type().is_block_device() {
        return Ok(rustix::fs::seek(file, SeekFrom::End(0))?);
    }
    Ok(metadata.len())
}

struct RawReader<'s> {
    source: &'s RawSource,
}

impl Reader for RawReader<'_> {
    fn read_at(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        let source = self.source;
        source.file.read_exact_at(buffer, offset_bytes).map_err(|error| {
            if error.kind() == std::io::ErrorKind::UnexpectedEof {
                return source.changed("it became smaller");
            }
            let what = format!("reading {} at offset {offset_bytes}", source.path.display());
            // The source is unreadable, whatever the errno: a missing file is not a
            // `NotFound` for a name that the user gave.
            Error::with_source(ErrorKind::Io, what, error)
        })
    }
}
