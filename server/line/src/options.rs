//! Options of a line.

use std::net::TcpStream;
use std::time::Duration;

use crate::credit::DEFAULT_BULK_WINDOW_BYTES;
use crate::socket::useful_connections;

/// Most bulk connections of a line.
pub(crate) const MAX_BULK_CONNECTIONS: usize = 32;
/// Time after which a silent peer counts as dead.
const SILENCE: Duration = Duration::from_secs(20);

/// Options of one side of a line.
#[derive(Clone, Debug)]
pub struct LineOptions {
    /// Credit that this side gives to the other for [`crate::Class::Bulk`], in bytes: what it may
    /// send before this side has received it. 8 MiB to 1 GiB; the default is 64 MiB.
    pub bulk_window_bytes: u64,
    /// As [`crate::Line::set_rate`].
    pub rate_bytes_per_second: Option<u64>,
    /// Connections for bulk, 1 to 32. `None`: 2 if the kernel allows BBR at both sides, else 8.
    /// The side that wants more decides.
    pub bulk_connections: Option<usize>,
    /// Time after which a silent peer counts as dead; the default is 20 s. The same at both sides: each
    /// says something every quarter of its own.
    pub silence: Duration,
}

impl Default for LineOptions {
    fn default() -> LineOptions {
        LineOptions {
            bulk_window_bytes: DEFAULT_BULK_WINDOW_BYTES,
            rate_bytes_per_second: None,
            bulk_connections: None,
            silence: SILENCE,
        }
    }
}

impl LineOptions {
    /// How many bulk connections this side wants, by what the kernel allowed on a socket.
    pub(crate) fn wanted_connections(&self, socket: &TcpStream) -> u8 {
        let wanted = self.bulk_connections.unwrap_or_else(|| useful_connections(socket));
        wanted.clamp(1, MAX_BULK_CONNECTIONS) as u8
    }
}
