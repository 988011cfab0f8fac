//! One address everywhere: `MACHINE/POINT[/DISK]` and `live/SESSION[/DISK]`.

use std::fmt;

use coldrise_block::{Error, ErrorKind, Result};

use crate::name::{LATEST, LIVE};
use crate::{DiskName, MachineName, PointName, SessionName, SessionTime};

/// Maximum N of `latest~N`.
pub(crate) const MAX_LATEST: u32 = 999_999;

/// Maximum length of a parsed address, in bytes.
const MAX_ADDRESS_BYTES: usize = 256;

/// Selects a point of a machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PointSelector {
    /// The point with this name.
    Exact(PointName),
    /// The newest point (0, written `latest`), the one before it (1, written
    /// `latest~1`), and so on.
    Latest(u32),
}

impl PointSelector {
    /// Parses a point name, `latest` or `latest~N` (N from 1 to
    /// [`MAX_LATEST`], without leading zeroes).
    ///
    /// # Errors
    /// `ErrorKind::InvalidInput`, naming the allowed forms.
    pub fn parse(text: &str) -> Result<Self> {
        let Some(rest) = text.strip_prefix(LATEST) else {
            return PointName::parse(text).map(PointSelector::Exact).map_err(|error| {
                Error::new(error.kind(), format!("{error}, or latest, or latest~1"))
            });
        };
        if rest.is_empty() {
            return Ok(PointSelector::Latest(0));
        }
        rest.strip_prefix('~')
            .filter(|n| n.bytes().all(|b| b.is_ascii_digit()) && !n.starts_with('0'))
            .and_then(|n| n.parse().ok())
            .filter(|n| *n <= MAX_LATEST)
            .map(PointSelector::Latest)
            .ok_or_else(|| {
                let shown: String = text.chars().take(80).collect();
                Error::new(
                    ErrorKind::InvalidInput,
                    format!(
                        "{shown:?} is not a point: after latest only ~N is allowed, N from 1 to \
                         {MAX_LATEST}"
                    ),
                )
            })
    }
}

impl fmt::Display for PointSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PointSelector::Exact(name) => name.fmt(f),
            PointSelector::Latest(0) => f.pad(LATEST),
            PointSelector::Latest(n) => f.pad(&format!("{LATEST}~{n}")),
        }
    }
}

/// The address of a point or session, as in a command, an export name or a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// A restore point, or one disk of it.
    Point {
        /// The machine.
        machine: MachineName,
        /// The point of the machine.
        selector: PointSelector,
        /// One disk; `None` stands for all.
        disk: Option<DiskName>,
    },
    /// A published session, or one disk of it.
    Live {
        /// The session.
        session: SessionName,
        /// One disk; `None` stands for all.
        disk: Option<DiskName>,
    },
    /// A published session as it was at a time mark, or one disk of it.
    Marked {
        /// The session.
        session: SessionName,
        /// The time.
        time: SessionTime,
        /// One disk; `None` stands for all.
        disk: Option<DiskName>,
    },
}

impl Address {
    /// Parses `MACHINE/POINT[/DISK]` or `live/SESSION[@TIME][/DISK]`.
    ///
    /// # Errors
    /// `ErrorKind::InvalidInput`, naming the allowed forms.
    pub fn parse(text: &str) -> Result<Self> {
        let malformed = || {
            let shown: String = text.chars().take(80).collect();
            Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "{shown:?} is not an address: use MACHINE/POINT, MACHINE/POINT/DISK, \
                     live/SESSION or live/SESSION/DISK"
                ),
            )
        };
        if text.len() > MAX_ADDRESS_BYTES {
            return Err(malformed());
        }
        let parts: Vec<&str> = text.split('/').collect();
        let (first, second, disk) = match parts[..] {
            [first, second] => (first, second, None),
            [first, second, disk] => (first, second, Some(DiskName::parse(disk)?)),
            _ => return Err(malformed()),
        };
        if let Some((session, time)) = second.split_once('@').filter(|_| first == LIVE) {
            let (session, time) = (SessionName::parse(session)?, SessionTime::parse(time)?);
            return Ok(Address::Marked { session, time, disk });
        }
        if first == LIVE {
            return Ok(Address::Live { session: SessionName::parse(second)?, disk });
        }
        Ok(Address::Point {
            machine: MachineName::parse(first)?,
            selector: PointSelector::parse(second)?,
            disk,
        })
    }

    /// The disk that the address names, if any.
    pub fn disk(&self) -> Option<&DiskName> {
        match self {
            Address::Point { disk, .. }
            | Address::Live { disk, .. }
            | Address::Marked { disk, .. } => disk.as_ref(),
        }
    }
}

impl std::str::FromStr for Address {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Address::parse(text)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let disk = match self {
            Address::Point { machine, selector, disk } => {
                write!(f, "{machine}/{selector}")?;
                disk
            }
            Address::Live { session, disk } => {
                write!(f, "{LIVE}/{session}")?;
                disk
            }
            Address::Marked { session, time, disk } => {
                write!(f, "{LIVE}/{session}@{time}")?;
                disk
            }
        };
        match disk {
            Some(disk) => write!(f, "/{disk}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "address_tests.rs"]
mod tests;
