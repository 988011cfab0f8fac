//! The machine of a run that reads file systems: what it has, and who talks to it.
//!
//! ```text
//! RUNS/ID/files.json     the points whose disks it has; written whole before others look for it
//! RUNS/ID/use            held (flock) by the process that talks to the machine
//! RUNS/ID/machine/port   QEMU's socket
//! ```
//!
//! The run ends by itself only while it holds `use`, so no client loses a machine in the middle of a
//! conversation. The kernel frees the lock of a killed process.

use std::time::SystemTime;

use coldrise_block::{Context, ErrorKind, HeldLock, Result, create_private};
use serde::{Deserialize, Serialize};

use super::MachineFiles;
use crate::RunId;
use crate::folder::RunsFolder;
use crate::run_files::RunFiles;

pub(crate) const RECORD: &str = "files.json";
pub(crate) const USE: &str = "use";
/// The command whose runs have such machines.
const COMMAND: &str = "files";
/// Maximum size of files.json, in bytes. A longer one is not read.
const MAX_RECORD_BYTES: u64 = 64 << 10;

/// The content of files.json.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesRecord {
    /// The repository's absolute path.
    pub repository: String,
    /// Its points. With several, the machine shows the disks of one at a time.
    pub points: Vec<FilesPoint>,
}

/// A point in such a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesPoint {
    /// MACHINE/POINT.
    pub address: String,
    /// The number of its first disk in the machine.
    pub first_disk: u64,
    /// The names of its disks, in order.
    pub disks: Vec<String>,
    /// Their length, in bytes.
    pub disk_bytes: u64,
}

impl MachineFiles {
    /// Tells others about a machine that reads file systems.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn tell_files(&self, record: &FilesRecord) -> Result<()> {
        create_private(&self.run.join(USE)).context(|| "making the lock of the machine")?;
        self.write(RECORD, record)
    }

    /// The machine is about to end: others no longer find it.
    pub fn forget_files(&self) {
        let _ = std::fs::remove_file(self.run.join(RECORD));
    }

    /// Takes the lock of conversations, if no client talks to the machine.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn try_use(&self) -> Result<Option<HeldLock>> {
        lock(&RunFiles::open(&self.run)?)
    }
}

impl RunsFolder {
    /// The machines of running runs that read file systems.
    ///
    /// # Errors
    /// Errors of reading the folder. Damaged records are left out.
    pub fn files_machines(&self) -> Result<Vec<(RunId, FilesRecord)>> {
        let ids = self.names()?.into_iter().filter_map(|name| name.parse::<RunId>().ok());
        let of_files = ids.filter(|id| id.word() == COMMAND);
        Ok(of_files.filter_map(|id| self.files_machine(&id).map(|record| (id, record))).collect())
    }

    /// The machine of a running run; `None` if it has not started or has ended.
    pub fn files_machine(&self, id: &RunId) -> Option<FilesRecord> {
        let run = self.open(id).ok()?;
        let record = run.document(RECORD, MAX_RECORD_BYTES).ok()?;
        // After the read: a run that has ended has no machine, whatever it left behind.
        run.is_locked().unwrap_or(false).then_some(record)
    }

    /// Takes the machine of a run for a conversation, until the lock is dropped. `None` if others talk to
    /// it, or if it has ended. The file's time is that of the last use.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn try_use_files(&self, id: &RunId) -> Result<Option<HeldLock>> {
        let Ok(run) = self.open(id) else { return Ok(None) };
        let locked = match lock(&run) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            locked => locked?,
        };
        // The run may have ended just before.
        Ok(locked.filter(|_| self.files_machine(id).is_some()))
    }

    /// When the machine of a run was used last.
    pub fn files_used(&self, id: &RunId) -> Option<SystemTime> {
        self.open(id).ok()?.file(USE).ok()?.metadata().ok()?.modified().ok()
    }
}

fn lock(run: &RunFiles) -> Result<Option<HeldLock>> {
    HeldLock::take(run.file(USE)?).context(|| "taking the lock of the machine")
}
