//! Lengths of time: `36h`, `7d`, `2w`, `3m`, `1y`.

use std::fmt;
use std::num::NonZeroU32;

use coldrise_block::{Error, ErrorKind, Result};
use jiff::tz::TimeZone;
use jiff::{Span, Timestamp};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Hours,
    Days,
    Weeks,
    Months,
    Years,
}

/// A length of time before a moment. Months and years follow the calendar:
/// three months before May 31 is the last day of February.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RetentionSpan {
    count: NonZeroU32,
    unit: Unit,
}

impl RetentionSpan {
    /// Parses a number of at least 1 and one of h, d, w, m (months) and y.
    ///
    /// # Errors
    /// `InvalidInput`; the message says what is allowed.
    pub fn parse(text: &str) -> Result<Self> {
        let refused = || {
            let shown: String = text.chars().take(40).collect();
            Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "{shown:?} is not a duration: use a number from 1 on with h, d, w, m (months) \
                     or y, for example 7d"
                ),
            )
        };
        let unit = match text.chars().next_back() {
            Some('h') => Unit::Hours,
            Some('d') => Unit::Days,
            Some('w') => Unit::Weeks,
            Some('m') => Unit::Months,
            Some('y') => Unit::Years,
            _ => return Err(refused()),
        };
        let digits = text.get(..text.len() - 1).unwrap_or_default();
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(refused());
        }
        Ok(RetentionSpan { count: digits.parse().map_err(|_| refused())?, unit })
    }

    /// The moment this long before `unix_seconds`, both in seconds since
    /// 1970-01-01T00:00:00Z; `None` if it lies before 1970.
    pub fn before(self, unix_seconds: u64) -> Option<u64> {
        let count = i64::from(self.count.get());
        let empty = Span::new();
        let span = match self.unit {
            Unit::Hours => empty.try_hours(count),
            Unit::Days => empty.try_days(count),
            Unit::Weeks => empty.try_weeks(count),
            Unit::Months => empty.try_months(count),
            Unit::Years => empty.try_years(count),
        };
        let moment = Timestamp::from_second(i64::try_from(unix_seconds).ok()?).ok()?;
        let before = moment.to_zoned(TimeZone::UTC).checked_sub(span.ok()?).ok()?;
        u64::try_from(before.timestamp().as_second()).ok()
    }
}

impl std::str::FromStr for RetentionSpan {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        RetentionSpan::parse(text)
    }
}

impl TryFrom<String> for RetentionSpan {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        RetentionSpan::parse(&text)
    }
}

impl From<RetentionSpan> for String {
    fn from(span: RetentionSpan) -> String {
        span.to_string()
    }
}

impl fmt::Display for RetentionSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match self.unit {
            Unit::Hours => 'h',
            Unit::Days => 'd',
            Unit::Weeks => 'w',
            Unit::Months => 'm',
            Unit::Years => 'y',
        };
        write!(f, "{}{letter}", self.count)
    }
}
