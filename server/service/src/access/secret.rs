//! Random secrets, and the hashes that are stored of them.

use aws_lc_rs::digest;
use coldrise_block::Result;
use coldrise_block::hex;
use zeroize::Zeroizing;

/// Size of a secret, in bytes. At 256 bits a plain hash of it is enough: it cannot be guessed.
const BYTES: usize = 32;

/// A secret of 256 random bits, as 64 hexadecimal digits.
pub(crate) struct Secret(Zeroizing<String>);

impl Secret {
    /// A new one.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub(crate) fn new() -> Result<Secret> {
        let mut bytes = Zeroizing::new([0; BYTES]);
        coldrise_store::random(&mut *bytes)?;
        Ok(Secret(Zeroizing::new(hex::encode(&*bytes))))
    }

    /// The text for its owner.
    pub(crate) fn text(&self) -> &str {
        &self.0
    }

    /// What is stored of it.
    pub(crate) fn hash(&self) -> [u8; 32] {
        sha256(&[self.0.as_bytes()])
    }
}

/// A short public id: 16 hexadecimal digits.
///
/// # Errors
/// If the system has no random numbers.
pub(crate) fn random_id() -> Result<String> {
    let mut bytes = [0; 8];
    coldrise_store::random(&mut bytes)?;
    Ok(hex::encode(&bytes))
}

/// SHA-256 over the parts. Each is preceded by its length, so that parts cannot be shifted.
pub(crate) fn sha256(parts: &[&[u8]]) -> [u8; 32] {
    let mut context = digest::Context::new(&digest::SHA256);
    for part in parts {
        context.update(&(part.len() as u64).to_be_bytes());
        context.update(part);
    }
    let mut hash = [0; 32];
    hash.copy_from_slice(context.finish().as_ref());
    hash
}
