//! The compression of chunks.

use std::fmt;

use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// The compression of a repository, written `none`, `lz4` or `zstd:LEVEL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Compression {
    /// Chunks are stored uncompressed.
    None,
    /// The LZ4 block format.
    Lz4,
    /// Zstandard with this level, from 1 to 19.
    Zstd(i32),
}

impl Compression {
    /// The level of plain `zstd`.
    pub(crate) const DEFAULT_ZSTD_LEVEL: i32 = 3;

    /// Parses `none`, `lz4`, `zstd` or `zstd:LEVEL`.
    ///
    /// # Errors
    /// `ErrorKind::InvalidInput`; the message says what is allowed.
    pub fn parse(text: &str) -> Result<Self> {
        let parsed = match text {
            "none" => Some(Compression::None),
            "lz4" => Some(Compression::Lz4),
            "zstd" => Some(Compression::Zstd(Self::DEFAULT_ZSTD_LEVEL)),
            _ => text
                .strip_prefix("zstd:")
                .filter(|level| level.bytes().all(|b| b.is_ascii_digit()))
                .and_then(|level| level.parse().ok())
                .map(Compression::Zstd),
        };
        let Some(compression) = parsed else {
            let shown: String = text.chars().take(40).collect();
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{shown:?} is not a compression: use none, lz4, zstd or zstd:LEVEL"),
            ));
        };
        compression.check()?;
        Ok(compression)
    }

    pub(crate) fn check(self) -> Result<()> {
        match self {
            Compression::Zstd(level) if !(1..=19).contains(&level) => Err(Error::new(
                ErrorKind::InvalidInput,
                format!("zstd level {level} is not possible: use 1 to 19"),
            )),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Compression::None => f.pad("none"),
            Compression::Lz4 => f.pad("lz4"),
            Compression::Zstd(level) => f.pad(&format!("zstd:{level}")),
        }
    }
}

impl std::str::FromStr for Compression {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Compression::parse(text)
    }
}

impl TryFrom<String> for Compression {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        Compression::parse(&text)
    }
}

impl From<Compression> for String {
    fn from(compression: Compression) -> String {
        compression.to_string()
    }
}
