//! Walks all maps.

use std::collections::HashMap;
use std::ops::Range;

use coldrise_block::{Error, ErrorKind, Result};

use super::owner::{Owner, Whose};
use super::sizes::ChunkSizes;
use super::{HeldAmount, Holdings, MachineAttribution, PointAttribution};
use crate::map::{PageId, PageSource, slot_of};
use crate::{DiskDocument, LayerId, MapRoot};

pub(super) struct Walk<'a> {
    source: &'a dyn PageSource,
    machines: &'a [Holdings],
    chunk_size_bytes: u64,
    window_chunks: u64,
    /// For all points, in the order of the machines.
    machine_of_point: Vec<u32>,
    pages: Pages,
    /// One per point and one per machine.
    of_points: Vec<PointAttribution>,
    of_machines: Vec<HeldAmount>,
}

/// Facts about pages, by page number.
struct Pages {
    owners: Vec<Owner>,
    /// Chunks in a leaf, plus one; 0 if unknown.
    leaves: Vec<u16>,
    /// Chunks below an inner page.
    inner: HashMap<PageId, u64>,
    /// The windows of chunk numbers with chunks in the subtree: one bit each.
    windows: Vec<u64>,
}

impl Pages {
    /// The index of a page's facts.
    fn place(&self, page: PageId) -> Result<usize> {
        usize::try_from(page).ok().filter(|at| *at < self.owners.len()).ok_or_else(|| {
            Error::new(
                ErrorKind::Corrupt,
                format!(
                    "a chunk map refers to page {page}, which was never stored; run coldrise \
                     verify to see what it affects"
                ),
            )
        })
    }
}

impl<'a> Walk<'a> {
    /// Pages from `next_page` on do not exist. The chunks are walked in windows of
    /// `window_chunks` numbers.
    pub(super) fn new(
        source: &'a dyn PageSource,
        machines: &'a [Holdings],
        next_page: PageId,
        chunk_size_bytes: u64,
        window_chunks: u64,
    ) -> Walk<'a> {
        let machine_of_point: Vec<u32> = (0u32..)
            .zip(machines)
            .flat_map(|(number, machine)| machine.points.iter().map(move |_| number))
            .collect();
        let pages = usize::try_from(next_page).unwrap_or(usize::MAX);
        Walk {
            source,
            machines,
            chunk_size_bytes,
            of_points: vec![PointAttribution::default(); machine_of_point.len()],
            of_machines: vec![HeldAmount::default(); machines.len()],
            machine_of_point,
            pages: Pages {
                owners: vec![Owner::NOBODY; pages],
                leaves: vec![0; pages],
                inner: HashMap::new(),
                windows: vec![0; pages],
            },
            window_chunks,
        }
    }

    /// Calls `each` with every referenced disk and its owner.
    fn for_each_disk(&self, mut each: impl FnMut(Owner, &'a DiskDocument)) {
        let mut point = 0;
        for (number, machine) in (0u32..).zip(self.machines) {
            for disks in &machine.points {
                disks.iter().for_each(|disk| each(Owner::point(point), disk));
                point += 1;
            }
            machine.sessions.iter().for_each(|disk| each(Owner::machine(number), disk));
        }
    }

    /// Reads every page once. Counts the chunks of every point's maps, and records
    /// the windows of the chunks below each page.
    pub(super) fn count_recoverable(&mut self) -> Result<()> {
        for disk in self.machines.iter().flat_map(|machine| &machine.sessions) {
            self.chunks_below(disk.root.page(), disk.root.levels())?;
        }
        let points = self.machines.iter().flat_map(|machine| &machine.points);
        for (number, disks) in points.enumerate() {
            let mut bytes = 0u64;
            for disk in disks {
                bytes = bytes.saturating_add(self.recoverable_bytes(disk)?);
            }
            self.of_points[number].recoverable_bytes = bytes;
        }
        Ok(())
    }

    fn recoverable_bytes(&mut self, disk: &DiskDocument) -> Result<u64> {
        let chunks = self.chunks_below(disk.root.page(), disk.root.levels())?;
        let mut bytes = chunks.saturating_mul(self.chunk_size_bytes);
        // The last chunk may extend past the disk's end.
        let used = disk.size_bytes % self.chunk_size_bytes;
        if used != 0 && self.is_stored(disk.root, disk.size_bytes / self.chunk_size_bytes)? {
            bytes = bytes.saturating_sub(self.chunk_size_bytes - used);
        }
        Ok(bytes)
    }

    fn chunks_below(&mut self, page: PageId, levels: u8) -> Result<u64> {
        if page == 0 {
            return Ok(0);
        }
        let at = self.pages.place(page)?;
        if levels == 1 {
            if self.pages.leaves[at] == 0 {
                let slots = self.source.page(page, 0)?;
                let stored = slots.iter().filter(|slot| **slot != 0);
                let (mut count, mut windows) = (0, 0);
                for id in stored {
                    count += 1;
                    windows |= self.window_bit(*id);
                }
                (self.pages.leaves[at], self.pages.windows[at]) = (count + 1, windows);
            }
            return Ok(u64::from(self.pages.leaves[at]) - 1);
        }
        if let Some(known) = self.pages.inner.get(&page) {
            return Ok(*known);
        }
        let (mut chunks, mut windows) = (0, 0);
        for child in self.source.page(page, levels - 1)?.iter().filter(|child| **child != 0) {
            chunks += self.chunks_below(*child, levels - 1)?;
            windows |= self.pages.windows[self.pages.place(*child)?];
        }
        self.pages.inner.insert(page, chunks);
        self.pages.windows[at] = windows;
        Ok(chunks)
    }

    /// The last bit stands for all remaining windows.
    fn window_bit(&self, id: u64) -> u64 {
        1 << (id / self.window_chunks).min(63)
    }

    fn is_stored(&self, root: MapRoot, index: u64) -> Result<bool> {
        if index >= root.capacity() {
            return Ok(false);
        }
        let mut id = root.page();
        for level in (0..root.levels()).rev() {
            if id == 0 {
                return Ok(false);
            }
            let page = self.source.page(id, level)?;
            id = page.get(slot_of(index, level)).copied().unwrap_or(0);
        }
        Ok(id != 0)
    }

    /// Finds the owners of a window's chunks, and counts them.
    pub(super) fn own_chunks(&mut self, range: Range<u64>, sizes: &ChunkSizes) -> Result<()> {
        let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let window_bit = self.window_bit(range.start);
        let mut roots = Vec::new();
        self.for_each_disk(|owner, disk| roots.push((owner, disk.root)));
        roots.retain(|(_, root)| match self.pages.place(root.page()) {
            Ok(at) => self.pages.windows[at] & window_bit != 0,
            Err(_) => false,
        });
        if roots.is_empty() {
            return Ok(());
        }
        self.pages.owners.fill(Owner::NOBODY);
        let owners = vec![Owner::NOBODY; length];
        let mut chunks = Chunks { first: range.start, window_bit, owners };
        for (owner, root) in roots {
            self.visit(root.page(), root.levels(), owner, &mut chunks)?;
        }
        for (owner, bytes) in chunks.owners.into_iter().zip(sizes.from(range.start)) {
            if let Some(share) = self.share_of_point(owner) {
                share.add_chunk(bytes);
            }
            if let Some(share) = self.share_of_machine(owner) {
                share.add_chunk(bytes);
            }
        }
        Ok(())
    }

    fn visit(
        &mut self,
        page: PageId,
        levels: u8,
        visitor: Owner,
        chunks: &mut Chunks,
    ) -> Result<()> {
        if page == 0 {
            return Ok(());
        }
        let at = self.pages.place(page)?;
        if self.pages.windows[at] & chunks.window_bit == 0 {
            return Ok(());
        }
        let owner = self.pages.owners[at].with(visitor, &self.machine_of_point);
        if owner == self.pages.owners[at] {
            return Ok(());
        }
        self.pages.owners[at] = owner;
        let slots = self.source.page(page, levels - 1)?;
        if levels == 1 {
            for id in slots.iter().filter(|id| **id != 0) {
                if let Some(chunk) = chunks.owner(*id) {
                    *chunk = chunk.with(owner, &self.machine_of_point);
                }
            }
            return Ok(());
        }
        for child in slots.iter() {
            self.visit(*child, levels - 1, owner, chunks)?;
        }
        Ok(())
    }

    fn share_of_point(&mut self, owner: Owner) -> Option<&mut HeldAmount> {
        match owner.whose() {
            Whose::Point(number) => self.of_points.get_mut(number).map(|point| &mut point.alone),
            Whose::Nobody | Whose::Machine(_) | Whose::Several => None,
        }
    }

    /// The share of one point is also its machine's share.
    fn share_of_machine(&mut self, owner: Owner) -> Option<&mut HeldAmount> {
        let number = match owner.whose() {
            Whose::Point(number) => *self.machine_of_point.get(number)? as usize,
            Whose::Machine(number) => number,
            Whose::Nobody | Whose::Several => return None,
        };
        self.of_machines.get_mut(number)
    }

    /// The result, including the layers.
    pub(super) fn finish(mut self) -> Vec<MachineAttribution> {
        let mut owners: HashMap<LayerId, Owner> = HashMap::new();
        self.for_each_disk(|owner, disk| {
            for layer in &disk.layers {
                let known = owners.entry(layer.id).or_default();
                *known = known.with(owner, &self.machine_of_point);
            }
        });
        let mut owners: Vec<(LayerId, Owner)> = owners.into_iter().collect();
        owners.sort_unstable_by_key(|(layer, _)| *layer);
        for (layer, owner) in owners {
            if let Some(share) = self.share_of_point(owner) {
                share.layers.push(layer);
            }
            if let Some(share) = self.share_of_machine(owner) {
                share.layers.push(layer);
            }
        }
        let mut points = self.of_points.into_iter();
        let machines = self.machines.iter().zip(self.of_machines);
        machines
            .map(|(holdings, alone)| MachineAttribution {
                alone,
                points: points.by_ref().take(holdings.points.len()).collect(),
            })
            .collect()
    }
}

/// The owners of a window's chunks.
struct Chunks {
    first: u64,
    window_bit: u64,
    owners: Vec<Owner>,
}

impl Chunks {
    /// `None` outside the range.
    #[inline]
    fn owner(&mut self, id: u64) -> Option<&mut Owner> {
        let at = usize::try_from(id.checked_sub(self.first)?).ok()?;
        self.owners.get_mut(at)
    }
}

impl HeldAmount {
    fn add_chunk(&mut self, stored_bytes: u64) {
        self.chunks += 1;
        self.stored_bytes = self.stored_bytes.saturating_add(stored_bytes);
    }
}
