//! The one-time code of a pairing, and what proves that a side knows it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use aws_lc_rs::hmac::{self, HMAC_SHA256};
use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use coldrise_block::{Error, ErrorKind, Result};
use zeroize::Zeroizing;

use crate::identity::PeerKey;

/// How long a code is valid if nothing else is said.
pub const CODE_VALID: Duration = Duration::from_secs(15 * 60);
/// Wrong codes after which an invitation is void.
pub const MAX_WRONG_CODES: u32 = 5;

/// Crockford's alphabet: no letter looks like a digit.
const DIGITS: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
const SECRET_BYTES: usize = 10;
const CODE_DIGITS: usize = SECRET_BYTES * 8 / 5;

/// A secret of 80 random bits, which an administrator carries from one site to the other. As text:
/// four groups of four letters and digits, `7K2M-9QXW-41TE-0ZHB`.
///
/// An attacker between the sites sees a proof, which has the code as its HMAC key, and would
/// have to find the code among 2^80 while it is valid.
pub struct PairingCode(Zeroizing<[u8; SECRET_BYTES]>);

impl PairingCode {
    /// A new one.
    ///
    /// # Errors
    /// `Internal` if the system has no random numbers.
    pub fn generate() -> Result<PairingCode> {
        let mut secret = Zeroizing::new([0; SECRET_BYTES]);
        fill_random(&mut *secret)?;
        Ok(PairingCode(secret))
    }

    /// Sent by the side that dials.
    pub(crate) fn near_proof(&self, keys: &ProvenKeys) -> [u8; 32] {
        let mut proof = [0; 32];
        proof.copy_from_slice(hmac::sign(&self.hmac_key(), &keys.text(b"near")).as_ref());
        proof
    }

    /// Sent by the side that listens.
    pub(crate) fn far_proof(&self, keys: &ProvenKeys) -> [u8; 32] {
        let mut proof = [0; 32];
        proof.copy_from_slice(hmac::sign(&self.hmac_key(), &keys.text(b"far ")).as_ref());
        proof
    }

    /// Whether it is the proof of the side that dials. Takes the same time for each wrong proof.
    pub(crate) fn is_near_proof(&self, keys: &ProvenKeys, proof: &[u8; 32]) -> bool {
        hmac::verify(&self.hmac_key(), &keys.text(b"near"), proof).is_ok()
    }

    /// Alike, of the side that listens.
    pub(crate) fn is_far_proof(&self, keys: &ProvenKeys, proof: &[u8; 32]) -> bool {
        hmac::verify(&self.hmac_key(), &keys.text(b"far "), proof).is_ok()
    }

    fn hmac_key(&self) -> hmac::Key {
        hmac::Key::new(HMAC_SHA256, &*self.0)
    }
}

/// The subject of a proof: one TLS connection, and the keys at its ends. With an attacker in the
/// middle there are two connections, and a proof of one is none for the other.
pub(crate) struct ProvenKeys {
    /// The connection, by its exporter.
    pub(crate) exporter: [u8; 32],
    /// The key of the side that dials.
    pub(crate) near: PeerKey,
    /// The key of the side that listens.
    pub(crate) far: PeerKey,
}

impl ProvenKeys {
    fn text(&self, side: &[u8; 4]) -> Vec<u8> {
        [b"coldrise pairing ", side.as_slice(), &self.exporter, &self.near.0, &self.far.0].concat()
    }
}

impl fmt::Display for PairingCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for digit in 0..CODE_DIGITS {
            if digit > 0 && digit % 4 == 0 {
                f.write_str("-")?;
            }
            let value = (0..5).fold(0, |value, bit| {
                let at = digit * 5 + bit;
                value << 1 | (self.0[at / 8] >> (7 - at % 8) & 1)
            });
            write!(f, "{}", char::from(DIGITS[usize::from(value)]))?;
        }
        Ok(())
    }
}

impl FromStr for PairingCode {
    type Err = Error;

    /// Takes small letters, spaces, O for 0, I and L for 1.
    fn from_str(text: &str) -> Result<PairingCode> {
        let refused = || {
            let text = "the code is not one of a pairing: four groups of four letters and digits";
            Error::new(ErrorKind::InvalidInput, text).advise("copy it from the other site's screen")
        };
        let mut secret = Zeroizing::new([0u8; SECRET_BYTES]);
        let mut count = 0;
        for letter in text.bytes().filter(|letter| !matches!(letter, b'-' | b' ')) {
            let letter = match letter.to_ascii_uppercase() {
                b'O' => b'0',
                b'I' | b'L' => b'1',
                letter => letter,
            };
            let value = DIGITS.iter().position(|&digit| digit == letter).ok_or_else(refused)?;
            if count == CODE_DIGITS {
                return Err(refused());
            }
            for bit in 0..5 {
                let at = count * 5 + bit;
                secret[at / 8] |= ((value >> (4 - bit) & 1) as u8) << (7 - at % 8);
            }
            count += 1;
        }
        match count {
            CODE_DIGITS => Ok(PairingCode(secret)),
            _ => Err(refused()),
        }
    }
}

/// Fills with random bytes.
pub(crate) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    let refused = |_| Error::new(ErrorKind::Internal, "the system gave no random numbers");
    SystemRandom::new().fill(bytes).map_err(refused)
}
