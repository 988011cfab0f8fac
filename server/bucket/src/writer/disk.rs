//! One disk on its way to a bucket.

use std::collections::HashMap;
use std::sync::Arc;

use coldrise_block::Result;

use super::{BucketWriter, Stored};
use crate::disk::BucketDisk;
use crate::pack_reader::PackReader;
use coldrise_store::MapRoot;
use coldrise_store::format::is_zero;
use coldrise_store::format::{MapBuilder, Page, PageId, PageSink, PageSource};
use coldrise_store::format::{check_size, end_of_write};
use coldrise_store::{DiskTarget, WriteCounts};

/// Content that is stored at once, in bytes.
const STEP_BYTES: usize = 1 << 20;

/// Takes one disk.
pub(super) struct BucketDiskWriter<'a> {
    writer: &'a BucketWriter,
    base: MapRoot,
    size_bytes: u64,
    chunk_size: usize,
    builder: MapBuilder,
    pages: Pages<'a>,
    /// Everything before this offset is written.
    next_offset: u64,
    counts: WriteCounts,
}

/// The pages below a map that is being made.
struct Pages<'a> {
    reader: &'a PackReader,
    /// Those that were made for a disk that has grown, and are not in the bucket yet.
    grown: HashMap<PageId, Page>,
}

impl PageSource for Pages<'_> {
    fn page(&self, id: PageId, level: u8) -> Result<Page> {
        match self.grown.get(&id) {
            Some(page) => Ok(Arc::clone(page)),
            None => self.reader.page(id, level),
        }
    }
}

/// Stores pages, and keeps them where that is asked.
struct Sink<'a> {
    writer: &'a BucketWriter,
    kept: Option<HashMap<PageId, Page>>,
}

impl PageSink for Sink<'_> {
    fn store(&mut self, level: u8, slots: &[u64]) -> Result<PageId> {
        let id = self.writer.store_page(level, slots)?;
        if let Some(kept) = &mut self.kept {
            kept.insert(id, slots.into());
        }
        Ok(id)
    }
}

impl<'a> BucketDiskWriter<'a> {
    pub(super) fn start(
        writer: &'a BucketWriter,
        base: MapRoot,
        size_bytes: u64,
    ) -> Result<BucketDiskWriter<'a>> {
        check_size(size_bytes)?;
        let reader = &*writer.reader;
        let chunk_size = reader.keys.chunk_size();
        let chunks = size_bytes.div_ceil(chunk_size as u64);
        let mut sink = Sink { writer, kept: Some(HashMap::new()) };
        let builder = MapBuilder::new(base, chunks, reader, &mut sink)?;
        let pages = Pages { reader, grown: sink.kept.unwrap_or_default() };
        Ok(BucketDiskWriter {
            writer,
            base,
            size_bytes,
            chunk_size,
            builder,
            pages,
            next_offset: 0,
            counts: WriteCounts::default(),
        })
    }

    fn advance(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        let left = self.next_offset..self.size_bytes;
        self.next_offset = end_of_write(self.chunk_size as u64, left, offset_bytes, length_bytes)?;
        Ok(())
    }

    /// Stores whole chunks from the chunk `first` on.
    fn store(&mut self, first: u64, bytes: &[u8]) -> Result<()> {
        let chunks: Vec<&[u8]> = bytes.chunks_exact(self.chunk_size).collect();
        let (zero, stored): (Vec<_>, Vec<_>) =
            (0..chunks.len()).partition(|at| is_zero(chunks[*at]));
        self.counts.zero_chunks += zero.len() as u64;
        let contents: Vec<_> = stored.iter().map(|at| chunks[*at]).collect();
        let mut ids = vec![0; chunks.len()];
        for (at, stored) in stored.into_iter().zip(self.writer.store(&contents)?) {
            ids[at] = match stored {
                Stored::Known(id) => {
                    self.counts.known_chunks += 1;
                    id
                }
                Stored::New { id, stored_bytes } => {
                    self.counts.stored_chunks += 1;
                    self.counts.stored_bytes += stored_bytes;
                    id
                }
            };
        }
        let mut sink = Sink { writer: self.writer, kept: None };
        for (at, id) in ids.into_iter().enumerate() {
            self.builder.set(first + at as u64, id, &self.pages, &mut sink)?;
        }
        Ok(())
    }

    /// Zeroes the last chunk beyond the end of the disk. A larger base may hold bytes there, which must not return when the
    /// disk grows again.
    fn trim_tail(&mut self) -> Result<()> {
        let used = (self.size_bytes % self.chunk_size as u64) as usize;
        let start = self.size_bytes - used as u64;
        if used == 0 || self.next_offset > start || self.base.page() == 0 {
            return Ok(());
        }
        let reader = Arc::clone(&self.writer.reader);
        let base = BucketDisk::new(reader, self.base, start + self.chunk_size as u64);
        let mut chunk = vec![0; self.chunk_size];
        coldrise_block::Disk::read_at(&base, &mut chunk, start)?;
        if is_zero(&chunk[used..]) {
            return Ok(());
        }
        chunk.truncate(used);
        self.write(start, chunk)
    }
}

impl DiskTarget for BucketDiskWriter<'_> {
    fn buffer(&mut self) -> Vec<u8> {
        Vec::new()
    }

    fn write(&mut self, offset_bytes: u64, mut bytes: Vec<u8>) -> Result<()> {
        self.advance(offset_bytes, bytes.len() as u64)?;
        bytes.resize(bytes.len().next_multiple_of(self.chunk_size), 0);
        let mut first = offset_bytes / self.chunk_size as u64;
        for step in bytes.chunks(STEP_BYTES.max(self.chunk_size)) {
            self.store(first, step)?;
            first += (step.len() / self.chunk_size) as u64;
        }
        Ok(())
    }

    fn write_hole(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.advance(offset_bytes, length_bytes)?;
        let chunk_size = self.chunk_size as u64;
        let (first, count) = (offset_bytes / chunk_size, length_bytes.div_ceil(chunk_size));
        let mut sink = Sink { writer: self.writer, kept: None };
        self.builder.set_holes(first, count, &self.pages, &mut sink)
    }

    fn counts(&self) -> WriteCounts {
        self.counts
    }

    fn finish(mut self: Box<Self>) -> Result<(MapRoot, WriteCounts)> {
        self.trim_tail()?;
        let BucketDiskWriter { writer, builder, pages, counts, .. } = *self;
        let root = builder.finish(&pages, &mut Sink { writer, kept: None })?;
        writer.flush()?;
        Ok((root, counts))
    }
}
