//! Writes image files by their layout: the disk's bytes at their places, and the
//! format's metadata.
//!
//! The present blocks of a compact image are determined before the first byte is
//! written. So every byte has its place from the start, and several threads write
//! without coordination.

use std::ops::Range;
use std::path::Path;
use std::time::SystemTime;

use coldrise_block::{Context, Error, ErrorKind, Result, StoredRanges};
use coldrise_formats::{DiskShape, File, Identity, Layout, Names, Presentation, Source};
use coldrise_formats::{Error as FormatError, Format};

use super::file::LocalSink;
use super::run::{Run, write_sparsely};
use super::{Sink, SinkWriter};

/// Largest piece of metadata in memory.
const METADATA_PIECE_BYTES: u64 = 1 << 20;

/// An image to write.
pub(super) struct Image {
    pub(super) names: Names,
    pub(super) shape: DiskShape,
    format: Format,
}

impl Image {
    /// The image at `path`. Fails if its format cannot hold the disk or the name.
    pub(super) fn new(run: &Run<'_>, path: &Path, format: Format) -> Result<Image> {
        let shape = DiskShape::new(run.disk.size_bytes(), new_identity()?);
        let refused = |error| refused(format, path, error);
        format.check(&shape).map_err(refused)?;
        let mut start = [0; Format::START_BYTES];
        if format.depends_on_start() && shape.size_bytes >= start.len() as u64 {
            run.disk.read_at(&mut start, 0)?;
            format.check_start(&start).map_err(refused)?;
        }
        let no_name = || {
            let text = format!("'{}' names no file, or not in UTF-8", path.display());
            Error::new(ErrorKind::InvalidInput, text)
        };
        let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(no_name)?;
        let mut names = Names::beside(format, name).map_err(refused)?;
        if format == Format::Qcow2External {
            // The absolute path of the data file works from any working directory.
            let data = std::path::absolute(path.with_file_name(names.companion()))
                .context(|| format!("finding the absolute path of {}", path.display()))?;
            names = names.with_reference(data.to_str().ok_or_else(no_name)?).map_err(refused)?;
        }
        Ok(Image { names, shape, format })
    }

    /// A compressed VMDK of this name with the given ids.
    ///
    /// # Errors
    /// As of [`Image::new`].
    pub(super) fn streamed(name: &str, shape: DiskShape) -> Result<Image> {
        let format = Format::VmdkStream;
        let refused = |error| refused(format, Path::new(name), error);
        format.check(&shape).map_err(refused)?;
        Ok(Image { names: Names::beside(format, name).map_err(refused)?, shape, format })
    }

    /// The file beside the image that holds the data, if the format has one.
    pub(super) fn companion(&self) -> Option<&str> {
        Some(self.names.companion()).filter(|name| *name != self.names.image())
    }

    /// Converts an error of the crate `formats` to one of a restore.
    pub(super) fn refused(&self, error: FormatError) -> Error {
        refused(self.format, Path::new(self.names.image()), error)
    }

    /// Writes the files into `folder` and makes them durable. Returns the bytes written
    /// of the disk.
    pub(super) fn write(&self, run: &Run<'_>, folder: &Path) -> Result<u64> {
        let mut stored = StoredRanges::of(run.disk);
        let until_cancelled = stored.by_ref().take_while(|_| run.check_cancel().is_ok());
        let presentation = Presentation::new(&self.names, &self.shape, until_cancelled);
        run.check_cancel()?;
        stored.end().context(|| "reading which ranges of the disk are stored")?;
        let mut written = 0;
        for File { name, layout } in presentation.map_err(|e| self.refused(e))?.into_files() {
            let sink = LayoutSink::create(&folder.join(name), layout)?;
            sink.write_metadata(run)?;
            if sink.layout.place_of(0).is_some() {
                written += run.copy(&sink)?;
            } else {
                sink.finish()?;
            }
        }
        Ok(written)
    }
}

/// A restored image is a new disk: its ids are random, so that no hypervisor takes it
/// for the served disk or for another restore of the same point.
fn new_identity() -> Result<Identity> {
    let mut seed = [0; 32];
    // The kernel returns up to 256 bytes completely or fails.
    rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())
        .map_err(std::io::Error::from)
        .context(|| "generating random ids for an image")?;
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let created_unix_seconds = since_1970.map_or(0, |time| time.as_secs());
    Ok(Identity { seed, created_unix_seconds })
}

fn refused(format: Format, path: &Path, error: FormatError) -> Error {
    let kind = match error {
        FormatError::DiskTooLarge { .. }
        | FormatError::DiskEmpty { .. }
        | FormatError::ImageTooLarge { .. }
        | FormatError::MistakenStart { .. } => ErrorKind::Unsupported,
        FormatError::FileName { .. } => ErrorKind::InvalidInput,
        _ => ErrorKind::Internal,
    };
    Error::with_source(kind, format!("writing {} as {format}", path.display()), error)
}

/// A new file with a layout, sparse.
struct LayoutSink {
    file: LocalSink,
    layout: Layout,
}

impl LayoutSink {
    fn create(path: &Path, layout: Layout) -> Result<LayoutSink> {
        Ok(LayoutSink { file: LocalSink::create(path, layout.size_bytes())?, layout })
    }

    /// Writes all bytes that are not the disk's. Zeroes stay holes: the table of an
    /// empty part of a disk takes no space.
    fn write_metadata(&self, run: &Run<'_>) -> Result<()> {
        let mut writer = self.file.writer()?;
        let mut buffer = Vec::new();
        for segment in self.layout.segments(0..self.layout.size_bytes()) {
            if segment.source != Source::Metadata {
                continue;
            }
            let end = segment.offset_bytes + segment.length_bytes;
            let mut at = segment.offset_bytes;
            while at < end {
                run.check_cancel()?;
                buffer.resize((end - at).min(METADATA_PIECE_BYTES) as usize, 0);
                self.layout.read_metadata(at, &mut buffer);
                write_sparsely(writer.as_mut(), &buffer, at)?;
                at += buffer.len() as u64;
            }
        }
        Ok(())
    }
}

impl Sink for LayoutSink {
    fn needs_zeroes(&self) -> bool {
        false
    }

    fn alignment_bytes(&self) -> u64 {
        self.file.alignment_bytes()
    }

    fn useful_writers(&self) -> usize {
        self.file.useful_writers()
    }

    fn writer(&self) -> Result<Box<dyn SinkWriter + '_>> {
        Ok(Box::new(LayoutWriter { file: self.file.writer()?, layout: &self.layout }))
    }

    fn finish(&self) -> Result<()> {
        self.file.finish()
    }
}

struct LayoutWriter<'s> {
    file: Box<dyn SinkWriter + 's>,
    layout: &'s Layout,
}

impl LayoutWriter<'_> {
    /// Calls `act` for every part of a disk range that lies in one piece in the file,
    /// with the part (relative to the range's start) and its place. A session may store
    /// blocks that were absent when the restore began; those have no place and are
    /// skipped.
    fn for_each_place(
        &mut self,
        range: Range<u64>,
        mut act: impl FnMut(&mut dyn SinkWriter, Range<u64>, u64) -> Result<()>,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let Some(place) = self.layout.place_of(at) else { break };
            let end = range.end.min(at + place.length_bytes);
            if let Some(offset_bytes) = place.offset_bytes {
                act(self.file.as_mut(), at - range.start..end - range.start, offset_bytes)?;
            }
            at = end;
        }
        Ok(())
    }
}

impl SinkWriter for LayoutWriter<'_> {
    fn write_at(&mut self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        let range = offset_bytes..offset_bytes + bytes.len() as u64;
        self.for_each_place(range, |file, part, place| {
            file.write_at(&bytes[part.start as usize..part.end as usize], place)
        })
    }

    fn write_zeroes(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.for_each_place(offset_bytes..offset_bytes + length_bytes, |file, part, place| {
            file.write_zeroes(place, part.end - part.start)
        })
    }
}
