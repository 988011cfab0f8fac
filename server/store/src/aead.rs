//! Sealing of stored bytes: authenticated encryption or, in an unencrypted repository, a keyed
//! checksum with the same layout.
//!
//! The nonce is chosen in two ways:
//!
//! - Chunks and map pages: 96 bits of a keyed BLAKE3 of everything sealed (associated data and
//!   plaintext). Equal nonces mean equal contents, whatever happens to the repository: a copy that
//!   continues separately, a rollback, an id that is assigned again after a crash. Probability of a
//!   chance collision with 2^36 values (1 PiB of 16 KiB chunks): 2^-25.
//! - Documents: 96 random bits. There are few documents.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use coldrise_block::{Error, ErrorKind, Result};
use zeroize::{Zeroize, Zeroizing};

/// 256 bits.
pub(crate) type Key = [u8; 32];

pub(crate) const NONCE_BYTES: usize = 12;
pub(crate) const TAG_BYTES: usize = 16;

/// The bytes do not authenticate. The caller names them in its error.
#[derive(Debug)]
pub(crate) struct Mismatch;

/// Encrypts and decrypts one kind of stored bytes with its own keys.
pub struct Aead {
    nonce_key: Zeroizing<Key>,
    mode: Mode,
}

enum Mode {
    Encrypted(LessSafeKey),
    /// The tag is a keyed BLAKE3 cut to 16 bytes; the nonce is all zeroes.
    Checked(Zeroizing<Key>),
}

impl Aead {
    /// Derives its keys from `root` for `purpose`.
    pub(crate) fn new(root: &Key, purpose: &str, encrypted: bool) -> Result<Self> {
        let key = derive_from(root, purpose, b"seal");
        let mode = if encrypted {
            let unbound = UnboundKey::new(&AES_256_GCM, key.as_ref())
                .map_err(|_| Error::new(ErrorKind::Internal, "AES-256-GCM refused its key"))?;
            Mode::Encrypted(LessSafeKey::new(unbound))
        } else {
            Mode::Checked(key)
        };
        Ok(Aead { nonce_key: derive_from(root, purpose, b"nonce"), mode })
    }

    /// Seals `bytes` in place under a nonce derived from the sealed content.
    pub(crate) fn encrypt_derived(
        &self,
        associated: &[u8],
        bytes: &mut [u8],
    ) -> Result<([u8; NONCE_BYTES], [u8; TAG_BYTES])> {
        self.encrypt_under(associated, bytes, |nonce, content| {
            let mut hasher = blake3::Hasher::new_keyed(&self.nonce_key);
            hasher.update(&(associated.len() as u64).to_le_bytes());
            hasher.update(associated);
            hasher.update(content);
            nonce.copy_from_slice(&hasher.finalize().as_bytes()[..NONCE_BYTES]);
            Ok(())
        })
    }

    /// Seals `bytes` in place under a random nonce.
    pub(crate) fn encrypt_random(
        &self,
        associated: &[u8],
        bytes: &mut [u8],
    ) -> Result<([u8; NONCE_BYTES], [u8; TAG_BYTES])> {
        self.encrypt_under(associated, bytes, |nonce, _| random(nonce))
    }

    /// Seals `bytes` in place under the nonce that `choose` makes from them.
    fn encrypt_under(
        &self,
        associated: &[u8],
        bytes: &mut [u8],
        choose: impl FnOnce(&mut [u8; NONCE_BYTES], &[u8]) -> Result<()>,
    ) -> Result<([u8; NONCE_BYTES], [u8; TAG_BYTES])> {
        let mut nonce = [0; NONCE_BYTES];
        if matches!(self.mode, Mode::Encrypted(_)) {
            choose(&mut nonce, bytes)?;
        }
        let tag = self.encrypt(nonce, associated, bytes)?;
        Ok((nonce, tag))
    }

    fn encrypt(
        &self,
        nonce: [u8; NONCE_BYTES],
        associated: &[u8],
        bytes: &mut [u8],
    ) -> Result<[u8; TAG_BYTES]> {
        match &self.mode {
            Mode::Encrypted(key) => {
                let nonce = Nonce::assume_unique_for_key(nonce);
                let tag = key
                    .seal_in_place_separate_tag(nonce, Aad::from(associated), bytes)
                    .map_err(|_| Error::new(ErrorKind::Internal, "AES-256-GCM refused to seal"))?;
                let mut out = [0; TAG_BYTES];
                out.copy_from_slice(tag.as_ref());
                Ok(out)
            }
            Mode::Checked(key) => Ok(checksum(key, &nonce, associated, bytes)),
        }
    }

    /// Opens `sealed` into `plaintext`, which has the same length. After a mismatch the content of
    /// `plaintext` must not be used.
    pub(crate) fn decrypt(
        &self,
        nonce: &[u8; NONCE_BYTES],
        tag: &[u8; TAG_BYTES],
        associated: &[u8],
        sealed: &[u8],
        plaintext: &mut [u8],
    ) -> std::result::Result<(), Mismatch> {
        if sealed.len() != plaintext.len() {
            return Err(Mismatch);
        }
        match &self.mode {
            Mode::Encrypted(key) => {
                let nonce = Nonce::assume_unique_for_key(*nonce);
                key.open_separate_gather(nonce, Aad::from(associated), sealed, tag, plaintext)
                    .map_err(|_| Mismatch)
            }
            Mode::Checked(key) => {
                if checksum(key, nonce, associated, sealed) != *tag {
                    return Err(Mismatch);
                }
                plaintext.copy_from_slice(sealed);
                Ok(())
            }
        }
    }
}

fn checksum(key: &Key, nonce: &[u8], associated: &[u8], bytes: &[u8]) -> [u8; TAG_BYTES] {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(&(associated.len() as u64).to_le_bytes());
    hasher.update(associated);
    hasher.update(nonce);
    hasher.update(bytes);
    let mut tag = [0; TAG_BYTES];
    tag.copy_from_slice(&hasher.finalize().as_bytes()[..TAG_BYTES]);
    tag
}

/// The only derivation of keys from keys: keyed BLAKE3 over the length of `purpose` (8 bytes,
/// little endian), `purpose` and `material`.
pub(crate) fn derive_from(root: &Key, purpose: &str, material: &[u8]) -> Zeroizing<Key> {
    let mut hasher = blake3::Hasher::new_keyed(root);
    hasher.update(&(purpose.len() as u64).to_le_bytes());
    hasher.update(purpose.as_bytes());
    hasher.update(material);
    let key = Zeroizing::new(*hasher.finalize().as_bytes());
    hasher.zeroize();
    key
}

/// Fills `bytes` from the operating system's generator. (The cipher library's own generator takes
/// 35 ms to start, which is most of a publish.)
///
/// # Errors
/// `Internal` if the system has none.
pub fn random(bytes: &mut [u8]) -> Result<()> {
    use rustix::rand::{GetRandomFlags, getrandom};
    let mut filled = 0;
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                let what = format!("no random numbers from the system: {errno}");
                return Err(Error::new(ErrorKind::Internal, what));
            }
        }
    }
    Ok(())
}

/// A sealed document: version, nonce, ciphertext, tag.
pub mod document {
    use super::*;

    const VERSION: u8 = 1;
    const OVERHEAD_BYTES: usize = 1 + NONCE_BYTES + TAG_BYTES;

    /// Maximum size of a document, in bytes of plaintext.
    pub const MAX_BYTES: usize = 16 << 20;

    fn associated(repository: &[u8; 16], purpose: &str) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(17 + purpose.len());
        bytes.extend_from_slice(repository);
        bytes.push(VERSION);
        bytes.extend_from_slice(purpose.as_bytes());
        bytes
    }

    /// Encrypts a document for `purpose`, which the reader must name.
    pub fn encrypt(
        aead: &Aead,
        repository: &[u8; 16],
        purpose: &str,
        plaintext: &[u8],
    ) -> Result<Vec<u8>> {
        if plaintext.len() > MAX_BYTES {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("a document of {} bytes is over the limit", plaintext.len()),
            ));
        }
        let mut bytes = Vec::with_capacity(plaintext.len() + OVERHEAD_BYTES);
        bytes.push(VERSION);
        bytes.extend_from_slice(&[0; NONCE_BYTES]);
        bytes.extend_from_slice(plaintext);
        let (nonce, tag) =
            aead.encrypt_random(&associated(repository, purpose), &mut bytes[1 + NONCE_BYTES..])?;
        bytes[1..1 + NONCE_BYTES].copy_from_slice(&nonce);
        bytes.extend_from_slice(&tag);
        Ok(bytes)
    }

    /// The content of an encrypted document.
    pub fn decrypt(
        aead: &Aead,
        repository: &[u8; 16],
        purpose: &str,
        bytes: &[u8],
    ) -> Result<Vec<u8>> {
        let corrupt = || {
            Error::new(
                ErrorKind::Corrupt,
                format!(
                    "a document ({purpose}) does not authenticate: it was changed or truncated"
                ),
            )
        };
        if bytes.len() > MAX_BYTES + OVERHEAD_BYTES {
            return Err(corrupt());
        }
        let (version, rest) = bytes.split_first().ok_or_else(corrupt)?;
        if *version != VERSION {
            return Err(corrupt());
        }
        let (nonce, rest) = rest.split_first_chunk::<NONCE_BYTES>().ok_or_else(corrupt)?;
        let (sealed, tag) = rest.split_last_chunk::<TAG_BYTES>().ok_or_else(corrupt)?;
        let mut plaintext = vec![0; sealed.len()];
        aead.decrypt(nonce, tag, &associated(repository, purpose), sealed, &mut plaintext)
            .map_err(|Mismatch| corrupt())?;
        Ok(plaintext)
    }
}
