//! Frames that arrived and were not received yet. Credit bounds them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use coldrise_block::Result;
use parking_lot::{Condvar, Mutex};

use crate::failure::{End, Failure};
use crate::frame::{Class, Frame};
use crate::line::Received;

/// One side's arrived frames.
pub(crate) struct Inbox {
    content: Mutex<Content>,
    changed: Condvar,
    /// Most of each class, in bytes of credit.
    windows: [u64; 3],
}

#[derive(Default)]
struct Content {
    queues: [VecDeque<Frame>; 3],
    /// Of frames that wait here, or whose body is being read.
    taken_bytes: [u64; 3],
    end: Option<End>,
}

impl Inbox {
    pub(crate) fn new(windows: [u64; 3]) -> Inbox {
        Inbox { content: Mutex::default(), changed: Condvar::new(), windows }
    }

    /// Keeps room for a frame of that cost, before its body is read.
    ///
    /// # Errors
    /// If the peer has no credit for it.
    pub(crate) fn reserve(
        &self,
        class: Class,
        cost_bytes: u64,
    ) -> std::result::Result<(), Failure> {
        let mut content = self.content.lock();
        let taken_bytes = &mut content.taken_bytes[class.index()];
        if *taken_bytes + cost_bytes > self.windows[class.index()] {
            return Err(Failure::protocol("it sent more than it had credit for"));
        }
        *taken_bytes += cost_bytes;
        Ok(())
    }

    /// Adds a frame for which room was reserved.
    pub(crate) fn push(&self, class: Class, frame: Frame) {
        self.content.lock().queues[class.index()].push_back(frame);
        self.changed.notify_all();
    }

    /// Ends the line; the first end counts.
    pub(crate) fn end(&self, end: End) {
        self.content.lock().end.get_or_insert(end);
        self.changed.notify_all();
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.content.lock().end.is_some()
    }

    /// See [`crate::Line::receive`].
    pub(crate) fn receive(&self, from: &[Class], limit: Duration, peer: &str) -> Result<Received> {
        let until = Instant::now().checked_add(limit);
        let mut content = self.content.lock();
        loop {
            for &class in from {
                if let Some(frame) = content.queues[class.index()].pop_front() {
                    content.taken_bytes[class.index()] -= frame.cost_bytes();
                    return Ok(Received::Frame { class, frame });
                }
            }
            match &content.end {
                Some(End::ClosedByPeer) => return Ok(Received::Closed),
                Some(end) => return Err(end.error(peer)),
                None => {}
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(Received::Nothing);
            }
            match until {
                Some(until) => drop(self.changed.wait_until(&mut content, until)),
                None => self.changed.wait(&mut content),
            }
        }
    }
}
