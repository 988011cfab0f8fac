//! A disk view through a layout: one file of an image, as if it were a disk.
//!
//! ```text
//!   vda.vhdx   │ header, log, tables │ zeroes │ disk from its byte 0 │ zeroes │
//!   read_at        Layout                fill     Disk::read_at          fill
//!   extents        stored                hole     the disk's, shifted    hole
//! ```
//!
//! Read-only so far: it keeps what `Disk` does with writes by default. What
//! becomes of each write stands in [`Segment::writes`], so writing belongs here.

use coldrise_block::{
    check_range, push_extent, Disk, Error, ErrorKind, Extent, ExtentKind, Result,
};
use coldrise_formats::{Layout, Segment, Source};
use std::ops::Range;
use std::sync::Arc;

/// One file of an image of a disk.
pub(crate) struct ImageFile {
    layout: Layout,
    disk: Arc<dyn Disk>,
}

impl ImageFile {
    /// The file that `layout` describes, over the disk that it was made for.
    pub(crate) fn new(layout: Layout, disk: Arc<dyn Disk>) -> ImageFile {
        ImageFile { layout, disk }
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

    /// Reports what the disk holds in a segment that shows it from `from` on.
    fn disk_extents(&self, segment: &Segment, from: u64, answer: &mut Answer) -> Result<()> {
        let end = from + segment.length_bytes;
        let mut at = from;
        while at < end && !answer.is_complete {
            let found = self.disk.extents(at, end - at, answer.room())?;
            if found.is_empty() {
                return Err(Error::new(ErrorKind::Internal, "a disk told no extents"));
            }
            for extent in found {
                at = extent.end_behind(at)?;
                let offset_bytes = extent.offset_bytes - from + segment.offset_bytes;
                answer.push(Extent { offset_bytes, ..extent });
            }
        }
        Ok(())
    }
}

impl Disk for ImageFile {
    fn size_bytes(&self) -> u64 {
        self.layout.size_bytes()
    }

    /// Nearly every read lies in one segment: it costs finding that, and nothing
    /// is allocated.
    #[inline]
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        let length_bytes = buffer.len() as u64;
        check_range(self.layout.size_bytes(), offset_bytes, length_bytes)?;
        let mut rest = buffer;
        for segment in self.layout.segments(offset_bytes..offset_bytes + length_bytes) {
            let (part, after) = rest.split_at_mut(segment.length_bytes as usize);
            match segment.source {
                Source::Disk { offset_bytes } => self.disk.read_at(part, offset_bytes)?,
                Source::Metadata => self.layout.read_metadata(segment.offset_bytes, part),
                Source::Zero => part.fill(0),
            }
            rest = after;
        }
        Ok(())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        check_range(self.layout.size_bytes(), offset_bytes, length_bytes)?;
        let mut answer = Answer { extents: Vec::new(), limit: limit.max(1), is_complete: false };
        for segment in self.layout.segments(offset_bytes..offset_bytes + length_bytes) {
            let whole = |kind| Extent {
                offset_bytes: segment.offset_bytes,
                length_bytes: segment.length_bytes,
                kind,
            };
            match segment.source {
                Source::Disk { offset_bytes } => {
                    self.disk_extents(&segment, offset_bytes, &mut answer)?;
                }
                Source::Metadata => answer.push(whole(ExtentKind::Stored)),
                Source::Zero => answer.push(whole(ExtentKind::Hole)),
            }
            if answer.is_complete {
                break;
            }
        }
        Ok(answer.extents)
    }
}

/// Extents up to a limit; what only makes the last one longer still fits.
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
