//! Reading every chunk, in the order of storing.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::{
    check_cancel, Coverage, Damaged, VerifyOptions, VerifyProgress, VerifyReport, MAX_DESCRIBED,
};
use crate::chunk::ChunkId;
use crate::rocks::{BlockBuffers, ChunkFiles, Cursor, Family, ReadMode};
use crate::Repository;

/// Neighbouring ids that one thread reads in one go, at most: what is read ahead at the
/// end of one is lost. At least: so that all threads have some.
const MAX_PIECE_IDS: u64 = 16_384;
const MIN_PIECE_IDS: u64 = 1024;
/// Pieces that each thread has, where there are enough ids.
const PIECES_PER_THREAD: u64 = 16;
/// The same for a sample: small, so that it is spread over the repository.
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

    /// The same ids, from now on by themselves.
    pub(crate) fn snapshot(&self) -> IdSet {
        let word = |word: &AtomicU64| AtomicU64::new(word.load(Ordering::Relaxed));
        IdSet { words: self.words.iter().map(word).collect() }
    }

    pub(crate) fn remove(&self, id: ChunkId) {
        if let Some(word) = self.words.get((id / 64) as usize) {
            word.fetch_and(!(1 << (id % 64)), Ordering::Relaxed);
        }
    }

    /// How many there are.
    fn len(&self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.words.iter().map(ones).sum()
    }

    /// True for what was inserted. An id at `end` or above is newer than the set.
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

/// The first id from a key on that may be cut short, as those in an index are.
fn id_at(key: &[u8]) -> ChunkId {
    let mut bytes = [0; 8];
    bytes.iter_mut().zip(key).for_each(|(byte, stored)| *byte = *stored);
    u64::from_be_bytes(bytes)
}

/// Reads the chunks of `ids` that the options ask for (and of these only the
/// `wanted`). Returns the ids that are damaged or not there.
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
    // Where it cannot be told what is where, RocksDB reads all.
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
        damaged: Mutex::new((Vec::new(), 0)),
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
    let (mut damaged, count) = run.damaged.into_inner();
    damaged.sort_by_key(|damaged| damaged.id);
    (report.damaged_chunks, report.damaged_chunk_count) = (damaged, count);
    Ok(run.unusable)
}

/// Of these ids those that may be stored: what a gc has removed may be most of them.
fn stored_ranges(files: &ChunkFiles, ids: &Range<ChunkId>) -> Option<Vec<Range<ChunkId>>> {
    let of_keys = |(first, last): (Vec<u8>, Vec<u8>)| {
        let first = id_of(&first)?.max(ids.start);
        Some(first..id_of(&last)?.saturating_add(1).min(ids.end))
    };
    let ranges: Option<Vec<_>> = files.ranges().into_iter().map(of_keys).collect();
    Some(ranges?.into_iter().filter(|range| !range.is_empty()).collect())
}

/// Which ids are read in one go, and by whom they are chosen.
struct Pieces {
    /// Ascending, none of them empty.
    ranges: Vec<Range<ChunkId>>,
    /// Of each range how many ids are in those before it.
    before: Vec<u64>,
    ids: u64,
    piece_ids: u64,
    /// How many are read, and of how many.
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

    /// The ids of one of the pieces that are read: all are divided into as many equal
    /// parts, and of each part one is taken at random.
    fn piece(&self, number: u64) -> Result<impl Iterator<Item = Range<ChunkId>> + '_> {
        // Below `all`, as `number` is at most `count`.
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

    /// All that is read; of a sample about, as the last piece may be a short one.
    fn ids_to_read(&self) -> u64 {
        self.ids.min(self.count * self.piece_ids)
    }
}

struct Run<'a> {
    repository: &'a Repository,
    files: Option<ChunkFiles>,
    wanted: Option<&'a IdSet>,
    /// How many those are.
    wanted_count: u64,
    options: &'a VerifyOptions<'a>,
    pieces: Pieces,
    next_piece: AtomicU64,
    unusable: IdSet,
    done_bytes: AtomicU64,
    chunks: AtomicU64,
    read_bytes: AtomicU64,
    damaged: Mutex<(Vec<Damaged>, u64)>,
}

/// Memory of one thread.
#[derive(Default)]
struct Scratch {
    plain: Vec<u8>,
    blocks: BlockBuffers,
    /// Chunks of the piece under way, and their bytes.
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

    /// Of what is not stored nothing has to be read.
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

    /// How many ids of a piece there are to read.
    fn wanted_ids(&self, piece: Range<ChunkId>) -> u64 {
        match self.wanted {
            Some(wanted) => piece.filter(|id| wanted.contains(*id)).count() as u64,
            None => piece.end - piece.start,
        }
    }

    fn is_wanted(&self, id: ChunkId) -> bool {
        self.wanted.is_none_or(|wanted| wanted.contains(id))
    }

    /// Goes along the stored chunks: in their files, where that is possible; from the
    /// first thing on that cannot be read there, as RocksDB does; where the files
    /// themselves are damaged, the rest of the piece is asked for one by one.
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

    /// Moves `next` behind what it has dealt with; true where that is all.
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
            let id = id_of(key).ok_or_else(|| Error::new(ErrorKind::Corrupt, "a key is no id"))?;
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

    /// Those from `next` to before `id` are not there.
    fn skip(&self, next: &mut ChunkId, id: ChunkId) {
        for missing in *next..id {
            if self.is_wanted(missing) {
                self.unusable.insert(missing);
            }
        }
        *next = id.max(*next);
    }

    /// Moves `next` behind what it has dealt with.
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
            Err(error) => self.damage(id, error.full_message()),
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
        let (codec, sealer) = (self.repository.codec(), &self.repository.keys().chunks);
        codec.authenticate(sealer, id, value, &mut scratch.plain)
    }

    fn damage(&self, id: ChunkId, reason: String) {
        self.unusable.insert(id);
        let (described, count) = &mut *self.damaged.lock();
        *count += 1;
        if described.len() < MAX_DESCRIBED {
            described.push(Damaged { id, reason });
        }
    }
}
