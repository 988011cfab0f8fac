//! The difference of two maps: a walk over both that skips shared pages.

use coldrise_block::Result;

use super::{MapRoot, PageId, PageSource, subtree_chunks};

/// Neighbouring chunks that differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRange {
    /// First chunk index.
    pub first: u64,
    /// Number of chunks.
    pub count: u64,
    /// Whether the second map holds chunks in the range, or holes.
    pub(crate) stored: bool,
}

struct Walk<'a> {
    source: &'a dyn PageSource,
    pending: Option<ChunkRange>,
    report: &'a mut dyn FnMut(ChunkRange) -> Result<()>,
}

/// Reports the ranges in which `to` differs from `from`, ascending and joined.
/// Visits only pages that are not shared.
pub fn for_each_difference(
    source: &dyn PageSource,
    from: MapRoot,
    to: MapRoot,
    report: &mut dyn FnMut(ChunkRange) -> Result<()>,
) -> Result<()> {
    let mut walk = Walk { source, pending: None, report };
    let levels = from.levels().max(to.levels());
    walk.step(Side::of(from), Side::of(to), levels, 0)?;
    match walk.pending.take() {
        Some(range) => (walk.report)(range),
        None => Ok(()),
    }
}

/// One map's side of a comparison: a subtree. A map that is lower than the
/// other one lies in the first slots of the taller one.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Side {
    page: PageId,
    levels: u8,
}

impl Side {
    fn of(root: MapRoot) -> Side {
        Side { page: root.page(), levels: if root.page() == 0 { 0 } else { root.levels() } }
    }

    const HOLE: Side = Side { page: 0, levels: 0 };

    /// The part in `slot` of a page with `levels` levels.
    fn child(self, page: Option<&[u64]>, slot: usize, levels: u8) -> Side {
        match page {
            Some(slots) => match slots.get(slot).copied().unwrap_or(0) {
                0 => Side::HOLE,
                page => Side { page, levels: levels - 1 },
            },
            // Lower than the other map, or a hole.
            None if slot == 0 => self,
            None => Side::HOLE,
        }
    }
}

impl Walk<'_> {
    fn step(&mut self, from: Side, to: Side, levels: u8, first: u64) -> Result<()> {
        if from == to {
            return Ok(());
        }
        if levels == 0 {
            return self.differ(first, to.page != 0);
        }
        let load = |side: Side| {
            if side.page != 0 && side.levels == levels {
                self.source.page(side.page, levels - 1).map(Some)
            } else {
                Ok(None)
            }
        };
        let (from_page, to_page) = (load(from)?, load(to)?);
        let span = subtree_chunks(levels - 1);
        for slot in 0..super::slots_of(levels - 1) {
            self.step(
                from.child(from_page.as_deref(), slot, levels),
                to.child(to_page.as_deref(), slot, levels),
                levels - 1,
                first + slot as u64 * span,
            )?;
        }
        Ok(())
    }

    fn differ(&mut self, index: u64, stored: bool) -> Result<()> {
        if let Some(range) = &mut self.pending {
            if range.first + range.count == index && range.stored == stored {
                range.count += 1;
                return Ok(());
            }
            let done = *range;
            (self.report)(done)?;
        }
        self.pending = Some(ChunkRange { first: index, count: 1, stored });
        Ok(())
    }
}
