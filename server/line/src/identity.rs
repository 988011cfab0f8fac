//! Keys of the two sides.

use coldrise_block::hex;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::Ed25519KeyPair;
use coldrise_block::{Error, ErrorKind, Result};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use zeroize::Zeroizing;

/// A side's public key: SHA-256 of its SubjectPublicKeyInfo. As text 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerKey(pub [u8; 32]);

impl PeerKey {
    /// The key of a raw public key that came through TLS.
    pub(crate) fn of(public_key: &[u8]) -> PeerKey {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, public_key).as_ref());
        PeerKey(hash)
    }
}

impl fmt::Display for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

impl fmt::Debug for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PeerKey {
    type Err = Error;

    fn from_str(text: &str) -> Result<PeerKey> {
        let refused =
            || Error::new(ErrorKind::InvalidInput, format!("{text:?} is not a key of a side"));
        let key = hex::decode(text).and_then(|key| key.try_into().ok());
        key.map(PeerKey).ok_or_else(refused)
    }
}

/// This side's private key (Ed25519). There are no certificates: TLS carries the raw public keys
/// (RFC 7250), and each side pins the other's.
pub struct Identity {
    pkcs8: Zeroizing<Vec<u8>>,
    certified: Arc<CertifiedKey>,
    key: PeerKey,
}

impl Identity {
    /// A new one.
    ///
    /// # Errors
    /// `Internal` if the system has no random numbers.
    pub fn generate() -> Result<Identity> {
        let document = Ed25519KeyPair::generate_pkcs8v1(&SystemRandom::new())
            .map_err(|_| Error::new(ErrorKind::Internal, "making a private key failed"))?;
        Identity::from_pkcs8(document.as_ref())
    }

    /// The one of which [`Identity::pkcs8`] was stored.
    ///
    /// # Errors
    /// `Corrupt` if it is not a private key.
    pub fn from_pkcs8(pkcs8: &[u8]) -> Result<Identity> {
        let refused = || Error::new(ErrorKind::Corrupt, "the private key of this side is damaged");
        let der = PrivatePkcs8KeyDer::from(pkcs8);
        let signing =
            rustls::crypto::aws_lc_rs::sign::any_eddsa_type(&der).map_err(|_| refused())?;
        let public = signing.public_key().ok_or_else(refused)?.to_vec();
        let key = PeerKey::of(&public);
        let certified = Arc::new(CertifiedKey::new(vec![CertificateDer::from(public)], signing));
        Ok(Identity { pkcs8: Zeroizing::new(pkcs8.to_vec()), certified, key })
    }

    /// The private key, for storing it encrypted.
    pub fn pkcs8(&self) -> &[u8] {
        &self.pkcs8
    }

    /// The public key, which the peer pins.
    pub fn key(&self) -> PeerKey {
        self.key
    }

    pub(crate) fn certified(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.certified)
    }
}
