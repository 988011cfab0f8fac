//! Names of machines, disks and sessions.
//!
//! A name is safe as a file name, as an NBD export name, as an NFS and FUSE path component and in a
//! URL: it needs no quoting anywhere, contains no separator, and is neither `.` nor `..`.

use std::fmt;

use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Maximum length of a name, in bytes.
pub const MAX_NAME_BYTES: usize = 63;

/// The first component of the address of a published session. So no machine can have this name.
pub(crate) const LIVE: &str = "live";

/// The second component of the address of a machine's newest point. So no machine can have this
/// name.
pub const LATEST: &str = "latest";

fn check_name(what: &str, text: &str) -> Result<()> {
    let bytes = text.as_bytes();
    let first_ok = bytes.first().is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let rest_ok = bytes
        .iter()
        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'_' | b'-'));
    if first_ok && rest_ok && bytes.len() <= MAX_NAME_BYTES {
        return Ok(());
    }
    let shown: String = text.chars().take(80).collect();
    Err(Error::new(
        ErrorKind::InvalidInput,
        format!(
            "{shown:?} is not a {what} name: use 1 to {MAX_NAME_BYTES} of a-z 0-9 . _ - and start \
             with a letter or digit"
        ),
    ))
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $what:literal, $check:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Accepts `[a-z0-9][a-z0-9._-]{0,62}`.
            ///
            /// # Errors
            /// `ErrorKind::InvalidInput`, naming the allowed form.
            pub fn parse(text: &str) -> Result<Self> {
                check_name($what, text)?;
                let check: fn(&str) -> Result<()> = $check;
                check(text)?;
                Ok($name(text.to_owned()))
            }

            /// The name.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;
            fn try_from(text: String) -> Result<Self> {
                $name::parse(&text)
            }
        }

        impl std::str::FromStr for $name {
            type Err = Error;
            fn from_str(text: &str) -> Result<Self> {
                $name::parse(text)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

name_type!(
    /// The name of a protected machine; never `live` or `latest`.
    MachineName,
    "machine",
    |text| {
        let meaning = match text {
            LIVE => "the published sessions",
            LATEST => "the newest point of a machine, as in web01/latest",
            _ => return Ok(()),
        };
        let message = format!("{text:?} is not a machine name: it addresses {meaning}");
        Err(Error::new(ErrorKind::InvalidInput, message))
    }
);

name_type!(
    /// The name of one virtual disk of a machine.
    DiskName,
    "disk",
    |_| Ok(())
);

name_type!(
    /// The name of a passphrase.
    KeyLabel,
    "passphrase",
    |_| Ok(())
);

name_type!(
    /// The name of a session.
    SessionName,
    "session",
    |_| Ok(())
);
