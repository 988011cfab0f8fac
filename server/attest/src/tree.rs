//! The tree of hashes over a disk.
//!
//! Leaf: SHA-256 of a byte 0 and 64 KiB of the disk. Node: SHA-256 of a byte 1, the left and the right
//! hash below. The disk is padded with zeroes to the next power of two of leaves, at least 16; a subtree
//! of zeroes alone has a hash that only depends on its height, so holes cost nothing.

use aws_lc_rs::digest::{Context, SHA256, digest};

/// Bytes of one leaf.
pub(super) const LEAF_BYTES: u64 = 64 << 10;

/// A hash of the tree.
pub(super) type Hash = [u8; 32];

/// The hash of a leaf.
pub(super) fn leaf(bytes: &[u8]) -> Hash {
    let mut context = Context::new(&SHA256);
    context.update(&[0]);
    context.update(bytes);
    as_hash(context.finish().as_ref())
}

/// The hash of two neighbours.
fn node(left: &Hash, right: &Hash) -> Hash {
    let mut bytes = [0; 65];
    bytes[0] = 1;
    bytes[1..33].copy_from_slice(left);
    bytes[33..].copy_from_slice(right);
    as_hash(digest(&SHA256, &bytes).as_ref())
}

/// A digest of SHA-256, which has 32 bytes.
fn as_hash(digest: &[u8]) -> Hash {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest);
    hash
}

/// The hashes of subtrees of zeroes, by height; 0 is a leaf.
pub(super) struct ZeroTrees(Vec<Hash>);

impl ZeroTrees {
    pub(super) fn new() -> ZeroTrees {
        let mut hashes = vec![leaf(&[0; LEAF_BYTES as usize])];
        // The largest disk has 2^30 leaves.
        for height in 1..=40 {
            let below = hashes[height - 1];
            hashes.push(node(&below, &below));
        }
        ZeroTrees(hashes)
    }

    /// The hash of a subtree of zeroes.
    pub(super) fn at(&self, height: u32) -> Hash {
        self.0[height as usize]
    }

    /// The hash above `hashes`, which are subtrees of `height`. Missing ones up to `top` are zeroes.
    pub(super) fn fold(&self, mut hashes: Vec<Hash>, height: u32, top: u32) -> Hash {
        for height in height..top {
            if hashes.len() % 2 == 1 {
                hashes.push(self.at(height));
            }
            hashes = hashes.chunks_exact(2).map(|pair| node(&pair[0], &pair[1])).collect();
        }
        hashes.first().copied().unwrap_or_else(|| self.at(top))
    }
}

/// The height of the smallest subtree that covers `length_bytes`.
pub(super) fn height_over(length_bytes: u64) -> u32 {
    length_bytes.div_ceil(LEAF_BYTES).max(1).next_power_of_two().trailing_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_and_missing_leaves_are_the_same() {
        let trees = ZeroTrees::new();
        let zero = leaf(&[0; LEAF_BYTES as usize]);
        let one = leaf(&[1; LEAF_BYTES as usize]);
        assert_eq!(trees.fold(vec![one], 0, 2), trees.fold(vec![one, zero, zero, zero], 0, 2));
        assert_eq!(trees.fold(Vec::new(), 0, 3), trees.at(3));
        let halves = vec![trees.fold(vec![one, zero], 0, 1), trees.fold(vec![zero, one], 0, 1)];
        assert_eq!(trees.fold(halves, 1, 2), trees.fold(vec![one, zero, zero, one], 0, 2));
    }

    #[test]
    fn the_height_follows_the_number_of_leaves() {
        let cases =
            [(1, 0), (LEAF_BYTES, 0), (LEAF_BYTES + 1, 1), (3 * LEAF_BYTES, 2), (64 << 40, 30)];
        for (bytes, height) in cases {
            assert_eq!(height_over(bytes), height, "{bytes}");
        }
    }
}
