//! Flush: one fdatasync for all waiting callers. Also the layer's own thread, which works ahead.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, Result};
use parking_lot::{Condvar, Mutex};

use super::format::segments_in;
use super::mark::{Mark, SealFacts};
use super::open::{check_length, length_of};
use super::{LayerFile, Writer};

/// Syncs are numbered. A flush waits for the first sync that starts after it.
pub(crate) struct SyncState {
    turn: Mutex<Turn>,
    finished: Condvar,
    marking: Mutex<Marking>,
    pub(crate) ahead: Ahead,
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
}

/// Maximum age of unflushed writes. After this time the layer syncs them itself: Linux then begins
/// to write a file's changes back. (Many syncs come earlier: see `Slots`.) After each sync the next
/// rewrite of a block takes another slot, in pages that become dirty again, so more frequent syncs
/// cost more.
const UNFLUSHED_AGE_LIMIT: Duration = Duration::from_secs(30);

/// Minimum interval between two marks. A mark lies in its own page, which the next sync has to
/// write.
const MARK_INTERVAL: Duration = Duration::from_secs(1);

/// The last mark, and the next one.
pub(crate) struct Marking {
    mark: Mark,
    at: Instant,
    /// Durable facts that wait for their mark, and the number of places still to be written.
    waiting: Option<(SealFacts, u8)>,
}

impl Marking {
    pub(crate) fn new(mark: Mark) -> Self {
        Marking { mark, at: Instant::now(), waiting: None }
    }
}

impl SyncState {
    pub(crate) fn new(marking: Marking) -> Self {
        SyncState {
            turn: Mutex::new(Turn::default()),
            finished: Condvar::new(),
            marking: Mutex::new(marking),
            ahead: Ahead::default(),
        }
    }
}

impl LayerFile {
    /// Makes every write durable that completed before the call. Concurrent callers share one sync.
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
                Err(error) => self.stop_after_failed_sync(writer, error),
            }
            writer.sync.finished.notify_all();
            result?;
        }
    }

    /// As [`LayerFile::flush`]. The time marks so far count after a crash: otherwise a later flush would show that this one
    /// has succeeded.
    pub(crate) fn flush_time_marks(&self) -> Result<()> {
        self.flush()?;
        if self.write_mark(self.writer()?, Duration::ZERO) {
            self.file.sync_data().context(|| format!("syncing {}", self.path.display()))?;
        }
        Ok(())
    }

    fn stop_after_failed_sync(&self, writer: &Writer, error: &Error) {
        writer.poison.set();
        tracing::error!(layer = %self.path.display(), error = %error.full_message(), "a sync failed: the session takes no more writes");
    }

    fn sync_now(&self, writer: &Writer) -> Result<()> {
        // Hold the gate exclusively for a moment: no write is unfinished, so everything up to
        // `covered` is in the page cache, slot and record.
        let (covered, superseded, facts) = {
            let _alone = writer.gate.write();
            let covered = writer.next_sequence.load(Ordering::SeqCst) - 1;
            writer.covered_sequence.store(covered, Ordering::SeqCst);
            (covered, writer.slots.begin_sync(), writer.facts())
        };
        if covered == writer.durable_sequence.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.file.sync_data().context(|| format!("syncing {}", self.path.display()))?;
        self.check_mapping()?;
        // Another program may have truncated the file. Later writes make it longer, but not as long as it was.
        check_length(&self.path, segments_in(length_of(&self.file, &self.path)?), &facts)?;
        writer.durable_sequence.store(covered, Ordering::SeqCst);
        let (mut free, mut later) = (Vec::with_capacity(superseded.len()), Vec::new());
        writer.history.keep(&superseded, &mut free, &mut later);
        writer.slots.release(free);
        writer.slots.supersede(&later);
        writer.sync.marking.lock().waiting = Some((facts, 2));
        self.write_mark(writer, MARK_INTERVAL);
        Ok(())
    }

    /// Writes a mark of the durable content if the last mark has at least this age. Damage to that content
    /// can then be distinguished from interrupted writes. Returns true if it wrote one.
    fn write_mark(&self, writer: &Writer, least_age: Duration) -> bool {
        let mut marking = writer.sync.marking.lock();
        if marking.at.elapsed() < least_age {
            return false;
        }
        let Some((facts, places)) = marking.waiting.take() else { return false };
        // The other place follows, so that damage to one mark loses nothing.
        marking.waiting = (places > 1).then_some((facts, places - 1));
        marking.at = Instant::now();
        // Without the mark less damage is detected. A failing file system fails the next write.
        match marking.mark.write_next(&self.file, self.keys.marks(), facts, false) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(layer = %self.path.display(), %error, "a layer's mark was not written");
                false
            }
        }
    }

    /// Marks the file as closed, in both places. No write comes after this.
    pub(super) fn mark_closed(&self, facts: SealFacts) -> std::io::Result<()> {
        let Some(writer) = &self.writer else { return Ok(()) };
        let mark = &mut writer.sync.marking.lock().mark;
        mark.write_next(&self.file, self.keys.marks(), facts, true)?;
        self.file.sync_data()?;
        mark.write_next(&self.file, self.keys.marks(), facts, true)
    }

    /// Starts the thread that grows the file, bounds unflushed writes and writes the marks.
    pub(super) fn start_ahead(layer: &Arc<Self>) -> Option<JoinHandle<()>> {
        let layer = Arc::clone(layer);
        let started = std::thread::Builder::new()
            .name("layer-ahead".into())
            .spawn(move || look_ahead(&layer));
        // Without the thread the writers grow the file, only more slowly.
        started
            .inspect_err(|error| {
                tracing::warn!(%error, "cannot start the thread that prepares space for writes");
            })
            .ok()
    }

    fn has_unflushed(&self, writer: &Writer) -> bool {
        let next = writer.next_sequence.load(Ordering::Relaxed);
        writer.durable_sequence.load(Ordering::Relaxed) + 1 < next
    }

    /// Asks the layer's own thread to grow or sync the file.
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
    /// Asks the thread to end.
    pub(crate) fn stop(&self) {
        self.state.lock().stop = true;
        self.wake.notify_all();
    }
}

fn look_ahead(layer: &LayerFile) {
    let Ok(writer) = layer.writer() else { return };
    let ahead = &writer.sync.ahead;
    let mut last_flush = Instant::now();
    loop {
        let grow = {
            let mut state = ahead.state.lock();
            if !state.grow && !state.stop {
                ahead.wake.wait_for(&mut state, MARK_INTERVAL);
            }
            if state.stop {
                return;
            }
            std::mem::take(&mut state.grow)
        };
        if writer.poison.check().is_err() {
            return;
        }
        if grow {
            // The write that needs the space meets the failure again and reports it.
            let _ = writer.slots.grow_ahead(&layer.file);
        }
        let is_unflushed = layer.has_unflushed(writer);
        let is_old = is_unflushed && last_flush.elapsed() > UNFLUSHED_AGE_LIMIT;
        if writer.slots.too_much_unsynced() || is_old {
            // `flush` logs the failure and sets the poison itself.
            let _ = layer.flush();
            last_flush = Instant::now();
        } else if !is_unflushed {
            last_flush = Instant::now();
        }
        // No flush is running, so no later sync makes the mark durable.
        if layer.write_mark(writer, MARK_INTERVAL) {
            if let Err(error) = layer.file.sync_data() {
                layer.stop_after_failed_sync(writer, &Error::io("syncing a layer's mark", error));
            }
        }
    }
}
