//! Machines that run from the backup under their own hypervisor.
//!
//! ```text
//!   point ─▶ session ─┬─ nbdkit on a Unix socket ─▶ a domain of libvirt on this host
//!                     └─ nfs-ganesha ─▶ a datastore of vCenter or ESXi ─▶ a machine there
//!   a disk of a point or session ─▶ nbdkit ─▶ attached to a machine that runs already
//! ```
//!
//! The process that serves the disks stays while the machine runs. If it is killed, the note of the session says
//! what was begun, and the next `recover` continues or undoes it.
#![forbid(unsafe_code)]

mod attached_disk;
mod domain;
mod domain_server;
mod end;
mod session_machines;
mod undo;
pub mod vsphere;
mod vsphere_server;

pub use attached_disk::{AttachedDiskServer, default_disk_name};
pub use domain::{DomainRequest, Prepared};
pub use domain_server::RecoveryServer;
pub use end::{MachineEnd, UndoRequest, Undone, keep_parts, prepare_end, remove_socket};
pub use session_machines::{startable_session, unserved};
pub use undo::undo;

/// Why the disks of a recovered machine are no longer served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryEnd {
    /// The machine is off.
    Off,
    /// This program was ended, and has paused the machine.
    Paused,
    /// Its disks were moved.
    Moved,
    /// The machine was undone.
    Undone,
    /// This program was ended, and the machine's disks stand still.
    Stalled,
}

impl RecoveryEnd {
    /// The word of `--json`.
    pub fn word(self) -> &'static str {
        match self {
            RecoveryEnd::Off => "off",
            RecoveryEnd::Paused => "paused",
            RecoveryEnd::Moved => "moved",
            RecoveryEnd::Undone => "undone",
            RecoveryEnd::Stalled => "stalled",
        }
    }
}
