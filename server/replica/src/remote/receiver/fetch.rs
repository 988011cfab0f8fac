//! Pieces of the incoming point that front ends read before they have arrived.
//!
//! ```text
//!   front ends' threads ── fetch ─▶ Fetches ── READ (one thread) ─▶ line
//!                            ▲        │ pieces in memory
//!                            └────────┴◀── DATA (one thread) ──── line
//!   the receiver's thread ── unnoted pieces ─▶ the note, every 10 s or 16 MiB
//! ```
//!
//! A piece is asked for once, however many front ends wait for it. It stays in memory until the second note after its
//! arrival: by then front ends read it from the noted map.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_line::{Class, Frame, Line, Received};
use coldrise_session::{ByteRanges, PieceSource};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::remote::messages::{
    DATA, MAX_READ_BYTES, READ, READ_CONTENT, READ_DAMAGED, READ_GONE, ReadAsk, Reader, broken,
};

/// Interval of looking whether the line has ended.
const INTERVAL: Duration = Duration::from_millis(200);
/// Reads that are under way.
const MAX_READS: usize = 64;
/// Bytes behind what a front end reads that come with it. They have to come anyway, and a reader waits a round trip for each read.
const AHEAD_BYTES: u64 = 256 << 10;
/// The same for one that reads in order, at most: it doubles with each read.
const MAX_AHEAD_BYTES: u64 = 2 << 20;
/// With more reads under way, the reader knows what it needs.
const FEW_READS: usize = 16;
/// A read that begins this near to the end of another one continues it, in bytes.
const NEAR_BYTES: u64 = 64 << 10;
/// Readers in order that are known.
const MAX_STREAMS: usize = 8;
/// Maximum number of bytes that wait to be noted.
const MAX_UNNOTED_BYTES: u64 = 64 << 20;

/// A disk of the announced point.
pub(super) struct FetchedDisk {
    pub(super) size_bytes: u64,
    /// Everything before has arrived.
    pub(super) end_bytes: u64,
    pub(super) differences: ByteRanges,
}

/// A piece that has been fetched.
pub(super) struct FetchedPiece {
    pub(super) disk: usize,
    pub(super) offset_bytes: u64,
    pub(super) content: Arc<Vec<u8>>,
}

enum Piece {
    Asked,
    Here {
        content: Arc<Vec<u8>>,
        /// The number of the note that has it.
        noted: Option<u64>,
    },
    /// It cannot be read; `true`: because the point is not announced any more.
    Failed(bool, String),
}

struct Point {
    number: u32,
    chunk_bytes: u64,
    disks: Vec<FetchedDisk>,
    pieces: HashMap<(usize, u64), Piece>,
    unnoted_bytes: u64,
    notes: u64,
    streams: Streams,
}

/// Reads in order, the youngest last.
#[derive(Default)]
struct Streams(VecDeque<Stream>);

struct Stream {
    disk: usize,
    /// Where its last read ended.
    end_bytes: u64,
    ahead_bytes: u64,
}

impl Streams {
    /// A read. Returns how far behind it to read ahead.
    fn note(&mut self, disk: usize, start_bytes: u64, end_bytes: u64) -> u64 {
        // Pieces are larger than what a machine reads, so two of its reads can be of the same one.
        let continues = |stream: &Stream| {
            stream.disk == disk && stream.end_bytes.abs_diff(start_bytes) <= NEAR_BYTES
        };
        let before = self.0.iter().position(continues).and_then(|at| self.0.remove(at));
        let ahead_bytes = before
            .as_ref()
            .map_or(AHEAD_BYTES, |stream| (stream.ahead_bytes * 2).min(MAX_AHEAD_BYTES));
        let end_bytes = before.map_or(end_bytes, |stream| stream.end_bytes.max(end_bytes));
        if self.0.len() >= MAX_STREAMS {
            self.0.pop_front();
        }
        self.0.push_back(Stream { disk, end_bytes, ahead_bytes });
        ahead_bytes
    }
}

#[derive(Default)]
struct State {
    point: Option<Point>,
    outgoing: VecDeque<ReadAsk>,
    in_flight: HashMap<u32, ReadAsk>,
    next_id: u32,
    is_over: bool,
}

/// The fetched pieces of one line.
#[derive(Default)]
pub(super) struct Fetches {
    state: Mutex<State>,
    changed: Condvar,
}

/// The pieces of one announced point, for front ends.
pub(super) struct PointPieces {
    pub(super) fetches: Arc<Fetches>,
    pub(super) number: u32,
}

impl PieceSource for PointPieces {
    fn fetch(&self, disk: usize, offset_bytes: u64, length_bytes: u64) -> Result<Vec<u8>> {
        self.fetches.fetch(self.number, disk, offset_bytes, length_bytes)
    }
}

fn away() -> Error {
    Error::new(ErrorKind::Io, "the point is no longer being copied over this line")
}

impl Fetches {
    /// Begins with a point; an earlier one is forgotten.
    pub(super) fn begin(&self, number: u32, chunk_bytes: u64, disks: Vec<FetchedDisk>) {
        let (pieces, unnoted_bytes, notes, streams) = Default::default();
        let point = Point { number, chunk_bytes, disks, pieces, unnoted_bytes, notes, streams };
        self.state.lock().point = Some(point);
        self.changed.notify_all();
    }

    /// Forgets the point.
    pub(super) fn forget(&self) {
        self.state.lock().point = None;
        self.changed.notify_all();
    }

    /// Ends the threads, and fails all waiting reads. Fetched pieces can still be noted.
    pub(super) fn end(&self) {
        self.state.lock().is_over = true;
        self.changed.notify_all();
    }

    fn fetch(&self, number: u32, disk: usize, offset: u64, length: u64) -> Result<Vec<u8>> {
        let mut state = self.state.lock();
        let mut is_first = true;
        loop {
            if state.is_over {
                return Err(away());
            }
            let reads = state.outgoing.len() + state.in_flight.len();
            let first_id = state.next_id;
            let Some(point) = state.point.as_mut().filter(|point| point.number == number) else {
                return Err(away());
            };
            let mut ahead_bytes = 0;
            if is_first {
                point.check(disk, offset, length)?;
                ahead_bytes = point.streams.note(disk, offset, offset + length);
            }
            is_first = false;
            let found = point.look(disk, offset, length)?;
            let has_room = reads < MAX_READS && point.unnoted_bytes < MAX_UNNOTED_BYTES;
            let mut runs = match &found {
                Availability::Missing(runs) if has_room => runs.clone(),
                _ => Vec::new(),
            };
            if has_room && reads < FEW_READS && ahead_bytes > 0 {
                runs.extend(point.ahead(disk, offset + length, ahead_bytes));
            }
            let asks = point.ask(disk, runs, first_id);
            state.next_id = first_id.wrapping_add(asks.len() as u32);
            if !asks.is_empty() {
                state.outgoing.extend(asks);
                self.changed.notify_all();
            }
            if let Availability::Here(content) = found {
                return Ok(content);
            }
            self.changed.wait(&mut state);
        }
    }

    /// The content of a piece, if it was fetched and is still in memory.
    pub(super) fn piece(&self, disk: usize, offset_bytes: u64) -> Option<Arc<Vec<u8>>> {
        let state = self.state.lock();
        match state.point.as_ref()?.pieces.get(&(disk, offset_bytes))? {
            Piece::Here { content, .. } => Some(Arc::clone(content)),
            Piece::Asked | Piece::Failed(..) => None,
        }
    }

    /// Bytes that no note has.
    pub(super) fn unnoted_bytes(&self) -> u64 {
        self.state.lock().point.as_ref().map_or(0, |point| point.unnoted_bytes)
    }

    /// The pieces that no note has, by disk and offset. They count as noted from now on.
    pub(super) fn take_unnoted(&self) -> Vec<FetchedPiece> {
        let mut state = self.state.lock();
        let Some(point) = &mut state.point else { return Vec::new() };
        point.notes += 1;
        point.unnoted_bytes = 0;
        let now = point.notes;
        let mut taken = Vec::new();
        point.pieces.retain(|(disk, offset_bytes), piece| match piece {
            Piece::Here { noted: Some(noted), .. } => *noted + 1 >= now,
            Piece::Here { content, noted } => {
                *noted = Some(now);
                let (disk, content) = (*disk, Arc::clone(content));
                taken.push(FetchedPiece { disk, offset_bytes: *offset_bytes, content });
                true
            }
            Piece::Asked | Piece::Failed(..) => true,
        });
        taken.sort_by_key(|piece| (piece.disk, piece.offset_bytes));
        self.changed.notify_all();
        taken
    }

    /// Notes how far a disk has arrived.
    pub(super) fn arrived(&self, disk: usize, end_bytes: u64) {
        let mut state = self.state.lock();
        let disk = state.point.as_mut().and_then(|point| point.disks.get_mut(disk));
        if let Some(disk) = disk {
            disk.end_bytes = disk.end_bytes.max(end_bytes);
        }
    }

    /// The thread that sends the reads.
    pub(super) fn send_reads(&self, line: &dyn Line) {
        loop {
            let Some(ask) = self.next_read() else { return };
            let frame = Frame { stream: 0, kind: READ, body: ask.encode() };
            if line.send(Class::Fetch, frame).is_err() {
                return self.end();
            }
        }
    }

    fn next_read(&self) -> Option<ReadAsk> {
        let mut state = self.state.lock();
        loop {
            if state.is_over {
                return None;
            }
            if let Some(ask) = state.outgoing.pop_front() {
                state.in_flight.insert(ask.id, ask);
                return Some(ask);
            }
            self.changed.wait(&mut state);
        }
    }

    /// The thread that takes the answers.
    pub(super) fn take_content(&self, line: &dyn Line) {
        loop {
            if self.state.lock().is_over {
                return;
            }
            let taken = match line.receive(&[Class::Fetch], INTERVAL) {
                Ok(Received::Nothing) => Ok(()),
                Ok(Received::Frame { frame, .. }) => self.take(&frame),
                // The receiver's own thread tells it.
                Ok(Received::Closed) | Err(_) => return self.end(),
            };
            if let Err(error) = taken {
                tracing::warn!("{}", error.full_message());
                self.end();
                line.close();
                return;
            }
        }
    }

    fn take(&self, frame: &Frame) -> Result<()> {
        if frame.kind != DATA {
            return Err(broken("an unknown frame"));
        }
        let mut reader = Reader(&frame.body);
        let id = reader.u32()?;
        let status = reader.take(1)?[0];
        let ask = self.state.lock().in_flight.remove(&id);
        let ask = ask.ok_or_else(|| broken("content that was not asked for"))?;
        let length = ask.length_bytes as usize;
        let outcome = match status {
            READ_CONTENT => {
                let plain = zstd::bulk::decompress(reader.0, length)
                    .map_err(|_| broken("content that cannot be decompressed"))?;
                if plain.len() != length {
                    return Err(broken("content of another length"));
                }
                Ok(plain)
            }
            READ_DAMAGED => Err((false, String::from_utf8_lossy(reader.0).into_owned())),
            READ_GONE => Err((true, String::new())),
            _ => return Err(broken("an unknown answer to a read")),
        };
        let mut state: MutexGuard<'_, State> = self.state.lock();
        if let Some(point) = state.point.as_mut().filter(|point| point.number == ask.number) {
            point.arrive(ask, outcome);
        }
        self.changed.notify_all();
        Ok(())
    }
}

/// The state of a range.
enum Availability {
    Here(Vec<u8>),
    /// Pieces that were not requested yet: start and end.
    Missing(Vec<(u64, u64)>),
    Asked,
}

impl Point {
    fn check(&self, disk: usize, offset: u64, length: u64) -> Result<()> {
        let size = self.disks.get(disk).map_or(0, |disk| disk.size_bytes);
        let end = offset.saturating_add(length);
        let is_whole = offset % self.chunk_bytes == 0
            && (end % self.chunk_bytes == 0 || end == size)
            && length <= u64::from(MAX_READ_BYTES).max(self.chunk_bytes);
        if length == 0 || end > size || !is_whole {
            let text = format!("{length} bytes at {offset} of disk {disk} are not pieces of it");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(())
    }

    /// The offsets of the pieces of a range.
    fn offsets(&self, start: u64, end: u64) -> impl Iterator<Item = u64> + use<> {
        (start..end).step_by(self.chunk_bytes as usize)
    }

    fn look(&mut self, disk: usize, offset: u64, length: u64) -> Result<Availability> {
        let end = offset + length;
        let mut content = Vec::with_capacity(length as usize);
        let mut missing: Vec<(u64, u64)> = Vec::new();
        let mut is_asked = false;
        for at in self.offsets(offset, end) {
            match self.pieces.get(&(disk, at)) {
                Some(Piece::Here { content: piece, .. }) => content.extend_from_slice(piece),
                Some(Piece::Asked) => is_asked = true,
                Some(Piece::Failed(is_away, text)) => {
                    let error = match is_away {
                        true => away(),
                        false => Error::new(ErrorKind::Corrupt, text.clone()),
                    };
                    // A repeated request reads it again.
                    self.pieces.remove(&(disk, at));
                    return Err(error);
                }
                None => {
                    let stop = (at + self.chunk_bytes).min(end);
                    match missing.last_mut() {
                        Some((_, last)) if *last == at => *last = stop,
                        _ => missing.push((at, stop)),
                    }
                }
            }
        }
        Ok(match () {
            () if !missing.is_empty() => Availability::Missing(missing),
            () if is_asked => Availability::Asked,
            () => Availability::Here(content),
        })
    }

    /// Marks runs of pieces as asked for, and returns the reads.
    fn ask(&mut self, disk: usize, runs: Vec<(u64, u64)>, first_id: u32) -> Vec<ReadAsk> {
        let mut asks = Vec::with_capacity(runs.len());
        for (start, end) in runs {
            for at in self.offsets(start, end) {
                self.pieces.insert((disk, at), Piece::Asked);
            }
            asks.push(ReadAsk {
                id: first_id.wrapping_add(asks.len() as u32),
                number: self.number,
                disk: disk as u16,
                offset_bytes: start,
                length_bytes: (end - start) as u32,
            });
        }
        asks
    }

    /// The ranges within the next bytes behind `end` that were not requested; empty while at least half of them is known.
    fn ahead(&self, disk: usize, end: u64, ahead_bytes: u64) -> Vec<(u64, u64)> {
        let Some(facts) = self.disks.get(disk) else { return Vec::new() };
        let most = (end + ahead_bytes.max(self.chunk_bytes)).min(facts.size_bytes);
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for at in self.offsets(end.next_multiple_of(self.chunk_bytes), most) {
            let is_here = at < facts.end_bytes || !facts.differences.at(at, most).0;
            if is_here || self.pieces.contains_key(&(disk, at)) {
                continue;
            }
            if runs.is_empty() && at > end + ahead_bytes / 2 {
                break;
            }
            let stop = (at + self.chunk_bytes).min(facts.size_bytes);
            match runs.last_mut() {
                Some((start, last)) if *last == at && stop - *start <= AHEAD_BYTES => *last = stop,
                _ => runs.push((at, stop)),
            }
        }
        runs
    }

    fn arrive(&mut self, ask: ReadAsk, outcome: std::result::Result<Vec<u8>, (bool, String)>) {
        let (disk, start) = (usize::from(ask.disk), ask.offset_bytes);
        let end = start + u64::from(ask.length_bytes);
        for at in self.offsets(start, end) {
            let piece = match &outcome {
                Ok(plain) => {
                    let stop = (at + self.chunk_bytes).min(end);
                    let content = plain[(at - start) as usize..(stop - start) as usize].to_vec();
                    self.unnoted_bytes += content.len() as u64;
                    Piece::Here { content: Arc::new(content), noted: None }
                }
                Err((is_away, text)) => Piece::Failed(*is_away, text.clone()),
            };
            self.pieces.insert((disk, at), piece);
        }
    }
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
