//! The counters of the store are made right again where they may be lost or old.
//!
//! An id that is given a second time is worse than one that is lost: whatever named the
//! first content reads the second, and that authenticates. So all that may name an id is
//! asked: what is stored, the index, the list of damaged chunks, the pages of chunk maps,
//! the documents. [`SKIPPED_IDS`] stand for what nothing names any more.

use coldrise_block::{Error, ErrorKind, Result};

use super::files::{is_flagged, raise_flag};
use crate::catalog::{self, CatalogEntry};
use crate::chunk::ChunkId;
use crate::damaged::{self, DamagedChunks};
use crate::map::{parse_page_value, PageId, MAX_LEVELS};
use crate::repository::Repository;
use crate::rocks::{Family, ReadMode};
use crate::state::StoreState;
use crate::verify::VerifiedDisk;
use crate::{dedup, RepositoryWriter};

/// Ids that are left unused where nobody knows which were the last.
const SKIPPED_IDS: u64 = 1 << 20;

/// The highest ids that something names.
struct Highest {
    chunk: ChunkId,
    page: PageId,
}

/// Makes the counters right where they may not be. The flag stays.
pub(super) fn settle_state(repository: &Repository) -> Result<()> {
    let stored = StoreState::read(repository);
    if !is_flagged(repository.path())? {
        if stored.is_ok() {
            return Ok(());
        }
        raise_flag(repository.path())?;
    }
    let mut state = stored.unwrap_or(StoreState::NEW);
    let mut highest = Highest {
        chunk: last_id(repository, Family::Chunks)?,
        page: last_id(repository, Family::Maps)?,
    };
    dedup::for_each(repository, |_key, entry| {
        highest.chunk = entry.map_or(highest.chunk, |(_, id)| highest.chunk.max(id));
        Ok(())
    })?;
    match DamagedChunks::read(repository) {
        Ok(listed) => highest.chunk = listed.ids().into_iter().fold(highest.chunk, u64::max),
        Err(_) => {
            // They are found again.
            let mut batch = repository.database().batch();
            damaged::put(repository, &mut batch, &Default::default())?;
            repository.database().write(batch, true)?;
        }
    }
    highest.look_at_pages(repository)?;
    catalog::for_each_entry(repository, |_what, entry| {
        if let Ok(CatalogEntry::Point(point)) = entry {
            let pages = point.disks.iter().map(|disk| disk.root.page());
            highest.page = pages.fold(highest.page, u64::max);
        }
        Ok(())
    })?;
    for (next, highest) in
        [(&mut state.next_chunk, highest.chunk), (&mut state.next_page, highest.page)]
    {
        *next = beyond((*next).max(highest))?;
    }
    state.count_anew(repository)
}

/// Makes the counters go on behind all that these disks name: their documents are not all
/// the store's, and are known only once it is open.
pub(super) fn skip_named(writer: &RepositoryWriter, disks: &[VerifiedDisk]) -> Result<()> {
    let named = disks.iter().map(|disk| disk.root.page()).max().unwrap_or(0);
    let mut progress = writer.shared.progress.lock();
    if named < progress.state.next_page {
        return Ok(());
    }
    progress.state.next_page = beyond(named)?;
    let repository = writer.repository();
    let mut batch = repository.database().batch();
    progress.state.put(repository, &mut batch)?;
    repository.database().write(batch, true)
}

impl Highest {
    /// All pages that are readable, whoever leads to them: also an unreadable one may.
    fn look_at_pages(&mut self, repository: &Repository) -> Result<()> {
        let mut cursor = repository.database().cursor(Family::Maps, ReadMode::Scan)?;
        cursor.seek(&[])?;
        while let Some((key, value)) = cursor.entry() {
            let id = key.try_into().map(PageId::from_be_bytes);
            // The level is part of what authenticates.
            let level = value.get(1).copied().filter(|level| *level < MAX_LEVELS);
            if let (Ok(id), Some(level)) = (id, level) {
                let sealer = &repository.keys().pages;
                if let Ok(slots) = parse_page_value(repository.id(), sealer, id, level, value) {
                    let named = if level == 0 { &mut self.chunk } else { &mut self.page };
                    *named = slots.into_iter().fold(*named, u64::max);
                }
            }
            cursor.next()?;
        }
        Ok(())
    }
}

fn beyond(id: u64) -> Result<u64> {
    id.checked_add(SKIPPED_IDS)
        .ok_or_else(|| Error::new(ErrorKind::Corrupt, "the ids of the store are used up"))
}

/// The last id that is stored; 0 where there is none.
fn last_id(repository: &Repository, family: Family) -> Result<u64> {
    let last = repository.database().last_key(family)?;
    Ok(last.and_then(|key| key.as_slice().try_into().ok()).map_or(0, u64::from_be_bytes))
}
