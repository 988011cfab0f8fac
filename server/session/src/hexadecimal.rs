//! Bytes in a JSON document: two lower-case digits per byte.

use coldrise_block::hex;
use serde::{Deserialize, Deserializer, Serializer};

pub(crate) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&hex::encode(bytes))
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(from)?;
    hex::decode(&text).ok_or_else(|| serde::de::Error::custom("not hexadecimal digits"))
}
