//! The I/O of clients on the disks of a served session: counts, sources, latencies, a heat map.
//!
//! ```text
//!   front end ─▶ ActiveDisk ─▶ LayeredDisk        every request adds to the disk's Counters
//!                    └─▶ Counters ◀─ socket `activity` of the session ◀─ session_activity()
//! ```
//!
//! The counts live in the memory of the process that writes the session, and end with it. Another
//! process asks for them through a socket in the session's folder: nothing is published without a
//! request, no file can be stale or reveal the heat map, and a server that has ended does not answer. The
//! socket is not the control socket: a seal must not wait for an observer.

mod counters;
mod disk;
mod sample;
mod socket;

pub(crate) use disk::ActiveDisk;
pub use sample::{DiskActivity, OperationActivity, SessionActivity};
pub use socket::{ActivityDetail, served_sessions, session_activity};
pub(crate) use socket::{ActivitySocket, Served};
