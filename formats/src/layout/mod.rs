//! A file as a sorted list of regions: the one mechanism behind all formats.
//!
//! A region is a range of the file with one kind of content. Tables (BATs, L2
//! tables, refcounts, grain tables) are formulas: an entry is computed on read,
//! so a 64 TiB disk needs no more memory than a small one. In a compact image
//! the blocks are interleaved with their bitmaps; one bit per block records
//! which blocks are present ([`present`]).

mod blocks;
mod builder;
mod present;
mod table;

use std::ops::Range;

pub(crate) use blocks::Blocks;
pub(crate) use builder::Builder;
pub(crate) use present::Present;
pub(crate) use table::{Table, Width};

/// The destination of the bytes that a client writes into a range of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// They go to the disk.
    ToDisk,
    /// They are stored beside the disk, for this file alone, and later reads
    /// return them: a changed CID, a header's sequence number, a log.
    Kept,
    /// They are accepted and discarded: an allocation table only says where the
    /// disk lies, and clients cannot change that.
    Dropped,
    /// They are refused, either because the file is read-only, or because
    /// keeping them would move the disk's data, so that the other presentations
    /// would no longer show it.
    Refused,
}

/// The source of a range of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The disk.
    Disk {
        /// The disk's byte at which the range begins.
        offset_bytes: u64,
    },
    /// [`Layout::read_metadata`].
    Metadata,
    /// Zeroes.
    Zero,
}

/// A range of the file of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte in the file.
    pub offset_bytes: u64,
    /// Length; never 0.
    pub length_bytes: u64,
    /// The source of its bytes.
    pub source: Source,
    /// The destination of a client's writes to it.
    pub writes: Writes,
}

/// Where a range of the disk lies in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// First byte in the file; `None` where the file omits the range, which then
    /// reads as zeroes.
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

/// One image file. Regions cover the file without gaps.
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
    /// the file's size. It equals [`Layout::size_bytes`] unless the file is a
    /// small text that clients rewrite as a whole. Bytes past the layout's size
    /// are treated as [`Writes::Kept`].
    pub fn growth_limit_bytes(&self) -> u64 {
        self.growth_limit_bytes
    }

    /// The segment from `offset_bytes` on; `None` at or past the end of the
    /// file. It ends where its kind ends, or earlier.
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

    /// The segments of a range of the file, in order and without gaps, up to the
    /// file's end.
    pub fn segments(&self, range: Range<u64>) -> Segments<'_> {
        Segments { layout: self, at: range.start, end: range.end.min(self.size_bytes) }
    }

    /// Fills `buffer` with the file's metadata and zeroes from `offset_bytes`
    /// on. Bytes of the disk or past the file's end are set to 0.
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

    /// Where the disk's bytes from `disk_offset_bytes` on lie; `None` past the
    /// disk's end or where the file holds no part of the disk.
    pub fn place_of(&self, disk_offset_bytes: u64) -> Option<Place> {
        // A layout has a dozen regions at most; only one of them holds the disk.
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
