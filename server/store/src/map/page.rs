//! The page value: one page of a chunk map as stored in the `maps` family.
//!
//! ```text
//! offset  size  field                                     (little endian)
//!      0     1  version, 1
//!      1     1  level: 0 for a leaf
//!      2     2  zero
//!      4    12  nonce
//!     16     n  ciphertext; n is a multiple of 64
//! 16 + n    16  tag
//! ```
//!
//! Associated data: repository id (16), page id (8, big endian), offsets 0 to 4
//! of the value. The plaintext of the ciphertext is the runs, then zeroes:
//!
//! ```text
//! run:  varint (slots - 1) * 2 + stored
//!       where stored is 1: varint of the zigzag of (first id - expected)
//! ```
//!
//! A run with stored = 0 stands for slots that are 0; a run with stored = 1
//! stands for ids that count up by one. `expected` is 1 at first, and after a
//! stored run its last id + 1. The runs cover all slots of the page. Varints
//! are LEB128, in the shortest form and of at most ten bytes. A whole leaf of
//! chunks that were stored in sequence takes four bytes.

use coldrise_block::{Error, ErrorKind, Result};

use super::{MAX_LEVELS, PageId, slots_of};
use crate::RepositoryId;
use crate::advice::VERIFY;
use crate::aead::{Aead, Mismatch, NONCE_BYTES, TAG_BYTES};

const VERSION: u8 = 1;
const FIXED_BYTES: usize = 4;
const HEADER_BYTES: usize = FIXED_BYTES + NONCE_BYTES;
const QUANTUM_BYTES: usize = 64;
const ASSOCIATED_BYTES: usize = 16 + 8 + FIXED_BYTES;
/// A run has at most 3 + 10 bytes; the longest page has 1024 runs.
const MAX_SEALED_BYTES: usize = 16 << 10;

const _: () = assert!(super::LEAF_SLOTS * 13 <= MAX_SEALED_BYTES);

fn associated(repository: &RepositoryId, id: PageId, fixed: &[u8; FIXED_BYTES]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(ASSOCIATED_BYTES);
    bytes.extend_from_slice(&repository.0);
    bytes.extend_from_slice(&id.to_be_bytes());
    bytes.extend_from_slice(fixed);
    bytes
}

/// The value of a page.
pub fn page_value(
    repository: &RepositoryId,
    aead: &Aead,
    id: PageId,
    level: u8,
    slots: &[u64],
) -> Result<Vec<u8>> {
    let fixed = [VERSION, level, 0, 0];
    let mut value = vec![0; HEADER_BYTES];
    encode_runs(slots, &mut value);
    let sealed_bytes = (value.len() - HEADER_BYTES).next_multiple_of(QUANTUM_BYTES);
    value.resize(HEADER_BYTES + sealed_bytes, 0);
    let (nonce, tag) =
        aead.encrypt_derived(&associated(repository, id, &fixed), &mut value[HEADER_BYTES..])?;
    value[..FIXED_BYTES].copy_from_slice(&fixed);
    value[FIXED_BYTES..HEADER_BYTES].copy_from_slice(&nonce);
    value.extend_from_slice(&tag);
    Ok(value)
}

/// The slots of page `id`, which must be of `level`.
///
/// # Errors
/// `ErrorKind::Corrupt`, naming the page.
pub fn parse_page_value(
    repository: &RepositoryId,
    aead: &Aead,
    id: PageId,
    level: u8,
    value: &[u8],
) -> Result<Vec<u64>> {
    try_parse(repository, aead, id, level, value).map_err(|why| {
        let message = format!("page {id} of a chunk map is damaged: {why}");
        Error::new(ErrorKind::Corrupt, message).advise(VERIFY)
    })
}

fn try_parse(
    repository: &RepositoryId,
    aead: &Aead,
    id: PageId,
    level: u8,
    value: &[u8],
) -> std::result::Result<Vec<u64>, &'static str> {
    let (fixed, rest) = value.split_first_chunk::<FIXED_BYTES>().ok_or("truncated")?;
    let (nonce, rest) = rest.split_first_chunk::<NONCE_BYTES>().ok_or("truncated")?;
    let (sealed, tag) = rest.split_last_chunk::<TAG_BYTES>().ok_or("truncated")?;
    if *fixed != [VERSION, level, 0, 0] || level >= MAX_LEVELS {
        return Err("unknown version, or not the level that leads to it");
    }
    if sealed.len() > MAX_SEALED_BYTES {
        return Err("too long");
    }
    let mut runs = vec![0; sealed.len()];
    aead.decrypt(nonce, tag, &associated(repository, id, fixed), sealed, &mut runs)
        .map_err(|Mismatch| "it does not authenticate")?;
    decode_runs(&runs, slots_of(level)).ok_or("malformed runs")
}

fn put_varint(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for position in 0..10u32 {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if position == 9 && bits > 1 {
            return None;
        }
        number |= bits << (7 * position);
        if byte & 0x80 == 0 {
            // Only the shortest form is valid: the last byte must not be zero.
            return (position == 0 || *byte != 0).then_some(number);
        }
    }
    None
}

fn encode_runs(slots: &[u64], out: &mut Vec<u8>) {
    let mut expected = 1u64;
    let mut at = 0;
    while at < slots.len() {
        let first = slots[at];
        let mut end = at + 1;
        if first == 0 {
            while end < slots.len() && slots[end] == 0 {
                end += 1;
            }
            put_varint((end - at - 1) as u64 * 2, out);
        } else {
            while end < slots.len() && Some(slots[end]) == first.checked_add((end - at) as u64) {
                end += 1;
            }
            put_varint((end - at - 1) as u64 * 2 + 1, out);
            let delta = first.wrapping_sub(expected) as i64;
            put_varint((delta << 1 ^ delta >> 63) as u64, out);
            expected = first.wrapping_add((end - at) as u64);
        }
        at = end;
    }
}

fn decode_runs(mut bytes: &[u8], slot_count: usize) -> Option<Vec<u64>> {
    let mut slots = Vec::with_capacity(slot_count);
    let mut expected = 1u64;
    while slots.len() < slot_count {
        let head = take_varint(&mut bytes)?;
        let length = usize::try_from(head >> 1).ok()?.checked_add(1)?;
        if length > slot_count - slots.len() {
            return None;
        }
        if head & 1 == 0 {
            slots.resize(slots.len() + length, 0);
            continue;
        }
        let zigzag = take_varint(&mut bytes)?;
        let delta = (zigzag >> 1) ^ (zigzag & 1).wrapping_neg();
        let first = expected.wrapping_add(delta);
        let last = first.checked_add(length as u64 - 1)?;
        if first == 0 {
            return None;
        }
        slots.extend(first..=last);
        expected = last.wrapping_add(1);
    }
    (bytes.len() < QUANTUM_BYTES && bytes.iter().all(|b| *b == 0)).then_some(slots)
}

#[cfg(test)]
#[path = "page_tests.rs"]
mod tests;
