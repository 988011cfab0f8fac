//! Backup of a running domain of libvirt, by libvirt's own backup jobs and checkpoints.
//!
//! ```text
//!   pull   guest ─▶ vda ─ old content, before the guest overwrites it ─▶ scratch file
//!          vda as it was at the instant ─▶ QEMU's NBD server ─▶ ingest
//!   push   vda as it was at the instant ─▶ scratch file; then scratch file ─▶ ingest
//! ```
//!
//! [`RunningDomain`]: connect, `take` the instant while the machine is claimed in the
//! repository, read the sources, store the point, then `close`.
//!
//! # Invariants
//!
//! 1. The guest goes first. libvirt 9 stops a guest whose scratch file is full, and has no word for another
//!    choice. So the files are ours (`--reuse-external`), and the space for all that a disk can need is allocated
//!    before the start. Thus a backup that was killed cannot stop the guest later, either.
//! 2. A disk with an iothread is pushed: an NBD export of it crashes a QEMU before 9.0, and libvirt does not
//!    tell the version of a QEMU that was started before an upgrade.
//! 3. A checkpoint is believed only if its name is that of the machine's latest backup in this repository (see
//!    `checkpoints`). Every checkpoint's bitmap counts from its own instant on until it is deleted, so no step
//!    of ours takes changes from another one: other programs and other repositories have their own.
//! 4. All that we start names a private folder of ours, which is locked while we live. So the next run sees whether
//!    a backup job is ours, and whether its process is alive.
//!
//! # Kills
//!
//! | killed | in libvirt | the next run |
//! |---|---|---|
//! | before `backup-begin` | nothing; a folder | removes the folder |
//! | while reading or copying | the job, which continues; the old and the new checkpoint | ends the job, deletes the new checkpoint; the old one has all changes |
//! | after the point was stored | the same | the new checkpoint has the name of the latest backup: it counts. Deletes the old one |
//! | libvirtd | the job continues; libvirtd finds it again | as above |
//! | QEMU | nothing; bitmaps are damaged | deletes the checkpoints, reads everything, and reports it |

mod checkpoints;
mod disks;
mod freeze;
mod job;
mod parts;
mod running;

pub(crate) use running::{DomainOptions, RunningDomain};
