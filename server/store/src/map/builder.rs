//! Builds a map from another one by ascending updates.
//!
//! Only the pages from the root to the last update are open in memory. A page
//! is stored when the updates leave it; the page above then gets its new id. So
//! a page is stored before the pages that refer to it.

use coldrise_block::{Error, ErrorKind, Result};

use super::{
    MAX_LEVELS, MapRoot, PageId, PageSource, levels_for, slot_of, slots_of, subtree_chunks,
};

/// Stores built pages.
pub trait PageSink {
    /// Stores a page and returns its id.
    fn store(&mut self, level: u8, slots: &[u64]) -> Result<PageId>;
}

struct OpenPage {
    level: u8,
    /// First chunk below this page.
    first_chunk: u64,
    slots: Vec<u64>,
    changed: bool,
}

/// A map under construction.
pub struct MapBuilder {
    base: MapRoot,
    /// From the root downwards.
    open: Vec<OpenPage>,
    /// Updates before this chunk are complete.
    next_chunk: u64,
    chunks: u64,
}

impl MapBuilder {
    /// A map of `chunks` chunks that starts as `base`, truncated or extended.
    pub fn new(
        base: MapRoot,
        chunks: u64,
        source: &dyn PageSource,
        sink: &mut dyn PageSink,
    ) -> Result<Self> {
        if chunks > subtree_chunks(MAX_LEVELS) {
            return Err(Error::new(ErrorKind::InvalidInput, "the disk is too large for a map"));
        }
        let levels = levels_for(chunks);
        let (mut page, mut height) = (base.page(), base.levels());
        // A lower map: chunks beyond the disk's end are dropped with the upper
        // pages.
        while height > levels {
            page = match page {
                0 => 0,
                id => source.page(id, height - 1)?.first().copied().unwrap_or(0),
            };
            height -= 1;
        }
        while height < levels {
            if page != 0 {
                let mut slots = vec![0; slots_of(height)];
                slots[0] = page;
                page = sink.store(height, &slots)?;
            }
            height += 1;
        }
        Ok(MapBuilder {
            base: MapRoot::new(page, height)?,
            open: Vec::new(),
            next_chunk: 0,
            chunks,
        })
    }

    /// Sets the chunk at `index` to `id`; 0 makes a hole.
    pub fn set(
        &mut self,
        index: u64,
        id: u64,
        source: &dyn PageSource,
        sink: &mut dyn PageSink,
    ) -> Result<()> {
        self.advance(index, 1)?;
        self.open_down_to(index, 0, source, sink)?;
        self.put(slot_of(index, 0), id);
        Ok(())
    }

    /// Makes `count` chunks from `first` on holes, whole subtrees at once.
    pub fn set_holes(
        &mut self,
        first: u64,
        count: u64,
        source: &dyn PageSource,
        sink: &mut dyn PageSink,
    ) -> Result<()> {
        self.advance(first, count)?;
        self.clear(first, first + count, source, sink)
    }

    fn clear(
        &mut self,
        mut index: u64,
        end: u64,
        source: &dyn PageSource,
        sink: &mut dyn PageSink,
    ) -> Result<()> {
        while index < end {
            // The largest subtree that starts here and ends within the range.
            let level = (0..self.base.levels())
                .rev()
                .find(|level| {
                    let span = subtree_chunks(*level);
                    index % span == 0 && end - index >= span
                })
                .unwrap_or(0);
            self.open_down_to(index, level, source, sink)?;
            self.put(slot_of(index, level), 0);
            index += subtree_chunks(level);
        }
        Ok(())
    }

    /// Completes the map: all chunks beyond the disk's end become holes.
    pub fn finish(mut self, source: &dyn PageSource, sink: &mut dyn PageSink) -> Result<MapRoot> {
        if self.base.page() != 0 || !self.open.is_empty() {
            let capacity = self.base.capacity();
            self.clear(self.chunks, capacity, source, sink)?;
        }
        while self.open.len() > 1 {
            self.close_last(sink)?;
        }
        let Some(root) = self.open.pop().filter(|root| root.changed) else {
            return Ok(self.base);
        };
        let page = if root.slots.iter().all(|slot| *slot == 0) {
            0
        } else {
            sink.store(root.level, &root.slots)?
        };
        MapRoot::new(page, self.base.levels())
    }

    fn advance(&mut self, first: u64, count: u64) -> Result<()> {
        match first.checked_add(count) {
            Some(end) if first >= self.next_chunk && end <= self.chunks => {
                self.next_chunk = end;
                Ok(())
            }
            _ => Err(Error::new(
                ErrorKind::Internal,
                format!("update of chunks {first}+{count} is out of order or beyond the disk"),
            )),
        }
    }

    /// Changes a slot of the lowest open page.
    fn put(&mut self, slot: usize, id: u64) {
        if let Some(page) = self.open.last_mut() {
            if let Some(place) = page.slots.get_mut(slot) {
                page.changed |= *place != id;
                *place = id;
            }
        }
    }

    /// Opens the pages on the path to chunk `index`, down to one of `level`,
    /// and closes all other open pages.
    fn open_down_to(
        &mut self,
        index: u64,
        level: u8,
        source: &dyn PageSource,
        sink: &mut dyn PageSink,
    ) -> Result<()> {
        while let Some(last) = self.open.last() {
            let end = last.first_chunk + subtree_chunks(last.level + 1);
            let holds = (last.first_chunk..end).contains(&index) && last.level >= level;
            if holds || self.open.len() == 1 {
                break;
            }
            self.close_last(sink)?;
        }
        if self.open.is_empty() {
            let level = self.base.levels() - 1;
            let page = open_page(self.base.page(), level, 0, source)?;
            self.open.push(page);
        }
        while let Some(above) = self.open.last().filter(|last| last.level > level) {
            let child_level = above.level - 1;
            let child = above.slots.get(slot_of(index, above.level)).copied().unwrap_or(0);
            let span = subtree_chunks(above.level);
            let page = open_page(child, child_level, index - index % span, source)?;
            self.open.push(page);
        }
        Ok(())
    }

    fn close_last(&mut self, sink: &mut dyn PageSink) -> Result<()> {
        let Some(page) = self.open.pop().filter(|page| page.changed) else {
            return Ok(());
        };
        let id = if page.slots.iter().all(|slot| *slot == 0) {
            0
        } else {
            sink.store(page.level, &page.slots)?
        };
        self.put(slot_of(page.first_chunk, page.level + 1), id);
        Ok(())
    }
}

fn open_page(id: PageId, level: u8, first_chunk: u64, source: &dyn PageSource) -> Result<OpenPage> {
    let slots = match id {
        0 => vec![0; slots_of(level)],
        id => source.page(id, level)?.to_vec(),
    };
    Ok(OpenPage { level, first_chunk, slots, changed: false })
}
