//! All that points of a bucket lead to.

use std::collections::BTreeMap;

use coldrise_block::Result;
use roaring::RoaringBitmap;

use super::pack::{PackNumber, id_of, parts_of};
use super::pack_reader::PackReader;
use coldrise_store::MapRoot;
use coldrise_store::format::{PageId, PageSource};

/// The chunks and pages that were reached: of each pack the places. A page that several maps share is read once.
#[derive(Default)]
pub(super) struct Reached {
    pub(super) packs: BTreeMap<PackNumber, RoaringBitmap>,
}

impl Reached {
    /// Adds what a map leads to.
    ///
    /// # Errors
    /// `Corrupt` for a missing or damaged page; errors of reaching the store.
    pub(super) fn add(&mut self, reader: &PackReader, root: MapRoot) -> Result<()> {
        match root.page() {
            0 => Ok(()),
            page => self.add_page(reader, page, root.levels() - 1),
        }
    }

    /// Whether a value was reached.
    pub(super) fn contains(&self, id: u64) -> bool {
        let (pack, place) = parts_of(id);
        self.packs.get(&pack).is_some_and(|places| places.contains(place as u32))
    }

    /// Everything that was reached.
    pub(super) fn ids(&self) -> impl Iterator<Item = u64> + '_ {
        let of_pack = |(pack, places): (&PackNumber, &RoaringBitmap)| {
            let pack = *pack;
            places.iter().map(move |place| id_of(pack, place as usize)).collect::<Vec<_>>()
        };
        self.packs.iter().flat_map(of_pack)
    }

    fn add_page(&mut self, reader: &PackReader, id: PageId, level: u8) -> Result<()> {
        if self.contains(id) {
            return Ok(());
        }
        let page = reader.page(id, level)?;
        for slot in page.iter().copied().filter(|slot| *slot != 0) {
            if level == 0 {
                self.insert(slot);
            } else {
                self.add_page(reader, slot, level - 1)?;
            }
        }
        // Last: a page counts as walked when all below it was.
        self.insert(id);
        Ok(())
    }

    fn insert(&mut self, id: u64) {
        let (pack, place) = parts_of(id);
        self.packs.entry(pack).or_default().insert(place as u32);
    }
}
