//! Reading a log piece by piece, from an offset that outlives the renaming of the log.
//!
//! An offset counts all bytes that were ever logged. The first line of each half but the first
//! says at which offset the half begins: `{"from_byte":8388652}`.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};

use coldrise_block::{Context, Result};

use crate::RunId;
use crate::documents::LogLine;
use crate::folder::RunsFolder;
use crate::log::{self, Beginning};

/// Bounds of a piece, in bytes. Lines are shorter than the lower one.
const MIN_PIECE_BYTES: u64 = 64 << 10;
const MAX_PIECE_BYTES: u64 = 4 << 20;
/// Maximum length of a [`Beginning`], in bytes.
const MAX_BEGINNING_BYTES: u64 = 64;

/// A half of the log, open for reading.
struct Half {
    file: File,
    from_byte: u64,
    end_byte: u64,
}

impl RunsFolder {
    /// The lines of a run's log from an offset on, about `max_bytes` of them (64 KiB to 4 MiB), and the
    /// offset of the next ones. Begin with 0. Only whole lines are read; an offset before the
    /// oldest kept line means that line, and one behind the end means the end. Damaged lines are skipped.
    ///
    /// # Errors
    /// `NotFound` if there is no such run; errors of the operating system.
    pub fn log_from(&self, id: &RunId, offset: u64, max_bytes: u64) -> Result<(Vec<LogLine>, u64)> {
        let run = self.open(id)?;
        // The newer half first: if it is renamed now, both are one file.
        let mut halves = Vec::new();
        for name in ["log", "log.1"] {
            if let Ok(file) = run.file(name) {
                let half = Half::open(file).context(|| format!("reading {name} of run {id}"))?;
                halves.push(half);
            }
        }
        let oldest = halves.iter().map(|half| half.from_byte).min().unwrap_or(0);
        let end = halves.iter().map(|half| half.end_byte).max().unwrap_or(0);
        let offset = offset.clamp(oldest, end);
        let newer = halves.iter().map(|half| half.from_byte).max().filter(|from| *from > offset);
        let covering = |half: &&mut Half| (half.from_byte..=half.end_byte).contains(&offset);
        // At the border of both, the half that continues.
        let half = halves.iter_mut().filter(covering);
        let Some(half) = half.max_by_key(|half| (half.end_byte > offset, half.from_byte)) else {
            return Ok((Vec::new(), newer.unwrap_or(offset)));
        };
        let max_bytes = max_bytes.clamp(MIN_PIECE_BYTES, MAX_PIECE_BYTES);
        let piece =
            half.read(offset, max_bytes).context(|| format!("reading the log of run {id}"))?;
        let next = match piece.iter().rposition(|byte| *byte == b'\n') {
            Some(end) => offset + end as u64 + 1,
            // Longer than any line: damaged.
            None if piece.len() as u64 == max_bytes => offset + max_bytes,
            // A torn line at the end of the older half is never completed.
            None => newer.unwrap_or(offset),
        };
        Ok((log::parse(&piece), next))
    }
}

impl Half {
    fn open(mut file: File) -> std::io::Result<Half> {
        let mut first = Vec::new();
        BufReader::new((&mut file).take(MAX_BEGINNING_BYTES)).read_until(b'\n', &mut first)?;
        let from_byte =
            serde_json::from_slice(&first).map_or(0, |begin: Beginning| begin.from_byte);
        let end_byte = from_byte.saturating_add(file.metadata()?.len());
        Ok(Half { file, from_byte, end_byte })
    }

    fn read(&mut self, offset: u64, max_bytes: u64) -> std::io::Result<Vec<u8>> {
        let mut piece = Vec::new();
        self.file.seek(SeekFrom::Start(offset - self.from_byte))?;
        (&mut self.file).take(max_bytes).read_to_end(&mut piece)?;
        Ok(piece)
    }
}
