//! A chunk map as a read-only disk: the base of every served disk.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use coldrise_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, ReadContext, ReadSource, Result, Waiting,
    check_range,
};

use crate::cache::DecodedChunk;
use crate::chunk::ChunkId;
use crate::map::{MapRoot, Page, Place, extents_of, for_each_difference, slot_of, subtree_chunks};
use crate::repository::Repository;
use crate::rocks::{Cursor, Family, ReadMode};

/// A read of at least this many bytes streams: the chunks it decodes are not cached,
/// so that a restore does not evict a guest's working set.
const STREAMING_BYTES: usize = 128 << 10;

/// The chunks of one disk of one point. Immutable; all calls may come from many
/// threads at once.
pub struct ChunkedDisk {
    repository: Arc<Repository>,
    root: MapRoot,
    size_bytes: u64,
    chunk_size: u64,
    root_page: OnceLock<Page>,
}

thread_local! {
    /// Buffer for a chunk that is not cached and of which only a part is needed.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Repository {
    /// The disk of a chunk map, read-only. Reads nothing from the store.
    pub fn disk(self: &Arc<Self>, root: MapRoot, size_bytes: u64) -> ChunkedDisk {
        ChunkedDisk::new(self.clone(), root, size_bytes)
    }
}

impl ChunkedDisk {
    pub(crate) fn new(repository: Arc<Repository>, root: MapRoot, size_bytes: u64) -> Self {
        let chunk_size = u64::from(repository.chunk_size_bytes());
        ChunkedDisk { repository, root, size_bytes, chunk_size, root_page: OnceLock::new() }
    }

    /// Size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The map's root.
    pub fn root(&self) -> MapRoot {
        self.root
    }

    /// Fills `buffer` from `offset_bytes` on.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end; `Corrupt`, naming the chunk or page, if stored
    /// bytes are missing or do not authenticate. The content of `buffer` is then
    /// undefined.
    pub fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        Disk::read_at(self, buffer, offset_bytes)
    }

    /// A part of a chunk, through the cache if there is one.
    #[inline]
    fn read_kept(
        &self,
        id: ChunkId,
        part: &mut [u8],
        skip: usize,
        context: &mut ReadContext,
    ) -> Result<ReadSource> {
        let Some(cache) = self.repository.chunk_cache() else {
            context.begin_wait()?;
            return self.read_passing(part, skip, |chunk| self.repository.read_chunk(id, chunk));
        };
        if let Some(chunk) = cache.get(id) {
            return copy_part(&chunk, part, skip).map(|()| ReadSource::Cache);
        }
        context.begin_wait()?;
        let mut chunk: DecodedChunk = std::iter::repeat_n(0, self.chunk_size as usize).collect();
        if let Some(room) = Arc::get_mut(&mut chunk) {
            self.repository.read_chunk(id, room)?;
        }
        copy_part(&chunk, part, skip)?;
        cache.insert(id, chunk);
        Ok(ReadSource::Backup)
    }

    /// A part of a chunk, without caching it; `cursor` follows the ids.
    fn read_streaming<'a>(
        &'a self,
        id: ChunkId,
        part: &mut [u8],
        skip: usize,
        cursor: &mut Option<Cursor<'a>>,
        context: &mut ReadContext,
    ) -> Result<ReadSource> {
        if let Some(chunk) = self.repository.chunk_cache().and_then(|cache| cache.get(id)) {
            return copy_part(&chunk, part, skip).map(|()| ReadSource::Cache);
        }
        context.begin_wait()?;
        self.read_passing(part, skip, |chunk| self.read_at_cursor(id, chunk, cursor))
    }

    /// Decodes directly into the target if a whole chunk is read.
    fn read_passing(
        &self,
        part: &mut [u8],
        skip: usize,
        decode: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<ReadSource> {
        let chunk_size = self.chunk_size as usize;
        if part.len() == chunk_size {
            return decode(part).map(|()| ReadSource::Backup);
        }
        SCRATCH.with_borrow_mut(|scratch| {
            if scratch.len() < chunk_size {
                scratch.resize(chunk_size, 0);
            }
            let chunk = &mut scratch[..chunk_size];
            decode(chunk)?;
            copy_part(chunk, part, skip).map(|()| ReadSource::Backup)
        })
    }

    fn read_at_cursor<'a>(
        &'a self,
        id: ChunkId,
        chunk: &mut [u8],
        place: &mut Option<Cursor<'a>>,
    ) -> Result<()> {
        let read = self.try_at_cursor(id, chunk, place);
        match read {
            Ok(true) => Ok(()),
            // The chunk may be newer than the cursor's snapshot.
            Ok(false) => self.repository.read_chunk(id, chunk),
            // A cursor stops at damage in a file even if the chunk was healed, or at a file that
            // the writer has deleted. A single read finds the chunk in a newer file first.
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {
                *place = None;
                self.repository.read_chunk(id, chunk)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns false if the cursor does not see the chunk.
    fn try_at_cursor<'a>(
        &'a self,
        id: ChunkId,
        chunk: &mut [u8],
        place: &mut Option<Cursor<'a>>,
    ) -> Result<bool> {
        let key = id.to_be_bytes();
        let is_at = |cursor: &Cursor<'_>| cursor.entry().is_some_and(|(found, _)| found == key);
        let cursor = match place {
            Some(cursor) => {
                // The usual case: the chunk was stored right after the previous one.
                let before = id.wrapping_sub(1).to_be_bytes();
                if cursor.entry().is_some_and(|(found, _)| found == before) {
                    cursor.next()?;
                }
                if !is_at(cursor) {
                    cursor.seek(&key)?;
                }
                cursor
            }
            None => {
                let database = self.repository.database();
                let cursor = place.insert(database.cursor(Family::Chunks, ReadMode::Payload)?);
                cursor.seek(&key)?;
                cursor
            }
        };
        match cursor.entry() {
            Some((found, value)) if found == key => {
                let keys = &self.repository.keys().chunks;
                self.repository.codec().decode(keys, id, value, chunk).map(|()| true)
            }
            _ => Ok(false),
        }
    }

    /// The content of a range, known without reading it, at chunk granularity and cut
    /// to the range: in order, without gaps, neighbours of one kind joined. Ends early
    /// at about `limit` extents, but returns at least one.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end, `Corrupt` for a damaged page.
    pub fn extents(
        &self,
        offset_bytes: u64,
        length_bytes: u64,
        limit: usize,
    ) -> Result<Vec<Extent>> {
        check_range(self.size_bytes, offset_bytes, length_bytes)?;
        let mut leaf = None;
        extents_of(self.chunk_size, (offset_bytes, offset_bytes + length_bytes), limit, |index| {
            self.place(index, &mut leaf, &mut ReadContext::new(Waiting::Allowed))
        })
    }

    /// Looks up a chunk. `leaf` keeps the last leaf for the next look-up.
    #[inline]
    fn place(
        &self,
        index: u64,
        leaf: &mut Option<(u64, Page)>,
        context: &mut ReadContext,
    ) -> Result<Place> {
        let leaf_number = index / subtree_chunks(1);
        if let Some((number, page)) = leaf {
            if *number == leaf_number {
                return Ok(Place { id: slot(page, index, 0), known_chunks: 1 });
            }
        }
        self.walk(index, leaf_number, leaf, context)
    }

    fn walk(
        &self,
        index: u64,
        leaf_number: u64,
        leaf: &mut Option<(u64, Page)>,
        context: &mut ReadContext,
    ) -> Result<Place> {
        let mut page_of = |id, level| match self.repository.decoded_page(id, level) {
            Some(page) => Ok(page),
            None => {
                context.begin_wait()?;
                self.repository.load_page(id, level)
            }
        };
        let absent = |level: u8| {
            let span = subtree_chunks(level);
            Ok(Place { id: 0, known_chunks: span - index % span })
        };
        let top = self.root.levels() - 1;
        if self.root.page() == 0 || index >= self.root.capacity() {
            return Ok(Place { id: 0, known_chunks: u64::MAX - index });
        }
        let root_page = match self.root_page.get() {
            Some(page) => page,
            None => {
                let page = page_of(self.root.page(), top)?;
                self.root_page.get_or_init(|| page)
            }
        };
        let mut below: Option<Page> = None;
        for level in (1..=top).rev() {
            let page = below.as_ref().unwrap_or(root_page);
            let child = slot(page, index, level);
            if child == 0 {
                return absent(level);
            }
            below = Some(page_of(child, level - 1)?);
        }
        let page = below.unwrap_or_else(|| root_page.clone());
        let id = slot(&page, index, 0);
        *leaf = Some((leaf_number, page));
        Ok(Place { id, known_chunks: 1 })
    }
}

/// Read-only, as every restore point is.
impl Disk for ChunkedDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()> {
        check_range(self.size_bytes, offset_bytes, buffer.len() as u64)?;
        let chunk_size = self.chunk_size as usize;
        let keep = buffer.len() < STREAMING_BYTES;
        let mut cursor = None;
        let mut rest = buffer;
        let mut index = offset_bytes / self.chunk_size;
        let mut skip = (offset_bytes % self.chunk_size) as usize;
        let mut leaf = None;
        while !rest.is_empty() {
            let length = rest.len().min(chunk_size - skip);
            let (part, after) = rest.split_at_mut(length);
            let id = self.place(index, &mut leaf, context)?.id;
            let source = if id == 0 {
                part.fill(0);
                ReadSource::Zero
            } else if keep {
                self.read_kept(id, part, skip, context)?
            } else {
                self.read_streaming(id, part, skip, &mut cursor, context)?
            };
            context.add(source, index * self.chunk_size + skip as u64, length as u64);
            rest = after;
            index += 1;
            skip = 0;
        }
        Ok(())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        ChunkedDisk::extents(self, offset_bytes, length_bytes, limit)
    }
}

#[inline]
fn slot(page: &Page, index: u64, level: u8) -> u64 {
    page.get(slot_of(index, level)).copied().unwrap_or(0)
}

#[inline]
fn copy_part(chunk: &[u8], part: &mut [u8], skip: usize) -> Result<()> {
    match chunk.get(skip..skip + part.len()) {
        Some(bytes) => {
            part.copy_from_slice(bytes);
            Ok(())
        }
        None => Err(Error::new(ErrorKind::Internal, "a read leaves its chunk")),
    }
}

/// Reports where `to` differs from `from`, ascending, at chunk granularity and cut to
/// the larger disk: `Stored` if `to` holds chunks, `Hole` if it does not. Chunks are
/// compared by id; with deduplication, equal contents have equal ids. The cost is in
/// proportion to the differences, not to the disks.
///
/// # Errors
/// `InvalidInput` for disks of two repositories, `Corrupt` for damaged pages, and the
/// errors of `report`.
pub fn diff(
    from: &ChunkedDisk,
    to: &ChunkedDisk,
    mut report: impl FnMut(Extent) -> Result<()>,
) -> Result<()> {
    if from.repository.id() != to.repository.id() {
        return Err(Error::new(ErrorKind::InvalidInput, "the disks are in different repositories"));
    }
    let end = from.size_bytes.max(to.size_bytes);
    for_each_difference(&*to.repository, from.root, to.root, &mut |range| {
        let offset_bytes = range.first.saturating_mul(to.chunk_size).min(end);
        let range_end = (range.first + range.count).saturating_mul(to.chunk_size).min(end);
        if offset_bytes == range_end {
            return Ok(());
        }
        report(Extent {
            offset_bytes,
            length_bytes: range_end - offset_bytes,
            kind: if range.stored { ExtentKind::Stored } else { ExtentKind::Hole },
        })
    })
}
