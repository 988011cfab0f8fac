//! The compressed stream, read back by a reader of its own.

use coldrise_formats::{
    DiskShape, Error, Format, GRAIN_SIZE_BYTES, GrainCompressor, Identity, Names, StreamVmdk,
};
use flate2::{Decompress, FlushDecompress, Status};
use proptest::prelude::*;

const SECTOR: usize = 512;
const GRAIN: usize = GRAIN_SIZE_BYTES as usize;

fn disk(size_bytes: u64) -> DiskShape {
    DiskShape::new(size_bytes, Identity { seed: [1; 32], created_unix_seconds: 0 })
}

fn write(content: &[u8]) -> Vec<u8> {
    let names = Names::in_tree(Format::VmdkStream, "vda").unwrap();
    let (mut whole, mut out) = (Vec::new(), Vec::new());
    let mut stream = StreamVmdk::start(&names, &disk(content.len() as u64), &mut out).unwrap();
    let mut compressor = GrainCompressor::new(1);
    for (grain, bytes) in (0..).zip(content.chunks(GRAIN)) {
        if let Some(compressed) = compressor.compress(grain, bytes).unwrap() {
            stream.append(&compressed, &mut out).unwrap();
        }
        // What was appended can be taken away at any time.
        whole.append(&mut out);
    }
    stream.finish(&mut out);
    whole.append(&mut out);
    whole
}

fn u32_at(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

fn u64_at(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

/// Reads by footer, directory and tables, as a reader with random access does.
fn read(image: &[u8]) -> Vec<u8> {
    let footer = &image[image.len() - 2 * SECTOR..];
    assert_eq!(&footer[..4], b"KDMV");
    assert_eq!(u32_at(image, image.len() - 3 * SECTOR + 12), 3);
    let mut content = vec![0; u64_at(footer, 12) * SECTOR];
    let directory = u64_at(footer, 56) * SECTOR;
    let grains = content.len().div_ceil(GRAIN);
    for grain in 0..grains {
        let table = u32_at(image, directory + grain / 512 * 4) * SECTOR;
        let at = if table == 0 { 0 } else { u32_at(image, table + grain % 512 * 4) * SECTOR };
        if at == 0 {
            continue;
        }
        assert_eq!(u64_at(image, at), grain * GRAIN / SECTOR);
        let compressed = &image[at + 12..][..u32_at(image, at + 8)];
        let mut bytes = Vec::with_capacity(GRAIN + 1);
        let mut zlib = Decompress::new(true);
        let status = zlib.decompress_vec(compressed, &mut bytes, FlushDecompress::Finish).unwrap();
        assert_eq!((status, bytes.len()), (Status::StreamEnd, GRAIN));
        let end = content.len().min((grain + 1) * GRAIN);
        content[grain * GRAIN..end].copy_from_slice(&bytes[..end - grain * GRAIN]);
        assert!(bytes[end - grain * GRAIN..].iter().all(|byte| *byte == 0));
    }
    content
}

/// Reads from front to back, as a reader of a pipe does: the markers alone.
fn walk(image: &[u8]) -> Vec<usize> {
    let mut at = u64_at(image, 64) * SECTOR;
    let mut grains = Vec::new();
    loop {
        let (value, size) = (u64_at(image, at), u32_at(image, at + 8));
        if size > 0 {
            grains.push(value * SECTOR / GRAIN);
            at += (12 + size).next_multiple_of(SECTOR);
            continue;
        }
        at += SECTOR;
        if u32_at(image, at - SECTOR + 12) == 0 {
            assert_eq!(at, image.len());
            return grains;
        }
        at += value * SECTOR;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10))]

    #[test]
    fn a_written_stream_is_read_back(
        sectors in 1..160_000usize,
        parts in prop::collection::vec((0..1000usize, 1..400_000usize, any::<u8>()), 0..5),
    ) {
        let mut content = vec![0u8; sectors * SECTOR];
        for (start, length, seed) in parts {
            let start = content.len() * start / 1000;
            let end = (start + length).min(content.len());
            let mut state = u64::from(seed);
            for byte in &mut content[start..end] {
                // Half of it does not compress.
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                *byte = if seed % 2 == 0 { (state >> 56) as u8 } else { seed };
            }
        }
        let image = write(&content);
        prop_assert!(read(&image) == content);
        let not_zero = content.chunks(GRAIN).enumerate();
        let not_zero = not_zero.filter(|(_, bytes)| bytes.iter().any(|byte| *byte != 0));
        prop_assert_eq!(walk(&image), not_zero.map(|(grain, _)| grain).collect::<Vec<_>>());
    }
}

#[test]
fn grains_out_of_order_or_not_whole_are_refused() {
    let names = Names::in_tree(Format::VmdkStream, "vda").unwrap();
    let mut out = Vec::new();
    let size = 2 * GRAIN_SIZE_BYTES + 100;
    let mut stream = StreamVmdk::start(&names, &disk(size), &mut out).unwrap();
    let mut compressor = GrainCompressor::new(1);
    let mut grain = |grain, length| {
        compressor.compress(grain, &vec![1; length]).unwrap().expect("it is not all zeroes")
    };
    let length = out.len();
    let short = stream.append(&grain(0, 100), &mut out);
    assert_eq!(short, Err(Error::GrainLength { length_bytes: 100 }));
    let outside = stream.append(&grain(3, GRAIN), &mut out);
    assert!(matches!(outside, Err(Error::GrainOrder { grain: 3, .. })));
    assert_eq!(out.len(), length);
    stream.append(&grain(1, GRAIN), &mut out).unwrap();
    for late in [0, 1] {
        let late = stream.append(&grain(late, GRAIN), &mut out);
        assert!(matches!(late, Err(Error::GrainOrder { expected: 2, .. })));
    }
    stream.append(&grain(2, 100), &mut out).unwrap();
    stream.finish(&mut out);
    assert_eq!(walk(&out), [1, 2]);
    assert!(matches!(compressor_of(GRAIN + 1), Err(Error::GrainLength { .. })));
    assert!(matches!(compressor_of(0), Err(Error::GrainLength { .. })));
}

fn compressor_of(length: usize) -> Result<(), Error> {
    GrainCompressor::new(1).compress(0, &vec![1; length]).map(|_| ())
}

#[test]
fn a_level_out_of_range_is_taken_for_the_highest() {
    let bytes = vec![7; GRAIN];
    for level in [0, 1, 6, 9, 100] {
        assert!(GrainCompressor::new(level).compress(0, &bytes).unwrap().is_some());
    }
}
