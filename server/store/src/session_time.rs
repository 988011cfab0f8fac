//! A time in the history of a session, as in the address `live/SESSION@TIME`.

use std::fmt;
use std::time::Duration;

use coldrise_block::units::parse_duration;
use coldrise_block::{Error, ErrorKind, Result};

use crate::PointName;

const LAST_GOOD: &str = "last-good-";

/// A time in the history of a session.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SessionTime {
    /// The mark of this second, written `20261127T030405Z`.
    At(PointName),
    /// The last mark that is at least this old, written `-90s`, `-15m` or `-2h`.
    Ago(Duration),
    /// The last mark before this second, written `last-good-20261127T030405Z`.
    LastGood(PointName),
}

impl SessionTime {
    /// Parses one of the three forms.
    ///
    /// # Errors
    /// `InvalidInput`, naming the allowed forms.
    pub fn parse(text: &str) -> Result<Self> {
        let second = |text| PointName::parse(text).ok().filter(|time| !time.is_synthetic());
        let parsed = if let Some(age) = text.strip_prefix('-') {
            parse_duration(age).ok().map(SessionTime::Ago)
        } else if let Some(time) = text.strip_prefix(LAST_GOOD) {
            second(time).map(SessionTime::LastGood)
        } else {
            second(text).map(SessionTime::At)
        };
        parsed.ok_or_else(|| {
            let shown: String = text.chars().take(60).collect();
            let message = format!(
                "{shown:?} is not a time of a session: use 20261127T030405Z (UTC), an age such as \
                 -90s, -15m or -2h, or {LAST_GOOD}20261127T030405Z for the last mark before that time"
            );
            Error::new(ErrorKind::InvalidInput, message)
        })
    }
}

impl fmt::Display for SessionTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SessionTime::At(time) => time.fmt(f),
            SessionTime::LastGood(time) => write!(f, "{LAST_GOOD}{time}"),
            SessionTime::Ago(age) => match age.as_secs() {
                seconds if seconds % 3600 == 0 => write!(f, "-{}h", seconds / 3600),
                seconds if seconds % 60 == 0 => write!(f, "-{}m", seconds / 60),
                seconds => write!(f, "-{seconds}s"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_of_a_time_is_shown_as_it_is_written() {
        for text in ["20261127T030405Z", "-90s", "-15m", "-2h", "last-good-20261127T030405Z"] {
            assert_eq!(SessionTime::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(SessionTime::parse("-120s").unwrap().to_string(), "-2m");
        for refused in
            ["", "-", "-0s", "90s", "-90", "20261127T030405Z+1", "last-good", "last-good-"]
        {
            let error = SessionTime::parse(refused).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{refused}");
            assert!(error.to_string().contains("-90s"), "{error}");
        }
    }
}
