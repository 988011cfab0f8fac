//! The compressed VMDK: many threads compress, and the grains are written in disk
//! order.
//!
//! ```text
//!   piece 7 ─ worker ─▶ grains of 7 ┐
//!   piece 6 ─ worker ─▶ grains of 6 ├─▶ Order: append 5, 6, 7 … ─▶ file
//!   piece 5 ─ worker ─▶ grains of 5 ┘
//! ```
//!
//! A worker that is ahead leaves its grains and takes the next piece. If too many
//! pieces wait, the worker waits too, so memory is bounded. The worker that brings the
//! next piece in order appends all pieces that are ready. It assigns their offsets
//! under the lock and writes them outside of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use aws_lc_rs::digest::Context as Digest;
use coldrise_block::{Phase, Result};
use coldrise_formats::{CompressedGrain, GRAIN_SIZE_BYTES, GrainCompressor, StreamVmdk};

use super::Sink;
use super::file::LocalSink;
use super::image::Image;
use super::pieces::{Piece, Pieces};
use super::run::{Counters, Run};

/// zlib's level, as in qemu-img and VMware's tools.
const LEVEL: u32 = 6;
/// How many pieces (of at most 2 MiB) may be ahead of the next one to append.
const WINDOW: u64 = 32;

/// Writes the image to `path`, which must not exist, and makes it durable. Returns the
/// bytes of compressed content.
pub(super) fn write(run: &Run<'_>, image: &Image, path: &Path) -> Result<u64> {
    let file = LocalSink::create(path, 0)?;
    let written = write_part(run, image, &file, 0, None)?;
    run.report(Phase::Finishing, run.disk.size_bytes(), written.content_bytes);
    file.finish()?;
    Ok(written.content_bytes)
}

/// A stream in a file.
pub(super) struct WrittenStream {
    /// Bytes of compressed content.
    pub(super) content_bytes: u64,
    /// The end of the stream in the file.
    pub(super) end_bytes: u64,
    /// The digest of the stream, if it was wanted.
    pub(super) digest: Option<Digest>,
}

/// Writes the image into `file` from `begin_bytes` on. The result is not durable yet.
pub(super) fn write_part(
    run: &Run<'_>,
    image: &Image,
    file: &LocalSink,
    begin_bytes: u64,
    mut digest: Option<Digest>,
) -> Result<WrittenStream> {
    let mut out = Vec::new();
    let stream = StreamVmdk::start(&image.names, &image.shape, &mut out);
    let stream = stream.map_err(|error| image.refused(error))?;
    file.writer()?.write_at(&out, begin_bytes)?;
    if let Some(digest) = &mut digest {
        digest.update(&out);
    }

    let work = Work {
        run,
        image,
        file,
        pieces: Pieces::new(run.disk, GRAIN_SIZE_BYTES, false),
        next_number: Mutex::new(0),
        order: Order::new(stream, begin_bytes + out.len() as u64, digest),
        counters: Counters::default(),
    };
    run.in_parallel(usize::MAX, &work.counters, || work.compress_pieces())?;

    let State { stream, end_bytes, mut digest, .. } = work.order.into_state();
    out.clear();
    stream.finish(&mut out);
    file.writer()?.write_at(&out, end_bytes)?;
    if let Some(digest) = &mut digest {
        digest.update(&out);
    }
    let content_bytes = work.counters.written_bytes();
    Ok(WrittenStream { content_bytes, end_bytes: end_bytes + out.len() as u64, digest })
}

/// State that the workers share.
struct Work<'a> {
    run: &'a Run<'a>,
    image: &'a Image,
    file: &'a LocalSink,
    pieces: Pieces<'a>,
    /// Number of the next stored piece. Locked while the piece is taken, so that
    /// numbers follow the disk.
    next_number: Mutex<u64>,
    order: Order,
    counters: Counters,
}

impl Work<'_> {
    /// One worker: takes pieces until none is left.
    fn compress_pieces(&self) -> Result<()> {
        // However this worker ends, no other worker waits forever for its pieces.
        let mut leave = Leave { order: &self.order, is_done: false };
        let mut compressor = GrainCompressor::new(LEVEL);
        let mut writer = self.file.writer()?;
        let mut buffer = Vec::new();
        while self.run.must_continue(&self.counters)? {
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

/// Brings pieces into disk order.
struct Order {
    state: Mutex<State>,
    /// The next piece in order has changed, or the work is over.
    moved: Condvar,
}

struct State {
    stream: StreamVmdk,
    /// Number of the next piece to append.
    next: u64,
    /// Pieces that arrived before their turn.
    waiting: BTreeMap<u64, Vec<CompressedGrain>>,
    /// The current end of the stream.
    end_bytes: u64,
    /// The digest of the stream up to its current end. Under the lock, where the bytes are in order.
    digest: Option<Digest>,
    is_over: bool,
}

/// Bytes of the stream and their offset.
struct Ready {
    bytes: Vec<u8>,
    offset_bytes: u64,
}

impl Order {
    fn new(stream: StreamVmdk, end_bytes: u64, digest: Option<Digest>) -> Order {
        let waiting = BTreeMap::new();
        let state = State { stream, next: 0, waiting, end_bytes, digest, is_over: false };
        Order { state: Mutex::new(state), moved: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a piece's grains. Returns the bytes to write now: none, or also those of
    /// other pieces. `None` if another worker has failed.
    fn bring(
        &self,
        number: u64,
        grains: Vec<CompressedGrain>,
        image: &Image,
    ) -> Result<Option<Ready>> {
        let mut state = self.lock();
        // The next piece in order never waits here, so one worker always makes
        // progress.
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
        if let Some(digest) = &mut state.digest {
            digest.update(&bytes);
        }
        self.moved.notify_all();
        Ok(Some(Ready { bytes, offset_bytes }))
    }

    fn into_state(self) -> State {
        self.state.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the work of all workers when one leaves early.
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
