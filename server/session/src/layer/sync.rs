//! Flush: one fdatasync for all who wait, and the thread that looks ahead.

use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Result};
use parking_lot::{Condvar, Mutex};

use super::format::{DurableMark, DURABLE_MARK_OFFSET_BYTES, SLOTS_PER_SEGMENT};
use super::{Layer, Writer};

/// Syncs are numbered; a flush waits for the first sync that starts after it.
pub(crate) struct SyncState {
    turn: Mutex<Turn>,
    finished: Condvar,
    /// When the durable mark was last written, and for how many segments.
    marked: Mutex<Option<(Instant, u32)>>,
    pub(crate) ahead: Arc<Ahead>,
}

#[derive(Default)]
struct Turn {
    started: u64,
    completed: u64,
    is_running: bool,
}

/// Wakes the thread that grows the file ahead of the writes.
#[derive(Default)]
pub(crate) struct Ahead {
    state: Mutex<AheadState>,
    wake: Condvar,
}

#[derive(Default)]
struct AheadState {
    grow: bool,
    stop: bool,
    is_started: bool,
    thread: Option<JoinHandle<()>>,
}

/// Unflushed writes are synced on the layer's own account after this long: when
/// Linux itself begins to write a file's changes back. (Much is synced earlier:
/// see `Slots`.) Each sync makes the next rewrite of a block take another slot,
/// in pages that have to be made dirty again, so more often is dearer.
const UNFLUSHED_AGE_LIMIT: Duration = Duration::from_secs(30);

/// The durable mark is at most so old while a layer is being flushed.
const DURABLE_MARK_INTERVAL: Duration = Duration::from_secs(1);

impl SyncState {
    pub(crate) fn new() -> Self {
        SyncState {
            turn: Mutex::new(Turn::default()),
            finished: Condvar::new(),
            marked: Mutex::new(None),
            ahead: Arc::new(Ahead::default()),
        }
    }
}

impl Layer {
    /// Makes durable every write that completed before the call. Concurrent
    /// callers share one sync.
    pub(crate) fn flush(&self) -> Result<()> {
        let writer = self.writer()?;
        let mut turn = writer.sync.turn.lock();
        let mine = turn.started + 1;
        loop {
            writer.poison.check()?;
            if turn.completed >= mine {
                return Ok(());
            }
            if turn.is_running {
                writer.sync.finished.wait(&mut turn);
                continue;
            }
            turn.is_running = true;
            turn.started += 1;
            let number = turn.started;
            drop(turn);
            let result = self.sync_now(writer);
            turn = writer.sync.turn.lock();
            turn.is_running = false;
            match &result {
                Ok(()) => turn.completed = number,
                Err(error) => {
                    writer.poison.set();
                    tracing::error!(layer = %self.path.display(), error = %error.full_message(), "a sync failed: the session takes no more writes");
                }
            }
            writer.sync.finished.notify_all();
            result?;
        }
    }

    fn sync_now(&self, writer: &Writer) -> Result<()> {
        // Alone for an instant: no write is half done, so everything up to
        // `covered` is in the page cache, slot and record.
        let (covered, superseded, ready) = {
            let _alone = writer.gate.write();
            let covered = writer.next_sequence.load(Ordering::SeqCst) - 1;
            writer.covered_sequence.store(covered, Ordering::SeqCst);
            (covered, writer.slots.begin_sync(), writer.slots.ready())
        };
        if covered == writer.durable_sequence.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.file.sync_data().context(|| format!("syncing {}", self.path.display()))?;
        writer.durable_sequence.store(covered, Ordering::SeqCst);
        writer.slots.release(superseded);
        self.mark_durable(writer, ready, covered);
        Ok(())
    }

    /// Writes down what is durable, so that damage to it is told from writes that a
    /// crash interrupted. Not at each sync: the mark lies in a page of its own, which
    /// the next sync has to write.
    fn mark_durable(&self, writer: &Writer, ready_slots: u32, sequence: u64) {
        let mut last = writer.sync.marked.lock();
        let segments = ready_slots / SLOTS_PER_SEGMENT;
        let is_recent = last
            .is_some_and(|(at, marked)| marked == segments && at.elapsed() < DURABLE_MARK_INTERVAL);
        if is_recent {
            return;
        }
        let mark = DurableMark { sequence, segments }.encode(self.keys.marks());
        // Without it less damage is found; a failing file system fails the next write.
        match self.file.write_all_at(&mark, DURABLE_MARK_OFFSET_BYTES as u64) {
            Ok(()) => *last = Some((Instant::now(), segments)),
            Err(error) => {
                tracing::warn!(layer = %self.path.display(), %error, "the durable mark was not written");
            }
        }
    }

    /// Starts the thread that grows the file and bounds unflushed writes, once.
    pub(crate) fn start_ahead(self: &Arc<Self>) {
        let Some(writer) = &self.writer else { return };
        let ahead = Arc::clone(&writer.sync.ahead);
        {
            let mut state = ahead.state.lock();
            if std::mem::replace(&mut state.is_started, true) {
                return;
            }
        }
        let layer = Arc::downgrade(self);
        let started = std::thread::Builder::new()
            .name("layer-ahead".into())
            .spawn(move || look_ahead(&layer, &ahead));
        match started {
            Ok(thread) => writer.sync.ahead.state.lock().thread = Some(thread),
            // Without the thread growth happens in the writers, only slower.
            Err(error) => {
                tracing::warn!(%error, "cannot start the thread that prepares space for writes");
            }
        }
    }

    /// Ends the layer's own thread and waits until it has let go of the layer.
    pub(crate) fn stop_ahead(&self) {
        let Some(writer) = &self.writer else { return };
        writer.sync.ahead.stop();
        let thread = writer.sync.ahead.state.lock().thread.take();
        if let Some(thread) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }

    fn has_unflushed(&self, writer: &Writer) -> bool {
        let next = writer.next_sequence.load(Ordering::Relaxed);
        writer.durable_sequence.load(Ordering::Relaxed) + 1 < next
    }

    /// Asks the layer's own thread to grow the file, or to sync it.
    pub(crate) fn want_ahead(&self) {
        if let Some(writer) = &self.writer {
            let mut state = writer.sync.ahead.state.lock();
            if !state.grow {
                state.grow = true;
                writer.sync.ahead.wake.notify_one();
            }
        }
    }
}

impl Ahead {
    /// Ends the thread; it does not have to be waited for.
    pub(crate) fn stop(&self) {
        self.state.lock().stop = true;
        self.wake.notify_all();
    }
}

fn look_ahead(layer: &Weak<Layer>, ahead: &Ahead) {
    let mut last_flush = Instant::now();
    loop {
        let grow = {
            let mut state = ahead.state.lock();
            if !state.grow && !state.stop {
                ahead.wake.wait_for(&mut state, Duration::from_secs(1));
            }
            if state.stop {
                return;
            }
            std::mem::take(&mut state.grow)
        };
        let Some(layer) = layer.upgrade() else { return };
        let Ok(writer) = layer.writer() else { return };
        if writer.poison.check().is_err() {
            return;
        }
        if grow {
            // A failure is met again, and reported, by the write that needs the space.
            let _ = writer.slots.grow_ahead(&layer.file);
        }
        let is_unflushed = layer.has_unflushed(writer);
        let is_old = is_unflushed && last_flush.elapsed() > UNFLUSHED_AGE_LIMIT;
        if writer.slots.too_much_unsynced() || is_old {
            // `flush` logs and poisons by itself.
            let _ = layer.flush();
            last_flush = Instant::now();
        } else if !is_unflushed {
            last_flush = Instant::now();
        }
    }
}
