//! A copy over a line that breaks: it connects again and continues.
//!
//! Nothing is remembered between two attempts: each asks the receiving site what it has. A window in which nothing is sent ends an
//! attempt, too: no line and no machine is held meanwhile. Points that are complete are
//! not copied again, and content that is there is not sent again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::{Flow, RateLimit};
use coldrise_line::{Identity, Line, LineOptions, LineStatistics, PeerKey, connect};
use coldrise_session::{RepositoryAccess, SharedWriter};
use coldrise_store::Repository;

use coldrise_block::units::show_duration;

use crate::{
    CopyProgress, CopyRequest, CopySummary, FetchRequest, LineRemote, MachineCopy, RateWindows,
    Remote, Traffic, copy, fetch, limit_fetch, local_time,
};

/// The first wait, which doubles with every attempt that fails.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// The longest wait.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Interval of looking whether the copy was cancelled.
const INTERVAL: Duration = Duration::from_millis(100);

/// The other site, and how to keep trying.
pub struct Site<'a> {
    /// Host and port.
    pub address: &'a str,
    /// This site's key.
    pub identity: Identity,
    /// The other site's key.
    pub peer: PeerKey,
    /// Time without progress after which a broken line fails the copy.
    pub patience: Duration,
    /// When how much may be sent.
    pub windows: &'a RateWindows,
}

/// Which side has the points.
pub enum Way<'a> {
    /// This site; the other one gets them.
    To {
        /// The repository with the points.
        source: &'a Arc<Repository>,
        /// The points to copy.
        request: &'a CopyRequest,
    },
    /// The other site; this one gets them.
    From {
        /// The repository that gets them.
        access: &'a RepositoryAccess,
        /// The points to fetch.
        request: &'a FetchRequest,
        /// Stands before the names of machines here.
        prefix: &'a str,
    },
}

/// The result of all attempts together.
pub struct Attempts {
    /// The copied points, by machine.
    pub copied: Result<CopySummary>,
    /// The traffic of all lines.
    pub traffic: Traffic,
    /// Statistics of the last line; the bytes are those of all.
    pub statistics: LineStatistics,
}

/// The result of one attempt.
struct Attempt {
    copied: Result<CopySummary>,
    /// Why the line was lost, if it was.
    loss: Option<Error>,
    traffic: Traffic,
    statistics: LineStatistics,
    /// A window in which nothing is sent has begun.
    was_stopped: bool,
}

impl Attempt {
    /// The line was lost before anything was said.
    fn lost(error: Error) -> Attempt {
        Attempt {
            loss: Some(Error::new(ErrorKind::Io, error.full_message())),
            copied: Err(error),
            traffic: Traffic::default(),
            statistics: LineStatistics::default(),
            was_stopped: false,
        }
    }
}

/// Copies over a line to the site, or from it.
///
/// # Errors
/// Those of the first connection: a site that was never reached is not waited for.
pub fn copy_over(
    site: &Site<'_>,
    way: &Way<'_>,
    progress: &dyn CopyProgress,
    cancel: &Arc<AtomicBool>,
) -> Result<Attempts> {
    let mut all = Attempts {
        copied: Ok(CopySummary::default()),
        traffic: Traffic::default(),
        statistics: LineStatistics::default(),
    };
    let (mut wait, mut last_progress) = (FIRST_WAIT, Instant::now());
    let (mut is_first, mut was_lost) = (true, false);
    loop {
        if !wait_for_window(site.windows, cancel) {
            all.copied = Err(Error::new(ErrorKind::Interrupted, "cancelled"));
            return Ok(all);
        }
        match attempt(site, way, progress, cancel) {
            Err(error) if is_first => return Err(error),
            Err(error) if ![ErrorKind::Io, ErrorKind::Busy].contains(&error.kind()) => {
                all.copied = Err(error);
                return Ok(all);
            }
            Err(_) if left(site, last_progress).is_zero() => return Ok(all),
            Err(_) => {}
            Ok(attempt) => {
                let (has_moved, was_stopped) =
                    (attempt.traffic.content_bytes > 0, attempt.was_stopped);
                was_lost |= attempt.loss.is_some();
                let Some(why) = all.add(attempt, was_lost) else { return Ok(all) };
                if has_moved || was_stopped {
                    (wait, last_progress) = (FIRST_WAIT, Instant::now());
                }
                if was_stopped {
                    continue;
                }
                let left = left(site, last_progress);
                if left.is_zero() {
                    return Ok(all);
                }
                tracing::warn!("{why}; trying again for {}", show_duration(left));
            }
        }
        is_first = false;
        if !pause(wait, cancel) {
            all.copied = Err(Error::new(ErrorKind::Interrupted, "cancelled"));
            return Ok(all);
        }
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

fn left(site: &Site<'_>, last_progress: Instant) -> Duration {
    site.patience.saturating_sub(last_progress.elapsed())
}

/// Connects, and copies until the end, the loss of the line, or a window in which nothing is sent.
///
/// # Errors
/// Those of connecting.
fn attempt(
    site: &Site<'_>,
    way: &Way<'_>,
    progress: &dyn CopyProgress,
    cancel: &Arc<AtomicBool>,
) -> Result<Attempt> {
    // A window that begins while the line is set up is followed then.
    let begun = match site.windows.flow(local_time()) {
        Flow::Stopped => Flow::Free,
        flow => flow,
    };
    let rate = rate_of(begun);
    let is_source = matches!(way, Way::To { .. });
    let rate_here = rate.filter(|_| is_source);
    let options = LineOptions { rate_bytes_per_second: rate_here, ..LineOptions::default() };
    let line = Arc::new(connect(site.address, &site.identity, site.peer, &options)?);
    let was_stopped = AtomicBool::new(false);
    let follow = |flow| match flow {
        Flow::Stopped => {
            was_stopped.store(true, Ordering::Relaxed);
            line.close();
        }
        _ if is_source => line.set_rate(rate_of(flow)),
        _ => {
            if let Err(error) = limit_fetch(&*line, rate_of(flow)) {
                tracing::debug!("{}", error.full_message());
            }
        }
    };
    let (copied, loss, traffic) = match way {
        Way::To { source, request } => {
            let greeted = LineRemote::new(Arc::clone(&line) as _, source.id(), Arc::clone(cancel));
            let remote = match greeted {
                Err(error) if error.kind() == ErrorKind::Io => return Ok(Attempt::lost(error)),
                greeted => greeted?,
            };
            let follow = |flow| {
                if flow == Flow::Stopped {
                    remote.pause();
                }
                follow(flow);
            };
            let copied = within(site.windows, begun, follow, || {
                copy(*source, &remote, request, progress, cancel)
            });
            (copied, remote.loss(), remote.traffic())
        }
        Way::From { access, request, prefix } => {
            let remote = SharedWriter::join(access, cancel)?;
            let request = FetchRequest { rate_bytes_per_second: rate, ..(*request).clone() };
            let fetched = within(site.windows, begun, follow, || {
                fetch(&*line, &remote, &request, prefix, progress, cancel)
            });
            (fetched.copied, fetched.loss, fetched.traffic)
        }
    };
    let statistics = line.statistics();
    let was_stopped = was_stopped.load(Ordering::Relaxed);
    Ok(Attempt { copied, loss, traffic, statistics, was_stopped })
}

/// Does `work` below a limit that follows the windows. Says when nothing may flow.
pub fn paced<T>(windows: &RateWindows, limit: &RateLimit, work: impl FnOnce() -> T) -> T {
    let set = |flow| {
        if flow == Flow::Stopped {
            tell_wait(windows);
        }
        limit.set(flow);
    };
    let begun = windows.flow(local_time());
    set(begun);
    within(windows, begun, set, work)
}

/// Does `work`, and tells `apply` beside it what may flow whenever that changes, from `begun` on.
fn within<T>(
    windows: &RateWindows,
    begun: Flow,
    apply: impl FnMut(Flow) + Send,
    work: impl FnOnce() -> T,
) -> T {
    if windows.are_constant() {
        return work();
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let is_over = &is_over;
        scope.spawn(move || {
            windows.follow(begun, &local_time, &|| is_over.load(Ordering::Relaxed), apply);
        });
        let _over = Over(is_over);
        work()
    })
}

/// Sets the flag when it is dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn rate_of(flow: Flow) -> Option<u64> {
    match flow {
        Flow::At(rate) => Some(rate.bytes_per_second()),
        Flow::Stopped | Flow::Free => None,
    }
}

/// Says that nothing is sent at this time, and until when.
fn tell_wait(windows: &RateWindows) {
    let until = windows.opens(local_time()).map(|time| time.strftime("%a %H:%M").to_string());
    let off: Vec<_> = windows.stopping().map(ToString::to_string).collect();
    let (off, until) = (off.join(", "), until.unwrap_or_default());
    tracing::warn!("nothing is sent at this time ({off}): waiting until {until}");
}

/// Waits until something may be sent; `false` if the copy was cancelled.
fn wait_for_window(windows: &RateWindows, cancel: &AtomicBool) -> bool {
    let mut is_reported = false;
    loop {
        if windows.flow(local_time()) != Flow::Stopped {
            return !cancel.load(Ordering::Relaxed);
        }
        if !std::mem::replace(&mut is_reported, true) {
            tell_wait(windows);
        }
        if !pause(FIRST_WAIT, cancel) {
            return false;
        }
    }
}

impl Attempts {
    /// Adds the next attempt. Returns why another one makes sense: the line was lost, or a site still holds a
    /// machine for a line that was.
    fn add(&mut self, attempt: Attempt, was_lost: bool) -> Option<String> {
        let why = reason(&attempt, was_lost);
        self.traffic = self.traffic + attempt.traffic;
        let before = std::mem::replace(&mut self.statistics, attempt.statistics);
        self.statistics.sent_bytes += before.sent_bytes;
        self.statistics.received_bytes += before.received_bytes;
        match (&mut self.copied, attempt.copied) {
            // It was lost before anything was known.
            (Ok(earlier), Err(_)) if why.is_some() && !earlier.machines.is_empty() => {}
            (Ok(earlier), Ok(mut now)) => {
                join(std::mem::take(earlier), &mut now);
                self.copied = Ok(now);
            }
            (_, now) => self.copied = now,
        }
        why
    }
}

fn reason(attempt: &Attempt, was_lost: bool) -> Option<String> {
    let errors = match &attempt.copied {
        Ok(summary) => {
            summary.machines.iter().filter_map(|machine| machine.error.as_ref()).collect::<Vec<_>>()
        }
        Err(error) => vec![error],
    };
    errors.first()?;
    if let Some(loss) = &attempt.loss {
        return Some(loss.full_message());
    }
    let busy = errors.iter().find(|error| was_lost && error.kind() == ErrorKind::Busy);
    busy.map(|error| error.full_message())
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
pub(crate) fn pause(wait: Duration, cancel: &AtomicBool) -> bool {
    let started = Instant::now();
    while started.elapsed() < wait {
        if cancel.load(Ordering::Relaxed) {
            return false;
        }
        std::thread::sleep(INTERVAL);
    }
    true
}
