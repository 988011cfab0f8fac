//! Encryption of a layer: AES-256-GCM, with the tag of each block in its record.
//!
//! A nonce consists of 7 random bytes drawn at every open for writing, then the low 40 bits of the
//! sequence number. A sequence number is used once per open, so no nonce repeats within an open.
//! The random part separates the opens, even if the file was copied or rolled back in between.
//! Blocks and records have separate keys, so they may share a nonce. The cipher is AES-GCM rather
//! than AES-XTS, because one pass both encrypts and authenticates: a reader detects a slot that was
//! reused during the read, and recovery detects a torn one.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use coldrise_block::{BLOCK_SIZE_BYTES, Result};
use coldrise_store::{LayerId, Repository};
use zeroize::Zeroizing;

use super::format::{RECORD_BYTES, RECORD_PLAIN_BYTES, Record, RecordKind};

/// Bytes of a nonce.
pub(crate) const NONCE_BYTES: usize = 12;

/// The keys of one layer.
pub(crate) struct LayerKeys {
    blocks: LessSafeKey,
    records: LessSafeKey,
    marks: Zeroizing<[u8; 32]>,
    unfinished: u64,
}

/// The random part of the nonces of one open.
#[derive(Clone, Copy)]
pub(crate) struct NoncePrefix([u8; 7]);

impl NoncePrefix {
    /// Draws a new prefix from the operating system's random numbers.
    pub(crate) fn random() -> Result<Self> {
        let mut prefix = [0; 7];
        coldrise_store::random(&mut prefix)?;
        Ok(NoncePrefix(prefix))
    }

    /// The nonce of a sequence number.
    pub(crate) fn nonce(&self, sequence: u64) -> [u8; NONCE_BYTES] {
        let mut nonce = [0; NONCE_BYTES];
        nonce[..7].copy_from_slice(&self.0);
        nonce[7..].copy_from_slice(&sequence.to_le_bytes()[..5]);
        nonce
    }

    /// The sequence number of a nonce made with this prefix; `None` for any other nonce.
    pub(crate) fn sequence(&self, nonce: &[u8]) -> Option<u64> {
        let nonce = nonce.get(..NONCE_BYTES)?;
        (nonce[..7] == self.0).then(|| sequence_in_nonce(nonce))
    }
}

/// The sequence number in a nonce, whichever open drew its prefix. `nonce` may be longer.
pub(crate) fn sequence_in_nonce(nonce: &[u8]) -> u64 {
    let mut sequence = [0; 8];
    sequence[..5].copy_from_slice(&nonce[7..NONCE_BYTES]);
    u64::from_le_bytes(sequence)
}

fn aead_key(key: &[u8; 32]) -> LessSafeKey {
    // The type fixes the length, so this cannot fail.
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("a 256-bit key"))
}

impl LayerKeys {
    /// The keys of the layer with this id.
    pub(crate) fn of(repository: &Repository, id: &LayerId) -> LayerKeys {
        LayerKeys::derive(|purpose| repository.derive_key(purpose, id.as_bytes()))
    }

    /// Derives the keys. `derive` turns a purpose into a key of this layer.
    pub(crate) fn derive(derive: impl Fn(&str) -> Zeroizing<[u8; 32]>) -> Self {
        let marks = derive("layer marks");
        let hash = blake3::keyed_hash(&marks, b"unfinished record");
        let mut unfinished = [0; 8];
        unfinished.copy_from_slice(&hash.as_bytes()[..8]);
        LayerKeys {
            blocks: aead_key(&derive("layer blocks")),
            records: aead_key(&derive("layer records")),
            marks,
            unfinished: u64::from_ne_bytes(unfinished),
        }
    }

    /// The first word of a record during its store. No damage produces it.
    pub(crate) fn unfinished(&self) -> u64 {
        self.unfinished
    }

    /// The key that authenticates the superblock and the marks.
    pub(crate) fn marks(&self) -> &[u8; 32] {
        &self.marks
    }

    /// Encrypts one block in place and returns its tag.
    pub(crate) fn seal_block(&self, nonce: [u8; NONCE_BYTES], block: &mut [u8]) -> [u8; 16] {
        debug_assert_eq!(block.len() as u64, BLOCK_SIZE_BYTES);
        let nonce = Nonce::assume_unique_for_key(nonce);
        let tag = self.blocks.seal_in_place_separate_tag(nonce, Aad::empty(), block);
        let mut bytes = [0; 16];
        // 4 KiB is far below the cipher's limit, so this cannot fail.
        bytes.copy_from_slice(tag.expect("a block is within the cipher's limit").as_ref());
        bytes
    }

    /// Decrypts one block into `out`. Returns false if the bytes do not match their record.
    pub(crate) fn open_block(
        &self,
        nonce: [u8; NONCE_BYTES],
        tag: &[u8; 16],
        stored: &[u8],
        out: &mut [u8],
    ) -> bool {
        let nonce = Nonce::assume_unique_for_key(nonce);
        self.blocks.open_separate_gather(nonce, Aad::empty(), stored, tag, out).is_ok()
    }

    /// Encrypts a record for its place (slot, and cell in the slot).
    pub(crate) fn seal_record(
        &self,
        place: RecordPlace,
        nonce: [u8; NONCE_BYTES],
        record: &Record,
    ) -> [u8; RECORD_BYTES] {
        let mut stored = [0; RECORD_BYTES];
        stored[..NONCE_BYTES].copy_from_slice(&nonce);
        let mut body = record.encode();
        let tag = self
            .records
            .seal_in_place_separate_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(place.bytes()),
                &mut body,
            )
            .expect("a record is within the cipher's limit");
        stored[NONCE_BYTES..NONCE_BYTES + RECORD_PLAIN_BYTES].copy_from_slice(&body);
        stored[NONCE_BYTES + RECORD_PLAIN_BYTES..].copy_from_slice(tag.as_ref());
        stored
    }

    /// The record of a slot that holds nothing. It proves nothing durable.
    pub(crate) fn seal_vacant(
        &self,
        slot: u32,
        nonces: &NoncePrefix,
        sequence: u64,
    ) -> [u8; RECORD_BYTES] {
        let (unflushed, kind) = (u32::MAX, RecordKind::Vacant);
        let record = Record { sequence, unflushed, block: 0, kind, payload: [0; 16] };
        self.seal_record(RecordPlace::of_slot(slot), nonces.nonce(sequence), &record)
    }

    /// Repairs a record in which one bit flipped after the store; `None` if that is not the damage.
    pub(crate) fn mend_record(
        &self,
        place: RecordPlace,
        stored: &[u8; RECORD_BYTES],
    ) -> Option<[u8; RECORD_BYTES]> {
        (0..RECORD_BYTES * 8).find_map(|bit| {
            let mut mended = *stored;
            mended[bit / 8] ^= 1 << (bit % 8);
            self.open_record(place, &mended).map(|_| mended)
        })
    }

    /// The record and its nonce, if the bytes are a whole record of that place.
    pub(crate) fn open_record(
        &self,
        place: RecordPlace,
        stored: &[u8; RECORD_BYTES],
    ) -> Option<(Record, [u8; NONCE_BYTES])> {
        let mut nonce = [0; NONCE_BYTES];
        nonce.copy_from_slice(&stored[..NONCE_BYTES]);
        let mut plain = [0; RECORD_PLAIN_BYTES];
        let (body, tag) = stored[NONCE_BYTES..].split_at(RECORD_PLAIN_BYTES);
        self.records
            .open_separate_gather(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(place.bytes()),
                body,
                tag,
                &mut plain,
            )
            .ok()?;
        Some((Record::decode(&plain)?, nonce))
    }
}

/// The place of a record. A record is valid only there.
#[derive(Clone, Copy)]
pub(crate) struct RecordPlace {
    /// The slot.
    pub(crate) slot: u32,
    /// For a cell: its number in the slot, and the nonce of the slot's own record. So a cell of an
    /// earlier use of the slot is not valid.
    pub(crate) cell: Option<(u8, [u8; NONCE_BYTES])>,
}

impl RecordPlace {
    pub(crate) fn of_slot(slot: u32) -> Self {
        RecordPlace { slot, cell: None }
    }

    fn bytes(self) -> [u8; 5 + NONCE_BYTES] {
        let mut bytes = [0; 5 + NONCE_BYTES];
        bytes[..4].copy_from_slice(&self.slot.to_le_bytes());
        let (cell, nonce) = self.cell.unwrap_or((0xff, [0; NONCE_BYTES]));
        bytes[4] = cell;
        bytes[5..].copy_from_slice(&nonce);
        bytes
    }
}
