//! Keys: how the master key is wrapped by a passphrase, and what is derived
//! from it.
//!
//! ```text
//! passphrase ── Argon2id(salt, parameters) ──▶ key-encryption key
//!                                                   │ AES-256-GCM
//! repository.json: wrapped master key ──────────────┴──▶ master key (random)
//!                                                             │ keyed BLAKE3
//!          chunk seal · chunk nonce · chunk hash · page seal · page nonce ·
//!          document seal · name hash · one key per layer …
//! ```
//!
//! In a repository without encryption the master key is derived from the
//! repository id, which everybody may know: everything below works the same
//! and protects against accidents only.

use std::time::{Duration, Instant};

use aws_lc_rs::aead::{Aad, LessSafeKey, Nonce, UnboundKey, AES_256_GCM};
use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, Zeroizing};

use crate::seal::{random, Sealer, NONCE_BYTES, TAG_BYTES};
use crate::{hex, KeyLabel, Passphrase, RepositoryId};

/// 256 bits.
pub(crate) type Key = [u8; 32];

const SALT_BYTES: usize = 16;
const WRAPPED_BYTES: usize = 32 + TAG_BYTES;

/// The cost of a guess at the passphrase. What is read from a file is held
/// between a floor, so that nobody edits it down, and a ceiling, so that
/// nobody makes opening a repository take all memory or forever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GuessCost {
    pub(crate) memory_kib: u32,
    pub(crate) passes: u32,
    pub(crate) lanes: u32,
}

impl GuessCost {
    pub(crate) const DEFAULT: GuessCost = GuessCost { memory_kib: 19_456, passes: 2, lanes: 1 };
    const CEILING: GuessCost = GuessCost { memory_kib: 1 << 20, passes: 64, lanes: 16 };
    /// Most KiB × passes: about ten seconds on one processor.
    const MAX_WORK: u64 = 16 << 20;

    /// A cost that takes about `time` on this machine, never less than the lowest:
    /// first more memory, up to the ceiling or a quarter of the machine's, then more
    /// passes.
    pub(crate) fn for_this_machine(time: Duration) -> Result<Self> {
        let passphrase = Passphrase::new(b"how long does a guess take".to_vec())?;
        let mut cost = Self::DEFAULT;
        let most_kib = Self::CEILING.memory_kib.min(memory_kib() / 4).max(cost.memory_kib);
        loop {
            let start = Instant::now();
            key_of_passphrase(&passphrase, &[0; SALT_BYTES], cost)?;
            let took = start.elapsed().max(Duration::from_micros(1));
            // Doubled until it is nearly there, so that the measurement costs little.
            if took.saturating_mul(2) <= time && cost.memory_kib < most_kib {
                cost.memory_kib = cost.memory_kib.saturating_mul(2).min(most_kib);
                continue;
            }
            let scale = time.as_secs_f64() / took.as_secs_f64();
            if cost.memory_kib < most_kib {
                let wanted = f64::from(cost.memory_kib) * scale;
                cost.memory_kib = (wanted as u32).clamp(Self::DEFAULT.memory_kib, most_kib);
            } else {
                let wanted = f64::from(cost.passes) * scale;
                let most = (Self::MAX_WORK / u64::from(cost.memory_kib)) as u32;
                let most = most.min(Self::CEILING.passes);
                cost.passes = (wanted as u32).clamp(Self::DEFAULT.passes, most);
            }
            return Ok(cost);
        }
    }

    /// How much a guess takes, to compare costs by.
    pub(crate) fn work(self) -> u64 {
        u64::from(self.memory_kib) * u64::from(self.passes)
    }

    /// Refuses a cost that Coldrise never writes, before anything is computed.
    fn check(self) -> Result<()> {
        let floor = GuessCost::DEFAULT;
        let within = |value: u32, low: u32, high: u32| (low..=high).contains(&value);
        if within(self.memory_kib, floor.memory_kib, Self::CEILING.memory_kib)
            && within(self.passes, floor.passes, Self::CEILING.passes)
            && within(self.lanes, floor.lanes, Self::CEILING.lanes)
            && self.work() <= Self::MAX_WORK
        {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "repository.json asks for Argon2id with {} KiB, {} passes, {} lanes, which is \
                 outside of what Coldrise ever writes: the file was changed; restore it from a copy",
                self.memory_kib, self.passes, self.lanes
            ),
        ))
    }
}

/// Refuses what a machine with `there` KiB of memory has no room for.
pub(crate) fn check_memory(cost: GuessCost, there: u32) -> Result<()> {
    if cost.memory_kib <= there / 4 * 3 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "a guess at the passphrase takes {} MiB of memory, and this machine has {} MiB: open \
             the repository on a larger one, or add a cheaper passphrase there (coldrise key add \
             --guess-ms)",
            cost.memory_kib >> 10,
            there >> 10
        ),
    ))
}

/// Memory of this machine, in KiB; 1 GiB where it does not tell.
fn memory_kib() -> u32 {
    let described = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = described.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let total = total.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    u32::try_from(total.unwrap_or(1 << 20)).unwrap_or(u32::MAX)
}

/// The master key, wrapped by one passphrase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeySlot {
    pub(crate) kdf: KeyDerivation,
    pub(crate) cost: GuessCost,
    pub(crate) salt: String,
    pub(crate) nonce: String,
    pub(crate) wrapped_key: String,
    /// Its name. Bound like the cost: nobody exchanges names without a passphrase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) label: Option<KeyLabel>,
    /// When it was added, in milliseconds since 1970-01-01T00:00:00Z.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) added_at_ms: Option<u64>,
}

/// How a passphrase becomes a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum KeyDerivation {
    /// Argon2id, version 0x13.
    #[serde(rename = "argon2id")]
    Argon2id,
}

impl KeySlot {
    /// Wraps `master` under `passphrase`. `bound` is what must not change in
    /// the file around the slot.
    pub(crate) fn wrap(
        master: &Key,
        passphrase: &Passphrase,
        bound: &[u8],
        cost: GuessCost,
        label: Option<KeyLabel>,
        added_at_ms: Option<u64>,
    ) -> Result<Self> {
        let (mut salt, mut nonce) = ([0; SALT_BYTES], [0; NONCE_BYTES]);
        random(&mut salt)?;
        random(&mut nonce)?;
        let key = key_of_passphrase(passphrase, &salt, cost)?;
        let mut wrapped = Zeroizing::new(*master);
        let tag = cipher(&key)?
            .seal_in_place_separate_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(associated(bound, cost, &salt, label.as_ref())),
                wrapped.as_mut(),
            )
            .map_err(|_| Error::new(ErrorKind::Internal, "AES-256-GCM refused to wrap a key"))?;
        let mut sealed = wrapped.to_vec();
        sealed.extend_from_slice(tag.as_ref());
        Ok(KeySlot {
            kdf: KeyDerivation::Argon2id,
            cost,
            salt: hex::encode(&salt),
            nonce: hex::encode(&nonce),
            wrapped_key: hex::encode(&sealed),
            label,
            added_at_ms,
        })
    }

    /// Unwraps the master key; `None` where the passphrase is another one (or
    /// something that is bound was changed, which looks the same).
    pub(crate) fn unwrap(
        &self,
        passphrase: &Passphrase,
        bound: &[u8],
    ) -> Result<Option<Zeroizing<Key>>> {
        let malformed =
            || Error::new(ErrorKind::Corrupt, "repository.json holds a malformed key slot");
        self.cost.check()?;
        let salt = hex::decode::<SALT_BYTES>(&self.salt).ok_or_else(malformed)?;
        let nonce = hex::decode::<NONCE_BYTES>(&self.nonce).ok_or_else(malformed)?;
        let mut sealed =
            Zeroizing::new(hex::decode::<WRAPPED_BYTES>(&self.wrapped_key).ok_or_else(malformed)?);
        check_memory(self.cost, memory_kib())?;
        let key = key_of_passphrase(passphrase, &salt, self.cost)?;
        let opened = cipher(&key)?.open_in_place(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(associated(bound, self.cost, &salt, self.label.as_ref())),
            sealed.as_mut(),
        );
        let Ok(plaintext) = opened else {
            return Ok(None);
        };
        let mut master = Zeroizing::new([0; 32]);
        master.copy_from_slice(plaintext);
        Ok(Some(master))
    }

    /// Checks what can be checked without a passphrase.
    pub(crate) fn check(&self) -> Result<()> {
        self.cost.check()
    }
}

fn associated(
    bound: &[u8],
    cost: GuessCost,
    salt: &[u8; SALT_BYTES],
    label: Option<&KeyLabel>,
) -> Vec<u8> {
    let mut bytes = bound.to_vec();
    for number in [cost.memory_kib, cost.passes, cost.lanes] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.extend_from_slice(salt);
    // Last, and nothing where there is none, as it was before there were names.
    bytes.extend_from_slice(label.map_or("", KeyLabel::as_str).as_bytes());
    bytes
}

fn cipher(key: &Key) -> Result<LessSafeKey> {
    UnboundKey::new(&AES_256_GCM, key)
        .map(LessSafeKey::new)
        .map_err(|_| Error::new(ErrorKind::Internal, "AES-256-GCM refused its key"))
}

fn key_of_passphrase(
    passphrase: &Passphrase,
    salt: &[u8; SALT_BYTES],
    cost: GuessCost,
) -> Result<Zeroizing<Key>> {
    let failed = |error: argon2::Error| {
        Error::new(ErrorKind::Internal, format!("Argon2id refused its parameters: {error}"))
    };
    let parameters =
        argon2::Params::new(cost.memory_kib, cost.passes, cost.lanes, Some(32)).map_err(failed)?;
    let mut key = Zeroizing::new([0; 32]);
    argon2::Argon2::new(argon2::Algorithm::Argon2id, argon2::Version::V0x13, parameters)
        .hash_password_into(passphrase.as_bytes(), salt, key.as_mut())
        .map_err(failed)?;
    Ok(key)
}

/// The one derivation of keys from keys: keyed BLAKE3 over the length of
/// `purpose` (8 bytes, little endian), `purpose` and `material`.
pub(crate) fn derive_from(root: &Key, purpose: &str, material: &[u8]) -> Zeroizing<Key> {
    let mut hasher = blake3::Hasher::new_keyed(root);
    hasher.update(&(purpose.len() as u64).to_le_bytes());
    hasher.update(purpose.as_bytes());
    hasher.update(material);
    let key = Zeroizing::new(*hasher.finalize().as_bytes());
    hasher.zeroize();
    key
}

/// Every key of an open repository.
pub(crate) struct Keys {
    /// The root of [`crate::Repository::derive_key`].
    exported: Zeroizing<Key>,
    /// Of the plaintext of chunks: what deduplication compares.
    pub(crate) chunk_hash: Zeroizing<Key>,
    /// Of entries of the dedup index.
    pub(crate) dedup_tag: Zeroizing<Key>,
    /// Of names, for the keys of the catalog.
    pub(crate) name_hash: Zeroizing<Key>,
    pub(crate) chunks: Sealer,
    pub(crate) pages: Sealer,
    pub(crate) documents: Sealer,
}

impl Keys {
    /// The keys below `master`.
    pub(crate) fn new(master: &Key, encrypted: bool) -> Result<Self> {
        Ok(Keys {
            exported: derive_from(master, "coldrise v1 exported", b""),
            chunk_hash: derive_from(master, "coldrise v1 chunk hash", b""),
            dedup_tag: derive_from(master, "coldrise v1 dedup tag", b""),
            name_hash: derive_from(master, "coldrise v1 name hash", b""),
            chunks: Sealer::new(master, "coldrise v1 chunk", encrypted)?,
            pages: Sealer::new(master, "coldrise v1 page", encrypted)?,
            documents: Sealer::new(master, "coldrise v1 document", encrypted)?,
        })
    }

    /// The master key of a repository without encryption.
    pub(crate) fn open_master(id: &RepositoryId) -> Zeroizing<Key> {
        Zeroizing::new(blake3::derive_key("coldrise v1 repository without encryption", &id.0))
    }

    /// A new random master key.
    pub(crate) fn new_master() -> Result<Zeroizing<Key>> {
        let mut master = Zeroizing::new([0; 32]);
        random(master.as_mut())?;
        Ok(master)
    }

    /// A key for another part of Coldrise.
    pub(crate) fn export(&self, purpose: &str, material: &[u8]) -> Zeroizing<Key> {
        derive_from(&self.exported, purpose, material)
    }
}
