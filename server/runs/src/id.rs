//! Names of runs: `20261123T014500Z-4f2a-backup`. They sort by time.

use std::fmt;
use std::str::FromStr;

use coldrise_block::{Error, ErrorKind, Result};

/// Maximum length of an id, in bytes.
const MAX_BYTES: usize = 64;
/// The form of `20261123T014500Z-4f2a-`: d is a digit, x a hexadecimal digit.
const PREFIX: &[u8] = b"ddddddddTddddddZ-xxxx-";

/// The name of one run, which is also the name of its folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunId(String);

impl RunId {
    /// An id for a run of `command` that starts now; `number` tells runs of one second apart.
    pub(crate) fn new(now: jiff::Timestamp, number: u16, command: &str) -> RunId {
        let word: String =
            command.chars().map(|c| if c == ' ' { '-' } else { c }).take(32).collect();
        RunId(format!("{}-{number:04x}-{word}", now.strftime("%Y%m%dT%H%M%SZ")))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The time in the id, as text that sorts: `20261123T014500Z`.
    pub(crate) fn time(&self) -> &str {
        self.0.get(..16).unwrap_or_default()
    }
}

impl FromStr for RunId {
    type Err = Error;

    fn from_str(text: &str) -> Result<RunId> {
        let bytes = text.as_bytes();
        let fits = |(pattern, byte): (&u8, &u8)| match pattern {
            b'd' => byte.is_ascii_digit(),
            b'x' => byte.is_ascii_digit() || (b'a'..=b'f').contains(byte),
            other => other == byte,
        };
        let is_prefix = PREFIX.len() < bytes.len() && PREFIX.iter().zip(bytes).all(fits);
        let is_word = bytes.iter().skip(PREFIX.len()).all(|b| b.is_ascii_lowercase() || *b == b'-');
        if is_prefix && is_word && bytes.len() <= MAX_BYTES {
            return Ok(RunId(text.to_owned()));
        }
        let shown: String = text.chars().take(MAX_BYTES).collect();
        Err(Error::new(
            ErrorKind::InvalidInput,
            format!("{shown:?} is not the id of a run, such as 20261123T014500Z-4f2a-backup"),
        ))
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::RunId;

    #[test]
    fn an_id_is_a_time_a_number_and_a_command() {
        let now = "2026-11-23T01:45:00.9Z".parse().unwrap();
        let id = RunId::new(now, 0x4f2a, "serve nbd");
        assert_eq!(id.as_str(), "20261123T014500Z-4f2a-serve-nbd");
        assert_eq!(id.as_str().parse::<RunId>().unwrap(), id);
        assert_eq!(id.time(), "20261123T014500Z");
        let long = format!("20261123T014500Z-4f2a-{}", "b".repeat(60));
        for text in [
            "",
            "..",
            "20261123T014500Z-4f2a-",
            "20261123T014500Z-4F2A-gc",
            "20261123T014500-4f2a-gc",
            "20261123T014500Z-4f2a-../x",
            "20261123T014500Z-4f2a-g\0c",
            "é0261123T014500Z-4f2a-gc",
            &long,
        ] {
            assert!(text.parse::<RunId>().is_err(), "{text}");
        }
    }
}
