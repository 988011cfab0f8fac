//! The identity of a repository.

use std::fmt;

use serde::{Deserialize, Serialize};

use coldrise_block::hex;

/// The random 16 bytes that distinguish one repository from all others.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RepositoryId(pub(crate) [u8; 16]);

impl RepositoryId {
    /// The bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for RepositoryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex::encode(&self.0))
    }
}

impl fmt::Debug for RepositoryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for RepositoryId {
    fn serialize<S: serde::Serializer>(&self, out: S) -> std::result::Result<S::Ok, S::Error> {
        out.serialize_str(&hex::encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for RepositoryId {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        hex::decode_lower(&text)
            .map(RepositoryId)
            .ok_or_else(|| serde::de::Error::custom("a repository id is 32 hexadecimal digits"))
    }
}
