//! The options of the commands that the command line, the service's API, its jobs and its page share.
//!
//! Each command is one struct. Its fields are the fields of the JSON request and, with the same names as ids,
//! the arguments of the command line; its comments are the help, the man page and the API's description.
//!
//! ```text
//!   coldrise forget web01/latest ──clap──▶ Addresses ──to_json──▶ POST /api/v1/runs {"kind": "forget", …}
//!                                            ▲                                 │
//!            run of the service ◀──words── Addresses ◀────────serde────────────┘
//! ```
//!
//! So an option is declared once: a field here. What a request may do, its caller's rights for one, is decided by the
//! service.

mod catalog;
mod encode;
mod production;
mod sessions;
mod stored;
mod value;

pub use catalog::{Addresses, Prune};
pub use encode::{to_json, words};
pub use production::{Attach, Detach, Move, Recover, Rollback};
pub use sessions::{Publish, Seal, Unpublish};
pub use stored::{Backup, CheckBoot, Fold, Gc, Restore, Verify};
pub use value::Pairs;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A request to run a command.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Request {
    /// Back up disks of a machine. Administrators only: it reads any file that the service can read.
    /// Others start jobs.
    Backup(Backup),
    /// Boot a point in isolation, and store the evidence with it.
    CheckBoot(CheckBoot),
    /// Check stored data: of an address, or of everything.
    Verify(Verify),
    /// Publish a point for writing.
    Publish(Publish),
    /// Make a restore point of what a session has captured.
    Seal(Seal),
    /// End a session: seal it first, or discard what it has captured.
    Unpublish(Unpublish),
    /// Write a disk to an image file.
    Restore(Restore),
    /// Run a machine from its backup under its own hypervisor. The run serves its disks, until the machine is
    /// off; cancelled, it suspends the machine first. With `undo`, end such a machine and its session.
    Recover(Recover),
    /// Move the disks of a running machine from its session to production storage. Safe to cancel until they
    /// switch.
    Move(Move),
    /// Make existing disks equal to a point: only what differs is written.
    Rollback(Rollback),
    /// Attach a disk to a running QEMU, until it is detached, or the run is cancelled.
    Attach(Attach),
    /// Detach an attached disk. Unmount it in the guest first.
    Detach(Detach),
    /// Remove points.
    Forget(Addresses),
    /// Keep points: neither prune nor forget removes them.
    Protect(Addresses),
    /// Take the protection off points.
    Unprotect(Addresses),
    /// Serve points no longer, and count them in no rule.
    Quarantine(Addresses),
    /// Take points out of quarantine.
    Release(Addresses),
    /// Remove points by rules.
    Prune(Prune),
    /// Free the space of removed points.
    Gc(Gc),
    /// Fold captured writes of sealed points into chunks: of an address, or of all.
    Fold(Fold),
}
