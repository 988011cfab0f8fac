//! Names of runs: `20261123T014500Z-4f2a-backup`. They sort by time.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};

use coldrise_block::{Error, ErrorKind, Result};

/// Maximum length of an id, in bytes.
const MAX_BYTES: usize = 64;
/// The form of `20261123T014500Z-4f2a-`: d is a digit, x a hexadecimal digit.
const PREFIX: &[u8] = b"ddddddddTddddddZ-xxxx-";

/// The bit of the number that planned runs have.
const PLANNED: u16 = 0x8000;

/// The name of one run, which is also the name of its folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId(String);

impl RunId {
    /// An id for a run of `command` that starts now, with a random number: others may begin in the
    /// same second.
    pub(crate) fn new(now: jiff::Timestamp, command: &str) -> RunId {
        RunId::with_number(now, random_number() & !PLANNED, command)
    }

    /// An id for a planned run. Its number differs from those of [`RunId::new`], and from the
    /// previous 32,767 of this process.
    pub(crate) fn planned(now: jiff::Timestamp, command: &str) -> RunId {
        static LAST: LazyLock<AtomicU16> = LazyLock::new(|| AtomicU16::new(random_number()));
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        RunId::with_number(now, number | PLANNED, command)
    }

    fn with_number(now: jiff::Timestamp, number: u16, command: &str) -> RunId {
        let letter = |c: char| if c.is_ascii_lowercase() { c } else { '-' };
        let word: String = command.chars().map(letter).take(32).collect();
        let word = if word.is_empty() { "-" } else { &word };
        RunId(format!("{}-{number:04x}-{word}", now.strftime("%Y%m%dT%H%M%SZ")))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The command in the id, with `-` for spaces.
    pub(crate) fn word(&self) -> &str {
        self.0.get(PREFIX.len()..).unwrap_or_default()
    }

    /// The time in the id, as text that sorts: `20261123T014500Z`.
    pub(crate) fn time(&self) -> &str {
        self.0.get(..16).unwrap_or_default()
    }
}

fn random_number() -> u16 {
    let mut random = [0; 2];
    // Without random bytes, ids of one second may be equal: the second run then takes another.
    let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    u16::from_ne_bytes(random)
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
    use std::collections::HashSet;

    use super::RunId;

    #[test]
    fn an_id_is_a_time_a_number_and_a_command() {
        let now = "2026-11-23T01:45:00.9Z".parse().unwrap();
        let id = RunId::with_number(now, 0x4f2a, "serve nbd");
        assert_eq!(id.as_str(), "20261123T014500Z-4f2a-serve-nbd");
        assert_eq!(id.as_str().parse::<RunId>().unwrap(), id);
        assert_eq!((id.time(), id.word()), ("20261123T014500Z", "serve-nbd"));
        let planned: Vec<_> = (0..1000).map(|_| RunId::planned(now, "Ä")).collect();
        assert_eq!(planned.iter().collect::<HashSet<_>>().len(), 1000);
        assert!(planned.iter().all(|id| id.as_str().parse::<RunId>().is_ok()));
        let is_planned = |id: &RunId| id.as_str().as_bytes()[17] >= b'8';
        assert!(planned.iter().all(is_planned));
        assert!((0..100).all(|_| !is_planned(&RunId::new(now, "gc"))));
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
