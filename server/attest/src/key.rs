//! Keys of Ed25519 in the files that OpenSSL reads and writes.

use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use coldrise_block::{Context, Error, ErrorKind, Result};
use zeroize::Zeroizing;

/// The bytes before the 32 bytes of a public key in its DER form (RFC 8410).
const PUBLIC_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];
/// Maximum length of a key file, in bytes.
const MAX_KEY_FILE_BYTES: u64 = 4096;

/// A private key.
pub struct SigningKey(Ed25519KeyPair);

impl SigningKey {
    /// Makes a key and stores it in a new file that only its owner reads.
    ///
    /// # Errors
    /// `AlreadyExists`: keys are never replaced; errors of the system.
    pub fn create(path: &Path) -> Result<SigningKey> {
        let refused = |_| Error::new(ErrorKind::Internal, "the system made no key");
        let pkcs8 = Ed25519KeyPair::generate_pkcs8v1(&SystemRandom::new()).map_err(refused)?;
        let text = Zeroizing::new(pem("PRIVATE KEY", pkcs8.as_ref()));
        let what = || format!("making {}", path.display());
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .context(what)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).context(what)?;
        SigningKey::of_pkcs8(pkcs8.as_ref(), path)
    }

    /// Reads a key of `coldrise attest --new-key` or `openssl genpkey -algorithm ed25519`.
    ///
    /// # Errors
    /// `InvalidInput` for another kind of file, or one that others than its owner may read.
    pub fn read(path: &Path) -> Result<SigningKey> {
        let what = || format!("reading {}", path.display());
        let mode = std::fs::metadata(path).context(what)?.mode();
        if mode & 0o077 != 0 {
            let text = format!("{} can be read by others than its owner", path.display());
            return Err(Error::new(ErrorKind::InvalidInput, text).advise("use chmod 600"));
        }
        let text = Zeroizing::new(read_short(path)?);
        let der = Zeroizing::new(of_pem("PRIVATE KEY", &text).ok_or_else(|| no_key(path))?);
        SigningKey::of_pkcs8(&der, path)
    }

    fn of_pkcs8(der: &[u8], path: &Path) -> Result<SigningKey> {
        Ed25519KeyPair::from_pkcs8_maybe_unchecked(der).map(SigningKey).map_err(|_| no_key(path))
    }

    /// The public half.
    pub fn public(&self) -> PublicKey {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(self.0.public_key().as_ref());
        PublicKey(bytes)
    }

    /// The signature of a message.
    pub(super) fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.0.sign(message).as_ref().to_vec()
    }
}

fn no_key(path: &Path) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        format!("{} is not an Ed25519 key in PEM format", path.display()),
    )
    .advise("make one with coldrise attest --new-key FILE")
}

/// A public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// Reads a file with a public key in PEM.
    ///
    /// # Errors
    /// `InvalidInput` for another kind of file; errors of the system.
    pub fn read(path: &Path) -> Result<PublicKey> {
        let text = read_short(path)?;
        PublicKey::of_pem(&text).ok_or_else(|| {
            let text = format!("{} is not an Ed25519 public key in PEM format", path.display());
            Error::new(ErrorKind::InvalidInput, text)
        })
    }

    /// The key of a text in PEM.
    pub(super) fn of_pem(text: &str) -> Option<PublicKey> {
        let der = of_pem("PUBLIC KEY", text)?;
        let key = der.strip_prefix(&PUBLIC_PREFIX)?;
        key.try_into().ok().map(PublicKey)
    }

    /// The key in PEM.
    pub fn to_pem(&self) -> String {
        pem("PUBLIC KEY", &[&PUBLIC_PREFIX[..], &self.0].concat())
    }

    /// A short name of the key for people: the start of the SHA-256 of its DER form.
    pub fn fingerprint(&self) -> String {
        let der = [&PUBLIC_PREFIX[..], &self.0].concat();
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &der);
        coldrise_block::hex::encode(&digest.as_ref()[..16])
    }

    /// Whether the signature of a message is this key's.
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ED25519, self.0).verify(message, signature).is_ok()
    }
}

fn read_short(path: &Path) -> Result<String> {
    let what = || format!("reading {}", path.display());
    let file = std::fs::File::open(path).context(what)?;
    let mut text = String::new();
    file.take(MAX_KEY_FILE_BYTES).read_to_string(&mut text).context(what)?;
    Ok(text)
}

fn pem(label: &str, der: &[u8]) -> String {
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", BASE64.encode(der))
}

/// The DER form in a text that holds nothing else. A key of Ed25519 has one line of base64.
fn of_pem(label: &str, text: &str) -> Option<Vec<u8>> {
    let text = text.trim().strip_prefix(&format!("-----BEGIN {label}-----"))?;
    let text = text.strip_suffix(&format!("-----END {label}-----"))?;
    BASE64.decode(text.trim()).ok()
}
