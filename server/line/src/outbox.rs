//! Frames that wait for a connection: one queue for each class. The bulk connections share theirs,
//! so that each takes what the network lets it take.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use coldrise_block::Result;
use parking_lot::{Condvar, Mutex};

use crate::failure::End;
use crate::frame::{Class, Frame};
use crate::wire::Message;
use crate::yielding::Yielding;

/// Most that a queue holds, in bytes of credit: enough to keep all connections busy.
const MAX_QUEUED_BYTES: u64 = 4 << 20;
/// Credit is given back when it is that much, in bytes. A sender that waits with less than a frame's credit
/// has a window of 8 MiB at least, so the receiver holds much more than this, or has given it back.
const LEAST_GRANT_BYTES: u64 = 256 << 10;

/// The queue of frames to send.
pub(crate) struct Outbox {
    content: Mutex<Content>,
    changed: Condvar,
}

#[derive(Default)]
struct Content {
    queues: [VecDeque<Frame>; 3],
    queued_bytes: [u64; 3],
    /// Credit to give back to the peer.
    grants: [u64; 3],
    yielding: Yielding,
    is_closing: bool,
    end: Option<End>,
}

/// The next step of a connection.
pub(crate) enum Work {
    Send(Message),
    /// Nothing came within the time.
    Idle,
    /// Everything is sent: report it and stop.
    Close,
    /// The line has ended.
    Stop,
}

impl Outbox {
    pub(crate) fn new() -> Outbox {
        Outbox { content: Mutex::default(), changed: Condvar::new() }
    }

    /// Queues a frame; waits for room.
    pub(crate) fn push(&self, class: Class, frame: Frame, peer: &str) -> Result<()> {
        let mut content = self.content.lock();
        loop {
            if let Some(end) = &content.end {
                return Err(end.error(peer));
            }
            if content.is_closing {
                return Err(End::Closed.error(peer));
            }
            if content.queued_bytes[class.index()] < MAX_QUEUED_BYTES {
                break;
            }
            self.changed.wait(&mut content);
        }
        content.queued_bytes[class.index()] += frame.cost_bytes();
        content.queues[class.index()].push_back(frame);
        drop(content);
        self.changed.notify_all();
        Ok(())
    }

    /// A block was asked for: bulk lets it pass.
    pub(crate) fn fetched(&self, round_trip: Duration) {
        self.content.lock().yielding.fetched(Instant::now(), round_trip);
    }

    /// Notes credit to give back to the peer.
    pub(crate) fn grant(&self, class: Class, bytes: u64) {
        let mut content = self.content.lock();
        content.grants[class.index()] += bytes;
        if content.grants[class.index()] >= LEAST_GRANT_BYTES {
            drop(content);
            self.changed.notify_all();
        }
    }

    /// The next thing to do for a connection of that class; [`Work::Idle`] after `limit`, however busy the others are.
    pub(crate) fn next(&self, class: Class, limit: Duration) -> Work {
        let until = Instant::now() + limit;
        let mut content = self.content.lock();
        let mut is_late = false;
        loop {
            if content.end.is_some() {
                return Work::Stop;
            }
            let is_due = |granted: &Class| content.grants[granted.index()] >= LEAST_GRANT_BYTES;
            if let Some(class) =
                Class::ALL.into_iter().find(|granted| class == Class::Control && is_due(granted))
            {
                let bytes = std::mem::take(&mut content.grants[class.index()]);
                return Work::Send(Message::Grant { class, bytes });
            }
            let standing = match class {
                Class::Bulk => content.yielding.wait(Instant::now()),
                Class::Control | Class::Fetch => None,
            };
            let mut carried = class.carries().iter();
            let next = carried.find(|carried| {
                let is_standing = **carried == Class::Bulk && standing.is_some();
                !is_standing && !content.queues[carried.index()].is_empty()
            });
            let frame =
                next.and_then(|next| Some((*next, content.queues[next.index()].pop_front()?)));
            if let Some((next, frame)) = frame {
                content.queued_bytes[next.index()] -= frame.cost_bytes();
                drop(content);
                self.changed.notify_all();
                return Work::Send(Message::Frame(next, frame));
            }
            if content.is_closing && standing.is_none() {
                return Work::Close;
            }
            if is_late {
                return Work::Idle;
            }
            let wait_until = standing.map_or(until, |at| at.min(until));
            self.changed.wait_until(&mut content, wait_until);
            is_late = Instant::now() >= until;
        }
    }

    /// Lets connections send what is queued and then stop.
    pub(crate) fn close(&self) {
        self.content.lock().is_closing = true;
        self.changed.notify_all();
    }

    /// Ends the line; the first end counts.
    pub(crate) fn end(&self, end: End) {
        self.content.lock().end.get_or_insert(end);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_idle_beside_a_busy_one() {
        let outbox = Outbox::new();
        let frame = || Frame { stream: 0, kind: 1, body: vec![0; 16] };
        std::thread::scope(|scope| {
            let idle = scope.spawn(|| outbox.next(Class::Fetch, Duration::from_millis(100)));
            let until = Instant::now() + Duration::from_secs(20);
            while !idle.is_finished() {
                assert!(Instant::now() < until, "it never says that it is alive");
                outbox.push(Class::Bulk, frame(), "peer").unwrap();
                assert!(matches!(outbox.next(Class::Bulk, Duration::ZERO), Work::Send(_)));
            }
            assert!(matches!(idle.join().unwrap(), Work::Idle));
        });
    }
}
