//! Points dated in the future, and the meaning of `latest` beside them.
//!
//! A clock that was once wrong must not decide for years which point is `latest`, and a clock that
//! is wrong now must not hide the newest backup. So two things count: the clock, and the backup
//! that was stored last. `latest` skips a point that is later than both.

use coldrise_block::{ErrorKind, Result};

use crate::{MachineName, PointName, Repository};

/// Clocks of two hosts may differ by this many seconds and still count as right.
const TOLERANCE_SECONDS: u64 = 300;

/// The time up to which the points of one machine count for `latest`.
#[derive(Clone, Copy, Debug)]
pub struct ClockGuard {
    /// The clock with its tolerance, in seconds since 1970-01-01T00:00:00Z.
    clock_seconds: u64,
    /// The clock, or the time of the last stored backup if that is later.
    latest_seconds: u64,
}

impl ClockGuard {
    /// The clock guard of a machine at the present time. `last_backup` is the backup that was stored
    /// last, unless it is gone or in quarantine.
    pub fn new(last_backup: Option<&PointName>) -> ClockGuard {
        let now = u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or(0);
        let clock_seconds = now.saturating_add(TOLERANCE_SECONDS);
        let last_seconds = last_backup.map_or(0, PointName::unix_seconds);
        ClockGuard { clock_seconds, latest_seconds: clock_seconds.max(last_seconds) }
    }

    /// Whether the point is dated in the future, according to the clock.
    pub fn is_in_future(&self, point: &PointName) -> bool {
        point.unix_seconds() > self.clock_seconds
    }

    /// Whether `latest` skips the point: it is dated in the future, and a backup with an earlier
    /// name was stored after it.
    pub fn is_passed_over(&self, point: &PointName) -> bool {
        point.unix_seconds() > self.latest_seconds
    }

    /// A warning about the points of a machine that are dated in the future; `None` if there are
    /// none.
    pub fn warning<'a>(
        &self,
        machine: &MachineName,
        points: impl IntoIterator<Item = &'a PointName>,
    ) -> Option<String> {
        let future: Vec<_> = points.into_iter().filter(|point| self.is_in_future(point)).collect();
        let newest = future.iter().max()?;
        let latest = future.iter().filter(|point| !self.is_passed_over(point)).max();
        let clock = PointName::from_time(jiff::Timestamp::now()).ok()?;
        let (what, them) = match future.len() {
            1 => ("is".to_owned(), "it"),
            2 => ("and 1 more point are".to_owned(), "them"),
            count => (format!("and {} more points are", count - 1), "them"),
        };
        let consequence = match latest {
            Some(latest) => format!("latest means {latest} until the next backup"),
            None => format!("latest passes over {them}"),
        };
        Some(format!(
            "{machine}/{newest} {what} dated in the future (it is {clock} here): a clock was \
             wrong then, or is wrong now; {consequence}"
        ))
    }
}

impl Repository {
    /// The clock guard of a machine at the present time.
    ///
    /// # Errors
    /// Errors of reading the catalog. A damaged document of the machine is not an error: then only
    /// the clock counts.
    pub fn clock_guard(&self, machine: &MachineName) -> Result<ClockGuard> {
        let clock = ClockGuard::new(None);
        let last = match self.last_backup(machine) {
            Err(error) if error.kind() == ErrorKind::Corrupt => None,
            last => last?,
        };
        let is_offered = |last: &PointName| match self.point(machine, last) {
            Ok(point) => point.quarantine.is_none(),
            Err(_) => false,
        };
        let last = last.filter(|last| clock.is_in_future(last) && is_offered(last));
        Ok(ClockGuard::new(last.as_ref()))
    }
}
