//! Values that both the command line and JSON have.

use std::collections::BTreeMap;
use std::str::FromStr;

use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Checks the text of an argument as a `T`, and keeps the text.
///
/// # Errors
/// Those of parsing it.
pub(crate) fn text<T: FromStr<Err = Error>>(text: &str) -> Result<String> {
    text.parse::<T>().map(|_| text.to_owned())
}

/// One `NAME=VALUE` word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The part before the first `=`.
    pub name: String,
    /// The part after it.
    pub value: String,
}

impl FromStr for Pair {
    type Err = Error;

    fn from_str(text: &str) -> Result<Pair> {
        let (name, value) = text.split_once('=').ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, format!("{text:?} is not NAME=VALUE"))
        })?;
        Ok(Pair { name: name.to_owned(), value: value.to_owned() })
    }
}

/// `NAME=VALUE` words: in JSON an object.
pub type Pairs = Vec<Pair>;

/// For serde: [`Pairs`] as an object.
pub(crate) mod pairs {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(pairs: &Pairs, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_map(pairs.iter().map(|pair| (&pair.name, &pair.value)))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Pairs, D::Error> {
        let map = BTreeMap::<String, String>::deserialize(from)?;
        Ok(map.into_iter().map(|(name, value)| Pair { name, value }).collect())
    }
}
