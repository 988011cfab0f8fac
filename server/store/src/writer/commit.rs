//! The committer: puts values, map and index into the store, in an order that
//! a crash may interrupt anywhere.
//!
//! One commit, and what a crash after each step leaves:
//!
//! 1. The file of chunks is completed and synced in the staging directory.
//!    Left: a file outside of the database; the next writer removes it.
//! 2. The database takes the file over (its manifest is synced). Left: chunks
//!    whose ids are at or above the committed `next_chunk`. No dedup entry and
//!    no committed page names them; the next writer drops them.
//! 3. One synced batch: the dedup entries and the new `next_chunk`. Left: the
//!    commit, whole. A dedup entry is therefore never there before its chunk.
//!
//! A commit of few bytes has no file: its chunks are part of the batch, which
//! is atomic by itself.
//!
//! Pages of the map are written as they are done, without a sync: the log keeps
//! their order before the batch that commits them (the last one, which sets
//! `next_page`). A root is returned, and can get into a point, only after that.

use std::collections::BTreeMap;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::sync::mpsc::Receiver;

use coldrise_block::{Context, Error, ErrorKind, Result};

use crate::dedup::{self, ChunkHash};
use crate::map::{page_value, MapBuilder, MapRoot, PageId, PageSink};
use crate::repair;
use crate::repository::Repository;
use crate::rocks::{Family, SstWriter};
use crate::state::StoreState;

use super::run::{HealedChunk, NewChunk, Run, Step};
use super::MAX_LOG_BYTES;

/// Bytes of values in one file of chunks.
const FILE_BYTES: u64 = 256 << 20;
/// Fewer bytes than this are not worth a file of their own: through the log
/// and a memtable they end up in files together with their neighbours.
const SMALL_BYTES: u64 = 8 << 20;
/// Entries of the dedup index in one commit, which bounds what is kept of them
/// in memory.
const COMMIT_ENTRIES: usize = 256 << 10;

/// Bytes of the drive that a backup leaves free: whoever forgets points and runs a gc to make
/// space needs some to open the database.
const HEADROOM_BYTES: u64 = 1 << 20;

/// What a run ends with.
pub(super) struct Outcome {
    /// The map; none where the run has failed or was cancelled.
    pub(super) root: Option<MapRoot>,
    /// As committed, but with every page id that was handed out gone: decoded
    /// pages are cached by id.
    pub(super) state: StoreState,
}

/// Commits what the workers send, until they are done.
pub(super) fn commit_all(
    run: &Run,
    steps: &Receiver<(u64, Step)>,
    base: MapRoot,
    state: StoreState,
) -> Outcome {
    let mut committer = match Committer::new(run, base, state) {
        Ok(committer) => Some(committer),
        Err(error) => {
            run.fail(error);
            None
        }
    };
    let mut early = BTreeMap::new();
    let mut next = 0;
    while let Ok((order, step)) = steps.recv() {
        early.insert(order, step);
        while let Some(step) = early.remove(&next) {
            next += 1;
            let bytes = match &step {
                Step::Chunks { bytes, .. } | Step::Nothing { bytes } => *bytes,
                Step::Holes { .. } => 0,
            };
            if let Some(committer) = committer.as_mut().filter(|_| !run.is_stopped()) {
                attempt(run, || committer.take(step));
            }
            run.leave(bytes);
        }
    }
    let Some(mut committer) = committer else {
        return Outcome { root: None, state };
    };
    let root = match run.is_stopped() {
        true => None,
        false => attempt(run, || committer.finish()),
    };
    if root.is_none() {
        committer.abandon(state.next_page);
    }
    Outcome { root, state: StoreState { next_page: committer.pages.next_page, ..committer.state } }
}

/// A panic must not leave the caller waiting for room.
fn attempt<T>(run: &Run, step: impl FnOnce() -> Result<T>) -> Option<T> {
    let result = catch_unwind(AssertUnwindSafe(step))
        .unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "the committer panicked")));
    result.map_err(|error| run.fail(error)).ok()
}

struct Committer<'run> {
    run: &'run Run,
    builder: Option<MapBuilder>,
    pages: PageWriter<'run>,
    state: StoreState,
    /// Values that may end up in a batch.
    small: Vec<(Vec<NewChunk>, Vec<u8>)>,
    file: Option<SstWriter<'run>>,
    /// Bytes of values since the last commit.
    value_bytes: u64,
    /// Chunks since the last commit.
    new: Vec<(ChunkHash, u64)>,
    files: u64,
    /// Damaged chunks whose content came by, for the next batch.
    healed: Vec<HealedChunk>,
    healed_bytes: u64,
}

impl<'run> Committer<'run> {
    fn new(run: &'run Run, base: MapRoot, state: StoreState) -> Result<Self> {
        let repository = &*run.shared.repository;
        let mut pages = PageWriter { repository, next_page: state.next_page, log_bytes: 0 };
        let chunks = run.size_bytes.div_ceil(run.chunk_size as u64);
        let builder = MapBuilder::new(base, chunks, repository, &mut pages)?;
        Ok(Committer {
            run,
            builder: Some(builder),
            pages,
            state,
            small: Vec::new(),
            file: None,
            value_bytes: 0,
            new: Vec::new(),
            files: 0,
            healed: Vec::new(),
            healed_bytes: 0,
        })
    }

    fn take(&mut self, step: Step) -> Result<()> {
        let source = &*self.run.shared.repository;
        let Some(builder) = &mut self.builder else {
            return Err(Error::new(ErrorKind::Internal, "a finished disk was written"));
        };
        match step {
            Step::Nothing { .. } => Ok(()),
            Step::Holes { first_chunk, count } => {
                builder.set_holes(first_chunk, count, source, &mut self.pages)
            }
            Step::Chunks { first_chunk, ids, new, values, healed, .. } => {
                for (index, id) in (first_chunk..).zip(ids) {
                    builder.set(index, id, source, &mut self.pages)?;
                }
                self.healed_bytes +=
                    healed.iter().map(|chunk| chunk.value.len() as u64).sum::<u64>();
                self.healed.extend(healed);
                self.take_values(new, values)?;
                match self.healed_bytes >= SMALL_BYTES {
                    true => self.commit(false),
                    false => Ok(()),
                }
            }
        }
    }

    fn take_values(&mut self, new: Vec<NewChunk>, values: Vec<u8>) -> Result<()> {
        if new.is_empty() {
            self.run.recycle_values(values);
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
            for (new, values) in std::mem::take(&mut self.small) {
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

    fn start_file(&mut self) -> Result<SstWriter<'run>> {
        let staging = self.run.shared.staging();
        match std::fs::create_dir(&staging) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(error).context(|| format!("making {}", staging.display()));
            }
            _ => {}
        }
        self.files += 1;
        let path = staging.join(format!("{}-{}.sst", self.state.next_chunk, self.files));
        SstWriter::create(self.run.shared.repository.database(), &path)
    }

    fn write_to_file(&mut self, new: &[NewChunk], values: Vec<u8>) -> Result<()> {
        if let Some(file) = &mut self.file {
            for_each_value(new, &values, |id, value| file.put(&id.to_be_bytes(), value))?;
        }
        self.run.recycle_values(values);
        Ok(())
    }

    /// See the head of this file.
    fn commit(&mut self, last: bool) -> Result<()> {
        let repository = &*self.run.shared.repository;
        let database = repository.database();
        let small = self.small.iter().map(|(_, values)| values.len() as u64);
        keep_headroom(repository.path(), small.sum())?;
        if let Some(file) = self.file.take() {
            let path = file.finish()?;
            // Small commits before it become a file of their own now. With those after
            // it they would become one that spans this file: rewriting either would
            // then take both.
            database.flush_family(Family::Chunks)?;
            database.ingest_chunks(&path)?;
            // Where the file could not be moved it was copied.
            let _ = std::fs::remove_file(&path);
        }
        let mut batch = database.batch();
        for (new, values) in std::mem::take(&mut self.small) {
            for_each_value(&new, &values, |id, value| {
                batch.put(Family::Chunks, &id.to_be_bytes(), value)
            })?;
            self.run.recycle_values(values);
        }
        if let Some((_, id)) = self.new.last() {
            self.state.next_chunk = id + 1;
        }
        // In the order of the keys the index takes them faster.
        self.new.sort_unstable();
        let changing_index = self.run.shared.referred.changing_index();
        for (hash, id) in &self.new {
            dedup::put(repository, &mut batch, hash, *id)?;
        }
        self.state.chunks += self.new.len() as u64;
        self.state.stored_bytes += self.value_bytes;
        if last {
            self.state.next_page = self.pages.next_page;
        }
        let healed = std::mem::take(&mut self.healed);
        self.healed_bytes = 0;
        let still_damaged = repair::heal(&self.run.shared, &mut batch, &healed)?;
        self.state.put(repository, &mut batch)?;
        self.pages.log_bytes += batch.bytes() as u64;
        repository.commit(batch)?;
        drop(changing_index);
        if let Some(chunks) = still_damaged {
            self.run.shared.damaged.set(chunks);
        }
        let mut progress = self.run.shared.progress.lock();
        progress.log_bytes += std::mem::take(&mut self.pages.log_bytes);
        let flush = last && progress.log_bytes > MAX_LOG_BYTES;
        if flush {
            progress.log_bytes = 0;
        }
        drop(progress);
        if flush {
            database.flush()?;
        }
        self.value_bytes = 0;
        let committed = std::mem::take(&mut self.new).into_iter().map(|(hash, _)| hash).collect();
        self.run.forget_committed(committed);
        Ok(())
    }

    fn finish(&mut self) -> Result<MapRoot> {
        let root = match self.builder.take() {
            Some(builder) => builder.finish(&*self.run.shared.repository, &mut self.pages)?,
            None => return Err(Error::new(ErrorKind::Internal, "a disk was finished twice")),
        };
        self.commit(true)?;
        Ok(root)
    }

    /// Drops what was not committed.
    fn abandon(&mut self, first_page: PageId) {
        drop(self.file.take());
        let database = self.run.shared.repository.database();
        let removed = super::remove_folder(&self.run.shared.staging()).and_then(|()| {
            if self.pages.next_page == first_page {
                return Ok(());
            }
            let mut batch = database.batch();
            for page in first_page..self.pages.next_page {
                batch.delete(Family::Maps, &page.to_be_bytes())?;
                batch.delete(Family::MapsCopy, &page.to_be_bytes())?;
            }
            database.write(batch, false)
        });
        if let Err(error) = removed {
            tracing::warn!(error = %error.full_message(), "leftovers stay for the next writer");
        }
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

struct PageWriter<'run> {
    repository: &'run Repository,
    next_page: PageId,
    log_bytes: u64,
}

impl PageSink for PageWriter<'_> {
    fn store(&mut self, level: u8, slots: &[u64]) -> Result<PageId> {
        let id = self.next_page;
        let keys = self.repository.keys();
        let value = page_value(self.repository.id(), &keys.pages, id, level, slots)?;
        let database = self.repository.database();
        let mut batch = database.batch();
        batch.put(Family::Maps, &id.to_be_bytes(), &value)?;
        self.log_bytes += batch.bytes() as u64;
        database.write(batch, false)?;
        // Not through the log, which already has it: a point waits until this is in a file.
        let mut copy = database.batch();
        copy.put(Family::MapsCopy, &id.to_be_bytes(), &value)?;
        database.write_unlogged(copy)?;
        self.next_page = id
            .checked_add(1)
            .ok_or_else(|| Error::new(ErrorKind::Internal, "the page ids are used up"))?;
        Ok(id)
    }
}

/// Refuses to take the last space of the drive for so many bytes.
fn keep_headroom(repository: &Path, bytes: u64) -> Result<()> {
    let what = || format!("asking for the free space of {}", repository.display());
    let found = rustix::fs::statvfs(repository).map_err(std::io::Error::from).context(what)?;
    if found.f_bavail.saturating_mul(found.f_frsize) >= HEADROOM_BYTES + bytes {
        return Ok(());
    }
    let text = format!(
        "the drive of {} is full but for the last {} MiB, which making room needs: free some, or \
         forget points and run coldrise gc",
        repository.display(),
        HEADROOM_BYTES >> 20
    );
    Err(Error::new(ErrorKind::NoSpace, text))
}
