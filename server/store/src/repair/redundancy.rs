//! Restores data that is stored twice if one copy is lost.
//!
//! - The counters continue from the high-water mark. Giving an id twice is worse than skipping one:
//!   a map that named the first content would read the second, which authenticates. If nothing
//!   shows the last ids, [`SKIPPED_IDS`] after the highest known id stay unused.
//! - A page of a chunk map that one of its two families lacks is copied from the other.
//! - A point that the catalog lacks is restored from its marker. A fresh database may contain an
//!   older document; then the marker's document counts.

use coldrise_block::{Error, ErrorKind, Result};

use super::WaitingPoints;
use crate::PointDocument;
use crate::catalog::{self, CatalogEntry};
use crate::chunk::ChunkId;
use crate::damage_list::{self, DamagedChunks};
use crate::dedup;
use crate::map::{MAX_LEVELS, parse_page_value};
use crate::repair_flag::is_flagged;
use crate::repair_flag::raise_flag;
use crate::repository::Repository;
use crate::rocks::{Cursor, Family, ReadMode};
use crate::state::StoreState;

/// Ids that stay unused if the last assigned ids are unknown.
const SKIPPED_IDS: u64 = 1 << 20;
/// Bytes of entries that are written together.
const MAX_BATCH_BYTES: usize = 4 << 20;

/// Restores lost data from its second copy, except points that are `waiting`. Returns the number of
/// points that the catalog had lost. The flag stays.
pub(super) fn restore(repository: &Repository, waiting: WaitingPoints<'_>) -> Result<u64> {
    restore_counters(repository)?;
    if DamagedChunks::read(repository).is_err() {
        // The verify finds these chunks again.
        raise_flag(repository.path())?;
        let mut batch = repository.database().batch();
        damage_list::put(repository, &mut batch, &Default::default())?;
        repository.commit(batch)?;
    }
    restore_pages(repository)?;
    restore_points(repository, waiting)
}

fn restore_counters(repository: &Repository) -> Result<()> {
    let (stored, mark) = (StoreState::read(repository), repository.high_water().get());
    let is_flagged = is_flagged(repository.path())?;
    let is_enough = |state: &StoreState| {
        state.next_chunk >= mark.next_chunk && state.next_page >= mark.next_page
    };
    if !is_flagged && stored.as_ref().is_ok_and(is_enough) {
        return Ok(());
    }
    raise_flag(repository.path())?;
    let is_known = mark.next_chunk > 0;
    let is_counted = stored.is_ok();
    let mut state = stored.unwrap_or(StoreState::NEW);
    state.next_chunk = state.next_chunk.max(mark.next_chunk);
    state.next_page = state.next_page.max(mark.next_page);
    if !is_known {
        let (chunk, page) = highest_ids(repository)?;
        state.next_chunk = beyond(state.next_chunk.max(chunk))?;
        state.next_page = beyond(state.next_page.max(page))?;
    }
    if !is_counted {
        return state.recount(repository);
    }
    // Damaged chunks still count: they heal under their ids.
    let mut batch = repository.database().batch();
    state.put(repository, &mut batch)?;
    repository.commit(batch)
}

/// The highest chunk id and page id that are stored or named.
fn highest_ids(repository: &Repository) -> Result<(ChunkId, u64)> {
    let last = |family| -> Result<u64> {
        let last = repository.database().last_key(family)?;
        Ok(last.and_then(|key| key.as_slice().try_into().ok()).map_or(0, u64::from_be_bytes))
    };
    let mut chunk = last(Family::Chunks)?;
    let mut page = last(Family::Maps)?.max(last(Family::MapsCopy)?);
    dedup::for_each(repository, |_key, entry| {
        chunk = entry.map_or(chunk, |(_, id)| chunk.max(id));
        Ok(())
    })?;
    if let Ok(listed) = DamagedChunks::read(repository) {
        chunk = listed.ids().into_iter().fold(chunk, u64::max);
    }
    for (point, _) in repository.marked_points()? {
        page = point.disks.iter().map(|disk| disk.root.page()).fold(page, u64::max);
    }
    Ok((chunk, page))
}

fn beyond(id: u64) -> Result<u64> {
    id.checked_add(SKIPPED_IDS)
        .ok_or_else(|| Error::new(ErrorKind::Corrupt, "the ids of the store are used up"))
}

/// Walks both families of pages together.
fn restore_pages(repository: &Repository) -> Result<()> {
    let database = repository.database();
    let families = [Family::Maps, Family::MapsCopy];
    let cursor = |family| -> Result<Cursor<'_>> {
        let mut cursor = database.cursor(family, ReadMode::Scan)?;
        cursor.seek(&[])?;
        Ok(cursor)
    };
    let mut cursors = [cursor(families[0])?, cursor(families[1])?];
    let mut batch = database.batch();
    loop {
        let keys = cursors.each_ref().map(|cursor| cursor.entry().map(|(key, _)| key.to_vec()));
        let Some(key) = keys.iter().flatten().min().cloned() else { break };
        let at: [bool; 2] = keys.map(|found| found.as_ref() == Some(&key));
        let values = [0, 1].map(|i| cursors[i].entry().filter(|_| at[i]).map(|(_, value)| value));
        if values[0] != values[1] {
            let sound = values.map(|value| value.filter(|value| is_page(repository, &key, value)));
            match sound {
                [Some(value), None] => batch.put(families[1], &key, value)?,
                [None, Some(value)] => batch.put(families[0], &key, value)?,
                _ => {}
            }
        }
        for i in 0..2 {
            if at[i] {
                cursors[i].next()?;
            }
        }
        if batch.bytes() > MAX_BATCH_BYTES {
            database.write(std::mem::replace(&mut batch, database.batch()), false)?;
        }
    }
    repository.commit(batch)
}

fn is_page(repository: &Repository, key: &[u8], value: &[u8]) -> bool {
    let (id, aead) = (key.try_into().map(u64::from_be_bytes), &repository.keys().pages);
    let level = value.get(1).copied().filter(|level| *level < MAX_LEVELS);
    let parsed = id.ok().zip(level);
    parsed.is_some_and(|(id, level)| {
        parse_page_value(repository.id(), aead, id, level, value).is_ok()
    })
}

fn restore_points(repository: &Repository, waiting: WaitingPoints<'_>) -> Result<u64> {
    let mut restored = 0;
    let is_new = is_flagged(repository.path())?;
    let mut batch = repository.database().batch();
    let mut known = std::collections::HashMap::new();
    catalog::for_each_entry(repository, |_what, entry| {
        if let Ok(CatalogEntry::Point(point)) = entry {
            known.insert((point.machine.clone(), point.point.clone()), *point);
        }
        Ok(())
    })?;
    // Before the sessions are read: a point gets its marker after its session names it.
    let all_marked = repository.marked_points()?;
    let waiting = waiting(repository)?;
    for (marked, files) in all_marked {
        let stored = known.get(&(marked.machine.clone(), marked.point.clone()));
        if stored.is_none() && waiting.contains(&format!("{}/{}", marked.machine, marked.point)) {
            continue;
        }
        restored += u64::from(stored.is_none());
        let wanted = match stored {
            Some(stored) => {
                // Includes the flags.
                let (is_protected, quarantine) = (stored.is_protected, stored.quarantine);
                PointDocument { is_protected, quarantine, ..marked }
            }
            None => marked,
        };
        let is_lost = stored.is_none_or(|stored| is_new && *stored != wanted);
        let has_lost_files = files.is_some()
            && !repository.point_files(&wanted.machine, &wanted.point).is_ok_and(|f| f.is_some());
        if is_lost || has_lost_files {
            tracing::warn!(machine = %wanted.machine, point = %wanted.point, "restored from its marker");
            catalog::restore_point(repository, &mut batch, &wanted, files.as_deref())?;
            repository.commit(std::mem::replace(&mut batch, repository.database().batch()))?;
        }
    }
    if is_new {
        catalog::forget_last_backups(repository, &mut batch)?;
        catalog::remove_ownerless(repository, &mut batch)?;
    }
    repository.commit(batch)?;
    Ok(restored)
}
