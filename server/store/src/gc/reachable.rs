//! Mark: finds all pages and chunks that a set of chunk maps refers to.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Error, ErrorKind, Result};
use roaring::RoaringTreemap;

use crate::map::{PageId, PageSource};
use crate::rocks::Family;
use crate::writer::Referred;
use crate::{MapRoot, Repository};

/// The pages and chunks that chunk maps refer to. Ids come in long runs, which the
/// bitmaps compress to a few bytes per thousand chunks.
#[derive(Clone, Debug, PartialEq)]
pub struct Reachable {
    pages: RoaringTreemap,
    chunks: RoaringTreemap,
    /// All pages and chunks from these ids on are included, too.
    pages_from: u64,
    chunks_from: u64,
}

impl Default for Reachable {
    fn default() -> Self {
        let (pages, chunks) = Default::default();
        Reachable { pages, chunks, pages_from: u64::MAX, chunks_from: u64::MAX }
    }
}

impl Reachable {
    /// The number of chunks.
    pub fn chunks(&self) -> u64 {
        self.chunks.len()
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        self.pages.len()
    }

    /// Includes all that `other` includes.
    pub fn join(&mut self, other: &Reachable) {
        self.pages |= &other.pages;
        self.chunks |= &other.chunks;
        self.pages_from = self.pages_from.min(other.pages_from);
        self.chunks_from = self.chunks_from.min(other.chunks_from);
    }

    fn ids(&self, family: Family) -> (&RoaringTreemap, u64) {
        match family {
            Family::Maps | Family::MapsCopy => (&self.pages, self.pages_from),
            _ => (&self.chunks, self.chunks_from),
        }
    }

    /// Adds all pages and chunks that a writer has stored itself.
    pub(super) fn add_all_of(&mut self, writer: &Referred) {
        self.pages_from = writer.first_page();
        self.chunks_from = writer.first_chunk();
    }

    /// Adds chunks.
    pub(super) fn add_chunks(&mut self, chunks: &RoaringTreemap) {
        self.chunks |= chunks;
    }

    /// Whether a chunk or a page is included.
    pub(crate) fn has(&self, family: Family, id: u64) -> bool {
        let (ids, from) = self.ids(family);
        id >= from || ids.contains(id)
    }

    /// The number of chunks or pages in a range of ids. In the range that a writer
    /// has stored itself every id counts, used or not.
    pub(crate) fn count_in(&self, family: Family, range: RangeInclusive<u64>) -> u64 {
        let (ids, from) = self.ids(family);
        let all = (range.end().saturating_add(1)).saturating_sub(from.max(*range.start()));
        let Some(last) = (*range.end()).min(from.saturating_sub(1)).checked_sub(*range.start())
        else {
            return all;
        };
        let before = range.start().checked_sub(1).map_or(0, |id| ids.rank(id));
        ids.rank(range.start() + last).saturating_sub(before) + all
    }
}

impl Repository {
    /// Finds all pages and chunks that the maps of `roots` refer to. Each page is
    /// read once, however many maps share it.
    ///
    /// # Errors
    /// `Corrupt` if a page is missing or damaged: its references are then unknown.
    /// `Interrupted` once `cancel` is set.
    pub fn reachable(
        &self,
        roots: impl IntoIterator<Item = MapRoot>,
        cancel: &AtomicBool,
    ) -> Result<Reachable> {
        let mut mark = Mark { repository: self, cancel, found: Reachable::default() };
        for root in roots {
            mark.descend(root.page(), root.levels())?;
        }
        Ok(mark.found)
    }
}

struct Mark<'a> {
    repository: &'a Repository,
    cancel: &'a AtomicBool,
    found: Reachable,
}

impl Mark<'_> {
    /// Recurses at most as deep as a map is high.
    fn descend(&mut self, page: PageId, levels: u8) -> Result<()> {
        if page == 0 || !self.found.pages.insert(page) {
            return Ok(());
        }
        if self.cancel.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
        let slots = self.repository.page(page, levels - 1)?;
        if levels > 1 {
            return slots.iter().try_for_each(|slot| self.descend(*slot, levels - 1));
        }
        for run in slots.chunk_by(|a, b| *a != 0 && a.checked_add(1) == Some(*b)) {
            if let [first, .., last] | [first @ last] = run {
                if *first != 0 {
                    self.found.chunks.insert_range(*first..=*last);
                }
            }
        }
        Ok(())
    }
}
