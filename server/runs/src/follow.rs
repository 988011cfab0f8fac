//! Reading a log while it grows.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use coldrise_block::{Context, Result};

use crate::documents::LogLine;
use crate::folder::RunsFolder;
use crate::run_files::RunFiles;
use crate::{RunId, log};

/// Interval of looking for new lines.
const INTERVAL: Duration = Duration::from_millis(200);
/// Bytes of one read, and the longest line that is kept.
const PIECE_BYTES: u64 = 64 << 10;

/// The lines of a log from its beginning to the end of the run. Waits for new ones.
pub struct Follow {
    run: RunFiles,
    file: Option<File>,
    partial: Vec<u8>,
    ready: VecDeque<LogLine>,
}

impl RunsFolder {
    /// Follows the log of a run.
    ///
    /// # Errors
    /// `NotFound` if there is no such run.
    pub fn follow(&self, id: &RunId) -> Result<Follow> {
        let (partial, ready) = (Vec::new(), VecDeque::new());
        Ok(Follow { run: self.open(id)?, file: None, partial, ready })
    }
}

impl Follow {
    /// Reads the next piece. Returns whether there was one.
    fn read_piece(&mut self) -> Result<bool> {
        if self.file.is_none() {
            self.file = self.run.file("log").ok();
        }
        let Some(file) = &mut self.file else { return Ok(false) };
        // Asked before the read: lines written before the log was renamed are read below.
        let number = |file: &File| file.metadata().map(|found| found.ino()).ok();
        let is_renamed = self.run.file("log").is_ok_and(|new| number(&new) != number(file));
        let before = self.partial.len();
        file.take(PIECE_BYTES).read_to_end(&mut self.partial).context(|| "reading the log")?;
        let has_grown = self.partial.len() > before;
        if let Some(end) = self.partial.iter().rposition(|byte| *byte == b'\n') {
            self.ready.extend(log::parse(&self.partial[..end]));
            self.partial.drain(..=end);
        }
        if self.partial.len() as u64 > PIECE_BYTES {
            self.partial.clear();
        }
        if is_renamed && !has_grown {
            self.file = None;
            return Ok(true);
        }
        Ok(has_grown)
    }
}

impl Iterator for Follow {
    type Item = Result<LogLine>;

    fn next(&mut self) -> Option<Result<LogLine>> {
        loop {
            if let Some(line) = self.ready.pop_front() {
                return Some(Ok(line));
            }
            let is_alive = self.run.is_locked().unwrap_or(false);
            match self.read_piece() {
                Err(error) => return Some(Err(error)),
                Ok(true) => {}
                Ok(false) if is_alive => std::thread::sleep(INTERVAL),
                Ok(false) => return None,
            }
        }
    }
}
