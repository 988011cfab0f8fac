//! Keys: wrapping the master key with a passphrase, and deriving keys from it.
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
//! In an unencrypted repository the master key is derived from the repository id, which is public.
//! Everything below works the same, and protects against accidents only.

use std::time::{Duration, Instant};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::aead::{Aead, Key, NONCE_BYTES, TAG_BYTES, derive_from, random};
use crate::allocator::prefer_huge_pages;
use crate::{KeyLabel, Passphrase, RepositoryId};
use coldrise_block::hex;

const SALT_BYTES: usize = 16;
const WRAPPED_BYTES: usize = 32 + TAG_BYTES;

/// The cost of one guess at the passphrase. A cost read from a file must lie between a floor, so
/// that it cannot be lowered, and a ceiling, so that no stored cost can make opening a repository take all
/// memory or never end.
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
    /// Maximum of KiB × passes: 10 to 30 seconds of one processor, depending on the speed of its
    /// memory.
    const MAX_WORK: u64 = 16 << 20;

    /// The cost of a guess that takes about `time` on this machine; see [`GuessCost::reaching`].
    /// A busy machine gives a lower cost.
    pub(crate) fn for_this_machine(time: Duration) -> Result<Self> {
        let passphrase = Passphrase::new(b"how long does a guess take".to_vec())?;
        GuessCost::reaching(time, memory_kib() / 4, |cost| {
            let start = Instant::now();
            key_of_passphrase(&passphrase, &[0; SALT_BYTES], cost)?;
            Ok(start.elapsed())
        })
    }

    /// The cost that takes about `time` by `measure`, but at least the default: first more memory,
    /// up to the ceiling or `room_kib`, then more passes.
    fn reaching(
        time: Duration,
        room_kib: u32,
        mut measure: impl FnMut(GuessCost) -> Result<Duration>,
    ) -> Result<Self> {
        let mut cost = Self::DEFAULT;
        let most_kib = Self::CEILING.memory_kib.min(room_kib).max(cost.memory_kib);
        loop {
            let took = measure(cost)?.max(Duration::from_micros(1));
            // Doubled until nearly reached, so that measuring takes little time.
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

    /// The work of a guess, for comparing costs.
    pub(crate) fn work(self) -> u64 {
        u64::from(self.memory_kib) * u64::from(self.passes)
    }

    /// Refuses a cost that Coldrise never writes, before computing anything.
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
                "repository.json asks for Argon2id with {} KiB, {} passes, {} lanes, which \
                 Coldrise never writes: the file was changed; restore it from a copy",
                self.memory_kib, self.passes, self.lanes
            ),
        ))
    }
}

/// Refuses a cost for which a machine with `there` KiB of memory has no room.
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

/// Memory of this machine, in KiB; 1 GiB if it is unknown.
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
    /// Its name. Bound like the cost, so that names cannot be exchanged without a passphrase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) label: Option<KeyLabel>,
    /// When it was added, in milliseconds since 1970-01-01T00:00:00Z.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) added_at_ms: Option<u64>,
}

/// How a key is derived from a passphrase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum KeyDerivation {
    /// Argon2id, version 0x13.
    #[serde(rename = "argon2id")]
    Argon2id,
}

impl KeySlot {
    /// Wraps `master` under `passphrase`. `bound` are the fields around the slot that must not
    /// change in the file.
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

    /// Unwraps the master key; `None` for a wrong passphrase. A change of bound fields looks the
    /// same.
    pub(crate) fn unwrap(
        &self,
        passphrase: &Passphrase,
        bound: &[u8],
    ) -> Result<Option<Zeroizing<Key>>> {
        let malformed =
            || Error::new(ErrorKind::Corrupt, "repository.json holds a malformed key slot");
        self.cost.check()?;
        let salt = hex::decode_lower::<SALT_BYTES>(&self.salt).ok_or_else(malformed)?;
        let nonce = hex::decode_lower::<NONCE_BYTES>(&self.nonce).ok_or_else(malformed)?;
        let mut sealed = Zeroizing::new(
            hex::decode_lower::<WRAPPED_BYTES>(&self.wrapped_key).ok_or_else(malformed)?,
        );
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

    /// Checks everything that needs no passphrase.
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
    // Last, and empty without a name, as in files from before there were names.
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
    let mut blocks = Vec::with_capacity(parameters.block_count());
    prefer_huge_pages(blocks.spare_capacity_mut());
    blocks.resize(parameters.block_count(), argon2::Block::default());
    let mut key = Zeroizing::new([0; 32]);
    argon2::Argon2::new(argon2::Algorithm::Argon2id, argon2::Version::V0x13, parameters)
        .hash_password_into_with_memory(passphrase.as_bytes(), salt, key.as_mut(), &mut blocks)
        .map_err(failed)?;
    Ok(key)
}

/// Every key of an open repository.
pub struct Keys {
    /// The root key of [`crate::Repository::derive_key`].
    exported: Zeroizing<Key>,
    /// Key of the hash of chunk plaintext, which deduplication compares.
    pub chunk_hash: Zeroizing<Key>,
    /// Key of the tag of dedup entries.
    pub dedup_tag: Zeroizing<Key>,
    /// Key of the hash of names in catalog keys.
    pub name_hash: Zeroizing<Key>,
    /// Encrypts chunks.
    pub chunks: Aead,
    /// Encrypts pages of maps.
    pub pages: Aead,
    /// Encrypts documents.
    pub documents: Aead,
}

impl Keys {
    /// The keys below `master`.
    pub fn new(master: &Key, encrypted: bool) -> Result<Self> {
        Ok(Keys {
            exported: derive_from(master, "coldrise v1 exported", b""),
            chunk_hash: derive_from(master, "coldrise v1 chunk hash", b""),
            dedup_tag: derive_from(master, "coldrise v1 dedup tag", b""),
            name_hash: derive_from(master, "coldrise v1 name hash", b""),
            chunks: Aead::new(master, "coldrise v1 chunk", encrypted)?,
            pages: Aead::new(master, "coldrise v1 page", encrypted)?,
            documents: Aead::new(master, "coldrise v1 document", encrypted)?,
        })
    }

    /// The master key of an unencrypted repository.
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
    pub fn export(&self, purpose: &str, material: &[u8]) -> Zeroizing<Key> {
        derive_from(&self.exported, purpose, material)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cost chosen on a machine that does `kib_per_ms` per millisecond.
    fn chosen(time_ms: u64, room_kib: u32, kib_per_ms: u64) -> GuessCost {
        let took = |cost: GuessCost| Ok(Duration::from_millis(cost.work() / kib_per_ms));
        GuessCost::reaching(Duration::from_millis(time_ms), room_kib, took).unwrap()
    }

    #[test]
    fn a_longer_guess_takes_more_memory_and_then_more_passes() {
        let default = GuessCost::DEFAULT;
        let (room, speed) = (256 << 10, 1000);
        assert_eq!(chosen(1, room, speed), default, "never less than the default");
        let half_a_second = chosen(500, room, speed);
        assert_eq!(half_a_second.passes, default.passes);
        assert!((480_000..=510_000).contains(&half_a_second.work()), "{half_a_second:?}");
        let two_seconds = chosen(2000, room, speed);
        assert_eq!(two_seconds.memory_kib, room);
        assert!(two_seconds.passes > default.passes && two_seconds.work() <= 2_100_000);
        assert_eq!(chosen(500, 1, speed).memory_kib, default.memory_kib, "no room for more");
        assert!(chosen(u64::from(u32::MAX), room, speed).work() <= GuessCost::MAX_WORK);
    }
}
