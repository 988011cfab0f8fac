//! Numbers hours, days, weeks, months and years.

use std::fmt;

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

const HOUR_SECONDS: u64 = 3600;
const DAY_SECONDS: u64 = 24 * HOUR_SECONDS;
/// 1970-01-01 was a Thursday, three days after the Monday of its week.
const DAYS_INTO_FIRST_WEEK: u64 = 3;

/// A kind of calendar period, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Period {
    /// From one full hour to the next.
    Hourly,
    /// From midnight to midnight.
    Daily,
    /// From Monday to Sunday, as ISO 8601 numbers weeks.
    Weekly,
    /// A calendar month.
    Monthly,
    /// A calendar year.
    Yearly,
}

impl Period {
    /// The number of the period that contains a moment: equal for two moments of
    /// one period, and greater for a later period.
    pub(super) fn number(self, unix_seconds: u64) -> u64 {
        let days = unix_seconds / DAY_SECONDS;
        let year = |date: Date| u64::try_from(date.year()).unwrap_or(0);
        match self {
            Period::Hourly => unix_seconds / HOUR_SECONDS,
            Period::Daily => days,
            Period::Weekly => (days + DAYS_INTO_FIRST_WEEK) / 7,
            Period::Monthly => date_of(unix_seconds)
                .map_or(0, |date| year(date) * 12 + u64::try_from(date.month()).unwrap_or(0)),
            Period::Yearly => date_of(unix_seconds).map_or(0, year),
        }
    }

    /// The name of the period that contains a moment: `2026-11-21T10`,
    /// `2026-11-21`, `2026-W47`, `2026-11`, `2026`.
    pub(super) fn describe(self, unix_seconds: u64) -> String {
        let Some(date) = date_of(unix_seconds) else { return String::new() };
        match self {
            Period::Hourly => {
                format!("{date}T{:02}", unix_seconds % DAY_SECONDS / HOUR_SECONDS)
            }
            Period::Daily => date.to_string(),
            Period::Weekly => {
                let week = date.iso_week_date();
                format!("{:04}-W{:02}", week.year(), week.week())
            }
            Period::Monthly => format!("{:04}-{:02}", date.year(), date.month()),
            Period::Yearly => format!("{:04}", date.year()),
        }
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Period::Hourly => "hourly",
            Period::Daily => "daily",
            Period::Weekly => "weekly",
            Period::Monthly => "monthly",
            Period::Yearly => "yearly",
        })
    }
}

/// The date in UTC; every point's name has one.
fn date_of(unix_seconds: u64) -> Option<Date> {
    let moment = Timestamp::from_second(i64::try_from(unix_seconds).ok()?).ok()?;
    Some(moment.to_zoned(TimeZone::UTC).date())
}
