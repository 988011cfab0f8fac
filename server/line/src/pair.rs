//! A line inside one process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use coldrise_block::Result;

use crate::DEFAULT_BULK_WINDOW_BYTES;
use crate::credit::{Credit, windows};
use crate::failure::{End, Failure};
use crate::frame::{Class, Frame};
use crate::inbox::Inbox;
use crate::line::{Line, LineStatistics, Received};

/// Both ends of a line in memory, for the tests of its users and for copies within one machine.
/// Bulk frames keep their order.
pub fn pair() -> (PairedLine, PairedLine) {
    pair_with_window(DEFAULT_BULK_WINDOW_BYTES)
}

/// As [`pair`], with the credit of bulk in bytes (8 MiB at least).
pub fn pair_with_window(bulk_window_bytes: u64) -> (PairedLine, PairedLine) {
    let windows = windows(bulk_window_bytes);
    let side = || {
        Arc::new(Side {
            inbox: Inbox::new(windows),
            credit: Credit::new(windows),
            sent_bytes: AtomicU64::new(0),
        })
    };
    let (near, far) = (side(), side());
    let other = PairedLine { own: Arc::clone(&far), peer: Arc::clone(&near) };
    (PairedLine { own: near, peer: far }, other)
}

/// One end of a line in memory.
pub struct PairedLine {
    own: Arc<Side>,
    peer: Arc<Side>,
}

struct Side {
    inbox: Inbox,
    /// For sending to the peer's inbox.
    credit: Credit,
    sent_bytes: AtomicU64,
}

const PEER: &str = "memory";

impl PairedLine {
    fn end(&self, own: End, peer: End) {
        for (side, end) in [(&self.own, own), (&self.peer, peer)] {
            side.credit.end(end.clone());
            side.inbox.end(end);
        }
    }

    /// Ends the line as a dead network does, for tests.
    pub fn cut(&self) {
        let failure = Failure {
            kind: coldrise_block::ErrorKind::Io,
            text: "the connection was lost".to_owned(),
            advice: "check the network between the sites",
        };
        self.end(End::Failed(failure.clone()), End::Failed(failure));
    }
}

impl Line for PairedLine {
    fn send(&self, class: Class, frame: Frame) -> Result<()> {
        frame.check()?;
        self.own.credit.take(class, frame.cost_bytes(), PEER)?;
        self.own.sent_bytes.fetch_add(frame.cost_bytes(), Ordering::Relaxed);
        // Credit has the size of the inbox.
        let room = self.peer.inbox.reserve(class, frame.cost_bytes());
        room.map_err(|failure| failure.error(PEER))?;
        self.peer.inbox.push(class, frame);
        Ok(())
    }

    fn receive(&self, from: &[Class], limit: Duration) -> Result<Received> {
        let received = self.own.inbox.receive(from, limit, PEER)?;
        if let Received::Frame { class, frame } = &received {
            // Grants of this size never add up to too much.
            let _ = self.peer.credit.add(*class, frame.cost_bytes());
        }
        Ok(received)
    }

    fn close(&self) {
        self.end(End::Closed, End::ClosedByPeer);
    }

    fn set_rate(&self, _bytes_per_second: Option<u64>) {}

    fn statistics(&self) -> LineStatistics {
        LineStatistics {
            sent_bytes: self.own.sent_bytes.load(Ordering::Relaxed),
            received_bytes: self.peer.sent_bytes.load(Ordering::Relaxed),
            ..LineStatistics::default()
        }
    }

    fn peer(&self) -> String {
        PEER.to_owned()
    }
}

impl Drop for PairedLine {
    fn drop(&mut self) {
        let failure = Failure {
            kind: coldrise_block::ErrorKind::Io,
            text: "the other side ended without closing it".to_owned(),
            advice: "look for the reason at the other site",
        };
        self.end(End::Closed, End::Failed(failure));
    }
}
