//! Hosts and ports in the settings of targets.

use std::net::IpAddr;

use coldrise_block::{Error, ErrorKind, Result};

/// Maximum length of a name, in bytes.
const MAX_BYTES: usize = 253;

/// The address in a host, with or without brackets.
fn address(host: &str) -> Option<IpAddr> {
    let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    inner.unwrap_or(host).parse().ok()
}

/// Checks the name or address of a host, without a port.
///
/// # Errors
/// `InvalidInput`, with the `field` that it is in.
pub(super) fn check_host(field: &str, host: &str) -> Result<()> {
    let is_allowed = |c: u8| c.is_ascii_alphanumeric() || b".-_".contains(&c);
    let is_name = !host.is_empty() && host.len() <= MAX_BYTES && host.bytes().all(is_allowed);
    // Digits alone are a mistyped address.
    let is_number = host.bytes().all(|c| c.is_ascii_digit() || c == b'.');
    if address(host).is_some() || (is_name && !is_number) {
        return Ok(());
    }
    let text = format!("{field}: give the name or address of a host, without a port");
    Err(Error::new(ErrorKind::InvalidInput, text))
}

/// Whether a host's name or address in a setting is this host.
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || address(host).is_some_and(|ip| ip.is_loopback())
}

/// The host as the resolver takes it: addresses without brackets.
pub(super) fn plain_host(host: &str) -> String {
    address(host).map_or_else(|| host.to_owned(), |ip| ip.to_string())
}

#[cfg(test)]
mod tests {
    use super::{check_host, is_loopback, plain_host};

    #[test]
    fn host_names_and_addresses_are_checked() {
        for host in ["mail", "mail.example", "192.0.2.1", "::1", "[2001:db8::1]", "a_b.example"] {
            check_host("host", host).unwrap();
        }
        for host in
            ["", "mail:25", "[mail]", "1.2.3", "999.1.1.1", "a b", "::1:x", &"a".repeat(254)]
        {
            assert!(check_host("host", host).is_err(), "{host}");
        }
        assert!(is_loopback("localhost") && is_loopback("[::1]") && !is_loopback("192.0.2.1"));
        assert_eq!((plain_host("[::1]"), plain_host("mail")), ("::1".into(), "mail".into()));
    }
}
