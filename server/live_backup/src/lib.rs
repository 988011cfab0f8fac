//! Backup of machines while they run: all disks as they are at one instant.
//!
//! ```text
//!   LiveBackup ─▶ LiveMachine ─┬─ qemu      the monitor of a plain QEMU: filters, dirty bitmaps
//!                              └─ libvirt   its backup jobs and checkpoints
//!        the instant: sources ─▶ ingest
//! ```
//!
//! libvirt also tells the images of a machine that is off: they are read as they are, on its host.
#![forbid(unsafe_code)]

mod disk_pick;
mod frozen_guest;
mod libvirt;
mod live_backup;
mod place;
mod qemu;
mod rounds;
mod since;

use disk_pick::DiskPick;
use libvirt::Stillness;
pub use live_backup::{LiveBackup, LiveOptions};
pub use place::{Candidate, find_host};
pub use rounds::{RoundReport, Rounds, RoundsEnd};
use since::Since;

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use coldrise_block::Result;

/// How the content leaves QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// We read the disks while old content is saved before the guest overwrites it.
    Pull,
    /// QEMU copies the disks into scratch files first.
    Push,
}

/// The result of taking the instant.
#[derive(Clone, Debug)]
pub struct Instant {
    /// The disks to read.
    pub sources: Vec<coldrise_ingest::SourceSpec>,
    /// How long the machine stood still, at most. `None`: it was not running, or did not stop.
    pub standstill: Option<Duration>,
    /// Whether the guest's file systems were frozen.
    pub is_quiesced: bool,
    /// Whether the machine is off.
    pub is_off: bool,
    /// Remarks for the user: leftovers removed, why a disk is read completely.
    pub remarks: Vec<String>,
    /// The machine's configuration, if its hypervisor tells it.
    pub configuration: Option<coldrise_store::Configuration>,
    /// Its parts beside the disks, as far as they could be read.
    pub parts: Vec<coldrise_store::MachinePart>,
}

/// A machine that runs, or that libvirt can start. Dropping it removes everything of ours from its hypervisor.
trait LiveMachine {
    /// Takes one instant of all disks, and offers them for reading. For a backup, call it while the machine is
    /// claimed in the repository: the start must stay its latest backup.
    ///
    /// # Errors
    /// `Busy` during another backup of the machine; `Unsupported`, `NoSpace`, `NotFound` with advice;
    /// `ToolFailed` if the hypervisor refuses something. After an error nothing is left in it, and the
    /// changes since the latest backup still count.
    fn take(&mut self, since: &Since<'_>, cancel: &AtomicBool) -> Result<Instant>;

    /// Removes everything of the backup. With `is_stored` the state that was read counts as the last one of its series;
    /// otherwise the bitmap or checkpoint of the one before stays valid.
    ///
    /// # Errors
    /// Says what is left; the next backup removes it.
    fn close(&mut self, is_stored: bool) -> Result<()>;

    /// Why the disks are no longer offered although [`LiveMachine::close`] was not called, and advice; `None` if they are.
    fn why_disks_are_lost(&self) -> Option<(String, &'static str)> {
        None
    }

    /// What has to hold while the disks are read, if the hypervisor does not keep the instant.
    fn stillness(&self) -> Option<&Stillness> {
        None
    }

    /// The machine as it is now, if what was read is useless because it was started, or its images were changed.
    ///
    /// # Errors
    /// `ToolFailed` if the hypervisor does not answer.
    fn again(&self) -> Result<Option<Box<dyn LiveMachine>>> {
        Ok(None)
    }

    /// Whether it runs.
    fn is_running(&self) -> bool {
        true
    }

    /// Its UUID in lower case, if its hypervisor knows it.
    fn uuid(&self) -> Option<&str> {
        None
    }

    /// Whether the hypervisor knows another machine of this name, running or not.
    ///
    /// # Errors
    /// `ToolFailed` if the hypervisor does not answer.
    fn is_named_by_another(&self, _name: &str) -> Result<bool> {
        Ok(false)
    }
}

/// The NBD URI of an export behind a Unix socket.
fn nbd_uri(socket: &Path, export: &str) -> String {
    use std::fmt::Write;
    use std::os::unix::ffi::OsStrExt;

    let mut text = format!("nbd+unix:///{export}?socket=");
    for byte in socket.as_os_str().as_bytes() {
        match byte {
            b'/' | b'.' | b'-' | b'_' => text.push(char::from(*byte)),
            byte if byte.is_ascii_alphanumeric() => text.push(char::from(*byte)),
            // Writing to a String cannot fail.
            byte => drop(write!(text, "%{byte:02X}")),
        }
    }
    text
}
