//! Backup of a domain of libvirt: of a running one by libvirt's own backup jobs and checkpoints.
//!
//! ```text
//!   pull   guest ─▶ vda ─ old content, before the guest overwrites it ─▶ scratch file
//!          vda as it was at the instant ─▶ QEMU's NBD server ─▶ ingest
//!   push   vda as it was at the instant ─▶ scratch file; then scratch file ─▶ qemu-nbd ─▶ ingest
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
//!
//! # A domain that is off
//!
//! ```text
//!   add bitmap P2 to each qcow2 ─▶ Stillness begins ─▶ read what bitmap P1 marks ─▶ Stillness proves ─▶ store P2 ─▶ remove bitmap P1
//! ```
//!
//! [`StoppedDomain`] reads the images without a lock, so a start of the machine succeeds at once; [`Stillness`]
//! notices it on the machine's host. Then nothing is stored, and the backup starts again with the domain as it is: usually running.
//!
//! 5. One rule for both: a bitmap counts from the point of its name, and only that of the latest backup is believed. The bitmap
//!    is in the image itself. So an older copy of the image, put back by somebody, lacks it, and is read completely. (The
//!    old bitmap could count on, because nothing writes; but in a copy that is older than the new point it would miss changes.)
//! 6. The new bitmap is added before the first byte is read. So whatever is written later is in it, whenever the machine
//!    starts. It may have too much, never too little.
//! 7. QEMU's lock for writing is held only while a bitmap is added or removed, 20 to 150 ms each. A start of the machine in
//!    that time fails.
//!
//! | killed | in the images | the next run |
//! |---|---|---|
//! | while adding bitmaps, or reading | P1, and P2 in some or all | P2 is not the name of the latest backup: removed. P1 has all changes |
//! | after the point was stored | P1 and P2 | P2 counts; P1 is removed |
//!
//! libvirt does not know the bitmaps that were added while the domain was off. A backup of the running domain makes the
//! one of the latest backup known (see `checkpoints`), and deletes the others.

mod checkpoints;
mod disks;
mod freeze;
mod job;
mod parts;
mod running;
mod stillness;
mod stopped;

use coldrise_block::Result;
use coldrise_hypervisors::libvirt::find_domain;

use crate::LiveMachine;
pub(crate) use running::DomainOptions;
use running::RunningDomain;
pub(crate) use stillness::Stillness;
use stopped::StoppedDomain;

/// Looks for the domain. Changes nothing.
///
/// # Errors
/// `NotFound` if there is none, with advice; `ToolFailed` if libvirt does not answer.
pub(crate) fn connect(options: DomainOptions) -> Result<Box<dyn LiveMachine>> {
    Ok(match find_domain(&options.virsh, &options.domain)? {
        (uuid, true) => Box::new(RunningDomain::new(options, uuid)),
        (uuid, false) => Box::new(StoppedDomain::new(options, uuid)),
    })
}
