//! Reads ahead of the store.
//!
//! ```text
//!   plan ─▶ requests ─▶ readers (threads) ─▶ answers ─▶ in order ─▶ DiskTarget
//!      ◀──────────── at most IN_FLIGHT at a time ──────────────┘
//! ```
//!
//! The calling thread plans and stores; readers work at the same time, and the store
//! compresses in threads of its own. The requests in flight and the store's own limit bound
//! the memory. With a rate, readers wait for their turn before each piece.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Phase, Progress, ProgressState, Result};
use coldrise_store::DiskTarget;

use super::plan::{Action, Plan, Span};
use super::rate::RateLimit;
use crate::source::{Reader, Source};

/// Maximum number of spans in reading or waiting for the store.
const IN_FLIGHT: usize = 8;
/// How often the cancel flag is checked while waiting for the source.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

/// A span to read, with its buffer.
struct Request {
    number: u64,
    offset_bytes: u64,
    buffer: Vec<u8>,
}

/// The result of a request.
struct Answer {
    number: u64,
    bytes: Result<Vec<u8>>,
}

/// The receiver of the pipeline's progress.
pub struct Watch<'a> {
    /// The disk's name.
    pub disk: &'a str,
    /// Gets the progress.
    pub progress: &'a dyn Progress,
    /// Set: the work ends with `Interrupted`.
    pub cancel: &'a AtomicBool,
}

impl Watch<'_> {
    /// # Errors
    /// `Interrupted` once cancelled.
    pub fn check_cancel(&self) -> Result<()> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::Interrupted,
                "cancelled: nothing of this point is visible; run the command again to continue",
            ));
        }
        Ok(())
    }
}

/// Takes the content, in ascending order.
pub(crate) trait Sink {
    /// An empty buffer, reused if possible.
    fn buffer(&mut self) -> Vec<u8>;
    fn write(&mut self, offset_bytes: u64, bytes: Vec<u8>) -> Result<()>;
    fn write_hole(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()>;
    /// Bytes stored so far.
    fn stored_bytes(&self) -> u64;
}

impl Sink for dyn DiskTarget + '_ {
    fn buffer(&mut self) -> Vec<u8> {
        DiskTarget::buffer(self)
    }

    fn write(&mut self, offset_bytes: u64, bytes: Vec<u8>) -> Result<()> {
        DiskTarget::write(self, offset_bytes, bytes)
    }

    fn write_hole(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        DiskTarget::write_hole(self, offset_bytes, length_bytes)
    }

    fn stored_bytes(&self) -> u64 {
        self.counts().stored_bytes
    }
}

/// Executes the plan, not faster than `limit`; returns the number of bytes read.
pub(crate) fn store_disk<S: Sink + ?Sized>(
    source: &dyn Source,
    plan: &mut Plan<'_>,
    writer: &mut S,
    limit: Option<&RateLimit>,
    watch: &Watch<'_>,
) -> Result<u64> {
    let is_over = AtomicBool::new(false);
    let pace = Pace { limit, unit_bytes: plan.unit_bytes(), is_over: &is_over };
    let (requests, to_readers) = channel();
    let to_readers = Mutex::new(to_readers);
    let (answers, from_readers) = channel();
    std::thread::scope(|scope| {
        for number in 0..source.useful_readers().max(1) {
            let answers = answers.clone();
            let (to_readers, pace) = (&to_readers, &pace);
            std::thread::Builder::new()
                .name(format!("reader-{number}"))
                .spawn_scoped(scope, move || read_requests(source, to_readers, &answers, pace))
                .map_err(|error| Error::io("starting a thread to read", error))?;
        }
        drop(answers);
        // Every return ends the readers: those that wait for their turn, and those for a request.
        let _over = Over(&is_over);
        let pipeline = Pipeline {
            requests,
            from_readers,
            early: BTreeMap::new(),
            queue: VecDeque::new(),
            next_number: 0,
            waiting: 0,
            read_bytes: 0,
        };
        pipeline.run(source.size_bytes(), plan, writer, watch)
    })
}

/// How fast readers read.
struct Pace<'a> {
    limit: Option<&'a RateLimit>,
    unit_bytes: u64,
    /// The pipeline has ended: no thread waits for answers.
    is_over: &'a AtomicBool,
}

impl Pace<'_> {
    /// Reads in pieces, each at its turn.
    fn read(&self, reader: &mut dyn Reader, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        let Some(limit) = self.limit else { return reader.read_at(buffer, offset_bytes) };
        let piece_bytes = usize::try_from(limit.piece_bytes(self.unit_bytes)).unwrap_or(usize::MAX);
        let mut at = offset_bytes;
        for piece in buffer.chunks_mut(piece_bytes) {
            let length_bytes = piece.len() as u64;
            if !limit.take(length_bytes, &|| self.is_over.load(Ordering::Relaxed)) {
                return Err(Error::new(ErrorKind::Interrupted, "the backup has ended"));
            }
            reader.read_at(piece, at)?;
            at += length_bytes;
        }
        Ok(())
    }
}

/// Sets the flag when it is dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// One reader: answers requests until the queue closes.
fn read_requests(
    source: &dyn Source,
    requests: &Mutex<Receiver<Request>>,
    answers: &Sender<Answer>,
    pace: &Pace<'_>,
) {
    let mut reader = None;
    loop {
        let request = requests.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Request { number, offset_bytes, mut buffer }) = request else { return };
        let mut read = || {
            if reader.is_none() {
                reader = Some(source.reader()?);
            }
            match &mut reader {
                Some(reader) => pace.read(reader.as_mut(), &mut buffer, offset_bytes),
                None => Err(Error::new(ErrorKind::Internal, "a reader is missing")),
            }
        };
        let bytes = read().map(|()| buffer);
        // The receiver is gone if the backup has failed or was cancelled.
        if answers.send(Answer { number, bytes }).is_err() {
            return;
        }
    }
}

/// A span in flight: a hole, or a request with this number.
enum Step {
    Hole(Span),
    Read(Span, u64),
}

struct Pipeline {
    requests: Sender<Request>,
    from_readers: Receiver<Answer>,
    /// Answers that arrived before their turn.
    early: BTreeMap<u64, Vec<u8>>,
    queue: VecDeque<Step>,
    next_number: u64,
    /// Requests that are in the queue.
    waiting: usize,
    read_bytes: u64,
}

impl Pipeline {
    fn run<S: Sink + ?Sized>(
        mut self,
        size_bytes: u64,
        plan: &mut Plan<'_>,
        writer: &mut S,
        watch: &Watch<'_>,
    ) -> Result<u64> {
        let mut is_planned = false;
        loop {
            watch.check_cancel()?;
            while !is_planned && self.waiting < IN_FLIGHT && self.queue.len() < 2 * IN_FLIGHT {
                match plan.next()? {
                    Some(span) => self.start(span, writer)?,
                    None => is_planned = true,
                }
            }
            let done_bytes = match self.queue.pop_front() {
                None if is_planned => break,
                None => continue,
                Some(Step::Hole(span)) => {
                    if span.action == Action::Hole {
                        writer.write_hole(span.offset_bytes, span.length_bytes)?;
                    }
                    span.offset_bytes + span.length_bytes
                }
                Some(Step::Read(span, number)) => {
                    let bytes = self.answer(number, watch)?;
                    self.waiting -= 1;
                    self.read_bytes += span.length_bytes;
                    writer.write(span.offset_bytes, bytes)?;
                    span.offset_bytes + span.length_bytes
                }
            };
            watch.progress.update(&ProgressState {
                phase: Phase::Storing,
                disk: watch.disk,
                done_bytes,
                total_bytes: size_bytes,
                read_bytes: self.read_bytes,
                stored_bytes: writer.stored_bytes(),
            });
        }
        Ok(self.read_bytes)
    }

    fn start<S: Sink + ?Sized>(&mut self, span: Span, writer: &mut S) -> Result<()> {
        if span.action != Action::Read {
            self.queue.push_back(Step::Hole(span));
            return Ok(());
        }
        let length = usize::try_from(span.length_bytes)
            .map_err(|_| Error::new(ErrorKind::Internal, "a span is too long to be read"))?;
        let mut buffer = writer.buffer();
        buffer.resize(length, 0);
        let number = self.next_number;
        let request = Request { number, offset_bytes: span.offset_bytes, buffer };
        self.requests
            .send(request)
            .map_err(|_| Error::new(ErrorKind::Internal, "all readers have ended"))?;
        self.next_number += 1;
        self.waiting += 1;
        self.queue.push_back(Step::Read(span, number));
        Ok(())
    }

    /// Waits for the answer to a request.
    fn answer(&mut self, number: u64, watch: &Watch<'_>) -> Result<Vec<u8>> {
        loop {
            if let Some(bytes) = self.early.remove(&number) {
                return Ok(bytes);
            }
            match self.from_readers.recv_timeout(CANCEL_INTERVAL) {
                Ok(answer) => {
                    self.early.insert(answer.number, answer.bytes?);
                }
                Err(RecvTimeoutError::Timeout) => watch.check_cancel()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(ErrorKind::Internal, "a reader has ended too early"));
                }
            }
        }
    }
}
