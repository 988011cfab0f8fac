//! Scratch files: what QEMU copies out of the guest's way.
//!
//! A scratch file has no name, so that a kill leaves none. QEMU gets it as an open file, with a
//! description that says which process it belongs to and which disk; QEMU keeps the description
//! as long as a block node uses the file.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_host::{TABLES_BYTES, free_bytes, no_space};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::disks::LiveDisk;
use super::monitor::{OURS, Qemu, text};

/// A scratch file of a pull may need this part of the disk: what the guest overwrites meanwhile.
const FREE_PART: u64 = 10;

/// The purpose of a scratch file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Description {
    process: u32,
    /// When that process started, in the kernel's ticks: process numbers are used again.
    pub(super) started: u64,
    pub(super) index: usize,
    pub(super) device: String,
    pub(super) node: String,
    /// Whether the machine ran before the backup.
    pub(super) was_running: bool,
}

impl Description {
    pub(super) fn new(index: usize, disk: &LiveDisk, was_running: bool) -> Description {
        let process = std::process::id();
        Description {
            process,
            started: start_of(process).unwrap_or(0),
            index,
            device: disk.device.clone(),
            node: disk.node.clone(),
            was_running,
        }
    }

    /// The process that made it, if it still runs and is not this one.
    pub(super) fn other_process(&self) -> Option<u32> {
        let is_running = start_of(self.process) == Some(self.started);
        (is_running && self.process != std::process::id()).then_some(self.process)
    }
}

/// When a process started, in the kernel's ticks; `None` if it does not run.
fn start_of(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The program's name, in parentheses, may contain anything. The time is the 20th field after it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// The scratch files that QEMU holds: number of the set, and description.
pub(super) fn held(qemu: &mut Qemu) -> Result<Vec<(u64, Description)>> {
    let mut found = Vec::new();
    for set in qemu.list("query-fdsets", Value::Null)? {
        let file = &set["fds"][0];
        let description = text(file, "opaque").strip_prefix(OURS);
        let description = description.and_then(|words| serde_json::from_str(words).ok());
        if let (Some(number), Some(description)) = (set["fdset-id"].as_u64(), description) {
            found.push((number, description));
        }
    }
    Ok(found)
}

/// Checks that there is space for what the guest overwrites during a pull.
///
/// # Errors
/// `NoSpace`, with advice.
pub(super) fn check_space(folder: &Path, disks: &[LiveDisk]) -> Result<()> {
    let wanted_bytes = disks.iter().map(|disk| disk.size_bytes / FREE_PART).sum::<u64>();
    if free_bytes(folder)? >= wanted_bytes {
        return Ok(());
    }
    Err(no_space(folder, wanted_bytes))
}

/// A file without a name.
pub(super) fn create(folder: &Path) -> Result<File> {
    tempfile::tempfile_in(folder)
        .context(|| format!("making a scratch file in {}", folder.display()))
        .map_err(|error| error.advise("name another folder with --scratch DIR"))
}

/// Allocates the space for `content_bytes` in a qcow2 image.
///
/// # Errors
/// `NoSpace`. A file system that cannot allocate ahead is accepted.
pub(super) fn reserve(file: &File, folder: &Path, content_bytes: u64) -> Result<()> {
    let bytes = content_bytes.saturating_add(content_bytes / 1000).saturating_add(TABLES_BYTES);
    match fallocate(file, FallocateFlags::KEEP_SIZE, 0, bytes) {
        Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
        Err(Errno::NOSPC | Errno::DQUOT) => Err(no_space(folder, bytes)),
        Err(error) => Err(std::io::Error::from(error))
            .context(|| format!("allocating a scratch file in {}", folder.display())),
    }
}

/// Hands the file to QEMU. Returns the name by which QEMU opens it.
pub(super) fn hand_over(qemu: &mut Qemu, file: &File, description: &Description) -> Result<String> {
    let words = serde_json::to_string(description)
        .map_err(|error| Error::with_source(ErrorKind::Internal, "describing a file", error))?;
    let arguments = json!({ "opaque": format!("{OURS}{words}") });
    let answer = qemu.ask_with_file("add-fd", arguments, file.as_fd())?;
    match answer["fdset-id"].as_u64() {
        Some(number) => Ok(format!("/dev/fdset/{number}")),
        None => Err(Error::new(ErrorKind::ToolFailed, "QEMU answers add-fd oddly")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_distinguished_from_another_with_its_number() {
        let own = std::process::id();
        let started = start_of(own).unwrap();
        assert!(started > 0);
        let of = |process, started| Description {
            process,
            started,
            index: 0,
            device: String::new(),
            node: String::new(),
            was_running: true,
        };
        assert_eq!(of(own, started).other_process(), None);
        let parent = std::os::unix::process::parent_id();
        let parent_started = start_of(parent).unwrap();
        assert_eq!(of(parent, parent_started).other_process(), Some(parent));
        assert_eq!(of(parent, parent_started + 1).other_process(), None);
        assert_eq!(of(u32::MAX, 0).other_process(), None);
    }
}
