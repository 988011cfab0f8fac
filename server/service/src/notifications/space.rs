//! When the file system of the repository will be full.
//!
//! A line through the samples of the last days says how fast it fills. Samples are rare, so a single
//! backup or gc does not change the answer.

use std::path::Path;

use coldrise_block::{Context, Result};
use rusqlite::{Connection, Transaction, params};

use super::condition::{Condition, Severity, Topic};
use crate::database::{Database, SqlResult};

const HOUR_MS: i64 = 3600 * 1000;
const DAY_MS: i64 = 24 * HOUR_MS;
/// A sample is taken at most this often.
const SAMPLE_INTERVAL_MS: i64 = 6 * HOUR_MS;
/// Samples older than this do not count.
const SPAN_MS: i64 = 14 * DAY_MS;
/// The samples must span this long for a forecast.
const MIN_SPAN_MS: i64 = DAY_MS;
/// Warn below this many days until it is full, fail below those.
const WARN_DAYS: f64 = 30.0;
const FAIL_DAYS: f64 = 3.0;
/// A failure is raised below this part of the free percent that raise a warning.
const FAIL_PART: f64 = 0.3;
/// An alarm that holds is cleared only that much above its limit: it must not flap.
const CLEAR_FACTOR: f64 = 1.1;

/// The state of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Drive {
    pub(crate) used_bytes: i64,
    /// The space left for the service's user.
    pub(crate) available_bytes: i64,
}

impl Drive {
    /// Measures the file system that has `path`.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub(crate) fn of(path: &Path) -> Result<Drive> {
        let found = rustix::fs::statvfs(path).map_err(std::io::Error::from);
        let found = found.context(|| format!("reading the file system of {}", path.display()))?;
        let bytes =
            |blocks: u64| i64::try_from(blocks.saturating_mul(found.f_frsize)).unwrap_or(i64::MAX);
        Ok(Drive {
            used_bytes: bytes(found.f_blocks.saturating_sub(found.f_bfree)),
            available_bytes: bytes(found.f_bavail),
        })
    }

    /// The whole size, as far as the service can use it.
    pub(crate) fn size_bytes(self) -> i64 {
        self.used_bytes.saturating_add(self.available_bytes)
    }
}

/// Adds a sample if one is due, and returns all that count, the oldest first.
pub(super) fn sample(
    sql: &Transaction<'_>,
    drive: Drive,
    now_ms: i64,
) -> SqlResult<Vec<(i64, i64)>> {
    // After the clock was set back, samples of the future say nothing.
    sql.execute(
        "DELETE FROM space_samples WHERE at_ms < ?1 OR at_ms > ?2",
        [now_ms - SPAN_MS, now_ms],
    )?;
    let samples = samples(sql)?;
    if samples.last().is_some_and(|(at_ms, _)| now_ms - at_ms < SAMPLE_INTERVAL_MS) {
        return Ok(samples);
    }
    sql.execute(
        "INSERT INTO space_samples (at_ms, used_bytes, size_bytes) VALUES (?1, ?2, ?3)",
        params![now_ms, drive.used_bytes, drive.size_bytes()],
    )?;
    self::samples(sql)
}

fn samples(sql: &Connection) -> SqlResult<Vec<(i64, i64)>> {
    let mut found =
        sql.prepare_cached("SELECT at_ms, used_bytes FROM space_samples ORDER BY at_ms")?;
    let found = found.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    found.collect()
}

impl Database {
    /// When the repository's drive will be full by the samples that are stored: see [`full_at_ms`].
    ///
    /// # Errors
    /// Errors of the database.
    pub(crate) fn full_at_ms(&self, drive: Drive, now_ms: i64) -> Result<Option<i64>> {
        Ok(full_at_ms(&self.read(samples)?, drive, now_ms))
    }
}

/// When the drive will be full, in milliseconds since 1970; `None` if it does not fill up, or if
/// too little is known.
fn full_at_ms(samples: &[(i64, i64)], drive: Drive, now_ms: i64) -> Option<i64> {
    let (first, last) = (samples.first()?.0, samples.last()?.0);
    if samples.len() < 3 || last - first < MIN_SPAN_MS {
        return None;
    }
    let count = samples.len() as f64;
    let point = |(at, used): &(i64, i64)| ((at - first) as f64, *used as f64);
    let mean = |value: fn((f64, f64)) -> f64| {
        samples.iter().map(|sample| value(point(sample))).sum::<f64>() / count
    };
    let (mean_at, mean_used) = (mean(|p| p.0), mean(|p| p.1));
    let (mut both, mut square) = (0.0, 0.0);
    for (at, used) in samples.iter().map(point) {
        both += (at - mean_at) * (used - mean_used);
        square += (at - mean_at) * (at - mean_at);
    }
    let bytes_per_ms = both / square;
    if bytes_per_ms.is_nan() || bytes_per_ms <= 0.0 {
        return None;
    }
    let left_ms = drive.available_bytes as f64 / bytes_per_ms;
    // Plans do not reach beyond ten years.
    (left_ms < 3650.0 * DAY_MS as f64).then(|| now_ms + left_ms as i64)
}

/// The condition of a drive that fills up: `min_free` percent raise a warning, 0 raises none.
/// `held` is the severity of the alarm that holds.
pub(super) fn condition(
    samples: &[(i64, i64)],
    drive: Drive,
    min_free: u8,
    now_ms: i64,
    path: &Path,
    held: Option<Severity>,
) -> Option<Condition> {
    if min_free == 0 {
        return None;
    }
    let warn_percent = f64::from(min_free);
    let full_at_ms = full_at_ms(samples, drive, now_ms);
    let days = full_at_ms.map_or(f64::INFINITY, |at| (at - now_ms) as f64 / DAY_MS as f64);
    let percent = 100.0 * drive.available_bytes as f64 / drive.size_bytes().max(1) as f64;
    let is_below = |limits: (f64, f64), severity: Severity| {
        let factor = if held >= Some(severity) { CLEAR_FACTOR } else { 1.0 };
        days < limits.0 * factor || percent < limits.1 * factor
    };
    let severity = if is_below((FAIL_DAYS, FAIL_PART * warn_percent), Severity::Fail) {
        Severity::Fail
    } else if is_below((WARN_DAYS, warn_percent), Severity::Warn) {
        Severity::Warn
    } else {
        return None;
    };
    let date = full_at_ms.and_then(|at| jiff::Timestamp::from_millisecond(at).ok());
    let date = date.map(|at| at.to_zoned(jiff::tz::TimeZone::system()).date());
    let summary = match date {
        Some(date) => format!("the repository's file system will be full on {date}"),
        None => "the repository's file system is almost full".to_owned(),
    };
    let mut condition = Condition::new("space", Topic::Space, severity, summary);
    condition.details = format!(
        "{} GiB ({percent:.0} %) are free for {}.",
        drive.available_bytes >> 30,
        path.display()
    );
    let advice = "remove restore points and free their space, or add space";
    Some(condition.advise(advice, Some("coldrise prune --dry-run; coldrise gc".to_owned())))
}

#[cfg(test)]
mod tests {
    use super::{DAY_MS, Drive, SAMPLE_INTERVAL_MS, Severity, condition, full_at_ms, sample};
    use crate::database::Database;
    use std::path::Path;

    const GIB: i64 = 1 << 30;

    /// One sample per 6 hours for 10 days, growing by `daily_bytes`.
    fn growth(daily_bytes: i64) -> Vec<(i64, i64)> {
        (0..=40).map(|n| (n * SAMPLE_INTERVAL_MS, 100 * GIB + daily_bytes * n / 4)).collect()
    }

    fn drive(available_gib: i64) -> Drive {
        Drive { used_bytes: 110 * GIB, available_bytes: available_gib * GIB }
    }

    #[test]
    fn the_day_of_a_full_drive_is_extrapolated_from_samples() {
        let now_ms = 10 * DAY_MS;
        let at = full_at_ms(&growth(GIB), drive(20), now_ms).unwrap();
        assert!((at - now_ms - 20 * DAY_MS).abs() < DAY_MS / 100, "{at}");
        // One backup that a gc takes back changes little.
        let mut uneven = growth(GIB);
        uneven[20].1 += 3 * GIB;
        let uneven = full_at_ms(&uneven, drive(20), now_ms).unwrap();
        assert!((uneven - at).abs() < DAY_MS, "{uneven}");
        assert_eq!(full_at_ms(&growth(0), drive(20), now_ms), None);
        assert_eq!(full_at_ms(&growth(-GIB), drive(20), now_ms), None);
        assert_eq!(full_at_ms(&growth(GIB)[..3], drive(20), now_ms), None, "half a day");
        assert_eq!(full_at_ms(&[], drive(20), now_ms), None);
    }

    #[test]
    fn severity_changes_at_the_limits_with_hysteresis() {
        let severity = |daily: i64, free: i64, held: Option<Severity>| {
            let found =
                condition(&growth(daily), drive(free), 10, 10 * DAY_MS, Path::new("/srv"), held);
            found.map(|condition| condition.severity)
        };
        assert_eq!(severity(0, 200, None), None);
        assert_eq!(severity(0, 10, None), Some(Severity::Warn), "8 % are free");
        assert_eq!(severity(0, 3, None), Some(Severity::Fail));
        assert_eq!(severity(GIB, 29, None), Some(Severity::Warn), "29 days");
        assert_eq!(severity(10 * GIB, 29, None), Some(Severity::Fail), "under 3 days");
        assert_eq!(severity(GIB, 31, None), None);
        assert_eq!(severity(GIB, 31, Some(Severity::Warn)), Some(Severity::Warn));
        assert_eq!(severity(GIB, 34, Some(Severity::Warn)), None);
        let found = condition(&growth(GIB), drive(20), 10, 10 * DAY_MS, Path::new("/srv"), None);
        assert_eq!(
            found.unwrap().summary,
            "the repository's file system will be full on 1970-01-31"
        );
        let limited = |min_free| {
            let found = condition(&growth(0), drive(3), min_free, DAY_MS, Path::new("/srv"), None);
            found.map(|condition| condition.severity)
        };
        assert_eq!(limited(2), None, "2.7 % are free");
        assert_eq!(limited(3), Some(Severity::Warn));
        assert_eq!(limited(0), None, "never");
    }

    #[test]
    fn samples_have_a_minimum_interval_and_expire() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(folder.path()).unwrap();
        let take = |now_ms| database.change(|sql| sample(sql, drive(1), now_ms)).unwrap().len();
        assert_eq!((take(0), take(1), take(SAMPLE_INTERVAL_MS)), (1, 1, 2));
        assert_eq!(take(14 * DAY_MS + 1), 2, "the oldest is over");
        assert_eq!(take(DAY_MS), 2, "the clock was set back");
    }
}
