//! From unusable chunks and pages to the disks that need them.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use coldrise_block::{ErrorKind, Result};

use super::chunks::IdSet;
use super::{check_cancel, Affected, Damaged, VerifiedDisk, VerifyReport};
use crate::chunk::ChunkId;
use crate::map::{subtree_chunks, PageId, PageSource};
use crate::Repository;

/// The chunks below `end` that the disks refer to. Pages that cannot be read are
/// left out here; [`find_affected`] reports them.
pub(super) fn referenced(
    repository: &Repository,
    disks: &[VerifiedDisk],
    end: ChunkId,
    cancel: &AtomicBool,
) -> Result<IdSet> {
    let ids = IdSet::new(end);
    let mut seen = HashMap::new();
    for disk in disks {
        collect(repository, disk.root.page(), disk.root.levels(), cancel, &ids, &mut seen)?;
    }
    Ok(ids)
}

fn collect(
    repository: &Repository,
    page: PageId,
    levels: u8,
    cancel: &AtomicBool,
    ids: &IdSet,
    seen: &mut HashMap<(PageId, u8), ()>,
) -> Result<()> {
    if page == 0 || seen.insert((page, levels), ()).is_some() {
        return Ok(());
    }
    check_cancel(cancel)?;
    let slots = match repository.page(page, levels - 1) {
        Ok(slots) => slots,
        Err(error) if is_damage(error.kind()) => return Ok(()),
        Err(error) => return Err(error),
    };
    for slot in slots.iter().copied().filter(|slot| *slot != 0) {
        match levels {
            1 => ids.insert(slot),
            _ => collect(repository, slot, levels - 1, cancel, ids, seen)?,
        }
    }
    Ok(())
}

/// The highest chunk id that the disks refer to; 0 where there is none. Pages that
/// cannot be read count as holes: the answer is then too low, which makes more new.
pub(super) fn highest(
    repository: &Repository,
    disks: &[VerifiedDisk],
    cancel: &AtomicBool,
) -> Result<ChunkId> {
    fn look(
        repository: &Repository,
        page: PageId,
        levels: u8,
        cancel: &AtomicBool,
        seen: &mut HashSet<(PageId, u8)>,
        highest: &mut ChunkId,
    ) -> Result<()> {
        if page == 0 || !seen.insert((page, levels)) {
            return Ok(());
        }
        check_cancel(cancel)?;
        let slots = match repository.page(page, levels - 1) {
            Ok(slots) => slots,
            Err(error) if is_damage(error.kind()) => return Ok(()),
            Err(error) => return Err(error),
        };
        if levels == 1 {
            *highest = slots.iter().copied().max().unwrap_or(0).max(*highest);
            return Ok(());
        }
        let mut slots = slots.iter();
        slots.try_for_each(|slot| look(repository, *slot, levels - 1, cancel, seen, highest))
    }
    let (mut seen, mut highest) = (HashSet::new(), 0);
    for disk in disks {
        let (page, levels) = (disk.root.page(), disk.root.levels());
        look(repository, page, levels, cancel, &mut seen, &mut highest)?;
    }
    Ok(highest)
}

/// Damage to a page, or to the files that hold it; everything else stops a verify.
fn is_damage(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Corrupt | ErrorKind::Io)
}

/// Visits every page once, and names the disks that lead to a page or a chunk
/// that is unusable.
pub(super) fn find_affected(
    repository: &Repository,
    disks: &[VerifiedDisk],
    unusable: &IdSet,
    cancel: &AtomicBool,
    report: &mut VerifyReport,
) -> Result<()> {
    let mut walk = Walk { repository, unusable, cancel, is_affected: HashMap::new(), report };
    for disk in disks {
        walk.judge(disk.root.page(), disk.root.levels())?;
    }
    let is_affected = walk.is_affected;
    report.pages = is_affected.len() as u64;
    report.damaged_pages.sort_by_key(|damaged| damaged.id);
    let chunk_size = u64::from(repository.chunk_size_bytes());
    for disk in disks {
        check_cancel(cancel)?;
        let mut found =
            Ranges { repository, unusable, is_affected: &is_affected, chunks: Vec::new() };
        found.descend(disk.root.page(), disk.root.levels(), 0)?;
        let in_bytes = |chunks: Range<u64>| {
            let end = chunks.end.saturating_mul(chunk_size).min(disk.size_bytes);
            (chunks.start.saturating_mul(chunk_size).min(end))..end
        };
        let ranges: Vec<_> = found.chunks.into_iter().map(in_bytes).collect();
        if !ranges.is_empty() {
            report.affected.push(Affected { disk: disk.name.clone(), ranges });
        }
    }
    Ok(())
}

struct Walk<'a> {
    repository: &'a Repository,
    unusable: &'a IdSet,
    cancel: &'a AtomicBool,
    is_affected: HashMap<(PageId, u8), bool>,
    report: &'a mut VerifyReport,
}

impl Walk<'_> {
    /// Whether anything below a page of `levels` levels is unusable.
    fn judge(&mut self, page: PageId, levels: u8) -> Result<bool> {
        if page == 0 {
            return Ok(false);
        }
        if let Some(known) = self.is_affected.get(&(page, levels)) {
            return Ok(*known);
        }
        check_cancel(self.cancel)?;
        let affected = match self.repository.page(page, levels - 1) {
            Ok(slots) if levels == 1 => slots.iter().any(|id| self.unusable.contains(*id)),
            Ok(slots) => {
                let mut any = false;
                for slot in slots.iter() {
                    any |= self.judge(*slot, levels - 1)?;
                }
                any
            }
            Err(error) if is_damage(error.kind()) => {
                let reason = error.full_message();
                self.report.damaged_pages.push(Damaged { id: page, reason });
                true
            }
            Err(error) => return Err(error),
        };
        self.is_affected.insert((page, levels), affected);
        Ok(affected)
    }
}

struct Ranges<'a> {
    repository: &'a Repository,
    unusable: &'a IdSet,
    is_affected: &'a HashMap<(PageId, u8), bool>,
    /// In chunks.
    chunks: Vec<Range<u64>>,
}

impl Ranges<'_> {
    fn descend(&mut self, page: PageId, levels: u8, first: u64) -> Result<()> {
        if page == 0 || self.is_affected.get(&(page, levels)) != Some(&true) {
            return Ok(());
        }
        let slots = match self.repository.page(page, levels - 1) {
            Ok(slots) => slots,
            Err(error) if is_damage(error.kind()) => {
                self.push(first..first + subtree_chunks(levels));
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let span = subtree_chunks(levels - 1);
        for (number, slot) in slots.iter().enumerate() {
            let at = first + number as u64 * span;
            if levels > 1 {
                self.descend(*slot, levels - 1, at)?;
            } else if self.unusable.contains(*slot) {
                self.push(at..at + 1);
            }
        }
        Ok(())
    }

    fn push(&mut self, range: Range<u64>) {
        match self.chunks.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.chunks.push(range),
        }
    }
}
