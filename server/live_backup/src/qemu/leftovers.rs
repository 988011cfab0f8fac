//! Removes all our objects from a QEMU: at the end of a backup, and what a killed one left.
//!
//! The order is that of use: exports, jobs, snapshots, the devices' filters, nodes, files. Each step asks QEMU
//! what is there, so it does not matter how far the backup came. A step that fails does not
//! keep the others from being tried.

use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use super::disks::device_path;
use super::monitor::{OURS, Qemu, text};
use super::scratch::{self, Description};

/// Time limit for the end of exports and jobs.
const END_PATIENCE: Duration = Duration::from_secs(30);

/// Refuses a machine that another process is backing up.
///
/// # Errors
/// `Busy`.
pub(super) fn check_others(qemu: &mut Qemu) -> Result<()> {
    let held = scratch::held(qemu)?;
    match held.iter().find_map(|(_, description)| description.other_process()) {
        Some(process) => {
            let text = format!("process {process} is backing up this machine");
            Err(Error::new(ErrorKind::Busy, text).advise("wait for its end"))
        }
        None => Ok(()),
    }
}

/// Removes everything of ours. Returns the names of what was there.
///
/// # Errors
/// The first failure, after all was tried.
pub(super) fn clear(qemu: &mut Qemu) -> Result<Vec<String>> {
    let files = scratch::held(qemu)?;
    let newest = newest(&files);
    let nodes = our_nodes(qemu)?;
    let mut removed = our_exports(qemu)?;
    let mut results = vec![remove_exports(qemu, &removed)];
    let is_alone = qemu.list("query-block-exports", Value::Null)?.is_empty();
    if is_alone && !(removed.is_empty() && nodes.is_empty()) {
        // Fails if there is none.
        let _ = qemu.ask("nbd-server-stop", Value::Null);
    }
    let jobs = our_jobs(qemu)?;
    results.push(end_jobs(qemu, &jobs));
    // A filter leaves only after its snapshot.
    let is_access = |node: &&String| node.starts_with(&access_prefix());
    for node in nodes.iter().filter(is_access) {
        results.push(remove_node(qemu, node));
    }
    results.push(restore_drives(qemu, &newest));
    for node in nodes.iter().filter(|node| !is_access(node)) {
        results.push(remove_node(qemu, node));
    }
    results.push(continue_machine(qemu, &newest, &nodes));
    for (number, _) in &files {
        results.push(qemu.ask("remove-fd", json!({ "fdset-id": number })).map(drop));
    }
    removed.extend(jobs);
    removed.extend(nodes);
    results.into_iter().collect::<Result<()>>().map(|()| removed)
}

/// The descriptions of the last backup. QEMU keeps those of earlier ones, whose files are closed, until
/// the machine runs.
fn newest(files: &[(u64, Description)]) -> Vec<&Description> {
    let descriptions = || files.iter().map(|(_, description)| description);
    let started = descriptions().map(|description| description.started).max();
    descriptions().filter(|description| Some(description.started) == started).collect()
}

fn our_exports(qemu: &mut Qemu) -> Result<Vec<String>> {
    Ok(ours(&qemu.list("query-block-exports", Value::Null)?, "id"))
}

fn our_jobs(qemu: &mut Qemu) -> Result<Vec<String>> {
    Ok(ours(&qemu.list("query-jobs", Value::Null)?, "id"))
}

/// In the order in which they can be removed.
fn our_nodes(qemu: &mut Qemu) -> Result<Vec<String>> {
    let all = qemu.list("query-named-block-nodes", json!({ "flat": true }))?;
    let mut nodes = ours(&all, "node-name");
    let kind = |node: &str| node.strip_prefix(OURS).and_then(|rest| rest.chars().next());
    // Snapshot access over filters over scratch images over files.
    nodes.sort_by_key(|node| ['a', 'c', 's', 'f'].into_iter().position(|k| Some(k) == kind(node)));
    Ok(nodes)
}

fn ours(entries: &[Value], field: &str) -> Vec<String> {
    let names = entries.iter().map(|entry| text(entry, field));
    names.filter(|name| name.starts_with(OURS)).map(str::to_owned).collect()
}

fn remove_exports(qemu: &mut Qemu, exports: &[String]) -> Result<()> {
    for id in exports {
        // It may be on its way out already.
        let _ = qemu.ask("block-export-del", json!({ "id": id, "mode": "hard" }));
    }
    qemu.wait_until("the end of the exports", END_PATIENCE, &mut |qemu| {
        Ok(our_exports(qemu)?.is_empty())
    })
}

fn end_jobs(qemu: &mut Qemu, jobs: &[String]) -> Result<()> {
    for id in jobs {
        // A job that has ended cannot be cancelled.
        let _ = qemu.ask("job-cancel", json!({ "id": id }));
    }
    qemu.wait_until("the end of the copies", END_PATIENCE, &mut |qemu| {
        for job in qemu.list("query-jobs", Value::Null)? {
            if text(&job, "id").starts_with(OURS) && text(&job, "status") == "concluded" {
                qemu.ask("job-dismiss", json!({ "id": job["id"] }))?;
            }
        }
        Ok(our_jobs(qemu)?.is_empty())
    })
}

fn remove_node(qemu: &mut Qemu, node: &str) -> Result<()> {
    qemu.ask("blockdev-del", json!({ "node-name": node })).map(drop)
}

/// Takes the filters out of the guest's way.
fn restore_drives(qemu: &mut Qemu, files: &[&Description]) -> Result<()> {
    let mut results = Vec::new();
    for entry in qemu.list("query-block", Value::Null)? {
        let inserted = text(&entry["inserted"], "node-name");
        let device = device_path(&entry);
        let description =
            files.iter().find(|found| filter(found.index) == inserted && found.device == device);
        if let Some(Description { device, node, .. }) = description {
            results.push(set_drive(qemu, device, node));
        }
    }
    results.into_iter().collect()
}

/// Resumes a machine that was stopped for the instant, by a process that was killed then.
fn continue_machine(qemu: &mut Qemu, files: &[&Description], nodes: &[String]) -> Result<()> {
    let was_running = files.iter().any(|description| description.was_running);
    // The first node after `cont`: with it, or without any, another program has paused the machine.
    let is_over = nodes.is_empty() || nodes.iter().any(|node| *node == access(0));
    if was_running && !is_over && qemu.status()? == "paused" {
        qemu.ask("cont", Value::Null)?;
    }
    Ok(())
}

/// Gives a device another block node.
pub(super) fn set_drive(qemu: &mut Qemu, device: &str, node: &str) -> Result<()> {
    let arguments = json!({ "path": device, "property": "drive", "value": node });
    qemu.ask("qom-set", arguments).map(drop)
}

/// The node through which the guest writes during a pull.
pub(super) fn filter(index: usize) -> String {
    format!("{OURS}c{index}")
}

/// The disk as it was at the instant, during a pull.
pub(super) fn access(index: usize) -> String {
    format!("{}{index}", access_prefix())
}

fn access_prefix() -> String {
    format!("{OURS}a")
}

/// The scratch image.
pub(super) fn scratch(index: usize) -> String {
    format!("{OURS}s{index}")
}

/// The file of a scratch image in a format.
pub(super) fn scratch_file(index: usize) -> String {
    format!("{OURS}f{index}")
}

/// The job that copies a disk during a push.
pub(super) fn copy_job(index: usize) -> String {
    format!("{OURS}j{index}")
}

/// The job that formats a scratch image.
pub(super) fn format_job(index: usize) -> String {
    format!("{OURS}k{index}")
}

/// The export.
pub(super) fn export(index: usize) -> String {
    format!("{OURS}e{index}")
}
