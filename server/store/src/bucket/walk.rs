//! All that the points of a bucket lead to.

use coldrise_block::Result;
use roaring::RoaringTreemap;

use super::shelf::Shelf;
use crate::map::{MapRoot, PageId, PageSource};

/// The values that were reached. A page that several maps share is read once.
#[derive(Default)]
pub(super) struct Reached {
    pub(super) chunks: RoaringTreemap,
    pub(super) pages: RoaringTreemap,
}

impl Reached {
    /// Adds what a map leads to.
    ///
    /// # Errors
    /// `Corrupt` for a missing or damaged page; errors of reaching the store.
    pub(super) fn add(&mut self, shelf: &Shelf, root: MapRoot) -> Result<()> {
        match root.page() {
            0 => Ok(()),
            page => self.add_page(shelf, page, root.levels() - 1),
        }
    }

    fn add_page(&mut self, shelf: &Shelf, id: PageId, level: u8) -> Result<()> {
        if self.pages.contains(id) {
            return Ok(());
        }
        let page = shelf.page(id, level)?;
        for slot in page.iter().copied().filter(|slot| *slot != 0) {
            if level == 0 {
                self.chunks.insert(slot);
            } else {
                self.add_page(shelf, slot, level - 1)?;
            }
        }
        // Last: a page counts as walked when all below it was.
        self.pages.insert(id);
        Ok(())
    }
}
