//! The clients that may connect.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use coldrise_block::{Error, ErrorKind, Result};

/// Longest prefix of a network.
const MOST_PREFIX: u8 = 99;

/// An address or a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    address: IpAddr,
    prefix: u8,
}

impl Client {
    /// Loopback alone.
    pub fn this_machine() -> [Client; 2] {
        [
            Client { address: Ipv4Addr::LOCALHOST.into(), prefix: 32 },
            Client { address: Ipv6Addr::LOCALHOST.into(), prefix: 128 },
        ]
    }
}

impl FromStr for Client {
    type Err = Error;

    fn from_str(text: &str) -> Result<Client> {
        let wrong = || {
            let what =
                format!("{text} is not an address or network, such as 10.0.0.5 or 10.0.0.0/24");
            Error::new(ErrorKind::InvalidInput, what)
        };
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            Some(prefix) => {
                prefix.parse().ok().filter(|prefix| *prefix <= most).ok_or_else(wrong)?
            }
            None => most,
        };
        // nfs-ganesha reads two digits.
        if prefix > MOST_PREFIX && prefix != most {
            return Err(wrong());
        }
        Ok(Client { address, prefix })
    }
}

/// The form for nfs-ganesha's configuration, which has no prefix of 0 and none of full
/// length.
impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.address, self.prefix) {
            (IpAddr::V4(_), 0) => f.write_str("0.0.0.0/1, 128.0.0.0/1"),
            (IpAddr::V6(_), 0) => f.write_str("::/1, 8000::/1"),
            (IpAddr::V4(address), 32) => address.fmt(f),
            (IpAddr::V6(address), 128) => address.fmt(f),
            (address, prefix) => write!(f, "{address}/{prefix}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_networks_alone_are_clients() {
        for (text, shown) in [
            ("10.0.0.5", "10.0.0.5"),
            ("10.0.0.5/32", "10.0.0.5"),
            ("10.0.0.0/24", "10.0.0.0/24"),
            ("0.0.0.0/0", "0.0.0.0/1, 128.0.0.0/1"),
            ("fd00::/8", "fd00::/8"),
            ("::1", "::1"),
        ] {
            assert_eq!(text.parse::<Client>().unwrap().to_string(), shown);
        }
        for text in [
            "",
            "*",
            "host",
            "10.0.0.0/33",
            "10.0.0/24",
            "10.0.0.1/",
            "1.1.1.1; }",
            "::/129",
            "::/100",
        ] {
            assert_eq!(
                text.parse::<Client>().unwrap_err().kind(),
                ErrorKind::InvalidInput,
                "{text}"
            );
        }
    }
}
