//! Reads every chunk, in storage order.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::{Coverage, VerifyOptions, VerifyProgress, VerifyReport, check_cancel};
use crate::Repository;
use crate::chunk::ChunkId;
use crate::rocks::{BlockBuffers, ChunkFiles, Cursor, Family, ReadMode};

/// Maximum number of neighbouring ids that one thread reads at once. Each piece wastes its
/// read-ahead at the end, so pieces are not small; the maximum gives every thread a share.
const MAX_PIECE_IDS: u64 = 16_384;
const MIN_PIECE_IDS: u64 = 1024;
/// Pieces per thread, if there are enough ids.
const PIECES_PER_THREAD: u64 = 64;
/// Ids per piece of a sample: few, so that the sample is spread over the repository.
const SAMPLED_PIECE_IDS: u64 = 32;

/// One bit per chunk id. Bits are set from many threads.
pub(crate) struct IdSet {
    words: Box<[AtomicU64]>,
}

impl IdSet {
    /// An empty set of ids below `end`.
    pub(crate) fn new(end: ChunkId) -> IdSet {
        let words = end.div_ceil(64);
        IdSet { words: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(crate) fn insert(&self, id: ChunkId) {
        if let Some(word) = self.words.get((id / 64) as usize) {
            word.fetch_or(1 << (id % 64), Ordering::Relaxed);
        }
    }

    /// An independent copy of the set.
    pub(crate) fn snapshot(&self) -> IdSet {
        let word = |word: &AtomicU64| AtomicU64::new(word.load(Ordering::Relaxed));
        IdSet { words: self.words.iter().map(word).collect() }
    }

    pub(crate) fn remove(&self, id: ChunkId) {
        if let Some(word) = self.words.get((id / 64) as usize) {
            word.fetch_and(!(1 << (id % 64)), Ordering::Relaxed);
        }
    }

    /// An empty set with the same end.
    pub(super) fn empty_like(&self) -> IdSet {
        IdSet::new(self.words.len() as u64 * 64)
    }

    /// Number of ids in the set.
    fn len(&self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.words.iter().map(ones).sum()
    }

    /// Whether an id was inserted. An id at `end` or above is newer than the set.
    pub(crate) fn contains(&self, id: ChunkId) -> bool {
        let word = self.words.get((id / 64) as usize);
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (id % 64) & 1 == 1)
    }
}

/// The highest id that is stored; 0 in an empty repository.
pub(crate) fn last_id(repository: &Repository) -> Result<ChunkId> {
    let mut cursor = repository.database().cursor(Family::Chunks, ReadMode::Payload)?;
    cursor.seek_to_last()?;
    Ok(cursor.entry().and_then(|(key, _)| id_of(key)).unwrap_or(0))
}

fn id_of(key: &[u8]) -> Option<ChunkId> {
    key.try_into().ok().map(u64::from_be_bytes)
}

/// The first id at or after a key. The key may be cut short, as in an index.
fn id_at(key: &[u8]) -> ChunkId {
    let mut bytes = [0; 8];
    bytes.iter_mut().zip(key).for_each(|(byte, stored)| *byte = *stored);
    u64::from_be_bytes(bytes)
}

/// Reads the chunks of `ids` that the options select (and of these only the `wanted`). Returns the
/// ids of damaged or missing chunks.
pub(super) fn verify(
    repository: &Repository,
    ids: Range<ChunkId>,
    wanted: Option<&IdSet>,
    options: &VerifyOptions<'_>,
    report: &mut VerifyReport,
) -> Result<IdSet> {
    let threads = match options.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    // Ids begin at 1.
    let ids = ids.start.max(1)..ids.end;
    // If the files cannot be judged, RocksDB reads everything.
    let files = repository.database().chunk_files().ok();
    let ranges = files.as_ref().and_then(|files| stored_ranges(files, &ids));
    let run = Run {
        repository,
        files,
        wanted,
        wanted_count: wanted.map_or(0, IdSet::len),
        options,
        pieces: Pieces::new(ranges.unwrap_or(vec![ids.clone()]), options.coverage, threads),
        next_piece: AtomicU64::new(0),
        unusable: IdSet::new(ids.end),
        done_bytes: AtomicU64::new(0),
        chunks: AtomicU64::new(0),
        read_bytes: AtomicU64::new(0),
        damaged: Mutex::default(),
    };
    run.skip_between(ids);
    run.tell();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| run.work())).collect();
        workers.into_iter().try_for_each(|worker| {
            let panicked = || Error::new(ErrorKind::Internal, "a verifying thread panicked");
            worker.join().unwrap_or_else(|_| Err(panicked()))
        })
    })?;
    report.chunks = run.chunks.into_inner();
    report.read_bytes = run.read_bytes.into_inner();
    let mut found = run.damaged.into_inner();
    found.damaged_chunks.sort_by_key(|damaged| damaged.id);
    report.damaged_chunks = found.damaged_chunks;
    report.damaged_chunk_count = found.damaged_chunk_count;
    Ok(run.unusable)
}

/// The ranges of these ids that may be stored: a gc may have removed most of the ids.
fn stored_ranges(files: &ChunkFiles, ids: &Range<ChunkId>) -> Option<Vec<Range<ChunkId>>> {
    let of_keys = |(first, last): (Vec<u8>, Vec<u8>)| {
        let first = id_of(&first)?.max(ids.start);
        Some(first..id_of(&last)?.saturating_add(1).min(ids.end))
    };
    let ranges: Option<Vec<_>> = files.ranges().into_iter().map(of_keys).collect();
    Some(ranges?.into_iter().filter(|range| !range.is_empty()).collect())
}

/// The ids that are read at once, and their selection.
struct Pieces {
    /// Ascending and not empty.
    ranges: Vec<Range<ChunkId>>,
    /// For each range, the number of ids in the ranges before it.
    before: Vec<u64>,
    ids: u64,
    piece_ids: u64,
    /// Pieces to read, and pieces in total.
    count: u64,
    all: u64,
}

impl Pieces {
    fn new(ranges: Vec<Range<ChunkId>>, coverage: Coverage, threads: usize) -> Pieces {
        let mut ids = 0;
        let mut before = Vec::with_capacity(ranges.len());
        for range in &ranges {
            before.push(ids);
            ids += range.end.saturating_sub(range.start);
        }
        let shared_out = ids / (threads as u64 * PIECES_PER_THREAD);
        let piece_ids = match coverage {
            Coverage::Sample(_) => SAMPLED_PIECE_IDS,
            Coverage::Everything | Coverage::Referenced => {
                shared_out.clamp(MIN_PIECE_IDS, MAX_PIECE_IDS)
            }
        };
        let all = ids.div_ceil(piece_ids);
        let count = match coverage {
            Coverage::Sample(percent) => {
                ((all as f64 * percent / 100.0).ceil() as u64).clamp(all.min(1), all)
            }
            Coverage::Everything | Coverage::Referenced => all,
        };
        Pieces { ranges, before, ids, piece_ids, count, all }
    }

    /// The ids of one piece to read. All pieces are divided into equal parts, and one piece of each
    /// part is chosen at random.
    fn piece(&self, number: u64) -> Result<impl Iterator<Item = Range<ChunkId>> + '_> {
        // At most `all`, because `part` is at most `count`.
        let start =
            |part: u64| (u128::from(part) * u128::from(self.all) / u128::from(self.count)) as u64;
        let part = start(number)..start(number + 1);
        let mut bytes = [0; 8];
        if part.end - part.start > 1 {
            crate::random(&mut bytes)?;
        }
        let chosen = part.start + u64::from_le_bytes(bytes) % (part.end - part.start);
        let first = chosen * self.piece_ids;
        let end = first + self.piece_ids;
        let at = self.before.partition_point(|before| *before <= first).saturating_sub(1);
        let ranges = self.ranges.iter().zip(&self.before).skip(at);
        Ok(ranges.take_while(move |(_, before)| **before < end).map(move |(range, before)| {
            let from = range.start + first.saturating_sub(*before);
            from..range.end.min(range.start + (end - before))
        }))
    }

    /// Number of ids to read. Approximate for a sample, because the last piece may be short.
    fn ids_to_read(&self) -> u64 {
        self.ids.min(self.count * self.piece_ids)
    }
}

struct Run<'a> {
    repository: &'a Repository,
    files: Option<ChunkFiles>,
    wanted: Option<&'a IdSet>,
    /// Number of wanted ids.
    wanted_count: u64,
    options: &'a VerifyOptions<'a>,
    pieces: Pieces,
    next_piece: AtomicU64,
    unusable: IdSet,
    done_bytes: AtomicU64,
    chunks: AtomicU64,
    read_bytes: AtomicU64,
    damaged: Mutex<VerifyReport>,
}

/// Buffers of one thread.
#[derive(Default)]
struct Scratch {
    plain: Vec<u8>,
    blocks: BlockBuffers,
    /// Number of chunks read in the current piece, and their bytes.
    read: (u64, u64),
}

impl Scratch {
    fn count(&mut self, value: &[u8]) {
        self.read.0 += 1;
        self.read.1 += value.len() as u64;
    }
}

impl Run<'_> {
    fn work(&self) -> Result<()> {
        let mut scratch = Scratch::default();
        loop {
            check_cancel(self.options.cancel)?;
            let number = self.next_piece.fetch_add(1, Ordering::Relaxed);
            if number >= self.pieces.count {
                return Ok(());
            }
            for piece in self.pieces.piece(number)? {
                self.read_piece(piece.start, piece.end, &mut scratch)?;
                let (chunks, bytes) = std::mem::take(&mut scratch.read);
                self.chunks.fetch_add(chunks, Ordering::Relaxed);
                self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
                let done = self.in_bytes(self.wanted_ids(piece));
                self.done_bytes.fetch_add(done, Ordering::Relaxed);
            }
            self.tell();
        }
    }

    /// Ids that are not stored need no reading.
    fn skip_between(&self, ids: Range<ChunkId>) {
        let mut next = ids.start;
        let end = std::iter::once(ids.end..ids.end);
        for range in self.pieces.ranges.iter().cloned().chain(end) {
            if self.wanted.is_some() {
                let missing = self.in_bytes(self.wanted_ids(next..range.start));
                self.done_bytes.fetch_add(missing, Ordering::Relaxed);
            }
            self.skip(&mut next, range.start);
            next = range.end;
        }
    }

    fn tell(&self) {
        let total_ids = match self.wanted {
            Some(_) => self.wanted_count,
            None => self.pieces.ids_to_read(),
        };
        (self.options.progress)(VerifyProgress {
            done_bytes: self.done_bytes.load(Ordering::Relaxed),
            total_bytes: self.in_bytes(total_ids),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
        });
    }

    fn in_bytes(&self, ids: u64) -> u64 {
        ids * u64::from(self.repository.chunk_size_bytes())
    }

    /// Number of ids to read in a piece.
    fn wanted_ids(&self, piece: Range<ChunkId>) -> u64 {
        match self.wanted {
            Some(wanted) => piece.filter(|id| wanted.contains(*id)).count() as u64,
            None => piece.end - piece.start,
        }
    }

    fn is_wanted(&self, id: ChunkId) -> bool {
        self.wanted.is_none_or(|wanted| wanted.contains(id))
    }

    /// Reads the stored chunks of a piece: directly from their files if possible; from the first
    /// unreadable place on with RocksDB's cursor; if the files themselves are damaged, the rest of
    /// the piece one by one.
    fn read_piece(&self, first: ChunkId, end: ChunkId, scratch: &mut Scratch) -> Result<()> {
        if self.wanted.is_some() && !(first..end).any(|id| self.is_wanted(id)) {
            return Ok(());
        }
        let mut next = first;
        if self.read_files(&mut next, end, scratch) {
            return Ok(());
        }
        if self.walk(&mut next, end, scratch).is_err() {
            for id in next..end {
                self.read_one(id, scratch);
            }
        }
        Ok(())
    }

    /// Moves `next` past the processed ids. Returns true if all were processed.
    fn read_files(&self, next: &mut ChunkId, end: ChunkId, scratch: &mut Scratch) -> bool {
        let (from, to) = (next.to_be_bytes(), end.to_be_bytes());
        let Some(files) = self.files.as_ref().filter(|files| files.cover(&from, &to)) else {
            return false;
        };
        let mut blocks = std::mem::take(&mut scratch.blocks);
        let is_wanted = |before: &[u8], last: &[u8]| {
            let ids = id_at(before)..=id_at(last).min(end);
            self.wanted.is_none() || ids.into_iter().any(|id| self.is_wanted(id))
        };
        let done = files.read((&from, &to), &mut blocks, is_wanted, |key, value| {
            let id =
                id_of(key).ok_or_else(|| Error::new(ErrorKind::Corrupt, "a key is not an id"))?;
            self.skip(next, id);
            if self.is_wanted(id) {
                match self.authenticate(id, value, scratch) {
                    Ok(()) => scratch.count(value),
                    Err(_) => self.read_one(id, scratch),
                }
            }
            *next = id + 1;
            Ok(())
        });
        scratch.blocks = blocks;
        if done.is_ok() {
            self.skip(next, end);
        }
        done.is_ok()
    }

    /// Marks the ids from `next` up to, but not including, `id` as missing.
    fn skip(&self, next: &mut ChunkId, id: ChunkId) {
        for missing in *next..id {
            if self.is_wanted(missing) {
                self.unusable.insert(missing);
            }
        }
        *next = id.max(*next);
    }

    /// Moves `next` past the processed ids.
    fn walk(&self, next: &mut ChunkId, end: ChunkId, scratch: &mut Scratch) -> Result<()> {
        let mut cursor: Cursor<'_> =
            self.repository.database().cursor(Family::Chunks, ReadMode::Scan)?;
        cursor.seek(&next.to_be_bytes())?;
        while *next < end {
            let found = cursor.entry().and_then(|(key, value)| Some((id_of(key)?, value)));
            let found = found.filter(|(id, _)| *id < end);
            self.skip(next, found.map_or(end, |(id, _)| id));
            let Some((id, value)) = found else { return Ok(()) };
            if self.is_wanted(id) {
                self.check(id, value, scratch);
            }
            *next += 1;
            cursor.next()?;
        }
        Ok(())
    }

    fn read_one(&self, id: ChunkId, scratch: &mut Scratch) {
        if !self.is_wanted(id) {
            return;
        }
        let database = self.repository.database();
        match database.get(Family::Chunks, &id.to_be_bytes(), ReadMode::Payload) {
            Ok(Some(value)) => self.check(id, &value, scratch),
            Ok(None) => self.unusable.insert(id),
            Err(error) => self.damage(id, error.message()),
        }
    }

    fn check(&self, id: ChunkId, value: &[u8], scratch: &mut Scratch) {
        scratch.count(value);
        if let Err(reason) = self.authenticate(id, value, scratch) {
            self.damage(id, reason.to_owned());
        }
    }

    fn authenticate(
        &self,
        id: ChunkId,
        value: &[u8],
        scratch: &mut Scratch,
    ) -> std::result::Result<(), &'static str> {
        let (codec, aead) = (self.repository.codec(), &self.repository.keys().chunks);
        codec.authenticate(aead, id, value, &mut scratch.plain)
    }

    fn damage(&self, id: ChunkId, reason: String) {
        self.unusable.insert(id);
        self.damaged.lock().damage(id, reason);
    }
}
