//! The compressed VMDK: many threads compress, the grains go out in the disk's order.
//!
//! ```text
//!   piece 7 ─ worker ─▶ grains of 7 ┐
//!   piece 6 ─ worker ─▶ grains of 6 ├─▶ Order: append 5, 6, 7 … ─▶ file
//!   piece 5 ─ worker ─▶ grains of 5 ┘
//! ```
//!
//! A worker that is ahead leaves its grains and takes the next piece, until so many
//! pieces wait that it has to wait itself: memory is bounded. Whoever brings the piece
//! that all wait for appends everything that is ready; the bytes are written outside of
//! the lock, each run at the offset that it was given under it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use coldrise_block::Result;
use coldrise_formats::{CompressedGrain, GrainCompressor, StreamVmdk, GRAIN_SIZE_BYTES};

use super::file::FileSink;
use super::image::Image;
use super::pieces::{Piece, Pieces};
use super::run::{Counters, Run};
use super::Sink;
use crate::progress::Phase;

/// zlib's level, as qemu-img and VMware's tools have it.
const LEVEL: u32 = 6;
/// Pieces (2 MiB at most) that may be ahead of the one that is to be appended.
const WINDOW: u64 = 32;

/// Writes the image to `path`, which must not exist, and makes it durable; the bytes of
/// compressed content.
pub(super) fn write(run: &Run<'_>, image: &Image, path: &Path) -> Result<u64> {
    let file = FileSink::create(path, 0)?;
    let mut out = Vec::new();
    let stream = StreamVmdk::start(&image.names, &image.shape, &mut out);
    let stream = stream.map_err(|error| image.refused(error))?;
    file.writer()?.write_at(&out, 0)?;

    let work = Work {
        run,
        image,
        file: &file,
        pieces: Pieces::new(run.disk, GRAIN_SIZE_BYTES, false),
        next_number: Mutex::new(0),
        order: Order::new(stream, out.len() as u64),
        counters: Counters::default(),
    };
    run.in_parallel(usize::MAX, &work.counters, || work.compress_pieces())?;

    let State { stream, end_bytes, .. } = work.order.into_state();
    out.clear();
    stream.finish(&mut out);
    file.writer()?.write_at(&out, end_bytes)?;
    let written = work.counters.written_bytes();
    run.report(Phase::Finishing, run.disk.size_bytes(), written);
    file.finish()?;
    Ok(written)
}

/// What the workers share.
struct Work<'a> {
    run: &'a Run<'a>,
    image: &'a Image,
    file: &'a FileSink,
    pieces: Pieces<'a>,
    /// Number of the next stored piece; held while the piece is taken, so that numbers
    /// follow the disk.
    next_number: Mutex<u64>,
    order: Order,
    counters: Counters,
}

impl Work<'_> {
    /// One worker: takes pieces until none is left.
    fn compress_pieces(&self) -> Result<()> {
        // However this worker ends, nobody goes on waiting for what it has not brought.
        let mut leave = Leave { order: &self.order, is_done: false };
        let mut compressor = GrainCompressor::new(LEVEL);
        let mut writer = self.file.writer()?;
        let mut buffer = Vec::new();
        while self.run.goes_on(&self.counters)? {
            let Some((number, offset_bytes, length_bytes)) = self.take()? else { break };
            self.run.read(&mut buffer, offset_bytes, length_bytes)?;
            let grains = self.compress(&mut compressor, &buffer, offset_bytes)?;
            let Some(ready) = self.order.bring(number, grains, self.image)? else { break };
            if !ready.bytes.is_empty() {
                writer.write_at(&ready.bytes, ready.offset_bytes)?;
            }
            self.run.advance(&self.counters, length_bytes as u64, ready.bytes.len() as u64);
        }
        leave.is_done = true;
        Ok(())
    }

    /// The next stored piece: its number, offset and length.
    fn take(&self) -> Result<Option<(u64, u64, usize)>> {
        let mut next = self.next_number.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(piece) = self.pieces.next()? {
            match piece {
                Piece::Stored { offset_bytes, length_bytes } => {
                    *next += 1;
                    return Ok(Some((*next - 1, offset_bytes, length_bytes)));
                }
                Piece::Zeroes { .. } | Piece::Skipped { .. } => {
                    self.run.advance(&self.counters, piece.length_bytes(), 0);
                }
            }
        }
        Ok(None)
    }

    fn compress(
        &self,
        compressor: &mut GrainCompressor,
        bytes: &[u8],
        offset_bytes: u64,
    ) -> Result<Vec<CompressedGrain>> {
        let first = offset_bytes / GRAIN_SIZE_BYTES;
        let grains = (first..).zip(bytes.chunks(GRAIN_SIZE_BYTES as usize));
        grains
            .filter_map(|(grain, bytes)| compressor.compress(grain, bytes).transpose())
            .collect::<std::result::Result<_, _>>()
            .map_err(|error| self.image.refused(error))
    }
}

/// Brings pieces into the disk's order.
struct Order {
    state: Mutex<State>,
    /// The piece that all wait for has changed, or the work is over.
    moved: Condvar,
}

struct State {
    stream: StreamVmdk,
    /// Number of the piece that is appended next.
    next: u64,
    /// Pieces that came before their turn.
    waiting: BTreeMap<u64, Vec<CompressedGrain>>,
    /// Where the stream ends so far.
    end_bytes: u64,
    is_over: bool,
}

/// Bytes of the stream and where they belong.
struct Ready {
    bytes: Vec<u8>,
    offset_bytes: u64,
}

impl Order {
    fn new(stream: StreamVmdk, end_bytes: u64) -> Order {
        let waiting = BTreeMap::new();
        let state = State { stream, next: 0, waiting, end_bytes, is_over: false };
        Order { state: Mutex::new(state), moved: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a piece's grains; returns what is to be written now, which may be nothing
    /// or pieces of others. `None` when another worker has failed.
    fn bring(
        &self,
        number: u64,
        grains: Vec<CompressedGrain>,
        image: &Image,
    ) -> Result<Option<Ready>> {
        let mut state = self.lock();
        // The piece whose turn it is never waits here, so somebody always goes on.
        while number >= state.next + WINDOW && !state.is_over {
            state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.is_over {
            return Ok(None);
        }
        state.waiting.insert(number, grains);
        let (offset_bytes, mut bytes) = (state.end_bytes, Vec::new());
        loop {
            let next = state.next;
            let Some(grains) = state.waiting.remove(&next) else { break };
            for grain in &grains {
                let appended = state.stream.append(grain, &mut bytes);
                appended.map_err(|error| image.refused(error))?;
            }
            state.next += 1;
        }
        state.end_bytes += bytes.len() as u64;
        self.moved.notify_all();
        Ok(Some(Ready { bytes, offset_bytes }))
    }

    fn into_state(self) -> State {
        self.state.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the work for all when a worker leaves before its end.
struct Leave<'o> {
    order: &'o Order,
    is_done: bool,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.order.lock().is_over = true;
            self.order.moved.notify_all();
        }
    }
}
