//! Makes the frames that bring content, compressed as well as the line has time for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Disk, Result};
use coldrise_line::Frame;
use zstd::stream::raw::{CParameter, Encoder, InBuffer, Operation, OutBuffer};

use super::content::{Coding, PACK_BYTES, WINDOW_LOG, add_base_piece, encode_head};
use super::messages::CONTENT;

/// Levels of zstd, from a line that is faster than the processors to one that is much slower. Higher ones take three times the
/// time of 9 for 1 % (docs/decisions/0065).
const LEVELS: [i32; 4] = [1, 3, 6, 9];
/// The lowest level that finds what is equal in a base of this size.
const LEAST_DELTA_LEVEL: i32 = 3;
/// Plaintext after which the level is thought over, in bytes: another level forgets what came before.
const LEVEL_BYTES: usize = 1 << 20;
/// A delta pays if at least one of this many bytes is equal to the base.
const EQUAL_SHARE: usize = 32;

/// The pieces of a batch.
pub(super) struct Batch {
    pub(super) bytes: Vec<u8>,
    /// Of each piece in `bytes`; empty for a piece of zeroes.
    pub(super) pieces: Vec<std::ops::Range<usize>>,
    /// On the disk.
    pub(super) offsets: Vec<u64>,
    /// The content of the other site at these offsets.
    pub(super) base: Option<Arc<dyn Disk>>,
}

/// Pieces that the other side wants.
pub(super) struct Wanted {
    pub(super) batch: Arc<Batch>,
    pub(super) number: u32,
    pub(super) places: Vec<u16>,
    /// It could not use a delta.
    pub(super) is_whole: bool,
}

/// A frame to send.
pub(super) struct Pack {
    pub(super) frame: Frame,
    pub(super) content_bytes: usize,
    /// Equal to the base.
    pub(super) delta_bytes: usize,
}

/// Compresses on one stream.
pub(super) struct Packer {
    stream: u32,
    sequence: u32,
    encoder: Encoder<'static>,
    /// The end of the part of the stream that was made with another level.
    ended: Vec<u8>,
    effort: Effort,
}

/// Of the places of a batch, those that differ little from the base, with what it has there.
#[derive(Default)]
struct Resembling {
    places: Vec<u16>,
    prefix: Vec<u8>,
    equal_bytes: Vec<usize>,
}

impl Packer {
    pub(super) fn new(stream: u32) -> Result<Packer> {
        let effort = Effort::default();
        let mut encoder = Encoder::new(effort.level()).context(what)?;
        encoder.set_parameter(CParameter::WindowLog(WINDOW_LOG)).context(what)?;
        Ok(Packer { stream, sequence: 0, encoder, ended: Vec::new(), effort })
    }

    /// Gives the frames with what is wanted to `send`.
    pub(super) fn pack(
        &mut self,
        wanted: &Wanted,
        mut send: impl FnMut(Pack) -> Result<()>,
    ) -> Result<()> {
        let (resembling, others) = sort_out(wanted);
        let mut others = &others[..];
        let mut start = 0;
        let batch = &*wanted.batch;
        while start < resembling.places.len() {
            let began = Instant::now();
            let (plain, count) = plain_of(batch, &resembling.places[start..]);
            let places = start..start + count;
            let prefix_bytes = plain.len() / count;
            let prefix = start * prefix_bytes..(start + count) * prefix_bytes;
            let mut body =
                encode_head(wanted.number, &resembling.places[places.clone()], Coding::Delta);
            let level = self.effort.level().max(LEAST_DELTA_LEVEL);
            compress_delta(&plain, &resembling.prefix[prefix], level, &mut body)?;
            let delta_bytes = resembling.equal_bytes[places].iter().sum();
            start += count;
            self.give(began, body, plain.len(), delta_bytes, &mut send)?;
        }
        while !others.is_empty() {
            let began = Instant::now();
            let (plain, count) = plain_of(batch, others);
            let (now, rest) = others.split_at(count);
            others = rest;
            let coding = Coding::Stream { sequence: self.sequence };
            self.sequence = self.sequence.wrapping_add(1);
            let mut body = encode_head(wanted.number, now, coding);
            body.append(&mut self.ended);
            self.compress(&plain, &mut body)?;
            self.give(began, body, plain.len(), 0, &mut send)?;
        }
        Ok(())
    }

    fn give(
        &mut self,
        began: Instant,
        body: Vec<u8>,
        content_bytes: usize,
        delta_bytes: usize,
        send: &mut impl FnMut(Pack) -> Result<()>,
    ) -> Result<()> {
        let compressing = began.elapsed();
        let began = Instant::now();
        let frame = Frame { stream: self.stream, kind: CONTENT, body };
        send(Pack { frame, content_bytes, delta_bytes })?;
        if self.effort.spent(content_bytes, compressing, began.elapsed()) {
            self.change_level()?;
        }
        Ok(())
    }

    fn compress(&mut self, plain: &[u8], body: &mut Vec<u8>) -> Result<()> {
        let mut input = InBuffer::around(plain);
        while input.pos() < plain.len() {
            into(body, |out| self.encoder.run(&mut input, out))?;
        }
        while into(body, |out| self.encoder.flush(out))? > 0 {}
        Ok(())
    }

    fn change_level(&mut self) -> Result<()> {
        while into(&mut self.ended, |out| self.encoder.finish(out, true))? > 0 {}
        self.encoder.reinit().context(what)?;
        self.encoder.set_parameter(CParameter::CompressionLevel(self.effort.level())).context(what)
    }
}

fn what() -> &'static str {
    "compressing"
}

/// Lets `step` write behind the end of `body`.
fn into(
    body: &mut Vec<u8>,
    step: impl FnOnce(&mut OutBuffer<'_, Vec<u8>>) -> std::io::Result<usize>,
) -> Result<usize> {
    let end = body.len();
    body.reserve(PACK_BYTES / 2);
    let mut out = OutBuffer::around_pos(body, end);
    step(&mut out).context(what)
}

fn compress_delta(plain: &[u8], prefix: &[u8], level: i32, body: &mut Vec<u8>) -> Result<()> {
    let mut encoder = Encoder::with_ref_prefix(level, prefix).context(what)?;
    encoder.set_pledged_src_size(Some(plain.len() as u64)).context(what)?;
    let mut input = InBuffer::around(plain);
    while input.pos() < plain.len() {
        into(body, |out| encoder.run(&mut input, out))?;
    }
    while into(body, |out| encoder.finish(out, true))? > 0 {}
    Ok(())
}

/// The content of the first of `places`, as many as fit in a frame; at least one.
fn plain_of(batch: &Batch, places: &[u16]) -> (Vec<u8>, usize) {
    let mut plain = Vec::with_capacity(PACK_BYTES);
    let mut count = 0;
    for place in places {
        let piece = &batch.pieces[usize::from(*place)];
        if count > 0 && plain.len() + piece.len() > PACK_BYTES {
            break;
        }
        plain.extend_from_slice(&batch.bytes[piece.clone()]);
        count += 1;
    }
    (plain, count)
}

/// The places for which a delta pays, and the others.
fn sort_out(wanted: &Wanted) -> (Resembling, Vec<u16>) {
    let mut resembling = Resembling::default();
    let batch = &*wanted.batch;
    let Some(base) = batch.base.as_ref().filter(|_| !wanted.is_whole) else {
        return (resembling, wanted.places.clone());
    };
    let mut others = Vec::new();
    for place in &wanted.places {
        let at = usize::from(*place);
        let piece = &batch.bytes[batch.pieces[at].clone()];
        let start = resembling.prefix.len();
        let read = add_base_piece(&**base, batch.offsets[at], piece.len(), &mut resembling.prefix);
        let equal = match read {
            Ok(()) => equal_bytes(piece, &resembling.prefix[start..]),
            Err(error) => {
                tracing::debug!("the base cannot be compared: {}", error.full_message());
                0
            }
        };
        if equal < piece.len().div_ceil(EQUAL_SHARE) {
            resembling.prefix.truncate(start);
            others.push(*place);
        } else {
            resembling.places.push(*place);
            resembling.equal_bytes.push(equal);
        }
    }
    (resembling, others)
}

/// How much of two pieces is equal at the same place, in bytes. Words are compared: that is quick.
fn equal_bytes(one: &[u8], other: &[u8]) -> usize {
    let words = one.chunks_exact(8).zip(other.chunks_exact(8));
    8 * words.filter(|(one, other)| one == other).count()
}

/// How much time the compression of the line's content may take.
#[derive(Default)]
struct Effort {
    place: usize,
    plain_bytes: usize,
    compressing: Duration,
    sending: Duration,
}

impl Effort {
    fn level(&self) -> i32 {
        LEVELS[self.place]
    }

    /// Counts what a frame took. Returns whether there is another level now: a better one while the line is the slower part.
    fn spent(&mut self, plain_bytes: usize, compressing: Duration, sending: Duration) -> bool {
        self.plain_bytes += plain_bytes;
        self.compressing += compressing;
        self.sending += sending;
        if self.plain_bytes < LEVEL_BYTES {
            return false;
        }
        let place = match () {
            () if self.sending > self.compressing => (self.place + 1).min(LEVELS.len() - 1),
            () if self.sending * 8 < self.compressing => self.place.saturating_sub(1),
            () => self.place,
        };
        let is_other = place != self.place;
        *self = Effort { place, ..Effort::default() };
        is_other
    }
}

#[cfg(test)]
#[path = "pack_tests.rs"]
mod tests;
