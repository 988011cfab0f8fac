//! A time as the user writes it: `20261120T100000Z`, or an age such as `7d`.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{PointName, RetentionSpan};

/// The start of a period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Since {
    Time(PointName),
    Ago(RetentionSpan),
}

impl Since {
    /// The time in milliseconds since 1970-01-01T00:00:00Z; `now` is the current
    /// time.
    pub(crate) fn unix_ms(&self, now: jiff::Timestamp) -> u64 {
        let seconds = match self {
            Since::Time(time) => time.unix_seconds(),
            // Before 1970: everything.
            Since::Ago(span) => {
                u64::try_from(now.as_second()).ok().and_then(|now| span.before(now)).unwrap_or(0)
            }
        };
        seconds.saturating_mul(1000)
    }
}

impl std::str::FromStr for Since {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        if let Ok(span) = RetentionSpan::parse(text) {
            return Ok(Since::Ago(span));
        }
        match PointName::parse(text) {
            Ok(time) if time.lineage().1 == 0 => Ok(Since::Time(time)),
            _ => {
                let shown: String = text.chars().take(40).collect();
                let message = format!(
                    "{shown:?} is not a time: use 20261120T100000Z (UTC), or an age such as 36h, \
                     7d, 2w, 3m (months) or 1y"
                );
                Err(Error::new(ErrorKind::InvalidInput, message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unix_ms(text: &str) -> Option<u64> {
        let now = jiff::Timestamp::from_second(1_000_000_000).unwrap();
        text.parse::<Since>().ok().map(|since| since.unix_ms(now))
    }

    #[test]
    fn times_and_durations_are_read() {
        assert_eq!(unix_ms("19700102T000001Z"), Some(86_401_000));
        assert_eq!(unix_ms("36h"), Some((1_000_000_000 - 36 * 3600) * 1000));
        assert_eq!(unix_ms("7d"), Some((1_000_000_000 - 7 * 86_400) * 1000));
        assert_eq!(unix_ms("100y"), Some(0));
        for text in ["", "7", "d", "yesterday", "2026-11-20", "20261120T100000Z+1", "-1d"] {
            assert_eq!(unix_ms(text), None, "{text}");
        }
    }
}
