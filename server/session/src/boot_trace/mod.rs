//! Boot traces: which parts of its disks a machine reads first, and in which order.
//!
//! ```text
//!   first reads of a fresh session ─▶ TraceRecorder ─▶ seal, close ─▶ REPO/traces/HASH
//!                                                                          │
//!   next session of the machine: first read ─▶ TraceReadAhead ◀────────────┘
//!                                                   └─▶ reads the same parts into the cache, many at once
//! ```
//!
//! A boot reads a few thousand small parts one after the other, so on a slow drive it waits for each.
//! Most of them lie where they lay at the boot before.
//!
//! A trace holds positions and no content, and the parts are read as for any client. So a missing, old or
//! damaged trace makes a boot slower and nothing else: it is replaced without being verified, and no
//! failure here fails a session.

mod read_ahead;
mod recorder;

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use coldrise_block::{
    Context, Error, ErrorKind, Result, path_exists, remove_if_present, replace_file,
};
use coldrise_store::{DiskName, MachineName, Repository};
use serde::{Deserialize, Serialize};

use crate::paths::SessionPaths;

pub(crate) use read_ahead::TraceReadAhead;
pub(crate) use recorder::TraceRecorder;

/// Positions are multiples of this many bytes.
const UNIT_BYTES: u64 = 16 << 10;
/// A recording of more units (2 GiB) is not a boot.
const MAX_UNITS: usize = 128 << 10;
/// Maximum number of runs of a trace. Later ones are dropped.
const MAX_RUNS: usize = 32 << 10;
/// Maximum size of a stored trace, in bytes: a run takes at most 30.
const MAX_STORED_BYTES: u64 = 1 << 20;

/// Neighbouring units of one disk that were read one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    /// Index in the list of disks.
    disk: u16,
    first_unit: u32,
    units: u32,
}

/// The first reads of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BootTrace {
    /// The names of the machine's disks.
    disks: Vec<DiskName>,
    /// In the order of the reads. No unit occurs twice.
    runs: Vec<Run>,
}

impl BootTrace {
    /// The stored trace of a machine, if there is one.
    ///
    /// # Errors
    /// `Corrupt` if it is damaged.
    pub(crate) fn read(
        repository: &Repository,
        machine: &MachineName,
    ) -> Result<Option<BootTrace>> {
        let path = path_of(repository, machine);
        let what = || format!("reading {}", path.display());
        let file = match File::open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            opened => opened.context(what)?,
        };
        let mut stored = Vec::new();
        file.take(MAX_STORED_BYTES).read_to_end(&mut stored).context(what)?;
        let text = repository.decrypt_document(&purpose(machine), &stored).context(what)?;
        let trace = serde_json::from_slice(&text)
            .map_err(|error| Error::with_source(ErrorKind::Corrupt, "a boot trace", error));
        trace.map(Some).context(what)
    }

    /// Stores it as the machine's trace.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub(crate) fn store(&self, repository: &Repository, machine: &MachineName) -> Result<()> {
        let text = serde_json::to_vec(self)
            .map_err(|error| Error::with_source(ErrorKind::Internal, "a boot trace", error))?;
        let stored = repository.encrypt_document(&purpose(machine), &text)?;
        SessionPaths::make_folder(&repository.traces_dir())?;
        replace_file(&path_of(repository, machine), &stored)
    }
}

/// The stored trace of a machine, for a copy of it at another site. One that cannot be read is none.
pub fn boot_trace(repository: &Repository, machine: &MachineName) -> Option<Vec<u8>> {
    let trace = BootTrace::read(repository, machine).ok()??;
    serde_json::to_vec(&trace).ok()
}

/// Stores the trace that another site has of a machine, unless this site has one of its own. Returns whether it did.
///
/// # Errors
/// `InvalidInput` if it is not a trace; errors of the operating system.
pub fn adopt_boot_trace(
    repository: &Repository,
    machine: &MachineName,
    trace: &[u8],
) -> Result<bool> {
    if path_exists(&path_of(repository, machine))? {
        return Ok(false);
    }
    let trace: BootTrace = serde_json::from_slice(trace)
        .map_err(|error| Error::with_source(ErrorKind::InvalidInput, "a boot trace", error))?;
    if trace.runs.len() > MAX_RUNS {
        return Err(Error::new(ErrorKind::InvalidInput, "a boot trace is too long"));
    }
    trace.store(repository, machine).map(|()| true)
}

fn path_of(repository: &Repository, machine: &MachineName) -> PathBuf {
    let hash = repository.derive_key("boot trace", machine.as_str().as_bytes());
    let hex: String = coldrise_block::hex::encode(&hash[..16]);
    repository.traces_dir().join(hex)
}

fn purpose(machine: &MachineName) -> String {
    format!("boot trace of {machine}")
}

/// Removes the traces of all machines but these.
///
/// # Errors
/// Errors of the operating system.
pub(crate) fn remove_other_traces(repository: &Repository, machines: &[MachineName]) -> Result<()> {
    let folder = repository.traces_dir();
    if !path_exists(&folder)? {
        return Ok(());
    }
    let what = || format!("reading {}", folder.display());
    let kept: Vec<PathBuf> = machines.iter().map(|machine| path_of(repository, machine)).collect();
    for entry in std::fs::read_dir(&folder).context(what)? {
        let path = entry.context(what)?.path();
        if !kept.contains(&path) {
            remove_if_present(&path)?;
        }
    }
    Ok(())
}
