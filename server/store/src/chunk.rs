//! The chunk value: one chunk of a disk as stored in the `chunks` family.
//!
//! ```text
//! offset  size  field                                     (little endian)
//!      0     1  version, 1
//!      1     1  codec: 0 none, 1 zstd, 2 LZ4
//!      2     2  flags, 0
//!      4     4  length of the plaintext: the repository's chunk size
//!      8    12  nonce
//!     20     n  ciphertext
//! 20 + n    16  tag
//! ```
//!
//! Associated data: repository id (16), chunk id (8, big endian), offsets 0 to 8 of the value. So a
//! value does not authenticate under another id or in another repository.
//!
//! With codec 0 the plaintext of the ciphertext is the chunk, and n is the
//! chunk size. Otherwise it is the compressed chunk and zeroes up to a multiple
//! of the quantum (chunk size / 64, at least 64 bytes). The last four bytes are
//! the compressed length, so the exact length is hidden.

use std::cell::RefCell;

use coldrise_block::{Error, ErrorKind, Result};
use zstd::bulk::{Compressor, Decompressor};

use crate::advice::VERIFY;
use crate::aead::{Aead, Mismatch, NONCE_BYTES, TAG_BYTES};
use crate::{Compression, RepositoryId};

/// Smallest chunk, in bytes.
pub const MIN_CHUNK_SIZE_BYTES: u32 = 4 << 10;
/// Largest chunk, in bytes.
pub const MAX_CHUNK_SIZE_BYTES: u32 = 256 << 10;

/// The number of a stored chunk: from 1 on, in the order of storing, never
/// reused for different visible contents. 0 stands for a hole.
pub type ChunkId = u64;

const VERSION: u8 = 1;
const FIXED_BYTES: usize = 8;
const HEADER_BYTES: usize = FIXED_BYTES + NONCE_BYTES;
const LENGTH_BYTES: usize = 4;
const ASSOCIATED_BYTES: usize = 16 + 8 + FIXED_BYTES;

const CODEC_NONE: u8 = 0;
const CODEC_ZSTD: u8 = 1;
const CODEC_LZ4: u8 = 2;

const _: () = assert!(HEADER_BYTES == 20 && ASSOCIATED_BYTES == 32);

const MISMATCH: &str = "it does not authenticate";

/// The parsed fields of a value.
struct Parts<'a> {
    header: &'a [u8; HEADER_BYTES],
    nonce: &'a [u8; NONCE_BYTES],
    sealed: &'a [u8],
    tag: &'a [u8; TAG_BYTES],
}

/// Turns chunks into values and back.
pub struct ChunkCodec {
    repository: RepositoryId,
    compression: Compression,
    chunk_size: usize,
}

/// State that one encoding thread keeps between chunks.
pub struct EncoderState {
    zstd: Option<Compressor<'static>>,
    /// LZ4 needs space for its worst case in advance.
    lz4: Vec<u8>,
}

/// State that one decoding thread keeps between chunks.
#[derive(Default)]
struct DecoderState {
    zstd: Option<Decompressor<'static>>,
    opened: Vec<u8>,
}

thread_local! {
    static DECODER: RefCell<DecoderState> = RefCell::default();
}

impl ChunkCodec {
    /// The codec of one repository.
    pub fn new(repository: RepositoryId, compression: Compression, chunk_size: u32) -> Self {
        ChunkCodec { repository, compression, chunk_size: chunk_size as usize }
    }

    /// Compressed chunks are padded to a multiple of this, in bytes.
    fn quantum(&self) -> usize {
        (self.chunk_size / 64).max(64)
    }

    /// The state that a thread needs to encode.
    pub fn encoder(&self) -> Result<EncoderState> {
        let failed = |e| Error::with_source(ErrorKind::Internal, "setting up compression", e);
        let zstd = match self.compression {
            Compression::Zstd(level) => {
                let mut compressor = Compressor::new(level).map_err(failed)?;
                // The header of the value contains the length.
                compressor
                    .set_parameter(zstd::zstd_safe::CParameter::ContentSizeFlag(false))
                    .map_err(failed)?;
                Some(compressor)
            }
            Compression::None | Compression::Lz4 => None,
        };
        let lz4 = match self.compression {
            Compression::Lz4 => vec![0; lz4_flex::block::get_maximum_output_size(self.chunk_size)],
            Compression::None | Compression::Zstd(_) => Vec::new(),
        };
        Ok(EncoderState { zstd, lz4 })
    }

    /// Appends the value of `chunk` to `out`. `chunk` must have the chunk size.
    pub fn encode(
        &self,
        state: &mut EncoderState,
        aead: &Aead,
        id: ChunkId,
        chunk: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<()> {
        if chunk.len() != self.chunk_size {
            return Err(Error::new(ErrorKind::Internal, "a chunk has not the chunk size"));
        }
        let start = out.len();
        out.resize(start + HEADER_BYTES + self.chunk_size, 0);
        let value = &mut out[start..];
        let (header, room) = value.split_at_mut(HEADER_BYTES);
        let (codec, sealed_bytes) = self.fill_payload(state, chunk, room);
        header[0] = VERSION;
        header[1] = codec;
        header[4..8].copy_from_slice(&(self.chunk_size as u32).to_le_bytes());
        let associated = self.associated(id, header);
        let (nonce, tag) = aead.encrypt_derived(&associated, &mut room[..sealed_bytes])?;
        header[FIXED_BYTES..].copy_from_slice(&nonce);
        out.truncate(start + HEADER_BYTES + sealed_bytes);
        out.extend_from_slice(&tag);
        Ok(())
    }

    /// Fills the front of `room` (one chunk size) with the payload to seal. A
    /// chunk that shrinks by less than 3 % is stored uncompressed, which makes
    /// reading cheaper.
    fn fill_payload(&self, state: &mut EncoderState, chunk: &[u8], room: &mut [u8]) -> (u8, usize) {
        let limit = self.chunk_size - self.chunk_size / 32 - LENGTH_BYTES;
        // A failure means that the result does not fit into `limit`.
        let compressed = match (&mut state.zstd, self.compression) {
            (Some(zstd), _) => zstd
                .compress_to_buffer(chunk, &mut room[..limit])
                .ok()
                .map(|length| (CODEC_ZSTD, length)),
            (None, Compression::Lz4) => lz4_flex::block::compress_into(chunk, &mut state.lz4)
                .ok()
                .filter(|length| *length <= limit)
                .map(|length| {
                    room[..length].copy_from_slice(&state.lz4[..length]);
                    (CODEC_LZ4, length)
                }),
            (None, _) => None,
        };
        let Some((codec, length)) = compressed else {
            room.copy_from_slice(chunk);
            return (CODEC_NONE, self.chunk_size);
        };
        let sealed_bytes = (length + LENGTH_BYTES).next_multiple_of(self.quantum());
        let length_at = sealed_bytes - LENGTH_BYTES;
        // The compressor may have written past its result.
        room[length..length_at].fill(0);
        room[length_at..sealed_bytes].copy_from_slice(&(length as u32).to_le_bytes());
        (codec, sealed_bytes)
    }

    fn associated(&self, id: ChunkId, header: &[u8]) -> [u8; ASSOCIATED_BYTES] {
        let mut bytes = [0; ASSOCIATED_BYTES];
        bytes[..16].copy_from_slice(&self.repository.0);
        bytes[16..24].copy_from_slice(&id.to_be_bytes());
        bytes[24..].copy_from_slice(&header[..FIXED_BYTES]);
        bytes
    }

    /// Decodes the value of chunk `id` into `chunk`, which must have the chunk
    /// size.
    ///
    /// # Errors
    /// `ErrorKind::Corrupt`, naming the id; the content of `chunk` is then
    /// undefined.
    pub fn decode(&self, aead: &Aead, id: ChunkId, value: &[u8], chunk: &mut [u8]) -> Result<()> {
        if chunk.len() != self.chunk_size {
            return Err(Error::new(ErrorKind::Internal, "a chunk has not the chunk size"));
        }
        self.try_decode(aead, id, value, chunk).map_err(|why| {
            Error::new(ErrorKind::Corrupt, format!("chunk {id} is damaged: {why}")).advise(VERIFY)
        })
    }

    /// Authenticates the value of chunk `id` without decompressing it. The
    /// error names the fault.
    pub(crate) fn authenticate(
        &self,
        aead: &Aead,
        id: ChunkId,
        value: &[u8],
        scratch: &mut Vec<u8>,
    ) -> std::result::Result<(), &'static str> {
        let Parts { header, nonce, sealed, tag } = self.parts(value)?;
        scratch.resize(self.chunk_size, 0);
        let room = scratch.get_mut(..sealed.len()).ok_or("wrong sealed length")?;
        let associated = self.associated(id, header);
        aead.decrypt(nonce, tag, &associated, sealed, room).map_err(|Mismatch| MISMATCH)
    }

    /// Parses a value, as far as possible without a key.
    fn parts<'a>(&self, value: &'a [u8]) -> std::result::Result<Parts<'a>, &'static str> {
        let (header, rest) = value.split_first_chunk::<HEADER_BYTES>().ok_or("truncated")?;
        let (sealed, tag) = rest.split_last_chunk::<TAG_BYTES>().ok_or("truncated")?;
        let (_, nonce) = header.split_last_chunk::<NONCE_BYTES>().ok_or("truncated")?;
        if header[0] != VERSION {
            return Err("unknown version");
        }
        if header[2..4] != [0, 0] {
            return Err("unknown flags");
        }
        if header[4..8] != (self.chunk_size as u32).to_le_bytes() {
            return Err("wrong length");
        }
        Ok(Parts { header, nonce, sealed, tag })
    }

    fn try_decode(
        &self,
        aead: &Aead,
        id: ChunkId,
        value: &[u8],
        chunk: &mut [u8],
    ) -> std::result::Result<(), &'static str> {
        let Parts { header, nonce, sealed, tag } = self.parts(value)?;
        let codec = header[1];
        let associated = self.associated(id, header);
        let mismatch = |Mismatch| MISMATCH;
        if codec == CODEC_NONE {
            return aead.decrypt(nonce, tag, &associated, sealed, chunk).map_err(mismatch);
        }
        if sealed.len() > self.chunk_size || sealed.len() < LENGTH_BYTES {
            return Err("wrong sealed length");
        }
        DECODER.with_borrow_mut(|state| {
            if state.opened.len() < sealed.len() {
                state.opened.resize(self.chunk_size, 0);
            }
            let opened = &mut state.opened[..sealed.len()];
            aead.decrypt(nonce, tag, &associated, sealed, opened).map_err(mismatch)?;
            let (padded, length) =
                opened.split_last_chunk::<LENGTH_BYTES>().ok_or("wrong sealed length")?;
            let payload =
                padded.get(..u32::from_le_bytes(*length) as usize).ok_or("wrong payload length")?;
            let filled = match codec {
                CODEC_ZSTD => {
                    if state.zstd.is_none() {
                        state.zstd = Decompressor::new().ok();
                    }
                    let zstd = state.zstd.as_mut().ok_or("no memory for zstd")?;
                    zstd.decompress_to_buffer(payload, chunk).map_err(|_| "bad zstd frame")?
                }
                CODEC_LZ4 => {
                    lz4_flex::block::decompress_into(payload, chunk).map_err(|_| "bad LZ4 block")?
                }
                _ => return Err("unknown codec"),
            };
            if filled == chunk.len() { Ok(()) } else { Err("wrong decompressed length") }
        })
    }
}

/// True if every byte is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Most non-zero chunks have a non-zero byte early; the rest is compared in
    // pieces that the compiler vectorizes.
    let (front, rest) = bytes.split_at(bytes.len().min(64));
    front.iter().all(|b| *b == 0)
        && rest.chunks(256).all(|piece| piece.iter().fold(0, |all, b| all | b) == 0)
}

#[cfg(test)]
#[path = "chunk_tests.rs"]
mod tests;
