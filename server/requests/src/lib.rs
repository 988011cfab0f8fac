//! Requests: the options of the commands that the command line, the service's API, its jobs and its page share.
//!
//! Each command is one struct. Its fields are the fields of the JSON request and, with the same names as ids,
//! the arguments of the command line; its comments are the help, the man page and the API's description.
//!
//! ```text
//!   coldrise forget web01/latest ──clap──▶ Forget ──given──▶ POST /api/v1/runs {"kind": "forget", …}
//!                                            ▲                                 │
//!   process of the run ◀──CommandLine── Forget ◀─────────────serde─────────────┘
//! ```
//!
//! An option is declared once: a field here. The command line adds the options that only make sense beside the
//! repository. The service checks requests, such as the rights of their callers.
#![forbid(unsafe_code)]

mod continuous;
mod copy;
mod encode;
mod hypervisors;
mod machines;
mod points;
mod value;

pub use continuous::{ProtectLive, Protected, parse_every};
pub use copy::CopyOptions;
pub use encode::{CommandLine, check, refuse};
pub use hypervisors::{Attach, AttachedAs, Detach, Move, Recover, Rollback, VsphereLogin};
pub use machines::{AtEnd, Boot, Network, Protocol, Serve};
pub use points::{
    Backup, BackupOptions, CheckBoot, Fold, Forget, Gc, Protect, Prune, Publish, Quarantine,
    Release, Restore, Seal, Unpublish, Verify, format_words,
};
pub use value::{
    Hypervisor, Target, live_session, parse_backup_machine, parse_network, parse_percent,
    parse_point, parse_target, sealable, session_name, unique_names,
};

use clap::{ArgMatches, Command};
use coldrise_block::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// What to run.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[schema(as = Start)]
pub enum Request {
    /// Back up disks of a machine. Administrators only: it reads any file that the service can read.
    /// Others start jobs.
    Backup(Backup),
    /// Capture the writes of a machine that runs elsewhere, until the run is cancelled. Administrators only: it reads any
    /// machine that the service can read.
    ProtectLive(ProtectLive),
    /// Boot a point in isolation, and store the evidence with it.
    CheckBoot(CheckBoot),
    /// Boot a machine from its backup, on this host. It runs until it is switched off, or the run is
    /// cancelled; the session stays. See /sessions/{session}/screen.
    Boot(Boot),
    /// Serve all points and sessions over NBD or NFS, until the run is cancelled.
    Serve(Serve),
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
    /// Remove points.
    Forget(Forget),
    /// Keep points: neither prune nor forget removes them.
    Protect(Protect),
    /// Remove the protection of points.
    Unprotect(Protect),
    /// Set untrusted points aside: they are not served, and no rule of prune counts them.
    Quarantine(Quarantine),
    /// Take points out of quarantine.
    Release(Release),
    /// Remove points by rules.
    Prune(Prune),
    /// Free the space of removed points.
    Gc(Gc),
    /// Fold captured writes of sealed points into chunks: of an address, or of all.
    Fold(Fold),
}

/// The request of a parsed command line, as JSON for POST /api/v1/runs. `command` has all its arguments.
///
/// # Errors
/// `InvalidInput` for a command or an option that a service does not run for others.
pub fn json(command: &Command, found: &ArgMatches) -> Result<Value> {
    let given = match command.get_name() {
        "backup" => encode::given::<Backup>,
        "protect-live" => encode::given::<ProtectLive>,
        "check-boot" => encode::given::<CheckBoot>,
        "recover" => encode::given::<Recover>,
        "move" => encode::given::<Move>,
        "rollback" => encode::given::<Rollback>,
        "attach" => encode::given::<Attach>,
        "detach" => encode::given::<Detach>,
        "verify" => encode::given::<Verify>,
        "publish" => encode::given::<Publish>,
        "seal" => encode::given::<Seal>,
        "unpublish" => encode::given::<Unpublish>,
        "restore" => encode::given::<Restore>,
        "forget" => encode::given::<Forget>,
        "protect" | "unprotect" => encode::given::<Protect>,
        "quarantine" => encode::given::<Quarantine>,
        "release" => encode::given::<Release>,
        "prune" => encode::given::<Prune>,
        "gc" => encode::given::<Gc>,
        "fold" => encode::given::<Fold>,
        other => return Err(refuse(&format!("coldrise {other}"))),
    };
    given(command, found)
}
