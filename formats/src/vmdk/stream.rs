//! streamOptimized: the VMDK of an OVA, written sequentially.
//!
//! Compression takes nearly all of the time, and each grain is independent: any
//! number of threads compress grains, each with its own [`GrainCompressor`], and
//! one thread appends them in order.

use flate2::{Compress, Compression, FlushCompress, Status};

use super::descriptor::{self, Extent};
use super::header::{DEFLATE, Header, flags};
use super::{GRAIN_SECTORS, GRAIN_SIZE_BYTES, MAX_IMAGE_SECTORS, SECTOR_BYTES, sectors};
use super::{TABLE_ENTRIES, TABLE_SECTORS};
use crate::fields::put;
use crate::{DiskShape, Error, Format, Names, Result};

const VERSION: u32 = 3;
/// "gdOffset" of a stream's header: GD_AT_END, the footer has the offset.
const DIRECTORY_AT_END: u64 = u64::MAX;
/// Sectors before the first grain, as in VMware's tools.
const OVERHEAD_SECTORS: u64 = GRAIN_SECTORS;
/// Bytes of a grain's marker before the compressed bytes: its first sector on
/// the disk (8), their length (4).
const GRAIN_MARKER_BYTES: usize = 12;
/// Upper bound of the bytes that zlib adds to incompressible data.
const INCOMPRESSIBLE_EXTRA_BYTES: usize = 1024;

/// "Markers": the part that follows a marker, other than a grain.
#[derive(Clone, Copy)]
enum Marker {
    EndOfStream = 0,
    GrainTable = 1,
    GrainDirectory = 2,
    Footer = 3,
}

/// A grain with its marker, as stored in the stream.
#[derive(Clone, Debug)]
pub struct CompressedGrain {
    grain: u64,
    disk_bytes: usize,
    marked: Vec<u8>,
}

/// Compresses grains. It keeps its working memory (about 256 KiB) between
/// grains.
#[derive(Debug)]
pub struct GrainCompressor {
    zlib: Compress,
    whole: Vec<u8>,
}

impl GrainCompressor {
    /// `level` is zlib's: 1 is fast, 9 is small; higher values mean 9.
    pub fn new(level: u32) -> Self {
        let zlib = Compress::new(Compression::new(level.min(9)), true);
        GrainCompressor { zlib, whole: Vec::new() }
    }

    /// Compresses the disk's bytes from `grain * GRAIN_SIZE_BYTES` on: a whole
    /// grain, or less at the disk's end. Returns `None` if all bytes are 0: the
    /// stream omits such a grain.
    ///
    /// # Errors
    /// `Error::GrainLength` for 0 bytes or more than a grain.
    pub fn compress(&mut self, grain: u64, bytes: &[u8]) -> Result<Option<CompressedGrain>> {
        let disk_bytes = bytes.len();
        if disk_bytes == 0 || disk_bytes > GRAIN_SIZE_BYTES as usize {
            return Err(Error::GrainLength { length_bytes: disk_bytes });
        }
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        // Readers expect every grain to be whole.
        let bytes = if disk_bytes < GRAIN_SIZE_BYTES as usize {
            self.whole.clear();
            self.whole.extend_from_slice(bytes);
            self.whole.resize(GRAIN_SIZE_BYTES as usize, 0);
            &self.whole
        } else {
            bytes
        };
        let room = GRAIN_MARKER_BYTES + bytes.len() + INCOMPRESSIBLE_EXTRA_BYTES;
        let mut marked = Vec::with_capacity(room);
        marked.extend_from_slice(&(grain.wrapping_mul(GRAIN_SECTORS)).to_le_bytes());
        marked.extend_from_slice(&[0; 4]);
        self.zlib.reset();
        loop {
            let done = self.zlib.total_in() as usize;
            // Compressing into memory fails only if the zlib state is invalid,
            // and it was just reset.
            match self.zlib.compress_vec(&bytes[done..], &mut marked, FlushCompress::Finish) {
                Ok(Status::StreamEnd) => break,
                _ => marked.reserve(INCOMPRESSIBLE_EXTRA_BYTES),
            }
        }
        let length = (marked.len() - GRAIN_MARKER_BYTES) as u32;
        put(&mut marked, 8, length.to_le_bytes());
        marked.resize(marked.len().next_multiple_of(SECTOR_BYTES as usize), 0);
        Ok(Some(CompressedGrain { grain, disk_bytes, marked }))
    }
}

/// A stream that is being written. It holds 4 bytes per 32 MiB of disk.
///
/// ```text
/// start → append, for every grain that is not all zeroes, ascending → finish
/// ```
#[derive(Debug)]
pub struct StreamVmdk {
    header: Header,
    disk_bytes: u64,
    next_grain: u64,
    /// Sectors written so far.
    at: u64,
    /// The index and entries of the current grain table.
    table: Option<(u64, Vec<u32>)>,
    directory: Vec<u32>,
}

impl StreamVmdk {
    /// Begins a stream and appends its first bytes to `out`.
    ///
    /// # Errors
    /// The errors of [`Format::check`].
    pub fn start(names: &Names, disk: &DiskShape, out: &mut Vec<u8>) -> Result<Self> {
        Format::VmdkStream.check(disk)?;
        let header = Header {
            version: VERSION,
            flags: flags::LINE_BREAKS | flags::COMPRESSED | flags::MARKERS,
            capacity: sectors(disk.shown_bytes()),
            redundant_directory: 0,
            directory: DIRECTORY_AT_END,
            overhead: OVERHEAD_SECTORS,
            compression: DEFLATE,
        };
        let text = descriptor::text(Extent::StreamOptimized, names.image(), disk);
        let begin = out.len();
        out.extend_from_slice(&header.with_descriptor(&text));
        out.resize(begin + (OVERHEAD_SECTORS * SECTOR_BYTES) as usize, 0);
        let tables = disk.size_bytes.div_ceil(GRAIN_SIZE_BYTES).div_ceil(TABLE_ENTRIES);
        Ok(StreamVmdk {
            header,
            disk_bytes: disk.size_bytes,
            next_grain: 0,
            at: OVERHEAD_SECTORS,
            table: None,
            directory: vec![0; tables as usize],
        })
    }

    /// Appends a grain to `out`. `out` holds all bytes that were not yet written
    /// to the file.
    ///
    /// # Errors
    /// `Error::GrainOrder` for a grain that is out of order or outside the disk;
    /// `Error::GrainLength` for a short grain that is not the last;
    /// `Error::ImageTooLarge` at 2 TiB. On an error nothing is appended.
    pub fn append(&mut self, grain: &CompressedGrain, out: &mut Vec<u8>) -> Result<()> {
        let grains = self.disk_bytes.div_ceil(GRAIN_SIZE_BYTES);
        if grain.grain < self.next_grain || grain.grain >= grains {
            let expected = self.next_grain;
            return Err(Error::GrainOrder { grain: grain.grain, expected, grains });
        }
        let left = self.disk_bytes - grain.grain * GRAIN_SIZE_BYTES;
        if (grain.disk_bytes as u64) < left.min(GRAIN_SIZE_BYTES) {
            return Err(Error::GrainLength { length_bytes: grain.disk_bytes });
        }
        // The parts after the last grain are addressed by sector, too.
        let added = sectors(grain.marked.len() as u64);
        let rest = 2 * (1 + TABLE_SECTORS) + 1 + sectors(self.directory.len() as u64 * 4);
        if self.at + added + rest > MAX_IMAGE_SECTORS {
            return Err(Error::ImageTooLarge {
                format: Format::VmdkStream,
                image_bytes: (self.at + added + rest) * SECTOR_BYTES,
                limit_bytes: MAX_IMAGE_SECTORS * SECTOR_BYTES,
            });
        }

        let index = grain.grain / TABLE_ENTRIES;
        if self.table.as_ref().is_some_and(|(current, _)| *current != index) {
            self.end_table(out);
        }
        let (_, table) = self.table.get_or_insert_with(|| (index, vec![0; TABLE_ENTRIES as usize]));
        table[(grain.grain % TABLE_ENTRIES) as usize] = self.at as u32;
        out.extend_from_slice(&grain.marked);
        self.at += added;
        self.next_grain = grain.grain + 1;
        Ok(())
    }

    /// Appends the last table, the directory and the footer to `out`.
    pub fn finish(mut self, out: &mut Vec<u8>) {
        self.end_table(out);
        let directory = std::mem::take(&mut self.directory);
        let at = self.put_marked(Marker::GrainDirectory, &entries(&directory), out);
        let footer = Header { directory: at, ..self.header };
        self.put_marked(Marker::Footer, &footer.bytes(), out);
        self.put_marked(Marker::EndOfStream, &[], out);
    }

    /// Writes the current grain table, if it has a grain.
    fn end_table(&mut self, out: &mut Vec<u8>) {
        if let Some((index, table)) = self.table.take() {
            let at = self.put_marked(Marker::GrainTable, &entries(&table), out);
            self.directory[index as usize] = at as u32;
        }
    }

    /// Appends a marker and the part it announces; returns the sector of that
    /// part.
    fn put_marked(&mut self, marker: Marker, bytes: &[u8], out: &mut Vec<u8>) -> u64 {
        let length = sectors(bytes.len() as u64);
        let mut sector = [0; SECTOR_BYTES as usize];
        put(&mut sector, 0, length.to_le_bytes());
        put(&mut sector, 12, (marker as u32).to_le_bytes());
        out.extend_from_slice(&sector);
        out.extend_from_slice(bytes);
        out.resize(out.len() + (length * SECTOR_BYTES) as usize - bytes.len(), 0);
        let at = self.at + 1;
        self.at = at + length;
        at
    }
}

fn entries(sectors: &[u32]) -> Vec<u8> {
    sectors.iter().flat_map(|sector| sector.to_le_bytes()).collect()
}
