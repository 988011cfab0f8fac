//! The interface of a line to its users.

use std::time::Duration;

use coldrise_block::Result;

use crate::frame::{Class, Frame};

/// A line to one peer. All methods can be called from several threads at once.
///
/// A line that failed stays failed: each later call gives the same error, and its user connects
/// again. The frames of a class on its way at that moment may have arrived or not; of
/// [`Class::Control`] a beginning of what was sent has arrived.
///
/// A thread that sends and receives in turn can wait forever for a peer that does the same: both
/// wait for credit. Receive in a thread of its own.
pub trait Line: Send + Sync {
    /// Queues a frame for sending. Waits while the peer gives no credit for the class, or while
    /// the line is paced.
    ///
    /// # Errors
    /// `InvalidInput` if the body is longer than [`crate::MAX_BODY_BYTES`]; `Io` if the line
    /// failed or was closed, by either side.
    fn send(&self, class: Class, frame: Frame) -> Result<()>;

    /// The next frame of the first class in `from` that has one; waits for one for `limit` at
    /// most. Frames that arrived before the line failed or was closed are received first.
    ///
    /// # Errors
    /// `Io` if the line failed: the peer is silent, its process ended, the network refused. `Corrupt` if
    /// the peer broke the protocol.
    fn receive(&self, from: &[Class], limit: Duration) -> Result<Received>;

    /// Sends what is queued (for 10 s at most), tells the peer, and ends the line. A line that is
    /// dropped without it fails at the peer.
    fn close(&self);

    /// Limits what is sent, in bytes of the wire in each second; `None`: no limit. It holds at
    /// once, for all connections together.
    fn set_rate(&self, bytes_per_second: Option<u64>);

    /// The counters and the state of the line.
    fn statistics(&self) -> LineStatistics;

    /// The peer, for messages: its address.
    fn peer(&self) -> String;
}

/// The result of [`Line::receive`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// A frame.
    Frame {
        /// The class in which it was sent.
        class: Class,
        /// The frame.
        frame: Frame,
    },
    /// No frame arrived in time.
    Nothing,
    /// The peer closed the line in order; everything that it sent has been received.
    Closed,
}

/// Figures of a line since it began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LineStatistics {
    /// Bytes given to the network: with TLS, without the headers of TCP and IP.
    pub sent_bytes: u64,
    /// Bytes that came from the network, counted alike.
    pub received_bytes: u64,
    /// Mean of the last complete seconds, five at most.
    pub sent_bytes_per_second: u64,
    /// Alike.
    pub received_bytes_per_second: u64,
    /// The smoothed round-trip time of the control connection; `None` if it is unknown.
    pub round_trip: Option<Duration>,
    /// The kernel's congestion control in use, such as `bbr`; empty for a line in memory.
    pub congestion_control: String,
    /// Connections, all classes together.
    pub connections: usize,
    /// The limit of [`Line::set_rate`].
    pub rate_limit_bytes_per_second: Option<u64>,
}
