//! Pull: the guest writes through a filter that first saves the old content.
//!
//! QEMU cannot insert filters in a transaction, so the machine stands still for some milliseconds.

use std::time::{Duration, Instant};

use coldrise_block::Result;
use serde_json::{Value, json};

use super::bitmaps::switch;
use super::guard::Guard;
use super::leftovers::{access, filter, scratch, set_drive};
use super::monitor::Qemu;
use super::running::TakenDisk;

/// How long a guest's write waits for the scratch file, in seconds. Then the backup is broken, and the
/// guest continues.
const SCRATCH_PATIENCE_S: u32 = 30;

/// Adds an empty image in a scratch file.
pub(super) fn add_scratch(qemu: &mut Qemu, index: usize, file: &str) -> Result<()> {
    let node = scratch(index);
    let arguments = json!({ "driver": "file", "node-name": node, "filename": file });
    qemu.ask("blockdev-add", arguments).map(drop)
}

/// Takes the instant. Returns how long the machine stood still; `None` if it was not running.
///
/// The machine continues whatever fails, also if this process is killed.
pub(super) fn take(
    qemu: &mut Qemu,
    disks: &[TakenDisk],
    granularity_bytes: u64,
    is_running: bool,
) -> Result<Option<Duration>> {
    if !is_running {
        return insert(qemu, disks, granularity_bytes).map(|()| None);
    }
    let guard = Guard::start(qemu.share()?)?;
    let started = Instant::now();
    let inserted =
        qemu.ask("stop", Value::Null).and_then(|_| insert(qemu, disks, granularity_bytes));
    let continued = qemu.ask("cont", Value::Null);
    let stood = started.elapsed();
    let guarded = guard.end();
    inserted?;
    continued?;
    guarded?;
    Ok(Some(stood))
}

fn insert(qemu: &mut Qemu, disks: &[TakenDisk], granularity_bytes: u64) -> Result<()> {
    let mut actions = Vec::new();
    for (index, taken) in disks.iter().enumerate() {
        let arguments = json!({
            "driver": "copy-before-write",
            "node-name": filter(index),
            "file": taken.live.node,
            "target": scratch(index),
            "on-cbw-error": "break-snapshot",
            "cbw-timeout": SCRATCH_PATIENCE_S,
        });
        qemu.ask("blockdev-add", arguments)?;
        set_drive(qemu, &taken.live.device, &filter(index))?;
        actions.extend(switch(&taken.live, taken.old.as_ref(), &taken.new, granularity_bytes));
    }
    qemu.transaction(actions)
}

/// Adds the view of the disk as it was at the instant. Returns its node.
pub(super) fn add_access(qemu: &mut Qemu, index: usize) -> Result<String> {
    let node = access(index);
    let arguments =
        json!({ "driver": "snapshot-access", "node-name": node, "file": filter(index) });
    qemu.ask("blockdev-add", arguments)?;
    Ok(node)
}
