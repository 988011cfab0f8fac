//! The SHA-256 of a certificate, as people compare it.

use std::fmt;
use std::str::FromStr;

use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

const BYTES: usize = 32;
const SHA1_BYTES: usize = 20;

/// The SHA-256 of a certificate. As text: 32 bytes in hexadecimal, with colons in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Thumbprint([u8; BYTES]);

impl Thumbprint {
    /// That of a certificate in DER.
    pub fn of(certificate: &[u8]) -> Thumbprint {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, certificate);
        let mut bytes = [0; BYTES];
        bytes.copy_from_slice(digest.as_ref());
        Thumbprint(bytes)
    }
}

impl FromStr for Thumbprint {
    type Err = Error;

    /// Reads hexadecimal digits of both cases, with or without colons.
    fn from_str(text: &str) -> Result<Thumbprint> {
        let invalid = |text: String| {
            Error::new(ErrorKind::InvalidInput, text).advise(
                "give the SHA-256 thumbprint: openssl x509 -noout -fingerprint -sha256 prints it",
            )
        };
        let digits: String = text.trim().chars().filter(|c| *c != ':').collect();
        if digits.is_empty() || !digits.chars().all(|c| c.is_ascii_hexdigit()) {
            return Err(invalid("a thumbprint is 32 bytes in hexadecimal, such as 4F:0A:…".into()));
        }
        match digits.len() / 2 {
            SHA1_BYTES if digits.len() == 2 * SHA1_BYTES => {
                return Err(invalid("this is a SHA-1 thumbprint, which can be forged".into()));
            }
            _ if digits.len() != 2 * BYTES => {
                let text =
                    format!("a thumbprint has {} digits, this has {}", 2 * BYTES, digits.len());
                return Err(invalid(text));
            }
            _ => {}
        }
        let mut bytes = [0; BYTES];
        for (index, byte) in bytes.iter_mut().enumerate() {
            let pair = digits.get(2 * index..2 * index + 2).unwrap_or_default();
            *byte = u8::from_str_radix(pair, 16)
                .map_err(|_| invalid(format!("{pair} is not a byte in hexadecimal")))?;
        }
        Ok(Thumbprint(bytes))
    }
}

impl fmt::Display for Thumbprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let colon = if index == 0 { "" } else { ":" };
            write!(f, "{colon}{byte:02X}")?;
        }
        Ok(())
    }
}

impl TryFrom<String> for Thumbprint {
    type Error = Error;

    fn try_from(text: String) -> Result<Thumbprint> {
        text.parse()
    }
}

impl From<Thumbprint> for String {
    fn from(thumbprint: Thumbprint) -> String {
        thumbprint.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::Thumbprint;

    #[test]
    fn both_cases_with_and_without_colons() {
        let shown = Thumbprint::of(b"certificate").to_string();
        assert_eq!(shown.len(), 95);
        for text in [shown.clone(), shown.to_lowercase(), shown.replace(':', "")] {
            assert_eq!(text.parse::<Thumbprint>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn other_texts_are_refused() {
        let shown = Thumbprint::of(b"certificate").to_string();
        for (text, said) in [
            (&shown[..59], "SHA-1"),
            (&shown[..92], "has 62"),
            (&shown[..94], "has 63"),
            ("", "32 bytes"),
            ("é:ü", "32 bytes"),
        ] {
            let error = text.parse::<Thumbprint>().unwrap_err().full_message();
            assert!(error.contains(said) && error.contains("-sha256"), "{text}: {error}");
        }
    }
}
