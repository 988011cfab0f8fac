//! Images in formats that are not ours: a qemu-nbd child reads them.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind, Extent, Result};

use super::inspect::inspect;
use super::{DirtyRun, ImageFormat, NbdSource, RawSource, Reader, Source, SourceOptions};
use crate::qemu::ImageServer;

/// Clients of the child at most: the readers, the questions, one to spare.
const MAX_CLIENTS: u32 = 8;

/// An image file, served by a child of ours.
pub(crate) struct ImageSource<'c> {
    // The connection is dropped before the server that it leads to.
    nbd: NbdSource<'c>,
    /// The image file itself, to see whether it changes while it is read.
    file: RawSource,
    _server: ImageServer,
}

impl<'c> ImageSource<'c> {
    /// Looks the image over, then starts the child on it.
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
        let image = inspect(path, format, options.follow_backing, cancel)?;
        let what = format!("opening {} as {format}", path.display());
        let server = ImageServer::start(&image, bitmap, MAX_CLIENTS)?;
        match NbdSource::open(server.endpoint(), path.display().to_string(), bitmap, cancel) {
            Ok(nbd) => Ok(ImageSource { nbd, file, _server: server }),
            Err(error) => Err(server.explain(&what, error)),
        }
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
        self.nbd.reader()
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<Extent>> {
        self.nbd.extents(offset_bytes, length_bytes)
    }

    fn dirty_runs(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<DirtyRun>> {
        self.nbd.dirty_runs(offset_bytes, length_bytes)
    }

    fn check_after_reading(&self) -> Result<Option<String>> {
        self.file.check_after_reading()
    }
}
