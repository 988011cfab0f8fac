//! Finds the disks that need unusable chunks and pages.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use coldrise_block::{ErrorKind, Result};

use super::chunks::IdSet;
use super::{Affected, Damaged, VerifiedDisk, VerifyReport, check_cancel};
use crate::Repository;
use crate::chunk::ChunkId;
use crate::map::{PageId, PageSource, subtree_chunks};
use crate::rocks::{Family, ReadMode};

/// The chunks below `end` that the disks refer to. Skips unreadable pages; [`find_affected`]
/// reports them.
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

/// The highest chunk id that the disks refer to; 0 if there is none. Unreadable pages count as
/// holes. The result is then too low, so more chunks count as new.
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

/// Whether an error means damage to a page or its file; any other error stops a verify.
fn is_damage(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Corrupt | ErrorKind::Io)
}

/// Visits every page once, and names the disks that need an unusable page or chunk. Adds missing
/// chunks to the damaged ones; an id without references may have been removed by a gc.
pub(super) fn find_affected(
    repository: &Repository,
    disks: &[VerifiedDisk],
    unusable: &IdSet,
    cancel: &AtomicBool,
    report: &mut VerifyReport,
) -> Result<()> {
    let is_affected = HashMap::new();
    let mut walk = Walk { repository, unusable, cancel, is_affected, missing: None, report };
    for disk in disks {
        walk.judge(disk.root.page(), disk.root.levels())?;
    }
    let is_affected = walk.is_affected;
    report.damaged_chunks.sort_by_key(|damaged| damaged.id);
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
    /// Missing chunks in the report; created with the first one.
    missing: Option<IdSet>,
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
            Ok(slots) if levels == 1 => {
                let unusable = slots.iter().filter(|id| self.unusable.contains(**id));
                let unusable: Vec<ChunkId> = unusable.copied().collect();
                unusable.iter().for_each(|id| self.report_if_missing(*id));
                !unusable.is_empty()
            }
            Ok(slots) => {
                let mut any = false;
                for slot in slots.iter() {
                    any |= self.judge(*slot, levels - 1)?;
                }
                any
            }
            Err(error) if is_damage(error.kind()) => {
                let reason = error.message();
                self.report.damaged_pages.push(Damaged { id: page, reason });
                true
            }
            Err(error) => return Err(error),
        };
        self.is_affected.insert((page, levels), affected);
        Ok(affected)
    }

    fn report_if_missing(&mut self, id: ChunkId) {
        let found =
            self.repository.database().get(Family::Chunks, &id.to_be_bytes(), ReadMode::Payload);
        let seen = self.missing.get_or_insert_with(|| self.unusable.empty_like());
        if matches!(found, Ok(None)) && !seen.contains(id) {
            seen.insert(id);
            self.report.damage(id, "it is missing".to_owned());
        }
    }
}

struct Ranges<'a> {
    repository: &'a Repository,
    unusable: &'a IdSet,
    is_affected: &'a HashMap<(PageId, u8), bool>,
    /// Ranges of chunk indexes.
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
