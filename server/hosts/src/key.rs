//! The public SSH key of a host.

use std::fmt;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// The public key of a host: a type such as `ssh-ed25519` and base64, as in a `known_hosts` file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostKey(String);

impl HostKey {
    /// Reads a type and base64.
    ///
    /// # Errors
    /// `InvalidInput` for anything else.
    pub fn parse(text: &str) -> Result<HostKey> {
        let invalid =
            || Error::new(ErrorKind::InvalidInput, "this is not the public key of a host");
        let (kind, key) = text.trim().split_once(' ').ok_or_else(invalid)?;
        let is_kind =
            kind.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-@.".contains(&byte));
        if !is_kind || kind.is_empty() || STANDARD.decode(key).is_err() {
            return Err(invalid());
        }
        Ok(HostKey(format!("{kind} {key}")))
    }

    /// The key's fingerprint, as `ssh-keygen -l` shows it: `SHA256:…`.
    pub fn fingerprint(&self) -> String {
        let key = self.0.split_once(' ').map_or("", |(_, key)| key);
        let bytes = STANDARD.decode(key).unwrap_or_default();
        format!("SHA256:{}", STANDARD_NO_PAD.encode(digest(&SHA256, &bytes)))
    }
}

impl fmt::Display for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::HostKey;

    #[test]
    fn a_fingerprint_is_that_of_ssh_keygen() {
        let text =
            "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl";
        let key = HostKey::parse(text).unwrap();
        assert_eq!(key.fingerprint(), "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU");
        assert_eq!(key.to_string(), text);
        for other in ["", "ssh-ed25519", "ssh-ed25519 !", "a b c", "x\ny AAAA", " AAAA"] {
            assert!(HostKey::parse(other).is_err(), "{other}");
        }
    }
}
