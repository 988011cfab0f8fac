//! A disk of a point in a bucket.

use std::sync::Arc;

use coldrise_block::{Disk, Extent, ReadContext, ReadSource, Result, check_range};

use super::pack_reader::{PackReader, Wanted};
use coldrise_store::MapRoot;
use coldrise_store::format::{
    Page, PageSource, Place, extents_of, for_each_difference, slot_of, subtree_chunks,
};

/// A disk of a point in a bucket, read-only. All calls may come from many threads at once.
pub struct BucketDisk {
    reader: Arc<PackReader>,
    root: MapRoot,
    size_bytes: u64,
}

impl BucketDisk {
    pub(super) fn new(reader: Arc<PackReader>, root: MapRoot, size_bytes: u64) -> BucketDisk {
        BucketDisk { reader, root, size_bytes }
    }

    /// Where this disk differs from `from`, a disk of the same bucket: offset and length in bytes, ascending, in whole
    /// chunks, cut to this disk.
    ///
    /// # Errors
    /// `Corrupt` for damaged pages; errors of reaching the store.
    pub fn changed_since(&self, from: &BucketDisk) -> Result<Vec<(u64, u64)>> {
        let chunk_size = self.reader.keys.chunk_size() as u64;
        let mut changed = Vec::new();
        for_each_difference(&*self.reader, from.root, self.root, &mut |range| {
            let start = range.first.saturating_mul(chunk_size).min(self.size_bytes);
            let end = (range.first + range.count).saturating_mul(chunk_size).min(self.size_bytes);
            if start < end {
                changed.push((start, end - start));
            }
            Ok(())
        })?;
        Ok(changed)
    }

    /// Looks a chunk up. `leaf` keeps the last leaf for the next look-up.
    fn place(&self, index: u64, leaf: &mut Option<(u64, Page)>) -> Result<Place> {
        let leaf_number = index / subtree_chunks(1);
        if let Some((_, page)) = leaf.as_ref().filter(|(number, _)| *number == leaf_number) {
            return Ok(Place { id: slot(page, index, 0), known_chunks: 1 });
        }
        if self.root.page() == 0 || index >= self.root.capacity() {
            return Ok(Place { id: 0, known_chunks: u64::MAX - index });
        }
        let top = self.root.levels() - 1;
        let mut page = self.reader.page(self.root.page(), top)?;
        for level in (1..=top).rev() {
            let child = slot(&page, index, level);
            if child == 0 {
                let span = subtree_chunks(level);
                return Ok(Place { id: 0, known_chunks: span - index % span });
            }
            page = self.reader.page(child, level - 1)?;
        }
        let id = slot(&page, index, 0);
        *leaf = Some((leaf_number, page));
        Ok(Place { id, known_chunks: 1 })
    }
}

impl Disk for BucketDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()> {
        check_range(self.size_bytes, offset_bytes, buffer.len() as u64)?;
        context.begin_wait()?;
        let chunk_size = self.reader.keys.chunk_size();
        // Whole chunks are decoded in place; at the ends, parts of them are copied.
        let mut ends: Vec<(u64, usize, &mut [u8])> = Vec::new();
        let mut wanted = Vec::new();
        let (mut rest, mut at, mut leaf) = (buffer, offset_bytes, None);
        while !rest.is_empty() {
            let skip = (at % chunk_size as u64) as usize;
            let length = rest.len().min(chunk_size - skip);
            let (part, after) = rest.split_at_mut(length);
            let id = self.place(at / chunk_size as u64, &mut leaf)?.id;
            let source = if id == 0 { ReadSource::Zero } else { ReadSource::Backup };
            context.add(source, at, length as u64);
            match (id, length == chunk_size) {
                (0, _) => part.fill(0),
                (id, true) => wanted.push(Wanted { id, chunk: part }),
                (id, false) => ends.push((id, skip, part)),
            }
            (rest, at) = (after, at + length as u64);
        }
        let mut whole = vec![vec![0; chunk_size]; ends.len()];
        wanted
            .extend(ends.iter().zip(&mut whole).map(|((id, ..), chunk)| Wanted { id: *id, chunk }));
        self.reader.read(wanted)?;
        for ((_, skip, part), chunk) in ends.into_iter().zip(whole) {
            part.copy_from_slice(&chunk[skip..skip + part.len()]);
        }
        Ok(())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        check_range(self.size_bytes, offset_bytes, length_bytes)?;
        let chunk_size = self.reader.keys.chunk_size() as u64;
        let mut leaf = None;
        extents_of(chunk_size, (offset_bytes, offset_bytes + length_bytes), limit, |index| {
            self.place(index, &mut leaf)
        })
    }
}

fn slot(page: &Page, index: u64, level: u8) -> u64 {
    page.get(slot_of(index, level)).copied().unwrap_or(0)
}
