//! Checks files before they are rewritten, and reports progress.

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::repository::Repository;
use crate::rocks::{BlockBuffers, Family, ReadMode};

use super::units::Unit;

/// A file is rewritten if at least this percentage of it is unreferenced. At 0 every file with
/// unreferenced entries is rewritten, at 100 none.
///
/// Unreferenced chunks that stay are not only lost space: a later backup of the same content uses
/// them again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u8")]
pub struct MaxUnused(u8);

impl MaxUnused {
    pub(super) fn percent(self) -> u64 {
        u64::from(self.0)
    }
}

/// By default, at most as many bytes are copied as are freed.
impl Default for MaxUnused {
    fn default() -> Self {
        MaxUnused(50)
    }
}

impl TryFrom<u8> for MaxUnused {
    type Error = Error;

    fn try_from(percent: u8) -> Result<Self> {
        match percent {
            0..=100 => Ok(MaxUnused(percent)),
            _ => Err(Error::new(ErrorKind::InvalidInput, "a percentage from 0 to 100 is needed")),
        }
    }
}

impl FromStr for MaxUnused {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        // An invalid number is treated as out of range.
        text.strip_suffix('%').unwrap_or(text).parse().unwrap_or(u8::MAX).try_into()
    }
}

/// Options of a gc.
#[derive(Clone, Copy)]
pub struct GcOptions<'a> {
    /// The files to rewrite.
    pub max_unused: MaxUnused,
    /// Cancels the gc. It ends after the current step.
    pub cancel: &'a AtomicBool,
    /// Receives the progress, from several threads.
    pub progress: &'a (dyn Fn(GcProgress) + Sync),
}

impl GcOptions<'_> {
    /// Fails with `Interrupted` after a cancel.
    pub(super) fn check_cancel(&self) -> Result<()> {
        if self.cancel.load(Ordering::Relaxed) {
            Err(Error::new(ErrorKind::Interrupted, "cancelled"))
        } else {
            Ok(())
        }
    }
}

/// The progress of a gc in rewriting files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GcProgress {
    /// Bytes checked, plus bytes rewritten.
    pub done_bytes: u64,
    /// Total bytes to check and to rewrite.
    pub total_bytes: u64,
}

/// The state of one gc.
pub(super) struct Work<'a> {
    options: &'a GcOptions<'a>,
    progress: Mutex<GcProgress>,
}

impl<'a> Work<'a> {
    pub(super) fn max_unused(&self) -> MaxUnused {
        self.options.max_unused
    }

    pub(super) fn new(options: &'a GcOptions<'a>) -> Work<'a> {
        Work { options, progress: Mutex::default() }
    }

    pub(super) fn check_cancel(&self) -> Result<()> {
        self.options.check_cancel()
    }

    /// Announces the work.
    pub(super) fn plan<'u>(&self, units: impl Iterator<Item = &'u Unit>) {
        let copied = units.filter(|unit| unit.is_copied());
        self.progress.lock().total_bytes = copied.map(|unit| 2 * unit.bytes).sum();
    }

    /// Adds completed bytes.
    pub(super) fn advance(&self, bytes: u64) {
        let now = {
            let mut progress = self.progress.lock();
            progress.done_bytes += bytes;
            *progress
        };
        (self.options.progress)(now);
    }
}

/// Reads every block to be copied and compares its checksum. This is needed because a
/// compaction that meets damage fails, and every later write to the database fails with it.
pub(super) fn check(repository: &Repository, unit: &Unit) -> Result<()> {
    if unit.family == Family::Chunks {
        let mut buffers = BlockBuffers::default();
        let database = repository.database();
        if unit.files.iter().all(|file| database.has_sound_blocks(file, &mut buffers)) {
            return Ok(());
        }
    }
    // RocksDB names the fault, and reads data that only it can read.
    let mut cursor = repository.database().cursor(unit.family, ReadMode::Scan)?;
    let last = unit.ids.end().to_be_bytes();
    cursor.seek(&unit.ids.start().to_be_bytes())?;
    while cursor.entry().is_some_and(|(key, _)| *key < last[..]) {
        cursor.next()?;
    }
    Ok(())
}
