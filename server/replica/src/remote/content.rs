//! The frame that brings content, and the rules that its two ends share.
//!
//! ```text
//! CONTENT  number of the batch, places in it (as in WANTED) │ coding 1 byte │ sequence 4 │ packed
//! ```
//!
//! The content of the places, one after the other, is the plaintext. It is coded in one of two ways:
//!
//! - *stream*: a part of the zstd stream of one packer, flushed. Frame::stream has the packer, `sequence` the place of this
//!   part in its stream: bulk frames arrive in any order. A part can refer to what came before it in its stream, so streams
//!   compress better than frames for themselves. The receiver decodes each part in order, also those of an abandoned disk.
//! - *delta*: a zstd frame for itself. Its prefix is what the base has at these places, one after the other.
//!
//! If the receiver cannot decode a delta, or the result does not have its name, it asks for these places once more with WHOLE, and gets them in
//! a stream. So a base that is damaged, or is not the same at both ends, costs bytes and never the copy.

use coldrise_block::{Disk, Result};

use super::messages::{broken, decode_places, encode_places};

/// Maximum plaintext in one frame, in bytes: more compress better, fewer arrive sooner.
pub(super) const PACK_BYTES: usize = 256 << 10;
/// How far a part of a stream refers back, as a power of two of bytes. The receiver takes as much memory for each stream.
pub(super) const WINDOW_LOG: u32 = 23;
/// Maximum number of streams of a line.
pub(super) const MAX_STREAMS: u32 = 4;

const STREAM: u8 = 0;
const DELTA: u8 = 1;

/// How the content of a frame is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    Stream { sequence: u32 },
    Delta,
}

/// The header before the packed content.
pub(super) fn encode_head(number: u32, places: &[u16], coding: Coding) -> Vec<u8> {
    let mut body = encode_places(number, places);
    match coding {
        Coding::Stream { sequence } => {
            body.push(STREAM);
            body.extend_from_slice(&sequence.to_le_bytes());
        }
        Coding::Delta => body.extend_from_slice(&[DELTA, 0, 0, 0, 0]),
    }
    body
}

/// The number of a batch, places in it, the coding, and the packed content.
pub(super) fn decode_head(body: &[u8]) -> Result<(u32, Vec<u16>, Coding, &[u8])> {
    let (number, places, rest) = decode_places(body)?;
    let Some((head, packed)) = rest.split_first_chunk::<5>() else {
        return Err(broken("a frame is too short"));
    };
    let [kind, sequence @ ..] = *head;
    let coding = match kind {
        STREAM => Coding::Stream { sequence: u32::from_le_bytes(sequence) },
        DELTA => Coding::Delta,
        _ => return Err(broken("an unknown coding")),
    };
    Ok((number, places, coding, packed))
}

/// Adds what a base has at the place of a piece to `prefix`: zeroes behind its end.
pub(super) fn add_base_piece(
    base: &dyn Disk,
    offset_bytes: u64,
    chunk_bytes: usize,
    prefix: &mut Vec<u8>,
) -> Result<()> {
    let start = prefix.len();
    prefix.resize(start + chunk_bytes, 0);
    let there = base.size_bytes().saturating_sub(offset_bytes);
    let length = usize::try_from(there).map_or(chunk_bytes, |there| there.min(chunk_bytes));
    match length {
        0 => Ok(()),
        length => base.read_at(&mut prefix[start..start + length], offset_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_comes_back() {
        for coding in [Coding::Delta, Coding::Stream { sequence: 7 << 20 }] {
            let mut body = encode_head(9, &[1, 5], coding);
            let head_bytes = body.len();
            body.extend_from_slice(b"rest");
            assert_eq!(decode_head(&body).unwrap(), (9, vec![1, 5], coding, &b"rest"[..]));
            (0..head_bytes).for_each(|length| assert!(decode_head(&body[..length]).is_err()));
        }
        let mut unknown = encode_places(9, &[1]);
        unknown.extend_from_slice(&[2, 0, 0, 0, 0]);
        assert!(decode_head(&unknown).is_err());
    }
}
