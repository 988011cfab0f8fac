//! A disk view through a layout: one file of an image, as a disk.
//!
//! ```text
//!   vda.vhdx   │ header, log, tables │ zeroes │ disk from its byte 0 │ zeroes │
//!   read_at      side file, Layout      fill     Disk::read_at          fill
//!   write_at     side file, or refused  side     Disk::write_at         side
//!   extents      stored                 hole     the disk's, shifted    hole
//! ```
//!
//! [`Segment::writes`] decides about a write. It goes to the disk, and so shows in every
//! other image of the disk; or the session's side file keeps it for this file alone; or it
//! is refused, because it would move the disk's data. A partly refused request changes
//! nothing.
//!
//! A flush makes both durable. Before a flush there is no order between them: a client that
//! needs its metadata before its data flushes in between, and a flush covers every write
//! that completed before it.

use crate::length::{length_of, side_file_bytes};
use coldrise_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, ReadContext, Result, check_range, push_extent,
};
use coldrise_formats::{Layout, Segment, Source, Writes};
use coldrise_session::Length;
use std::ops::Range;
use std::sync::Arc;

/// Bytes per step when a write is checked to change nothing.
const COMPARED_BYTES: u64 = 64 << 10;

/// One file of an image of a disk.
pub(crate) struct ImageFile {
    layout: Arc<Layout>,
    disk: Arc<dyn Disk>,
    /// The bytes that clients wrote around the disk, over the layout's own bytes. A restore
    /// point has none.
    side: Option<Arc<dyn Disk>>,
    /// Set for a file that clients may lengthen or shorten.
    length: Option<Length>,
}

impl ImageFile {
    /// The file that `layout` describes, over its disk, read-only.
    pub(crate) fn read_only(layout: Layout, disk: Arc<dyn Disk>) -> ImageFile {
        ImageFile { layout: Arc::new(layout), disk, side: None, length: None }
    }

    /// The same for a session: `open_side` opens the side file of that size over the
    /// layout's bytes. The file is writable if side file and disk are.
    pub(crate) fn live(
        layout: Layout,
        disk: Arc<dyn Disk>,
        open_side: impl FnOnce(u64, Arc<dyn Disk>) -> Result<Arc<dyn Disk>>,
    ) -> Result<ImageFile> {
        let layout = Arc::new(layout);
        let size_bytes = side_file_bytes(&layout);
        let around = Around { layout: Arc::clone(&layout), size_bytes };
        let side = open_side(size_bytes, Arc::new(around))?;
        let length = length_of(&layout, &side);
        Ok(ImageFile { layout, disk, side: Some(side), length })
    }

    /// The disk whose bytes the file shows.
    pub(crate) fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// Which ranges of the disk a range of the file shows.
    pub(crate) fn disk_ranges(&self, file: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.layout.segments(file).filter_map(|segment| match segment.source {
            Source::Disk { offset_bytes } => {
                Some(offset_bytes..offset_bytes + segment.length_bytes)
            }
            Source::Metadata | Source::Zero => None,
        })
    }

    /// Lengthens the file with zeroes, or shortens it.
    ///
    /// # Errors
    /// `ReadOnly`; `Unsupported` if the disk determines the file's size; `OutOfRange` above
    /// the maximum size of the file.
    pub(crate) fn set_size_bytes(&self, size_bytes: u64) -> Result<()> {
        self.check_writable()?;
        if size_bytes == self.size_bytes() {
            return Ok(());
        }
        let Some(length) = &self.length else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the size of an image follows from the size of its disk",
            ));
        };
        length.set(size_bytes)
    }

    /// The segments of a range of the file, its added length included.
    fn segments(&self, range: Range<u64>) -> impl Iterator<Item = Segment> + '_ {
        let grown = range.start.max(self.layout.size_bytes())..range.end;
        let tail = (grown.start < grown.end).then(|| Segment {
            offset_bytes: grown.start,
            length_bytes: grown.end - grown.start,
            source: Source::Metadata,
            writes: Writes::Kept,
        });
        self.layout.segments(range).chain(tail)
    }

    fn side_of(&self, segment: &Segment) -> Option<&dyn Disk> {
        self.side.as_deref().filter(|_| segment.writes == Writes::Kept)
    }

    fn check_writable(&self) -> Result<&dyn Disk> {
        match &self.side {
            Some(side) if !self.is_read_only() => Ok(&**side),
            _ => Err(Error::new(
                ErrorKind::ReadOnly,
                "this image file is read-only; publish the restore point and write to the session",
            )),
        }
    }

    /// Refuses a write of `bytes` (of zeroes if `None`) that would change protected bytes;
    /// writing the same bytes again is not a change.
    fn check_refused(&self, range: Range<u64>, bytes: Option<&[u8]>) -> Result<()> {
        let mut there = Vec::new();
        for segment in self.segments(range.clone()) {
            if segment.writes != Writes::Refused {
                continue;
            }
            let end = segment.offset_bytes + segment.length_bytes;
            let mut at = segment.offset_bytes;
            while at < end {
                let length = (end - at).min(COMPARED_BYTES);
                there.resize(length as usize, 0);
                self.layout.read_metadata(at, &mut there);
                let is_same = match bytes {
                    Some(bytes) => bytes[(at - range.start) as usize..].starts_with(&there),
                    None => there.iter().all(|byte| *byte == 0),
                };
                if !is_same {
                    return Err(refused(at));
                }
                at += length;
            }
        }
        Ok(())
    }

    /// Reports the extents of `from` at the segment's position from `start` on.
    fn extents_of(
        &self,
        from: &dyn Disk,
        segment: &Segment,
        start: u64,
        answer: &mut Answer,
    ) -> Result<()> {
        let end = start + segment.length_bytes;
        let mut at = start;
        while at < end && !answer.is_complete {
            let found = from.extents(at, end - at, answer.room())?;
            if found.is_empty() {
                return Err(Error::new(ErrorKind::Internal, "a disk reported no extents"));
            }
            for extent in found {
                at = extent.end_behind(at)?;
                let offset_bytes = extent.offset_bytes - start + segment.offset_bytes;
                answer.push(Extent { offset_bytes, ..extent });
            }
        }
        Ok(())
    }
}

fn refused(at: u64) -> Error {
    Error::new(
        ErrorKind::ReadOnly,
        format!(
            "byte {at} belongs to a table of the image that says where the disk's data is, and \
             the data stays where it is. A client that discards blocks or moves them needs the \
             disk itself, or its .raw, .vhd, .vmdk or .external.qcow2"
        ),
    )
}

impl Disk for ImageFile {
    fn size_bytes(&self) -> u64 {
        self.length.as_ref().map_or(self.layout.size_bytes(), Length::get)
    }

    fn is_read_only(&self) -> bool {
        self.disk.is_read_only() || self.side.as_ref().is_none_or(|side| side.is_read_only())
    }

    /// Nearly every read lies in one segment: finding it is the only cost, without an
    /// allocation.
    #[inline]
    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()> {
        let length_bytes = buffer.len() as u64;
        check_range(self.size_bytes(), offset_bytes, length_bytes)?;
        let mut rest = buffer;
        for segment in self.segments(offset_bytes..offset_bytes + length_bytes) {
            let (part, after) = rest.split_at_mut(segment.length_bytes as usize);
            match (segment.source, self.side_of(&segment)) {
                (Source::Disk { offset_bytes }, _) => {
                    self.disk.read(part, offset_bytes, context)?
                }
                (_, Some(side)) => side.read(part, segment.offset_bytes, context)?,
                (Source::Metadata, None) => self.layout.read_metadata(segment.offset_bytes, part),
                (Source::Zero, None) => part.fill(0),
            }
            rest = after;
        }
        Ok(())
    }

    /// A write behind the end of a file that may grow lengthens it.
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        let side = self.check_writable()?;
        let limit = self.length.as_ref().map_or(self.size_bytes(), Length::limit_bytes);
        check_range(limit, offset_bytes, bytes.len() as u64)?;
        let range = offset_bytes..offset_bytes + bytes.len() as u64;
        self.check_refused(range.clone(), Some(bytes))?;
        let mut rest = bytes;
        for segment in self.segments(range.clone()) {
            let (part, after) = rest.split_at(segment.length_bytes as usize);
            match (segment.writes, segment.source) {
                (Writes::ToDisk, Source::Disk { offset_bytes }) => {
                    self.disk.write_at(part, offset_bytes)?;
                }
                (Writes::Kept, _) => side.write_at(part, segment.offset_bytes)?,
                (Writes::ToDisk | Writes::Dropped | Writes::Refused, _) => {}
            }
            rest = after;
        }
        self.length.as_ref().map_or(Ok(()), |length| length.reach(range.end))
    }

    fn write_zeroes(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        let side = self.check_writable()?;
        check_range(self.size_bytes(), offset_bytes, length_bytes)?;
        let range = offset_bytes..offset_bytes + length_bytes;
        self.check_refused(range.clone(), None)?;
        for segment in self.segments(range) {
            match (segment.writes, segment.source) {
                (Writes::ToDisk, Source::Disk { offset_bytes }) => {
                    self.disk.write_zeroes(offset_bytes, segment.length_bytes)?;
                }
                (Writes::Kept, _) => {
                    side.write_zeroes(segment.offset_bytes, segment.length_bytes)?;
                }
                (Writes::ToDisk | Writes::Dropped | Writes::Refused, _) => {}
            }
        }
        Ok(())
    }

    /// Only the disk frees space: a trim is a hint, and the bytes around the disk are few.
    fn trim(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.check_writable()?;
        check_range(self.size_bytes(), offset_bytes, length_bytes)?;
        for segment in self.segments(offset_bytes..offset_bytes + length_bytes) {
            if let (Writes::ToDisk, Source::Disk { offset_bytes }) =
                (segment.writes, segment.source)
            {
                self.disk.trim(offset_bytes, segment.length_bytes)?;
            }
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.disk.flush()?;
        self.side.as_ref().map_or(Ok(()), |side| side.flush())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        check_range(self.size_bytes(), offset_bytes, length_bytes)?;
        let mut answer = Answer { extents: Vec::new(), limit: limit.max(1), is_complete: false };
        for segment in self.segments(offset_bytes..offset_bytes + length_bytes) {
            let whole = |kind| Extent {
                offset_bytes: segment.offset_bytes,
                length_bytes: segment.length_bytes,
                kind,
            };
            match (segment.source, self.side_of(&segment)) {
                (Source::Disk { offset_bytes }, _) => {
                    self.extents_of(&*self.disk, &segment, offset_bytes, &mut answer)?;
                }
                (_, Some(side)) => {
                    self.extents_of(side, &segment, segment.offset_bytes, &mut answer)?;
                }
                (Source::Metadata, None) => answer.push(whole(ExtentKind::Stored)),
                (Source::Zero, None) => answer.push(whole(ExtentKind::Hole)),
            }
            if answer.is_complete {
                break;
            }
        }
        Ok(answer.extents)
    }
}

/// The layout's bytes around the disk: a side file shows them until they are written. The
/// disk's own bytes are zeroes here.
struct Around {
    layout: Arc<Layout>,
    size_bytes: u64,
}

impl Disk for Around {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, _: &mut ReadContext) -> Result<()> {
        check_range(self.size_bytes, offset_bytes, buffer.len() as u64)?;
        self.layout.read_metadata(offset_bytes, buffer);
        Ok(())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        check_range(self.size_bytes, offset_bytes, length_bytes)?;
        let mut answer = Answer { extents: Vec::new(), limit: limit.max(1), is_complete: false };
        let end = offset_bytes + length_bytes;
        let mut at = offset_bytes;
        for segment in self.layout.segments(offset_bytes..end) {
            let kind = match segment.source {
                Source::Metadata => ExtentKind::Stored,
                Source::Disk { .. } | Source::Zero => ExtentKind::Hole,
            };
            let Segment { offset_bytes, length_bytes, .. } = segment;
            answer.push(Extent { offset_bytes, length_bytes, kind });
            at = offset_bytes + length_bytes;
        }
        if at < end {
            let (offset_bytes, length_bytes) = (at, end - at);
            answer.push(Extent { offset_bytes, length_bytes, kind: ExtentKind::Hole });
        }
        Ok(answer.extents)
    }
}

/// Extents up to a limit; one that only lengthens the last extent still fits.
struct Answer {
    extents: Vec<Extent>,
    limit: usize,
    is_complete: bool,
}

impl Answer {
    fn push(&mut self, next: Extent) {
        let is_full = self.extents.len() >= self.limit;
        if is_full && self.extents.last().is_some_and(|last| last.kind != next.kind) {
            self.is_complete = true;
        }
        if !self.is_complete {
            push_extent(&mut self.extents, next);
        }
    }

    fn room(&self) -> usize {
        self.limit.saturating_sub(self.extents.len()).max(1)
    }
}

#[cfg(test)]
#[path = "image_file_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "image_file_write_tests.rs"]
mod write_tests;
