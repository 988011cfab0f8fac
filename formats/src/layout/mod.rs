//! The one mechanism behind all formats: a file as a sorted list of regions.
//!
//! A region is a range of the file with one kind of content. Tables (BATs, L2
//! tables, refcounts, grain tables) are formulas: an entry is computed when it
//! is read, so a 64 TiB disk costs no more memory than a small one. The content
//! of a compact image is interleaved with its blocks' bitmaps; which blocks
//! there are is one bit each ([`present`]).

mod blocks;
mod builder;
mod present;
mod table;

use std::ops::Range;

pub(crate) use blocks::Blocks;
pub(crate) use builder::Builder;
pub(crate) use present::Present;
pub(crate) use table::{Table, Width};

/// What becomes of the bytes that a client writes into a range of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// They are the disk's.
    ToDisk,
    /// They are kept beside the disk, for this file alone, and read back from
    /// then on: a changed CID, a header's sequence number, a log.
    Kept,
    /// They are accepted and forgotten: an allocation table that only says where
    /// the disk lies, which is where it is, whatever a client makes of it.
    Dropped,
    /// They are refused, because keeping them would move the disk's data away
    /// from its place, so that the other presentations would no longer show
    /// it; or because the file is read-only.
    Refused,
}

/// Where the bytes of a range of the file come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// From the disk.
    Disk {
        /// The disk's byte at which the range begins.
        offset_bytes: u64,
    },
    /// From [`Layout::read_metadata`].
    Metadata,
    /// There are only zeroes.
    Zero,
}

/// A range of the file of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte in the file.
    pub offset_bytes: u64,
    /// Length; never 0.
    pub length_bytes: u64,
    /// Where its bytes come from.
    pub source: Source,
    /// What becomes of a client's writes to it.
    pub writes: Writes,
}

/// Where a range of the disk lies in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// First byte in the file; `None` where the file leaves the range out, so
    /// that it reads as zeroes.
    pub offset_bytes: Option<u64>,
    /// Length; never 0.
    pub length_bytes: u64,
}

#[derive(Debug)]
enum Content {
    Bytes(Vec<u8>),
    Table(Table),
    Disk,
    Blocks(Blocks),
    Zero,
}

#[derive(Debug)]
struct Region {
    start_bytes: u64,
    length_bytes: u64,
    content: Content,
    writes: Writes,
}

/// One image file. Regions cover it from the first byte to the last, without
/// gaps.
#[derive(Debug)]
pub struct Layout {
    regions: Vec<Region>,
    size_bytes: u64,
    growth_limit_bytes: u64,
}

impl Layout {
    /// The file's size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The size in bytes up to which a client's writes and truncates may change
    /// the file's. It equals [`Layout::size_bytes`] unless the file is a small
    /// text that clients write anew as a whole; bytes past the layout's size
    /// are treated as [`Writes::Kept`].
    pub fn growth_limit_bytes(&self) -> u64 {
        self.growth_limit_bytes
    }

    /// The segment from `offset_bytes` on; `None` at the end of the file and
    /// behind it. It ends where its kind does, or earlier.
    pub fn segment_at(&self, offset_bytes: u64) -> Option<Segment> {
        if offset_bytes >= self.size_bytes {
            return None;
        }
        let region = &self.regions[self.region_index(offset_bytes)];
        let within = offset_bytes - region.start_bytes;
        let rest = region.length_bytes - within;
        let (source, length_bytes) = match &region.content {
            Content::Bytes(_) | Content::Table(_) => (Source::Metadata, rest),
            Content::Disk => (Source::Disk { offset_bytes: within }, rest),
            Content::Zero => (Source::Zero, rest),
            Content::Blocks(blocks) => blocks.source_at(within),
        };
        Some(Segment { offset_bytes, length_bytes, source, writes: region.writes })
    }

    /// The segments of a range of the file, in order and without gaps. What is
    /// behind the file's end is left out.
    pub fn segments(&self, range: Range<u64>) -> Segments<'_> {
        Segments { layout: self, at: range.start, end: range.end.min(self.size_bytes) }
    }

    /// Fills `buffer` with the file's metadata and zeroes from `offset_bytes`
    /// on. Bytes that are the disk's, or behind the file's end, come out as 0.
    pub fn read_metadata(&self, offset_bytes: u64, buffer: &mut [u8]) {
        buffer.fill(0);
        let end = offset_bytes.saturating_add(buffer.len() as u64).min(self.size_bytes);
        let mut at = offset_bytes;
        while at < end {
            let region = &self.regions[self.region_index(at)];
            let stop = end.min(region.start_bytes + region.length_bytes);
            let part = &mut buffer[(at - offset_bytes) as usize..(stop - offset_bytes) as usize];
            let within = at - region.start_bytes;
            match &region.content {
                Content::Bytes(bytes) => {
                    part.copy_from_slice(&bytes[within as usize..][..part.len()]);
                }
                Content::Table(table) => table.read(within, part),
                Content::Blocks(blocks) => blocks.read_leads(within, part),
                Content::Disk | Content::Zero => {}
            }
            at = stop;
        }
    }

    /// Where the disk's bytes from `disk_offset_bytes` on lie; `None` where the
    /// disk has ended or the file holds nothing of it.
    pub fn place_of(&self, disk_offset_bytes: u64) -> Option<Place> {
        // A layout has a dozen regions at most, and one of them is the disk's.
        self.regions.iter().find_map(|region| match &region.content {
            Content::Disk if disk_offset_bytes < region.length_bytes => Some(Place {
                offset_bytes: Some(region.start_bytes + disk_offset_bytes),
                length_bytes: region.length_bytes - disk_offset_bytes,
            }),
            Content::Blocks(blocks) => blocks.place_of(disk_offset_bytes, region.start_bytes),
            _ => None,
        })
    }

    fn region_index(&self, offset_bytes: u64) -> usize {
        self.regions.partition_point(|region| region.start_bytes <= offset_bytes) - 1
    }
}

/// The segments of a range of a file; see [`Layout::segments`].
#[derive(Debug)]
pub struct Segments<'a> {
    layout: &'a Layout,
    at: u64,
    end: u64,
}

impl Iterator for Segments<'_> {
    type Item = Segment;

    fn next(&mut self) -> Option<Segment> {
        if self.at >= self.end {
            return None;
        }
        let mut segment = self.layout.segment_at(self.at)?;
        segment.length_bytes = segment.length_bytes.min(self.end - self.at);
        self.at += segment.length_bytes;
        Some(segment)
    }
}
