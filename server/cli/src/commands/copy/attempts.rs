//! A copy over a line that breaks: it connects again and goes on.
//!
//! Nothing is remembered between two attempts: each asks the other site what it has. Points that are complete are
//! not copied again, and content that is there is not sent again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::Progress;
use coldrise_line::{connect, Identity, LineOptions, LineStatistics, PeerKey};
use coldrise_replica::{copy, CopyRequest, CopySummary, FarSide, LineFar, MachineCopy, Traffic};
use coldrise_store::Repository;

use crate::units::show_duration;

/// The first wait, which doubles with every attempt that fails.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// The longest wait.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Interval of looking whether the copy was cancelled.
const INTERVAL: Duration = Duration::from_millis(100);

/// The other site, and how long to go on trying.
pub(super) struct Site<'a> {
    pub(super) address: &'a str,
    pub(super) identity: Identity,
    pub(super) peer: PeerKey,
    pub(super) options: LineOptions,
    /// Time without progress after which a broken line fails the copy.
    pub(super) patience: Duration,
}

/// The result of all attempts together.
pub(super) struct Attempts {
    pub(super) copied: Result<CopySummary>,
    /// What was sent over all lines.
    pub(super) traffic: Traffic,
    /// Of the last line; the bytes are those of all.
    pub(super) statistics: LineStatistics,
}

/// Copies what `request` says to the site.
///
/// # Errors
/// Those of the first connection: a site that was never reached is not waited for.
pub(super) fn copy_to(
    site: &Site<'_>,
    source: &Arc<Repository>,
    request: &CopyRequest,
    progress: &dyn Progress,
    cancel: &Arc<AtomicBool>,
) -> Result<Attempts> {
    let reach = || {
        let line = connect(site.address, &site.identity, site.peer, &site.options)?;
        LineFar::new(Arc::new(line), source.id(), Arc::clone(cancel))
    };
    let mut far = reach()?;
    let mut all = Attempts {
        copied: Ok(CopySummary::default()),
        traffic: Traffic::default(),
        statistics: LineStatistics::default(),
    };
    let (mut wait, mut last_progress) = (FIRST_WAIT, Instant::now());
    let mut was_lost = false;
    loop {
        let copied = copy(source, &far, request, progress, cancel);
        let (loss, traffic) = (far.loss(), far.traffic());
        all.add(copied, traffic, far.statistics());
        drop(far);
        if traffic.content_bytes > 0 {
            (wait, last_progress) = (FIRST_WAIT, Instant::now());
        }
        was_lost |= loss.is_some();
        let Some(why) = all.reason(loss, was_lost) else { return Ok(all) };
        let left = || site.patience.saturating_sub(last_progress.elapsed());
        if left().is_zero() {
            return Ok(all);
        }
        tracing::warn!("{why}; trying again for {}", show_duration(left()));
        far = loop {
            if !pause(wait, cancel) {
                all.copied = Err(Error::new(ErrorKind::Interrupted, "cancelled"));
                return Ok(all);
            }
            wait = (wait * 2).min(LONGEST_WAIT);
            match reach() {
                Ok(far) => break far,
                Err(error) if error.kind() != ErrorKind::Io => {
                    all.copied = Err(error);
                    return Ok(all);
                }
                Err(_) if left().is_zero() => return Ok(all),
                Err(_) => {}
            }
        };
    }
}

impl Attempts {
    /// Adds the next attempt.
    fn add(&mut self, copied: Result<CopySummary>, traffic: Traffic, now: LineStatistics) {
        self.traffic = self.traffic + traffic;
        let before = std::mem::replace(&mut self.statistics, now);
        self.statistics.sent_bytes += before.sent_bytes;
        self.statistics.received_bytes += before.received_bytes;
        let earlier = std::mem::replace(&mut self.copied, copied);
        if let (Ok(earlier), Ok(now)) = (earlier, &mut self.copied) {
            join(earlier, now);
        }
    }

    /// Why another attempt makes sense: the line was lost, or the other site still holds a machine for a line that was.
    fn reason(&self, loss: Option<Error>, was_lost: bool) -> Option<String> {
        let summary = self.copied.as_ref().ok()?;
        let errors = || summary.machines.iter().filter_map(|machine| machine.error.as_ref());
        errors().next()?;
        if let Some(loss) = loss {
            return Some(loss.full_message());
        }
        let busy = errors().find(|error| was_lost && error.kind() == ErrorKind::Busy);
        busy.map(Error::full_message)
    }
}

/// Adds what `earlier` attempts copied to the last one.
fn join(earlier: CopySummary, now: &mut CopySummary) {
    for before in earlier.machines {
        let same = |machine: &&mut MachineCopy| machine.machine == before.machine;
        if let Some(machine) = now.machines.iter_mut().find(same) {
            machine.there = machine.there.saturating_sub(before.copied.len());
            machine.copied.splice(0..0, before.copied);
            machine.traffic = machine.traffic + before.traffic;
        }
    }
}

/// Waits; `false` if the copy was cancelled.
fn pause(wait: Duration, cancel: &AtomicBool) -> bool {
    let started = Instant::now();
    while started.elapsed() < wait {
        if cancel.load(Ordering::Relaxed) {
            return false;
        }
        std::thread::sleep(INTERVAL);
    }
    true
}
