//! The committer: writes values, map and index into the store. A crash may interrupt it anywhere.
//!
//! The steps of one commit, and what a crash after each leaves:
//!
//! 1. The file of chunks is completed and synced in the staging directory. A crash leaves a file
//!    outside the database; the next writer removes it.
//! 2. The database ingests the file (its manifest is synced). A crash leaves chunks whose ids are
//!    at or above the committed `next_chunk`. No dedup entry and no committed page names them; the
//!    next writer drops them.
//! 3. One synced batch writes the dedup entries and the new `next_chunk`. A crash leaves the whole
//!    commit. So a dedup entry never exists before its chunk.
//!
//! A small commit has no file: its chunks are part of the batch, which is atomic.
//!
//! Pages of a map are written as they are completed, without a sync. The log keeps them before the
//! batch that commits them (the batch that ends a disk and sets `next_page`). A root is returned,
//! and can get into a point, only after that batch.
//!
//! All disks written at the same time share the chunks, the commits and both counters; each has its
//! own map. The end of one disk therefore commits the chunks that the others have stored so far,
//! and `next_page` passes the pages of incomplete disks. Nothing names those pages: a cancelled
//! disk deletes them, and after a kill they stay until a gc.

use std::collections::BTreeMap;
use std::mem::take;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;

use coldrise_block::{Context, Error, ErrorKind, Result};
use roaring::RoaringTreemap;

use super::heal::heal;
use crate::dedup::{self, ChunkHash};
use crate::map::{MapBuilder, MapRoot, PageId, PageSink, page_value};
use crate::repository::Repository;
use crate::rocks::{Family, SstWriter};
use crate::state::StoreState;

use super::MAX_LOG_BYTES;
use super::disk_run::{DiskMap, DiskRun};
use super::pipeline::{Chunks, HealedChunk, NewChunk, Pipeline, Step};

/// Bytes of values in one file of chunks.
const FILE_BYTES: u64 = 256 << 20;
/// Fewer bytes than this get no file of their own: through the log and a memtable they are flushed
/// into files together with their neighbours. With less, the tests in this crate need less data;
/// those of its interface have the real bound.
const SMALL_BYTES: u64 = if cfg!(test) { 2 << 20 } else { 8 << 20 };
/// Maximum number of dedup entries in one commit. It bounds the memory that they take.
const COMMIT_ENTRIES: usize = 256 << 10;

/// Maximum bytes of a file of chunks that are in memory or not counted yet: buffers, and the index
/// at the file's end.
const FILE_TAIL_BYTES: u64 = 2 << 20;
/// Bytes of one dedup entry in a batch.
const DEDUP_ENTRY_BYTES: u64 = 64;

/// Commits what the workers send, until no disk and no worker is left. Returns the committed state,
/// but counts every assigned page id as used: decoded pages are cached by id.
pub(super) fn commit_all(
    pipeline: &Pipeline,
    steps: &Receiver<(u64, Step)>,
    state: StoreState,
) -> StoreState {
    let mut committer = Committer::new(pipeline, state);
    let mut early = BTreeMap::new();
    let mut next = 0;
    while let Ok((order, step)) = steps.recv() {
        early.insert(order, step);
        while let Some(step) = early.remove(&next) {
            next += 1;
            let bytes = step.bytes();
            committer.take(step);
            pipeline.leave(bytes);
        }
    }
    committer.end()
}

/// Turns a panic into an error, so that no thread waits forever.
fn caught<T>(step: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(step))
        .unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "the committer panicked")))
}

fn begun(builder: &mut Option<MapBuilder>) -> Result<&mut MapBuilder> {
    builder.as_mut().ok_or_else(never_begun)
}

fn never_begun() -> Error {
    Error::new(ErrorKind::Internal, "a map was changed that was never begun")
}

struct Committer<'a> {
    pipeline: &'a Pipeline,
    state: StoreState,
    pages: Pages<'a>,
    /// Values that may become part of a batch.
    small: Vec<(Vec<NewChunk>, Vec<u8>)>,
    file: Option<SstWriter<'a>>,
    /// Bytes of values since the last commit.
    value_bytes: u64,
    /// Chunks since the last commit.
    new: Vec<(ChunkHash, u64)>,
    files: u64,
    /// Damaged chunks whose content was written again, for the next batch.
    healed: Vec<HealedChunk>,
    healed_bytes: u64,
}

impl<'a> Committer<'a> {
    fn new(pipeline: &'a Pipeline, state: StoreState) -> Self {
        let repository = &*pipeline.shared.repository;
        Committer {
            pipeline,
            state,
            pages: Pages { repository, next_page: state.next_page, log_bytes: 0 },
            small: Vec::new(),
            file: None,
            value_bytes: 0,
            new: Vec::new(),
            files: 0,
            healed: Vec::new(),
            healed_bytes: 0,
        }
    }

    /// Executes one step. A failure in a disk's map fails that disk; any other failure fails all
    /// disks.
    fn take(&mut self, step: Step) {
        if self.pipeline.is_failed() {
            return;
        }
        let done = match step {
            Step::Nothing { .. } => Ok(()),
            Step::Holes { disk, first_chunk, count } => {
                self.change_map(&disk, |builder, source, pages| {
                    begun(builder)?.set_holes(first_chunk, count, source, pages)
                });
                Ok(())
            }
            Step::Chunks(chunks) => {
                let Chunks { disk, first_chunk, ids, new, values, healed, .. } = chunks;
                self.change_map(&disk, |builder, source, pages| {
                    let (builder, mut chunks) = (begun(builder)?, (first_chunk..).zip(ids));
                    chunks.try_for_each(|(index, id)| builder.set(index, id, source, pages))
                });
                caught(|| self.store(new, values, healed))
            }
            Step::Finish { disk, answer } => {
                match self.finish(&disk) {
                    // The receiver may no longer exist.
                    Ok(root) => drop(root.map(|root| answer.send(root))),
                    // Before the answer is dropped: that makes the caller look for the failure.
                    Err(error) => self.pipeline.fail(&error),
                }
                Ok(())
            }
            Step::Abandon { disk, .. } => {
                self.abandon(&disk);
                Ok(())
            }
        };
        if let Err(error) = done {
            self.pipeline.fail(&error);
        }
    }

    /// Changes the map of a disk that was not stopped.
    fn change_map<T>(
        &mut self,
        disk: &DiskRun,
        change: impl FnOnce(&mut Option<MapBuilder>, &Repository, &mut PageWriter<'_, '_>) -> Result<T>,
    ) -> Option<T> {
        if disk.is_stopped() {
            return None;
        }
        let mut map = disk.map.lock();
        let DiskMap { builder, pages: stored } = &mut *map;
        let source = self.pages.repository;
        let mut writer = PageWriter { pages: &mut self.pages, stored, has_failed: false };
        let changed = caught(|| {
            if builder.is_none() {
                let chunks = disk.size_bytes.div_ceil(self.pipeline.chunk_size as u64);
                *builder = Some(MapBuilder::new(disk.base, chunks, source, &mut writer)?);
            }
            change(builder, source, &mut writer)
        });
        let has_failed = writer.has_failed;
        match changed {
            Ok(changed) => return Some(changed),
            Err(error) if has_failed => self.pipeline.fail(&error),
            Err(error) => disk.fail(error),
        }
        None
    }

    /// Stores chunks that have their ids, even if their disk was stopped.
    fn store(
        &mut self,
        new: Vec<NewChunk>,
        values: Vec<u8>,
        healed: Vec<HealedChunk>,
    ) -> Result<()> {
        self.healed_bytes += healed.iter().map(|chunk| chunk.value.len() as u64).sum::<u64>();
        self.healed.extend(healed);
        self.take_values(new, values)?;
        if self.healed_bytes >= SMALL_BYTES { self.commit(false) } else { Ok(()) }
    }

    fn take_values(&mut self, new: Vec<NewChunk>, values: Vec<u8>) -> Result<()> {
        if new.is_empty() {
            self.pipeline.recycle_values(values);
            return Ok(());
        }
        self.value_bytes += values.len() as u64;
        self.new.extend(new.iter().map(|chunk| (chunk.hash, chunk.id)));
        if self.file.is_none() {
            self.small.push((new, values));
            if self.value_bytes < SMALL_BYTES {
                return Ok(());
            }
            self.file = Some(self.start_file()?);
            for (new, values) in take(&mut self.small) {
                self.write_to_file(&new, values)?;
            }
        } else {
            self.write_to_file(&new, values)?;
        }
        if self.value_bytes >= FILE_BYTES || self.new.len() >= COMMIT_ENTRIES {
            self.commit(false)?;
        }
        Ok(())
    }

    fn start_file(&mut self) -> Result<SstWriter<'a>> {
        let staging = self.pipeline.shared.staging();
        match std::fs::create_dir(&staging) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(error).context(|| format!("making {}", staging.display()));
            }
            _ => {}
        }
        self.files += 1;
        let path = staging.join(format!("{}-{}.sst", self.state.next_chunk, self.files));
        SstWriter::create(self.pipeline.shared.repository.database(), &path)
    }

    fn write_to_file(&mut self, new: &[NewChunk], values: Vec<u8>) -> Result<()> {
        if let Some(file) = &mut self.file {
            let index_bytes = DEDUP_ENTRY_BYTES * self.new.len() as u64;
            let file_bytes = values.len() as u64 + FILE_TAIL_BYTES;
            self.pipeline.shared.repository.keep_reserve(file_bytes, index_bytes)?;
            for_each_value(new, &values, |id, value| file.put(&id.to_be_bytes(), value))?;
        }
        self.pipeline.recycle_values(values);
        Ok(())
    }

    /// See the module header.
    fn commit(&mut self, last: bool) -> Result<()> {
        let repository = &*self.pipeline.shared.repository;
        let database = repository.database();
        let small: u64 = self.small.iter().map(|(_, values)| values.len() as u64).sum();
        let file_bytes = if self.file.is_some() { FILE_TAIL_BYTES } else { 0 };
        let batch_bytes = small + self.healed_bytes + DEDUP_ENTRY_BYTES * self.new.len() as u64;
        repository.keep_reserve(file_bytes, batch_bytes)?;
        if let Some(file) = self.file.take() {
            let path = file.finish()?;
            // Flush earlier small commits into a file of their own now. Together with later ones
            // they would form a file that spans this one, and rewriting either would rewrite both.
            database.flush_family(Family::Chunks)?;
            database.ingest_chunks(&path)?;
            // If the file could not be moved, it was copied.
            let _ = std::fs::remove_file(&path);
        }
        let mut batch = database.batch();
        for (new, values) in take(&mut self.small) {
            for_each_value(&new, &values, |id, value| {
                batch.put(Family::Chunks, &id.to_be_bytes(), value)
            })?;
            self.pipeline.recycle_values(values);
        }
        if let Some((_, id)) = self.new.last() {
            self.state.next_chunk = id + 1;
        }
        // The index takes entries faster in key order.
        self.new.sort_unstable();
        let changing_index = self.pipeline.shared.referred.changing_index();
        for (hash, id) in &self.new {
            dedup::put(repository, &mut batch, hash, *id)?;
        }
        self.state.chunks += self.new.len() as u64;
        self.state.stored_bytes += self.value_bytes;
        if last {
            self.state.next_page = self.pages.next_page;
        }
        let healed = take(&mut self.healed);
        self.healed_bytes = 0;
        let still_damaged = heal(&self.pipeline.shared, &mut batch, &healed)?;
        self.state.put(repository, &mut batch)?;
        self.pages.log_bytes += batch.bytes() as u64;
        repository.commit(batch)?;
        drop(changing_index);
        if let Some(chunks) = still_damaged {
            self.pipeline.shared.damaged.set(chunks);
        }
        let mut progress = self.pipeline.shared.progress.lock();
        progress.log_bytes += take(&mut self.pages.log_bytes);
        let flush = last && progress.log_bytes > MAX_LOG_BYTES;
        if flush {
            progress.log_bytes = 0;
        }
        drop(progress);
        if flush {
            database.flush()?;
        }
        self.value_bytes = 0;
        let committed = take(&mut self.new).into_iter().map(|(hash, _)| hash).collect();
        self.pipeline.forget_committed(committed);
        Ok(())
    }

    /// The map of a disk, once it is durable; `None` if the disk was stopped.
    fn finish(&mut self, disk: &DiskRun) -> Result<Option<MapRoot>> {
        let root = self.change_map(disk, |builder, source, pages| {
            builder.take().ok_or_else(never_begun)?.finish(source, pages)
        });
        if root.is_some() {
            caught(|| self.commit(true))?;
            if take(&mut self.pipeline.shared.progress.lock().is_to_be_counted) {
                self.state.count_after_gc(self.pages.repository);
            }
        }
        Ok(root)
    }

    /// Deletes the pages of a disk that was cancelled or has failed.
    fn abandon(&mut self, disk: &DiskRun) {
        let pages = take(&mut disk.map.lock().pages);
        let database = self.pipeline.shared.repository.database();
        let mut batch = database.batch();
        let deleted = caught(|| {
            if pages.is_empty() {
                return Ok(());
            }
            for page in &pages {
                batch.delete(Family::Maps, &page.to_be_bytes())?;
                batch.delete(Family::MapsCopy, &page.to_be_bytes())?;
            }
            database.write(batch, false)
        });
        if let Err(error) = deleted {
            tracing::warn!(error = %error.full_message(), "pages stay until the next gc");
        }
    }

    /// Drops everything that was not committed.
    fn end(mut self) -> StoreState {
        drop(self.file.take());
        if let Err(error) = super::remove_folder(&self.pipeline.shared.staging()) {
            tracing::warn!(error = %error.full_message(), "leftovers stay for the next writer");
        }
        StoreState { next_page: self.pages.next_page, ..self.state }
    }
}

fn for_each_value(
    new: &[NewChunk],
    values: &[u8],
    mut each: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut start = 0;
    for chunk in new {
        let value = values
            .get(start..chunk.value_end)
            .ok_or_else(|| Error::new(ErrorKind::Internal, "a value leaves its buffer"))?;
        each(chunk.id, value)?;
        start = chunk.value_end;
    }
    Ok(())
}

/// Writes the pages of all maps.
struct Pages<'a> {
    repository: &'a Repository,
    next_page: PageId,
    log_bytes: u64,
}

/// Writes the pages of one disk's map.
struct PageWriter<'p, 'a> {
    pages: &'p mut Pages<'a>,
    stored: &'p mut RoaringTreemap,
    /// The store refused a page; this fails all disks.
    has_failed: bool,
}

impl PageSink for PageWriter<'_, '_> {
    fn store(&mut self, level: u8, slots: &[u64]) -> Result<PageId> {
        let stored = self.pages.store(level, slots);
        match &stored {
            Ok(id) => {
                self.stored.insert(*id);
            }
            Err(_) => self.has_failed = true,
        }
        stored
    }
}

impl Pages<'_> {
    fn store(&mut self, level: u8, slots: &[u64]) -> Result<PageId> {
        let id = self.next_page;
        let keys = self.repository.keys();
        let value = page_value(self.repository.id(), &keys.pages, id, level, slots)?;
        let database = self.repository.database();
        let mut batch = database.batch();
        batch.put(Family::Maps, &id.to_be_bytes(), &value)?;
        self.repository.keep_reserve(0, 2 * batch.bytes() as u64)?;
        self.log_bytes += batch.bytes() as u64;
        database.write(batch, false)?;
        // Not through the log, which already has the page: a point waits until this copy is in a
        // file.
        let mut copy = database.batch();
        copy.put(Family::MapsCopy, &id.to_be_bytes(), &value)?;
        database.write_unlogged(copy)?;
        self.next_page = id
            .checked_add(1)
            .ok_or_else(|| Error::new(ErrorKind::Internal, "the page ids are used up"))?;
        Ok(id)
    }
}
