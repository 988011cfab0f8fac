use std::sync::Arc;

use coldrise_block::{Disk, ErrorKind, Extent, ReadContext};

use super::*;
use crate::remote::content::encode_head;
use crate::remote::messages::CONTENT;
use crate::remote::pack::{Batch, Packer, Wanted};

pub(in crate::remote) const CHUNK: usize = 4096;

struct MemoryDisk(Vec<u8>);

impl Disk for MemoryDisk {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, _context: &mut ReadContext) -> Result<()> {
        let start = offset_bytes as usize;
        buffer.copy_from_slice(&self.0[start..start + buffer.len()]);
        Ok(())
    }

    fn extents(&self, _offset: u64, _length: u64, _most: usize) -> Result<Vec<Extent>> {
        Ok(Vec::new())
    }
}

/// Content that does not compress.
pub(in crate::remote) fn random(count: usize, seed: u8) -> Vec<u8> {
    let mut bytes = vec![0; count];
    blake3::Hasher::new().update(&[seed]).finalize_xof().fill(&mut bytes);
    bytes
}

pub(in crate::remote) fn wanted(
    number: u32,
    bytes: Vec<u8>,
    base: Option<Arc<dyn Disk>>,
) -> Wanted {
    let count = bytes.len() / CHUNK;
    let pieces = (0..count).map(|at| at * CHUNK..(at + 1) * CHUNK).collect();
    let offsets = (0..count).map(|at| (at * CHUNK) as u64).collect();
    let batch = Arc::new(Batch { bytes, pieces, offsets, base });
    Wanted { batch, number, places: (0..count as u16).collect(), is_whole: false }
}

pub(in crate::remote) fn frames(packer: &mut Packer, wanted: &Wanted) -> Vec<Frame> {
    let mut frames = Vec::new();
    let packed = packer.pack(wanted, |pack| {
        frames.push(pack.frame);
        Ok(())
    });
    packed.unwrap();
    frames
}

fn stream_frame(sequence: u32, places: &[u16], packed: &[u8]) -> Frame {
    let mut body = encode_head(1, places, Coding::Stream { sequence });
    body.extend_from_slice(packed);
    Frame { stream: 0, kind: CONTENT, body }
}

pub(in crate::remote) fn plain(content: &Content) -> &[u8] {
    match &content.bytes {
        Bytes::Plain(plain) => plain,
        Bytes::Delta(_) => panic!("a delta"),
    }
}

#[test]
fn malformed_streams_are_refused() {
    let mut packer = Packer::new(0).unwrap();
    let good = frames(&mut packer, &wanted(1, vec![7; 8 * CHUNK], None)).remove(0);
    let places: Vec<u16> = (0..8).collect();
    let (.., packed) = decode_head(&good.body).unwrap();
    let packed = packed.to_vec();
    // Cut, longer, shorter than its places say, and nonsense.
    for wrong in [
        stream_frame(0, &places, &packed[..packed.len() - 1]),
        stream_frame(0, &places, &[&packed[..], b"more"].concat()),
        stream_frame(0, &places[..7], &packed),
        stream_frame(0, &[&places[..], &[8]].concat(), &packed),
        stream_frame(0, &places, b"nonsense"),
        stream_frame(0, &places, &[]),
        stream_frame(0, &[], &packed),
        stream_frame(0, &[0; 70], &packed),
        Frame { stream: MAX_STREAMS, ..good.clone() },
    ] {
        let error = Unpacker::default().take(wrong, CHUNK).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    }
    let mut unpacker = Unpacker::default();
    assert_eq!(unpacker.take(good.clone(), CHUNK).unwrap().len(), 1);
    assert_eq!(unpacker.take(good, CHUNK).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn compression_bombs_and_waiting_parts_are_bounded() {
    // A gigabyte of zeroes in a few KiB, for one piece; and a frame that asks for a window of 2 GiB.
    let mut bomb = zstd::stream::raw::Encoder::new(1).unwrap();
    let zeroes = vec![0; 1 << 20];
    let mut packed = Vec::with_capacity(1 << 20);
    for _ in 0..1024 {
        let mut input = InBuffer::around(&zeroes);
        while input.pos() < zeroes.len() {
            let end = packed.len();
            bomb.run(&mut input, &mut OutBuffer::around_pos(&mut packed, end)).unwrap();
        }
    }
    let end = packed.len();
    bomb.flush(&mut OutBuffer::around_pos(&mut packed, end)).unwrap();
    let window = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa8, 0x01, 0x00, 0x00];
    for wrong in [&packed[..], &window] {
        let error = Unpacker::default().take(stream_frame(0, &[0], wrong), CHUNK).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert_eq!(apply_delta(wrong, &[0; CHUNK]), None);
    }
    // The first part never comes.
    let mut unpacker = Unpacker::default();
    let waiting = vec![0; 1 << 20];
    let refused = (1..1000)
        .find(|sequence| unpacker.take(stream_frame(*sequence, &[0], &waiting), CHUNK).is_err());
    assert!(refused.is_some_and(|sequence| sequence < 128), "{refused:?}");
}

#[test]
fn a_delta_holds_only_changed_bytes_and_needs_its_base() {
    let base = random(64 * CHUNK, 5);
    let mut now = base.clone();
    // A sixteenth of each piece.
    for (at, piece) in now.chunks_exact_mut(CHUNK).enumerate() {
        piece[512..768].copy_from_slice(&random(256, 100 + at as u8));
    }
    // The last one is another.
    now[63 * CHUNK..].copy_from_slice(&random(CHUNK, 9));
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk(base.clone()));
    let mut offered = wanted(1, now.clone(), Some(disk));
    let mut packer = Packer::new(0).unwrap();
    let made = frames(&mut packer, &offered);
    let (delta, others) = made.split_at(1);
    assert_eq!(others.len(), 1);
    assert!(delta[0].body.len() < 63 * (256 + 24), "{}", delta[0].body.len());
    let content = Unpacker::default().take(delta[0].clone(), CHUNK).unwrap().remove(0);
    let Bytes::Delta(packed) = content.bytes else { panic!("no delta") };
    assert_eq!(content.places, (0..63).collect::<Vec<u16>>());
    assert_eq!(apply_delta(&packed, &base[..63 * CHUNK]).unwrap(), &now[..63 * CHUNK]);
    // With a wrong base it is something else, or nothing; cut it is nothing.
    assert_ne!(apply_delta(&packed, &random(63 * CHUNK, 6)).as_deref(), Some(&now[..63 * CHUNK]));
    assert_eq!(apply_delta(&packed, &base[..62 * CHUNK]), None);
    for length in 0..packed.len() {
        let short = apply_delta(&packed[..length], &base[..63 * CHUNK]);
        assert_ne!(short.as_deref(), Some(&now[..63 * CHUNK]));
    }
    // Asked for as a whole it comes without the base.
    offered.is_whole = true;
    let whole = frames(&mut packer, &offered);
    let mut unpacker = Unpacker::default();
    unpacker.take(others[0].clone(), CHUNK).unwrap();
    let contents: Vec<_> =
        whole.into_iter().flat_map(|frame| unpacker.take(frame, CHUNK).unwrap()).collect();
    assert_eq!(contents.iter().flat_map(plain).copied().collect::<Vec<_>>(), now);
}
