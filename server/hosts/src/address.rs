//! The address of a host: `ssh://[USER@]HOST[:PORT]`.

use std::fmt;
use std::str::FromStr;

use coldrise_block::{Error, ErrorKind};
use serde::{Deserialize, Serialize};

/// Maximum length of a user's or host's name, in bytes.
const MAX_BYTES: usize = 255;

/// Where SSH connects to. HOST may be a name of the user's `~/.ssh/config`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostAddress {
    /// The user there; `None`: as SSH chooses.
    pub user: Option<String>,
    /// The host.
    pub host: String,
    /// The port; `None`: as SSH chooses.
    pub port: Option<u16>,
}

impl FromStr for HostAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<HostAddress, Error> {
        parse(text).ok_or_else(|| {
            let shown: String = text.chars().take(80).collect();
            Error::new(ErrorKind::InvalidInput, format!("{shown:?} is not the address of a host"))
                .advise("write ssh://USER@HOST or ssh://USER@HOST:PORT")
        })
    }
}

fn parse(text: &str) -> Option<HostAddress> {
    let rest = text.strip_prefix("ssh://")?;
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let (user, rest) = match rest.rsplit_once('@') {
        Some((user, rest)) => (Some(user), rest),
        None => (None, rest),
    };
    // An IPv6 address is in brackets.
    let (host, rest) = match rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, rest),
        None => rest.split_at(rest.find(':').unwrap_or(rest.len())),
    };
    let port = match rest.strip_prefix(':') {
        Some(port) => Some(port.parse().ok().filter(|port| *port > 0)?),
        None if rest.is_empty() => None,
        None => return None,
    };
    // ssh takes a leading - for an option.
    let is_plain = |text: &str, more: &str| {
        let is_right = |c: char| c.is_ascii_alphanumeric() || more.contains(c);
        (1..=MAX_BYTES).contains(&text.len())
            && !text.starts_with('-')
            && text.chars().all(is_right)
    };
    let is_right = is_plain(host, ".-_:%") && user.is_none_or(|user| is_plain(user, ".-_"));
    is_right.then(|| HostAddress { user: user.map(str::to_owned), host: host.to_owned(), port })
}

impl TryFrom<String> for HostAddress {
    type Error = Error;

    fn try_from(text: String) -> Result<HostAddress, Error> {
        text.parse()
    }
}

impl From<HostAddress> for String {
    fn from(address: HostAddress) -> String {
        address.to_string()
    }
}

impl fmt::Display for HostAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ssh://")?;
        if let Some(user) = &self.user {
            write!(f, "{user}@")?;
        }
        match self.host.contains(':') {
            true => write!(f, "[{}]", self.host)?,
            false => f.write_str(&self.host)?,
        }
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for text in [
            "ssh://hv1",
            "ssh://root@hv1.example",
            "ssh://a.b@10.0.0.1:22",
            "ssh://root@[fd00::1]:2222",
        ] {
            assert_eq!(text.parse::<HostAddress>().unwrap().to_string(), text);
        }
        let address: HostAddress = "ssh://root@hv1:2222/".parse().unwrap();
        assert_eq!((address.user.as_deref(), address.port), (Some("root"), Some(2222)));
    }

    #[test]
    fn host_addresses_cannot_inject_options_or_commands() {
        for text in [
            "hv1",
            "ssh://",
            "ssh://-oProxyCommand=x",
            "ssh://root@-x",
            "ssh://-l@hv1",
            "ssh://a b",
            "ssh://h;id",
            "ssh://h:0",
            "ssh://h:70000",
            "ssh://h:22:22",
            "ssh://u@",
            "ssh://@h",
            "ssh://h/path",
            "ssh://$(id)",
            "ssh://[::1",
        ] {
            assert!(text.parse::<HostAddress>().is_err(), "{text}");
        }
    }
}
