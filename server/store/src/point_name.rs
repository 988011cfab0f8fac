//! Names of restore points: a UTC second, with `+N` for points sealed from it.

use std::fmt;

use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// The name of a restore point: `YYYYMMDDTHHMMSSZ`, or for a synthetic point
/// `YYYYMMDDTHHMMSSZ+N` with N from 1 on, without leading zeroes.
///
/// Years 1970 to 9999. Ordered by time, then by N.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PointName {
    /// Seconds since 1970-01-01T00:00:00Z.
    unix_seconds: u64,
    /// 0: a backup. From 1 on: the N of a synthetic point.
    synthetic: u32,
    text: String,
}

const TIME_PATTERN: &[u8; 16] = b"ddddddddTddddddZ";

impl PointName {
    /// Parses the one canonical form.
    ///
    /// # Errors
    /// `ErrorKind::InvalidInput`, naming the allowed form.
    pub fn parse(text: &str) -> Result<Self> {
        Self::parse_canonical(text).ok_or_else(|| {
            let shown: String = text.chars().take(80).collect();
            Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "{shown:?} is not a point name: use YYYYMMDDTHHMMSSZ (UTC), or \
                     YYYYMMDDTHHMMSSZ+N for a synthetic point"
                ),
            )
        })
    }

    fn parse_canonical(text: &str) -> Option<Self> {
        let (time, synthetic) = match text.split_once('+') {
            None => (text, 0),
            Some((time, number)) => {
                let canonical = number.len() <= 10
                    && number.bytes().all(|b| b.is_ascii_digit())
                    && number.as_bytes().first().is_some_and(|b| *b != b'0');
                if !canonical {
                    return None;
                }
                (time, number.parse::<u32>().ok()?)
            }
        };
        let bytes = time.as_bytes();
        let shaped = bytes.len() == TIME_PATTERN.len()
            && bytes.iter().zip(TIME_PATTERN).all(|(byte, pattern)| match pattern {
                b'd' => byte.is_ascii_digit(),
                letter => byte == letter,
            });
        if !shaped {
            return None;
        }
        let digits = |from: usize, count: usize| -> Option<i16> {
            time.get(from..from + count)?.parse::<i16>().ok()
        };
        let byte = |from: usize| -> Option<i8> { i8::try_from(digits(from, 2)?).ok() };
        let moment = jiff::civil::DateTime::new(
            digits(0, 4)?,
            byte(4)?,
            byte(6)?,
            byte(9)?,
            byte(11)?,
            byte(13)?,
            0,
        )
        .ok()?
        .to_zoned(jiff::tz::TimeZone::UTC)
        .ok()?;
        let unix_seconds = u64::try_from(moment.timestamp().as_second()).ok()?;
        Some(PointName { unix_seconds, synthetic, text: text.to_owned() })
    }

    /// The name of a point taken at `time`, truncated to the second.
    ///
    /// # Errors
    /// `ErrorKind::InvalidInput` before 1970 and after 9999.
    pub fn from_time(time: jiff::Timestamp) -> Result<Self> {
        if time.as_second() < 0 {
            let text = format!("{time} is before 1970, so no point can be named for it");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Self::parse(&time_text(jiff::tz::Offset::UTC.to_datetime(time)))
    }

    /// The synthetic point number `n` at this point's time.
    ///
    /// # Errors
    /// `ErrorKind::InvalidInput` for n = 0.
    pub fn synthetic(&self, n: u32) -> Result<Self> {
        Self::parse(&format!("{}+{n}", self.time_part()))
    }

    /// The time part of the name and N; N is 0 for a backup.
    pub fn lineage(&self) -> (&str, u32) {
        (self.time_part(), self.synthetic)
    }

    /// True for a point that was sealed from a session.
    pub fn is_synthetic(&self) -> bool {
        self.synthetic != 0
    }

    /// The time of the name, in seconds since 1970-01-01T00:00:00Z.
    pub fn unix_seconds(&self) -> u64 {
        self.unix_seconds
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    fn time_part(&self) -> &str {
        self.text.split('+').next().unwrap_or(&self.text)
    }

    /// Twelve bytes that sort like the names.
    pub fn sort_key(&self) -> [u8; 12] {
        let mut key = [0; 12];
        key[..8].copy_from_slice(&self.unix_seconds.to_be_bytes());
        key[8..].copy_from_slice(&self.synthetic.to_be_bytes());
        key
    }

    /// The name of a sort key; `None` for a key that no name has.
    pub fn from_sort_key(key: &[u8; 12]) -> Option<Self> {
        let (seconds, number) = key.split_first_chunk::<8>()?;
        let unix_seconds = u64::from_be_bytes(*seconds);
        let time = jiff::Timestamp::from_second(i64::try_from(unix_seconds).ok()?).ok()?;
        let synthetic = u32::from_be_bytes(number.try_into().ok()?);
        let mut text = time_text(jiff::tz::Offset::UTC.to_datetime(time));
        if synthetic > 0 {
            text.push_str(&format!("+{synthetic}"));
        }
        Some(PointName { unix_seconds, synthetic, text })
    }
}

/// `YYYYMMDDTHHMMSSZ`, without the formatting machinery: a list has 100,000 of them.
fn time_text(moment: jiff::civil::DateTime) -> String {
    let mut text = String::with_capacity(TIME_PATTERN.len());
    let mut push = |number: i16| {
        for digit in [number / 10 % 10, number % 10] {
            text.push(char::from(b'0' + u8::try_from(digit).unwrap_or(0)));
        }
    };
    push(moment.year() / 100);
    push(moment.year());
    push(moment.month().into());
    push(moment.day().into());
    push(moment.hour().into());
    push(moment.minute().into());
    push(moment.second().into());
    text.insert(8, 'T');
    text.push('Z');
    text
}

impl TryFrom<String> for PointName {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        PointName::parse(&text)
    }
}

impl std::str::FromStr for PointName {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        PointName::parse(text)
    }
}

impl From<PointName> for String {
    fn from(name: PointName) -> String {
        name.text
    }
}

impl fmt::Display for PointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text)
    }
}

impl fmt::Debug for PointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text, f)
    }
}
