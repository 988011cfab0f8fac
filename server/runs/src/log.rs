//! The log of a run: JSON lines, in two halves.
//!
//! When `log` exceeds its bound, it is renamed to `log.1`, which is replaced, and a new `log`
//! begins with the line of [`Beginning`]. Lines are not synced.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::documents::LogLine;
use crate::run_files::RunFiles;

/// Size at which the log is renamed, in bytes.
const MAX_BYTES: u64 = 8 << 20;
/// Maximum length of a line's text, in bytes.
pub(crate) const MAX_TEXT_BYTES: usize = 8 << 10;
/// Length of the end of a log that readers look at, in bytes.
const TAIL_BYTES: u64 = 64 << 10;

/// The first line of a half of the log.
#[derive(Serialize, Deserialize)]
pub(crate) struct Beginning {
    /// Number of bytes logged before.
    pub(crate) from_byte: u64,
}

/// A log that is open for writing.
pub(crate) struct LogFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// Number of bytes that were logged before this file.
    from_byte: u64,
    /// A failed write may have left a part of a line.
    is_torn: bool,
}

impl LogFile {
    pub(crate) fn create(folder: &Path) -> std::io::Result<LogFile> {
        let path = folder.join("log");
        Ok(LogFile { file: new_file(&path)?, path, bytes: 0, from_byte: 0, is_torn: false })
    }

    /// The run's folder was renamed.
    pub(crate) fn moved_to(&mut self, folder: &Path) {
        self.path = folder.join("log");
    }

    pub(crate) fn append(&mut self, line: &LogLine) -> std::io::Result<()> {
        if self.bytes > MAX_BYTES {
            match std::fs::rename(&self.path, self.path.with_file_name("log.1")) {
                // The new file could not be made the last time.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                renamed => renamed?,
            }
            let old = std::mem::replace(&mut self.file, new_file(&self.path)?);
            self.from_byte = self.from_byte.saturating_add(old.metadata()?.len());
            self.bytes = 0;
            self.is_torn = false;
        }
        let mut text = if self.is_torn { b"\n".to_vec() } else { Vec::new() };
        if self.bytes == 0 && self.from_byte > 0 {
            serde_json::to_writer(&mut text, &Beginning { from_byte: self.from_byte })?;
            text.push(b'\n');
        }
        serde_json::to_writer(&mut text, line)?;
        text.push(b'\n');
        let written = self.file.write_all(&text);
        self.is_torn = written.is_err();
        self.bytes = self.bytes.saturating_add(text.len() as u64);
        written
    }
}

fn new_file(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().append(true).create_new(true).mode(0o600).open(path)
}

/// The readable lines at the end of a log. Damaged lines are skipped.
pub(crate) fn tail(run: &RunFiles) -> Vec<LogLine> {
    let read = |name| {
        let mut file = run.file(name).ok()?;
        let from = file.metadata().ok()?.len().saturating_sub(TAIL_BYTES);
        file.seek(SeekFrom::Start(from)).ok()?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    };
    let lines = read("log").map(|bytes| parse(&bytes)).unwrap_or_default();
    match lines.is_empty() {
        // The log was renamed a moment ago.
        true => read("log.1").map(|bytes| parse(&bytes)).unwrap_or_default(),
        false => lines,
    }
}

/// The first progress in a log that has this field. At most the oldest 8 MiB of a log may be gone.
pub(crate) fn first_progress(run: &RunFiles, field: &str) -> Option<Value> {
    ["log.1", "log"].into_iter().find_map(|name| {
        let mut bytes = Vec::new();
        // Lines that were read before an error count.
        let _ = run.file(name).map(|file| file.take(2 * MAX_BYTES).read_to_end(&mut bytes));
        let mut all = parse(&bytes).into_iter().filter_map(|line| line.progress);
        all.find(|progress| progress.get(field).is_some())
    })
}

/// The readable lines of a piece of a log.
pub(crate) fn parse(bytes: &[u8]) -> Vec<LogLine> {
    bytes
        .split(|byte| *byte == b'\n')
        .filter_map(|line| serde_json::from_slice(line).ok())
        .collect()
}
