//! Lines from a socket, with a limit on their length and a deadline.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use coldrise_block::{Context, Error, ErrorKind, Result};

use crate::{MAX_LINE_BYTES, MIN_WAIT};

const READ_BYTES: usize = 16 << 10;

/// The bytes after the last whole line.
#[derive(Default)]
pub(crate) struct Lines {
    pending: Vec<u8>,
    /// This many of the pending bytes contain no line end.
    scanned: usize,
}

impl Lines {
    /// The next line without its end; `None` at the deadline. Empty lines are skipped.
    ///
    /// # Errors
    /// `ToolFailed` if the line is too long or the connection ends; `Io` if reading fails.
    pub(crate) fn next(
        &mut self,
        stream: &mut UnixStream,
        until: Instant,
    ) -> Result<Option<Vec<u8>>> {
        let mut piece = vec![0; READ_BYTES];
        loop {
            if let Some(line) = self.take() {
                return Ok(Some(line));
            }
            if self.pending.len() > MAX_LINE_BYTES {
                let text =
                    format!("QEMU's monitor sent more than {MAX_LINE_BYTES} bytes in one line");
                return Err(Error::new(ErrorKind::ToolFailed, text));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let reading = || "reading from QEMU's monitor";
            stream.set_read_timeout(Some(left.max(MIN_WAIT))).context(reading)?;
            match stream.read(&mut piece) {
                Ok(0) => {
                    let text = "QEMU closed the connection to its monitor";
                    return Err(Error::new(ErrorKind::ToolFailed, text));
                }
                Ok(count) => self.pending.extend(piece.iter().take(count)),
                Err(error) => match error.kind() {
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {}
                    std::io::ErrorKind::Interrupted => {}
                    _ => return Err(error).context(reading),
                },
            }
        }
    }

    fn take(&mut self) -> Option<Vec<u8>> {
        loop {
            let found = self.pending.iter().skip(self.scanned).position(|byte| *byte == b'\n');
            let Some(end) = found.map(|end| end + self.scanned) else {
                self.scanned = self.pending.len();
                return None;
            };
            let rest = self.pending.split_off(end + 1);
            let line = std::mem::replace(&mut self.pending, rest);
            self.scanned = 0;
            let line = line.trim_ascii();
            if !line.is_empty() {
                return Some(line.to_vec());
            }
        }
    }
}
