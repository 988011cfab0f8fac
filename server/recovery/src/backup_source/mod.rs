//! Backup of a machine while it runs, without an agent and without downtime.
//!
//! ```text
//!   guest ──▶ coldrise-c0 (copy-before-write) ──▶ vda, with the bitmaps
//!                  │ old content, before the guest overwrites it
//!                  ▼
//!             coldrise-s0 (scratch file)
//!   coldrise-a0 (snapshot-access: all as it was at the instant) ──▶ NBD ──▶ ingest
//! ```
//!
//! [`RunningMachine`] is a machine of a plain QEMU, reached through its monitor: connect,
//! [`take`](RunningMachine::take) the instant while the machine is claimed in the repository, read
//! the sources, store the point, then [`close`](RunningMachine::close).
//!
//! # Invariants
//!
//! 1. The guest goes first. A full scratch file or a slow backup breaks the backup, not the guest
//!    (`on-cbw-error=break-snapshot`). With [`Mode::Push`] the space of the scratch file is
//!    allocated before the start.
//! 2. A bitmap is believed only if its name is that of the machine's latest backup in this
//!    repository, disk by disk (see `bitmaps`). In one transaction at the instant the old bitmap stops
//!    and the new one starts, for all disks.
//! 3. QEMU opens no file of ours by its name: it gets scratch files without a name and the listening
//!    socket as open files. So QEMU needs no rights, and the kernel frees the space when QEMU closes them.
//! 4. All our objects in QEMU begin with `coldrise-`, and the scratch files' descriptions say which
//!    process they belong to. `leftovers` removes them all, whatever is there: at the end of
//!    each backup, and at the start of the next one.
//!
//! # Kills
//!
//! | killed | in QEMU | the next run |
//! |---|---|---|
//! | before `stop` | scratch nodes | removes them |
//! | between `stop` and `cont` (some ms) | a stopped machine, some filters | removes them, then continues the machine |
//! | while reading | filters, the export; the old bitmap stands still, the new one counts | removes them; merges the new bitmap into the old one: nothing is lost |
//! | after the point was stored | the same | the new bitmap's name is that of the latest backup: it counts |
//! | QEMU, at any time | nothing; bitmaps in memory are gone | reads everything, and says so |

mod agent;
mod bitmaps;
mod disks;
mod leftovers;
mod monitor;
mod pull;
mod push;
mod running;
mod scratch;

pub use disks::DiskPick;
pub use running::{MachineOptions, Mode, RunningMachine};

pub(crate) use agent::{file_systems, FrozenGuest, LIMIT as FREEZE_LIMIT};
pub(crate) use scratch::{no_space, TABLES_BYTES};

use std::path::Path;
use std::time::Duration;

/// The result of taking the instant.
#[derive(Clone, Debug)]
pub struct Instant {
    /// The disks to read.
    pub sources: Vec<coldrise_ingest::SourceSpec>,
    /// How long the machine stood still, at most. `None`: it was not running, or did not stop.
    pub standstill: Option<Duration>,
    /// Whether the guest's file systems were frozen.
    pub is_quiesced: bool,
    /// Remarks for the user: leftovers removed, why a disk is read completely.
    pub remarks: Vec<String>,
    /// The machine's configuration, if its hypervisor tells it.
    pub configuration: Option<coldrise_store::Configuration>,
}

/// The NBD URI of an export behind a Unix socket.
pub(crate) fn nbd_uri(socket: &Path, export: &str) -> String {
    use std::fmt::Write;
    use std::os::unix::ffi::OsStrExt;

    let mut text = format!("nbd+unix:///{export}?socket=");
    for byte in socket.as_os_str().as_bytes() {
        match byte {
            b'/' | b'.' | b'-' | b'_' => text.push(char::from(*byte)),
            byte if byte.is_ascii_alphanumeric() => text.push(char::from(*byte)),
            // Writing to a String cannot fail.
            byte => drop(write!(text, "%{byte:02X}")),
        }
    }
    text
}
