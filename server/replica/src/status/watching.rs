//! A copy's progress on its way to the display.

use parking_lot::Mutex;

use super::recorder::Recorder;
use crate::content::Content;
use crate::remote::Remote;
use coldrise_block::{Phase, Progress, ProgressState};

/// Passes the progress on, in bytes of what has to come: holes, and what does not differ from the base, take no time and
/// would hide how much is left. Bytes that were read, and are not stored at the other site yet, are not
/// done: that can be many megabytes.
pub(crate) struct Watching<'a> {
    recorder: &'a Recorder,
    pub(super) remote: &'a dyn Remote,
    inner: &'a dyn Progress,
    content: Mutex<Content>,
    last: Mutex<Option<Last>>,
}

/// The last progress of a disk.
struct Last {
    phase: Phase,
    disk: String,
    done_bytes: u64,
    total_bytes: u64,
    read_bytes: u64,
    stored_bytes: u64,
    /// As it was reported.
    pending_bytes: u64,
}

impl<'a> Watching<'a> {
    pub(crate) fn new(
        recorder: &'a Recorder,
        remote: &'a dyn Remote,
        inner: &'a dyn Progress,
    ) -> Watching<'a> {
        Watching { recorder, remote, inner, content: Mutex::default(), last: Mutex::default() }
    }

    /// A disk begins. The part before `begun_bytes` has arrived before.
    pub(crate) fn begin_disk(&self, content: Content, begun_bytes: u64) {
        self.recorder.begin_disk(content.bytes_before(begun_bytes));
        *self.content.lock() = content;
    }

    /// Tells what became done meanwhile: while the copy waits for the line, it reads nothing.
    pub(super) fn tell_again(&self) {
        let mut last = self.last.lock();
        let Some(last) = &mut *last else { return };
        let pending_bytes = self.remote.pending_bytes();
        if pending_bytes != last.pending_bytes {
            last.pending_bytes = pending_bytes;
            self.tell(last);
        }
    }

    /// The disk is stored, or was abandoned.
    pub(crate) fn end_disk(&self, is_stored: bool) {
        let mut last = self.last.lock();
        if let Some(last) = last.take().filter(|_| is_stored) {
            self.tell(&Last { pending_bytes: 0, ..last });
        }
    }

    fn tell(&self, last: &Last) {
        self.recorder.reached(last.done_bytes, last.read_bytes, last.pending_bytes);
        let is_finishing = last.phase == Phase::Finishing && last.pending_bytes > 0;
        self.inner.update(&ProgressState {
            phase: if is_finishing { Phase::Storing } else { last.phase },
            disk: &last.disk,
            done_bytes: last.done_bytes.saturating_sub(last.pending_bytes),
            total_bytes: last.total_bytes,
            read_bytes: last.read_bytes,
            stored_bytes: last.stored_bytes,
        });
    }
}

impl Progress for Watching<'_> {
    fn update(&self, progress: &ProgressState<'_>) {
        let mut last = self.last.lock();
        let content = self.content.lock();
        let last = last.insert(Last {
            phase: progress.phase,
            disk: progress.disk.to_owned(),
            done_bytes: content.bytes_before(progress.done_bytes),
            total_bytes: content.bytes(),
            read_bytes: progress.read_bytes,
            stored_bytes: progress.stored_bytes,
            pending_bytes: self.remote.pending_bytes(),
        });
        self.tell(last);
    }
}
