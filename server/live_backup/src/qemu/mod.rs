//! Backup of a machine in a plain QEMU while it runs, without an agent and without downtime.
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
//! `take` the instant while the machine is claimed in the repository, read
//! the sources, store the point, then `close`.
//!
//! # Invariants
//!
//! 1. The guest goes first. A full scratch file or a slow backup breaks the backup, not the guest
//!    (`on-cbw-error=break-snapshot`). With [`Mode::Push`](crate::Mode::Push) the space of the scratch file is
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
//! | QEMU, at any time | nothing; bitmaps in memory are gone | reads everything, and reports it |

mod bitmaps;
mod disks;
mod guard;
mod leftovers;
mod monitor;
mod pull;
mod push;
mod running;
mod scratch;

pub(crate) use running::{MachineOptions, RunningMachine};
