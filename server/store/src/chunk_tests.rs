use proptest::prelude::*;

use super::*;
use crate::keys::Keys;

const CHUNK: usize = 4096;

struct Fixture {
    keys: Keys,
    codec: ChunkCodec,
}

fn fixture(compression: Compression, encrypted: bool) -> Fixture {
    Fixture {
        keys: Keys::new(&[7; 32], encrypted).unwrap(),
        codec: ChunkCodec::new(RepositoryId([9; 16]), compression, CHUNK as u32),
    }
}

impl Fixture {
    fn encode(&self, id: ChunkId, chunk: &[u8]) -> Vec<u8> {
        let mut value = Vec::new();
        let mut encoder = self.codec.encoder().unwrap();
        self.codec.encode(&mut encoder, &self.keys.chunks, id, chunk, &mut value).unwrap();
        value
    }

    fn decode(&self, id: ChunkId, value: &[u8]) -> Result<Vec<u8>> {
        let mut chunk = vec![0xaa; CHUNK];
        self.codec.decode(&self.keys.chunks, id, value, &mut chunk).map(|()| chunk)
    }
}

fn fixtures() -> impl Iterator<Item = Fixture> {
    [Compression::None, Compression::Lz4, Compression::Zstd(3)]
        .into_iter()
        .flat_map(|compression| [true, false].map(|encrypted| fixture(compression, encrypted)))
}

/// A chunk in which `noisy` bytes do not compress.
fn chunk_of(noisy: usize, seed: u64) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    let mut chunk = vec![seed as u8; CHUNK];
    hasher.finalize_xof().fill(&mut chunk[..noisy]);
    chunk
}

proptest! {
    #[test]
    fn every_chunk_survives(noisy in 0..=CHUNK, seed: u64, id in 1..u64::MAX) {
        for fixture in fixtures() {
            let chunk = chunk_of(noisy, seed);
            prop_assert_eq!(fixture.decode(id, &fixture.encode(id, &chunk)).unwrap(), chunk);
        }
    }

    #[test]
    fn any_changed_byte_is_noticed(noisy in 0..=CHUNK, at: prop::sample::Index, mask in 1u8..) {
        for fixture in fixtures() {
            let mut value = fixture.encode(5, &chunk_of(noisy, 3));
            let at = at.index(value.len());
            value[at] ^= mask;
            prop_assert_eq!(fixture.decode(5, &value).unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }

    #[test]
    fn any_other_length_is_noticed(length in 0usize..6000) {
        for fixture in fixtures() {
            let mut value = fixture.encode(5, &chunk_of(1000, 3));
            prop_assume!(value.len() != length);
            value.resize(length, 0);
            prop_assert_eq!(fixture.decode(5, &value).unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }

    #[test]
    fn arbitrary_values_are_refused(value: Vec<u8>) {
        for fixture in fixtures() {
            prop_assert_eq!(fixture.decode(5, &value).unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }

    /// A person with the key of a repository can write anything: payloads that authenticate and are
    /// not compressed chunks.
    #[test]
    fn authenticated_garbage_is_refused(
        codec in 1u8..5,
        mut payload in prop::collection::vec(any::<u8>(), 0..CHUNK),
        claimed: u32,
    ) {
        let fixture = fixture(Compression::None, true);
        payload.extend_from_slice(&claimed.to_le_bytes());
        let mut value = vec![VERSION, codec, 0, 0];
        value.extend_from_slice(&(CHUNK as u32).to_le_bytes());
        let associated = fixture.codec.associated(5, &value);
        let (nonce, tag) = fixture.keys.chunks.encrypt_derived(&associated, &mut payload).unwrap();
        value.extend_from_slice(&nonce);
        value.extend_from_slice(&payload);
        value.extend_from_slice(&tag);
        if let Err(error) = fixture.decode(5, &value) {
            prop_assert_eq!(error.kind(), ErrorKind::Corrupt);
        }
    }
}

#[test]
fn a_value_opens_only_under_its_id_and_in_its_repository() {
    for fixture in fixtures() {
        let value = fixture.encode(5, &chunk_of(100, 1));
        assert_eq!(fixture.decode(6, &value).unwrap_err().kind(), ErrorKind::Corrupt);
        let elsewhere = ChunkCodec { repository: RepositoryId([8; 16]), ..fixture.codec };
        let elsewhere = Fixture { codec: elsewhere, keys: fixture.keys };
        assert_eq!(elsewhere.decode(5, &value).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn encrypted_lengths_reveal_only_the_quantum() {
    let fixture = fixture(Compression::Zstd(3), true);
    for noisy in (0..CHUNK).step_by(50) {
        let value = fixture.encode(1, &chunk_of(noisy, 2));
        assert_eq!((value.len() - HEADER_BYTES - TAG_BYTES) % fixture.codec.quantum(), 0);
    }
}

#[test]
fn a_chunk_that_hardly_shrinks_is_stored_as_it_is() {
    for compression in [Compression::Lz4, Compression::Zstd(19)] {
        let fixture = fixture(compression, true);
        let value = fixture.encode(1, &chunk_of(CHUNK, 2));
        assert_eq!((value[1], value.len()), (CODEC_NONE, HEADER_BYTES + CHUNK + TAG_BYTES));
        let value = fixture.encode(1, &chunk_of(CHUNK / 2, 2));
        assert_ne!(value[1], CODEC_NONE);
        assert!(value.len() < CHUNK * 5 / 8);
    }
}

#[test]
fn nonces_differ_where_contents_or_ids_differ_and_only_there() {
    let fixture = fixture(Compression::None, true);
    let nonce = |id, chunk: &[u8]| fixture.encode(id, chunk)[FIXED_BYTES..HEADER_BYTES].to_vec();
    let (one, two) = (chunk_of(10, 1), chunk_of(10, 2));
    assert_eq!(nonce(1, &one), nonce(1, &one));
    assert_ne!(nonce(1, &one), nonce(1, &two));
    assert_ne!(nonce(1, &one), nonce(2, &one));
}

#[test]
fn the_plaintext_does_not_show() {
    let fixture = fixture(Compression::None, true);
    let chunk = b"a guest's secret ".repeat(CHUNK / 17 + 1)[..CHUNK].to_vec();
    let value = fixture.encode(1, &chunk);
    assert!(!value.windows(6).any(|window| window == b"secret"));
}

/// The layout that docs/on-disk-format.md describes, byte by byte.
#[test]
fn the_value_of_a_known_chunk_is_the_documented_one() {
    let fixture = fixture(Compression::None, true);
    let value = fixture.encode(0x0102, &[0x5a; CHUNK]);
    assert_eq!(value[..8], [1, 0, 0, 0, 0, 0x10, 0, 0]);
    assert_eq!(value.len(), 8 + 12 + CHUNK + 16);
    assert_eq!(
        blake3::hash(&value).to_hex().as_str(),
        include_str!("chunk_value.golden").trim(),
        "the format has changed: that needs a new version"
    );
}

#[test]
fn zeroes_are_distinguished_from_everything_else() {
    for length in [1, 64, 65, 4096, 16_384] {
        let mut chunk = vec![0; length];
        assert!(is_zero(&chunk));
        for at in [0, length / 2, length - 1] {
            chunk[at] = 1;
            assert!(!is_zero(&chunk));
            chunk[at] = 0;
        }
    }
    assert!(is_zero(&[]));
}
