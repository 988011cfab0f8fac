//! Values of requests that both the command line and JSON have as text, and their parsers.

use std::collections::BTreeMap;
use std::str::FromStr;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hypervisors::libvirt::NetworkChoice;
use coldrise_ingest::Rate;
use coldrise_store::{Address, DisplayName, MachineName, PointSelector, SessionName};
use serde::Deserializer;
use serde::de::{Error as _, MapAccess, Visitor};

/// A parser of an argument that checks the text with `parse`, and keeps the text.
pub(crate) fn text<T: 'static>(
    parse: fn(&str) -> Result<T>,
) -> impl Fn(&str) -> Result<String> + Clone + Send + Sync + 'static {
    move |text| parse(text).map(|_| text.to_owned())
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

/// A hypervisor on which machines are recovered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hypervisor {
    /// QEMU under libvirt.
    Libvirt,
    /// vCenter or ESXi, at `HOST` or `HOST:PORT`.
    Vsphere(String),
}

impl FromStr for Hypervisor {
    type Err = Error;

    fn from_str(text: &str) -> Result<Hypervisor> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || ".-_:[]".contains(c);
        match text.split_once(':') {
            None if text == "libvirt" => Ok(Hypervisor::Libvirt),
            Some(("vcenter" | "esxi", server))
                if !server.is_empty() && server.chars().all(is_part) =>
            {
                Ok(Hypervisor::Vsphere(server.to_owned()))
            }
            _ => Err(invalid(format!("{text}: give libvirt, vcenter:HOST or esxi:HOST"))),
        }
    }
}

/// The network of a recovered machine.
///
/// # Errors
/// `InvalidInput` for an empty text.
pub fn parse_network(text: &str) -> Result<NetworkChoice> {
    match text {
        "none" => Ok(NetworkChoice::None),
        "same" => Ok(NetworkChoice::Same),
        "" => Err(invalid("give none, same or the name of a network")),
        name => Ok(NetworkChoice::Named(name.to_owned())),
    }
}

/// The machine of a backup: its name; or another name of a domain of libvirt, and the machine's name that is derived from it.
///
/// # Errors
/// `InvalidInput` if no name can be derived.
pub fn parse_backup_machine(text: &str) -> Result<(MachineName, Option<DisplayName>)> {
    MachineName::parse(text).map(|machine| (machine, None)).or_else(|error| {
        let other = DisplayName::parse(text).ok();
        let found = other.and_then(|other| Some((other.to_machine()?, Some(other))));
        found.ok_or(error)
    })
}

/// A session by its name or its address.
///
/// # Errors
/// `InvalidInput` if it is neither.
pub fn session_name(text: &str) -> Result<SessionName> {
    SessionName::parse(text.strip_prefix("live/").unwrap_or(text))
}

/// A session, or one at a time mark: its name, live/SESSION or live/SESSION@TIME.
///
/// # Errors
/// `InvalidInput` for another address.
pub fn sealable(text: &str) -> Result<Address> {
    let address = match text.contains('/') {
        true => Address::parse(text)?,
        false => Address::parse(&format!("live/{text}"))?,
    };
    match address {
        Address::Live { disk: None, .. } | Address::Marked { disk: None, .. } => Ok(address),
        _ => Err(invalid(format!(
            "{text}: all disks of a session are sealed together: give SESSION or live/SESSION@TIME"
        ))),
    }
}

/// A session by its address.
///
/// # Errors
/// `InvalidInput` for another address.
pub fn live_session(text: &str) -> Result<SessionName> {
    match Address::parse(text)? {
        Address::Live { session, disk: None } => Ok(session),
        _ => {
            Err(invalid(format!("{text}: all disks of a session move together: give live/SESSION")))
        }
    }
}

/// A named point, or all points of a machine.
#[derive(Clone, Debug)]
pub enum Target {
    /// `MACHINE/POINT`.
    Point(MachineName, PointSelector),
    /// `MACHINE`.
    Machine(MachineName),
}

/// Parses `MACHINE/POINT` or `MACHINE`.
///
/// # Errors
/// `InvalidInput`; the message says what is allowed.
pub fn parse_target(text: &str) -> Result<Target> {
    if !text.contains('/') {
        return MachineName::parse(text).map(Target::Machine);
    }
    parse_point(text)
}

/// Parses `MACHINE/POINT`.
///
/// # Errors
/// `InvalidInput`; the message says what is allowed.
pub fn parse_point(text: &str) -> Result<Target> {
    match Address::parse(text)? {
        Address::Point { machine, selector, disk: None } => Ok(Target::Point(machine, selector)),
        _ => Err(invalid(format!(
            "{text}: the command takes whole restore points: give MACHINE/POINT"
        ))),
    }
}

/// `5` or `5%` or `0.5`.
///
/// # Errors
/// A message that says what is allowed.
pub fn parse_percent(text: &str) -> std::result::Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).parse::<f64>();
    number
        .ok()
        .filter(|percent| *percent > 0.0 && *percent <= 100.0)
        .ok_or_else(|| "a percentage above 0 and up to 100, for example 5%".to_owned())
}

/// Bytes per second that a backup reads.
pub(crate) fn parse_rate(text: &str) -> Result<u64> {
    text.parse::<Rate>().map(Rate::bytes_per_second)
}

/// For serde: `NAME=VALUE` words as an object. The command checks them; only a repeated name would be lost before.
pub(crate) mod pairs {
    use std::collections::BTreeMap;

    use serde::ser::Error as _;
    use serde::{Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(words: &[String], to: S) -> Result<S::Ok, S::Error> {
        let mut pairs = BTreeMap::new();
        for word in words {
            let Some((name, value)) = word.split_once('=') else {
                return Err(S::Error::custom(format!(
                    "{word:?} is not NAME=VALUE (a whole machine, .ova or .ovf, is backed up on the host of the \
                     repository, without --server)"
                )));
            };
            if pairs.insert(name, value).is_some() {
                return Err(S::Error::custom(format!("disk {name} is named twice")));
            }
        }
        pairs.serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
        let pairs = super::unique_names(from)?;
        Ok(pairs.iter().map(|(name, value)| format!("{name}={value}")).collect())
    }
}

/// For serde: an object of texts by the names of disks, none of which is repeated.
///
/// # Errors
/// The error of the format.
pub fn unique_names<'de, D: Deserializer<'de>>(
    from: D,
) -> std::result::Result<BTreeMap<String, String>, D::Error> {
    struct Pairs;

    impl<'de> Visitor<'de> for Pairs {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object of texts")
        }

        fn visit_map<A: MapAccess<'de>>(
            self,
            mut given: A,
        ) -> std::result::Result<Self::Value, A::Error> {
            let mut pairs = BTreeMap::new();
            while let Some((name, value)) = given.next_entry::<String, String>()? {
                let repeated = A::Error::custom(format_args!("disk {name} is named twice"));
                if pairs.insert(name, value).is_some() {
                    return Err(repeated);
                }
            }
            Ok(pairs)
        }
    }

    from.deserialize_map(Pairs)
}

/// For serde: at most one value of a list.
pub(crate) mod only {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(values: &[String], to: S) -> Result<S::Ok, S::Error> {
        match values {
            [] => None,
            [value] => Some(value),
            _ => {
                let text =
                    "several addresses: this is not possible over the network; run it on the \
                            host of the repository, without --server";
                return Err(serde::ser::Error::custom(text));
            }
        }
        .serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
        Ok(Option::<String>::deserialize(from)?.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_names_of_disks_are_refused() {
        let read = |text: &str| unique_names(&mut serde_json::Deserializer::from_str(text));
        assert_eq!(read(r#"{"vda":"a","vdb":"b"}"#).unwrap().len(), 2);
        let error = read(r#"{"vda":"a","vda":"b"}"#).unwrap_err().to_string();
        assert!(error.starts_with("disk vda is named twice"), "{error}");
        let words = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            pairs::serialize(&words, serde_json::value::Serializer)
        };
        assert!(words(&["vda=a", "vdb=b"]).is_ok());
        assert!(words(&["vda=a", "vda=b"]).unwrap_err().to_string().contains("named twice"));
    }

    #[test]
    fn percentages_are_read_with_and_without_their_sign() {
        assert_eq!((parse_percent("5%"), parse_percent("0.5")), (Ok(5.0), Ok(0.5)));
        for text in ["0", "-1", "101", "five", "", "%", "NaN", "inf"] {
            assert!(parse_percent(text).is_err(), "{text}");
        }
    }
}
