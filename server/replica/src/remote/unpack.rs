//! Decodes the frames that bring content.
//!
//! Memory is bounded before it is taken: plaintext by the number of places in a frame, a stream by its window, and parts of a
//! stream that came early by what a source can have under way.

use std::collections::{BTreeMap, HashMap};

use coldrise_block::{Context, Result};
use coldrise_line::Frame;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

use super::content::{Coding, MAX_STREAMS, PACK_BYTES, WINDOW_LOG, decode_head};
use super::messages::{BATCH_BYTES, MAX_BATCHES, broken};

/// Maximum length of all parts that came early, in bytes: content that cannot be compressed is a little longer.
const MAX_EARLY_BYTES: usize = MAX_BATCHES * BATCH_BYTES / 8 * 9;

/// The decoded content of a frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Content {
    /// The number of the batch.
    pub(super) number: u32,
    pub(super) places: Vec<u16>,
    pub(super) bytes: Bytes,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Bytes {
    /// As long as the places.
    Plain(Vec<u8>),
    /// For [`apply_delta`].
    Delta(Vec<u8>),
}

#[derive(Default)]
pub(super) struct Unpacker {
    streams: HashMap<u32, Stream>,
    early_bytes: usize,
}

struct Stream {
    decoder: Decoder<'static>,
    /// The part that is decoded next.
    sequence: u32,
    early: BTreeMap<u32, Frame>,
}

impl Unpacker {
    /// Takes a frame. Returns what can be decoded now: all that were waited for, too.
    pub(super) fn take(&mut self, frame: Frame, chunk_bytes: usize) -> Result<Vec<Content>> {
        let (number, places, coding, packed) = decode_head(&frame.body)?;
        check_length(&places, chunk_bytes)?;
        let Coding::Stream { sequence } = coding else {
            let bytes = Bytes::Delta(packed.to_vec());
            return Ok(vec![Content { number, places, bytes }]);
        };
        if frame.stream >= MAX_STREAMS {
            return Err(broken("too many streams"));
        }
        let stream = match self.streams.entry(frame.stream) {
            std::collections::hash_map::Entry::Occupied(found) => found.into_mut(),
            std::collections::hash_map::Entry::Vacant(free) => free.insert(Stream::new()?),
        };
        if stream.early.contains_key(&sequence) || sequence < stream.sequence {
            return Err(broken("a part of a stream came twice"));
        }
        self.early_bytes += frame.body.len();
        stream.early.insert(sequence, frame);
        let mut contents = Vec::new();
        while let Some(frame) = stream.early.remove(&stream.sequence) {
            self.early_bytes -= frame.body.len();
            let next = stream.sequence.checked_add(1);
            stream.sequence = next.ok_or_else(|| broken("a stream is too long"))?;
            let (number, places, _, packed) = decode_head(&frame.body)?;
            let bytes = decode(&mut stream.decoder, packed, places.len() * chunk_bytes)?;
            contents.push(Content { number, places, bytes: Bytes::Plain(bytes) });
        }
        match self.early_bytes > MAX_EARLY_BYTES {
            true => Err(broken("too much content came early")),
            false => Ok(contents),
        }
    }
}

impl Stream {
    fn new() -> Result<Stream> {
        let mut decoder = Decoder::new().context(what)?;
        decoder.set_parameter(DParameter::WindowLogMax(WINDOW_LOG)).context(what)?;
        Ok(Stream { decoder, sequence: 0, early: BTreeMap::new() })
    }
}

/// The content of a delta, or `None` if `prefix` is not what it was made with. It can be something else, too.
pub(super) fn apply_delta(packed: &[u8], prefix: &[u8]) -> Option<Vec<u8>> {
    let mut decoder = Decoder::with_ref_prefix(prefix).ok()?;
    decoder.set_parameter(DParameter::WindowLogMax(WINDOW_LOG)).ok()?;
    // Both have one piece for each place.
    decode(&mut decoder, packed, prefix.len()).ok()
}

fn what() -> &'static str {
    "decompressing"
}

fn check_length(places: &[u16], chunk_bytes: usize) -> Result<()> {
    let length = places.len().saturating_mul(chunk_bytes);
    match places.len() {
        0 => Err(broken("a frame without content")),
        1 if length <= BATCH_BYTES => Ok(()),
        _ if length <= PACK_BYTES => Ok(()),
        _ => Err(broken("too much content in a frame")),
    }
}

/// Decodes all of `packed`, which has exactly `length` bytes of content.
fn decode(decoder: &mut Decoder<'_>, packed: &[u8], length: usize) -> Result<Vec<u8>> {
    // One byte more shows that it is longer.
    let mut plain = Vec::with_capacity(length + 1);
    let mut input = InBuffer::around(packed);
    loop {
        let (read, written) = (input.pos(), plain.len());
        let mut out = OutBuffer::around_pos(&mut plain, written);
        let done = decoder.run(&mut input, &mut out);
        done.map_err(|_| broken("content that cannot be decompressed"))?;
        if plain.len() > length {
            return Err(broken("content of another length"));
        }
        if (input.pos(), plain.len()) == (read, written) {
            break;
        }
    }
    match plain.len() == length && input.pos() == packed.len() {
        true => Ok(plain),
        false => Err(broken("content of another length")),
    }
}

#[cfg(test)]
#[path = "unpack_tests.rs"]
pub(super) mod tests;
