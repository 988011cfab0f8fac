//! What is to be rewritten is read before, and how far it all has come.

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::repository::Repository;
use crate::rocks::{BlockBuffers, Family, ReadMode};

use super::units::Unit;

/// How much of a file may be of no use before it is rewritten, in percent of what lies in
/// it. At 0 every file is in which anything is of no use, at 100 none.
///
/// Chunks that stay are not lost space alone: a backup of the same content uses them again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u8")]
pub struct MaxUnused(u8);

impl MaxUnused {
    pub(super) fn percent(self) -> u64 {
        u64::from(self.0)
    }
}

/// At most as much is copied as is given back.
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
        // What is no such number is out of the range, too.
        text.strip_suffix('%').unwrap_or(text).parse().unwrap_or(u8::MAX).try_into()
    }
}

/// How to give space back.
#[derive(Clone, Copy)]
pub struct ReclaimOptions<'a> {
    /// Which files are rewritten.
    pub max_unused: MaxUnused,
    /// Set by whoever wants to end it. It ends after the step under way.
    pub cancel: &'a AtomicBool,
    /// Hears how far it has come, from several threads.
    pub progress: &'a (dyn Fn(ReclaimProgress) + Sync),
}

impl ReclaimOptions<'_> {
    /// Fails with `Interrupted` once it was cancelled.
    pub(super) fn go_on(&self) -> Result<()> {
        match self.cancel.load(Ordering::Relaxed) {
            true => Err(Error::new(ErrorKind::Interrupted, "cancelled")),
            false => Ok(()),
        }
    }
}

/// How far a gc has come with the files that it rewrites.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimProgress {
    /// Bytes that were checked, and bytes that were rewritten.
    pub done_bytes: u64,
    /// All there are to check and to rewrite.
    pub total_bytes: u64,
}

/// The work of one gc.
pub(super) struct Work<'a> {
    options: &'a ReclaimOptions<'a>,
    progress: Mutex<ReclaimProgress>,
}

impl<'a> Work<'a> {
    pub(super) fn max_unused(&self) -> MaxUnused {
        self.options.max_unused
    }

    pub(super) fn new(options: &'a ReclaimOptions<'a>) -> Work<'a> {
        Work { options, progress: Mutex::default() }
    }

    pub(super) fn go_on(&self) -> Result<()> {
        self.options.go_on()
    }

    /// Says what there is to do.
    pub(super) fn plan<'u>(&self, units: impl Iterator<Item = &'u Unit>) {
        let copied = units.filter(|unit| unit.is_copied());
        self.progress.lock().total_bytes = copied.map(|unit| 2 * unit.bytes).sum();
    }

    /// Says that as many more bytes are done.
    pub(super) fn advance(&self, bytes: u64) {
        let now = {
            let mut progress = self.progress.lock();
            progress.done_bytes += bytes;
            *progress
        };
        (self.options.progress)(now);
    }
}

/// Reads every block of what is to be copied and compares it with its checksum: a
/// compaction that meets damage fails, and with it every later write to the database.
pub(super) fn check(repository: &Repository, unit: &Unit) -> Result<()> {
    if unit.family == Family::Chunks {
        let mut buffers = BlockBuffers::default();
        let database = repository.database();
        if unit.files.iter().all(|file| database.has_sound_blocks(file, &mut buffers)) {
            return Ok(());
        }
    }
    // RocksDB tells what is wrong, and reads what only it can.
    let mut cursor = repository.database().cursor(unit.family, ReadMode::Scan)?;
    let last = unit.ids.end().to_be_bytes();
    cursor.seek(&unit.ids.start().to_be_bytes())?;
    while cursor.entry().is_some_and(|(key, _)| *key < last[..]) {
        cursor.next()?;
    }
    Ok(())
}
