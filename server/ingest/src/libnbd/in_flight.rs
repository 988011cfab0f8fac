//! Keeps several requests of a connection in flight.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};

use super::{Connection, POLL_MS, cancelled, ffi, last_error};

/// Requests that one call keeps in flight.
const MAX_IN_FLIGHT: usize = 8;
/// A server that has not moved a byte for this long counts as dead.
const SILENCE_LIMIT: Duration = Duration::from_secs(300);

impl Connection<'_> {
    /// Cuts `0..total` into pieces of at most `piece` bytes and keeps up to
    /// [`MAX_IN_FLIGHT`] of them in flight. `issue(handle, at, length)` starts one and
    /// returns its cookie. Any failure closes the handle, so that no request outlives the
    /// call.
    pub(super) fn batch(
        &mut self,
        total: u64,
        piece: u64,
        what: &str,
        mut issue: impl FnMut(*mut ffi::NbdHandle, u64, u64) -> i64,
    ) -> Result<()> {
        let result = self.run_batch(total, piece, what, &mut issue);
        if result.is_err() {
            self.close();
        }
        result
    }

    fn run_batch(
        &mut self,
        total: u64,
        piece: u64,
        what: &str,
        issue: &mut dyn FnMut(*mut ffi::NbdHandle, u64, u64) -> i64,
    ) -> Result<()> {
        let mut next = 0;
        let mut in_flight: Vec<u64> = Vec::with_capacity(MAX_IN_FLIGHT);
        while next < total || !in_flight.is_empty() {
            while next < total && in_flight.len() < MAX_IN_FLIGHT {
                let length = piece.min(total - next);
                let cookie = issue(self.live()?, next, length);
                in_flight.push(u64::try_from(cookie).map_err(|_| last_error(what))?);
                next += length;
            }
            self.wait(what, |handle| retire(handle, &mut in_flight, what))?;
        }
        Ok(())
    }

    /// Polls until `done` returns true. Checks the cancel flag and the silence limit.
    pub(super) fn wait(
        &mut self,
        what: &str,
        mut done: impl FnMut(*mut ffi::NbdHandle) -> Result<bool>,
    ) -> Result<()> {
        let handle = self.live()?;
        let mut last_progress = Instant::now();
        loop {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(cancelled());
            }
            if done(handle)? {
                return Ok(());
            }
            // SAFETY: a live handle. Memory lent to its requests is still borrowed by the
            // caller of this method.
            match unsafe { ffi::nbd_poll(handle, POLL_MS) } {
                1 => last_progress = Instant::now(),
                0 if last_progress.elapsed() > SILENCE_LIMIT => {
                    return Err(Error::new(
                        ErrorKind::Io,
                        format!(
                            "{what}: the NBD server has not answered for {} s",
                            SILENCE_LIMIT.as_secs()
                        ),
                    ));
                }
                0 => {}
                _ => return Err(last_error(what)),
            }
        }
    }
}

/// Retires completed requests; true if there was at least one, so that the next can start.
fn retire(handle: *mut ffi::NbdHandle, in_flight: &mut Vec<u64>, what: &str) -> Result<bool> {
    let before = in_flight.len();
    let mut failed = None;
    in_flight.retain(|&cookie| {
        if failed.is_some() {
            return true;
        }
        // SAFETY: a live handle and an unretired cookie that the handle gave out.
        match unsafe { ffi::nbd_aio_command_completed(handle, cookie) } {
            0 => true,
            1 => false,
            _ => {
                failed = Some(last_error(what));
                false
            }
        }
    });
    match failed {
        Some(error) => Err(error),
        None => Ok(in_flight.len() < before),
    }
}
