//! Push: QEMU copies the disks, or what has changed, into scratch images; then those are read.
//!
//! The machine does not stop, and no export touches a disk's own thread. The price: until the copy is
//! done, a guest's write to a part not yet copied waits for the scratch file, and a failing scratch file
//! fails that write. So the space is allocated before the start.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use super::bitmaps::switch;
use super::leftovers::{copy_job, format_job, scratch, scratch_file};
use super::monitor::{Qemu, text};
use super::running::TakenDisk;
use super::scratch as scratch_space;

/// Time limit for formatting an empty image.
const FORMAT_PATIENCE: Duration = Duration::from_secs(60);
/// A copy may take as long as it takes.
const COPY_PATIENCE: Duration = Duration::from_secs(365 * 24 * 3600);

/// Makes an empty qcow2 image in a scratch file, which keeps holes and zeroes small.
pub(super) fn add_scratch(
    qemu: &mut Qemu,
    index: usize,
    taken: &TakenDisk,
    file: &File,
    folder: &Path,
    name: &str,
) -> Result<()> {
    let base = scratch_file(index);
    let arguments = json!({ "driver": "file", "node-name": base, "filename": name });
    qemu.ask("blockdev-add", arguments)?;
    let options = json!({ "driver": "qcow2", "file": base, "size": taken.live.size_bytes });
    let id = format_job(index);
    qemu.ask("blockdev-create", json!({ "job-id": id, "options": options }))?;
    wait_for_jobs(qemu, "formatting a scratch image", FORMAT_PATIENCE, &AtomicBool::new(false))?;
    scratch_space::reserve(file, folder, taken.copied_bytes())?;
    open_image(qemu, index)
}

fn open_image(qemu: &mut Qemu, index: usize) -> Result<()> {
    let arguments =
        json!({ "driver": "qcow2", "node-name": scratch(index), "file": scratch_file(index) });
    qemu.ask("blockdev-add", arguments).map(drop)
}

/// Takes the instant: the copies of all disks start with the new bitmaps.
pub(super) fn take(qemu: &mut Qemu, disks: &[TakenDisk], granularity_bytes: u64) -> Result<()> {
    let mut actions = Vec::new();
    for (index, taken) in disks.iter().enumerate() {
        actions.extend(switch(&taken.live, taken.old.as_ref(), &taken.new, granularity_bytes));
        let mut job = json!({
            "job-id": copy_job(index),
            "device": taken.live.node,
            "target": scratch(index),
            "auto-dismiss": false,
            "sync": "full",
        });
        if let Some(old) = &taken.old {
            job["sync"] = "bitmap".into();
            job["bitmap"] = old.as_str().into();
            job["bitmap-mode"] = "never".into();
        }
        actions.push(json!({ "type": "blockdev-backup", "data": job }));
    }
    qemu.transaction(actions)
}

/// Waits for the copies, then opens the images again: the copy has left them in the disks' threads,
/// where an export would crash an older QEMU.
pub(super) fn finish_copies(
    qemu: &mut Qemu,
    disks: &[TakenDisk],
    names: &[String],
    cancel: &AtomicBool,
) -> Result<()> {
    wait_for_jobs(qemu, "copying the disks", COPY_PATIENCE, cancel)?;
    for (index, name) in names.iter().enumerate().take(disks.len()) {
        qemu.ask("blockdev-del", json!({ "node-name": scratch(index) }))?;
        qemu.ask("blockdev-del", json!({ "node-name": scratch_file(index) }))?;
        let base = scratch_file(index);
        let arguments = json!({ "driver": "file", "node-name": base, "filename": name });
        qemu.ask("blockdev-add", arguments)?;
        open_image(qemu, index)?;
    }
    Ok(())
}

/// Waits until all our jobs have ended well, and dismisses them.
fn wait_for_jobs(
    qemu: &mut Qemu,
    what: &str,
    patience: Duration,
    cancel: &AtomicBool,
) -> Result<()> {
    qemu.wait_until(what, patience, &mut |qemu| {
        if cancel.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
        let jobs = qemu.list("query-jobs", Value::Null)?;
        let ours = || jobs.iter().filter(|job| text(job, "id").starts_with(super::monitor::OURS));
        if let Some(job) = ours().find(|job| job["error"].is_string()) {
            let text: String = text(job, "error").chars().filter(|c| !c.is_control()).collect();
            return Err(Error::new(ErrorKind::ToolFailed, format!("QEMU failed {what}: {text}")));
        }
        if ours().any(|job| text(job, "status") != "concluded") {
            return Ok(false);
        }
        let ended: Vec<Value> = ours().map(|job| json!({ "id": job["id"] })).collect();
        for job in ended {
            qemu.ask("job-dismiss", job)?;
        }
        Ok(true)
    })
}
