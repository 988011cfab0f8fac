//! Images in foreign formats: a confined qemu-nbd child reads them.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

use coldrise_block::{Error, ErrorKind, Extent, ExtentKind, Result};
use coldrise_host::{Host, ScratchSpace};

use super::inspect::{Inspected, Inspection, inspect, inspect_member};
use super::nbd::Status;
use super::vhdx::VhdxMap;
use super::{DirtyRun, ImageFormat, NbdSource, RawSource, Reader, Source, SourceOptions};
use crate::qemu::{FileRange, ImageServer};

/// The name of the socket.
const SOCKET: &str = "nbd";
/// The maximum expansion of deflate, the strongest compression that images use.
const MAX_EXPANSION: u64 = 1032;
/// Tolerance: an image may store less than a block's end suggests.
const TOLERANCE_BYTES: u64 = 64 << 20;

/// An image file, served by a child of ours.
pub(crate) struct ImageSource<'c> {
    // The connection must be dropped before its server.
    nbd: NbdSource<'c>,
    /// The image file itself, to detect changes while it is read.
    file: RawSource,
    /// The block map of a VHDX, which QEMU does not report.
    map: Option<VhdxMap>,
    plausible: PlausibleContent,
    server: ImageServer,
    _space: ScratchSpace,
}

impl<'c> ImageSource<'c> {
    /// Inspects the image, then starts the child on it.
    pub(crate) fn open(
        path: &Path,
        format: ImageFormat,
        options: &SourceOptions,
        cancel: &'c AtomicBool,
    ) -> Result<ImageSource<'c>> {
        let bitmap = options.bitmap.as_deref();
        if bitmap.is_some() && format != ImageFormat::Qcow2 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("a {format} image keeps no dirty bitmap: leave out --bitmap"),
            ));
        }
        let file = RawSource::open(path)?;
        let space = private_folder()?;
        let way = Inspection::of_import(&space, options.follow_backing, cancel);
        let inspected = inspect(path, format, &way)?;
        ImageSource::serve(space, path, format, file, inspected, bitmap, cancel)
    }

    /// The same for a VMDK that is a part of the file `archive`.
    pub(crate) fn open_member(
        archive: &Path,
        name: &str,
        range: FileRange,
        options: &SourceOptions,
        cancel: &'c AtomicBool,
    ) -> Result<ImageSource<'c>> {
        if options.bitmap.is_some() {
            let text = "a vmdk image keeps no dirty bitmap: leave out --bitmap";
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let file = RawSource::open(archive)?;
        let space = private_folder()?;
        let inspected = inspect_member(&space, archive, Path::new(name), range, cancel)?;
        ImageSource::serve(space, Path::new(name), ImageFormat::Vmdk, file, inspected, None, cancel)
    }

    /// Starts the child.
    fn serve(
        space: ScratchSpace,
        path: &Path,
        format: ImageFormat,
        file: RawSource,
        inspected: Inspected,
        bitmap: Option<&str>,
        cancel: &'c AtomicBool,
    ) -> Result<ImageSource<'c>> {
        let expansion = if inspected.may_be_compressed { MAX_EXPANSION } else { 1 };
        let plausible = PlausibleContent::new(path, inspected.image.length_bytes(), expansion);
        let what = format!("opening {} as {format}", path.display());
        let server = ImageServer::start(&inspected.image, bitmap, &space, SOCKET)?;
        let name = path.display().to_string();
        let nbd = NbdSource::open(server.endpoint(), name, bitmap, Status::Believed, cancel)
            .map_err(|error| server.explain_refusal(&what, error))?;
        let map = match format {
            ImageFormat::Vhdx => Some(VhdxMap::open(path)?),
            _ => None,
        };
        if map.as_ref().is_some_and(|map| map.size_bytes() != nbd.size_bytes()) {
            return Err(Error::new(
                ErrorKind::Incomplete,
                format!("{what}: its size changed while it was opened"),
            ));
        }
        Ok(ImageSource { nbd, file, map, plausible, server, _space: space })
    }
}

impl Source for ImageSource<'_> {
    fn size_bytes(&self) -> u64 {
        self.nbd.size_bytes()
    }

    fn alignment_bytes(&self) -> u64 {
        self.nbd.alignment_bytes()
    }

    fn useful_readers(&self) -> usize {
        self.nbd.useful_readers()
    }

    fn useful_read_bytes(&self) -> u64 {
        self.nbd.useful_read_bytes()
    }

    fn reader(&self) -> Result<Box<dyn Reader + '_>> {
        let reader = self.nbd.reader().map_err(|error| self.server.explain_failure(error))?;
        Ok(Box::new(ImageReader { reader, server: &self.server }))
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<Extent>> {
        let extents = match &self.map {
            Some(map) => map.extents(offset_bytes, length_bytes),
            None => self
                .nbd
                .extents(offset_bytes, length_bytes)
                .map_err(|error| self.server.explain_failure(error)),
        }?;
        self.plausible.check(&extents)?;
        Ok(extents)
    }

    fn dirty_runs(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<DirtyRun>> {
        self.nbd
            .dirty_runs(offset_bytes, length_bytes)
            .map_err(|error| self.server.explain_failure(error))
    }

    fn check_after_reading(&self) -> Result<Option<String>> {
        self.file.check_after_reading()
    }
}

/// A private folder for QEMU's tools, on this host.
fn private_folder() -> Result<ScratchSpace> {
    ScratchSpace::new(&Host::here(), Some(&std::env::temp_dir()), None)
}

struct ImageReader<'s> {
    reader: Box<dyn Reader + 's>,
    server: &'s ImageServer,
}

impl Reader for ImageReader<'_> {
    fn read_at(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.reader
            .read_at(buffer, offset_bytes)
            .map_err(|error| self.server.explain_failure(error))
    }
}

/// Stops at an image that claims to store more than its files can hold.
///
/// Tables may point to one place repeatedly. Then a file of a few KiB is a disk with
/// terabytes of content, and all of it would be read.
struct PlausibleContent {
    /// The image's name for messages.
    name: String,
    most_bytes: u64,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// The end of the counted part of the disk.
    end: u64,
    stored_bytes: u64,
}

impl PlausibleContent {
    /// For an image whose files have `length_bytes` together and whose content may
    /// expand by `expansion` when it is decompressed.
    fn new(path: &Path, length_bytes: u64, expansion: u64) -> PlausibleContent {
        let most_bytes = length_bytes.saturating_mul(expansion).saturating_add(TOLERANCE_BYTES);
        PlausibleContent { name: path.display().to_string(), most_bytes, seen: Mutex::default() }
    }

    fn check(&self, extents: &[Extent]) -> Result<()> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        for extent in extents {
            let end = extent.offset_bytes.saturating_add(extent.length_bytes);
            if extent.kind == ExtentKind::Stored {
                // Ranges that are queried again count once.
                seen.stored_bytes += end.saturating_sub(extent.offset_bytes.max(seen.end));
            }
            seen.end = seen.end.max(end);
        }
        if seen.stored_bytes <= self.most_bytes {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} claims more content than its files can hold, more than {} bytes: its tables \
                 point to the same place repeatedly. If the image is intact nevertheless, convert \
                 it to raw, or name an NBD export of it",
                self.name, self.most_bytes
            ),
        ))
    }
}
