//! Which blocks of a disk are present in an image, and their positions.
//!
//! The structure takes one bit per block and a count per 512 of them: 1.07 bits
//! per block. Per TiB of disk that is 68 KiB with blocks of 2 MiB and 2.1 MiB
//! with VMDK's grains of 64 KiB, regardless of fragmentation. If all blocks are
//! present, no bitmap is kept.

use std::ops::Range;

use crate::{Error, Result};

const WORD_BITS: u64 = u64::BITS as u64;
/// Words under one count: 512 bits, a cache line.
const GROUP_WORDS: usize = 8;

/// The present blocks among all blocks of a disk.
#[derive(Debug)]
pub(crate) enum Present {
    /// All blocks; the value is their number.
    All(u64),
    /// The blocks whose bit is set.
    Some(Bits),
}

/// A bitmap with running counts.
#[derive(Debug)]
pub(crate) struct Bits {
    block_count: u64,
    present_count: u64,
    words: Vec<u64>,
    /// Present blocks before each group. There are 2^30 blocks at most (64 TiB
    /// in grains of 64 KiB), so 32 bits are enough.
    before: Vec<u32>,
}

const _: () = assert!(crate::MAX_DISK_SIZE_BYTES / (64 << 10) <= u32::MAX as u64);

impl Present {
    /// The blocks of `block_bytes` (64 KiB or more) that `stored` touches, on a
    /// disk of `size_bytes`. The ranges are in bytes, in any order.
    ///
    /// # Errors
    /// `Error::RangeOutside` if a range leaves the disk.
    pub(crate) fn from_stored(
        size_bytes: u64,
        block_bytes: u64,
        stored: impl IntoIterator<Item = Range<u64>>,
    ) -> Result<Self> {
        let block_count = size_bytes.div_ceil(block_bytes);
        let mut words = vec![0u64; block_count.div_ceil(WORD_BITS) as usize];
        for range in stored {
            let Range { start: start_bytes, end: end_bytes } = range;
            if start_bytes > end_bytes || end_bytes > size_bytes {
                return Err(Error::RangeOutside { start_bytes, end_bytes, size_bytes });
            }
            if start_bytes < end_bytes {
                set(&mut words, start_bytes / block_bytes..end_bytes.div_ceil(block_bytes));
            }
        }
        let mut present_count = 0;
        let mut before = Vec::with_capacity(words.len().div_ceil(GROUP_WORDS));
        for group in words.chunks(GROUP_WORDS) {
            before.push(present_count as u32);
            present_count += ones(group);
        }
        Ok(Present::Some(Bits { block_count, present_count, words, before }))
    }

    /// Number of blocks on the disk.
    pub(crate) fn block_count(&self) -> u64 {
        match self {
            Present::All(count) => *count,
            Present::Some(bits) => bits.block_count,
        }
    }

    /// Number of present blocks.
    pub(crate) fn present_count(&self) -> u64 {
        match self {
            Present::All(count) => *count,
            Present::Some(bits) => bits.present_count,
        }
    }

    /// The number of present blocks before `block`, or `None` if `block` is
    /// absent.
    pub(crate) fn rank(&self, block: u64) -> Option<u64> {
        match self {
            Present::All(count) => (block < *count).then_some(block),
            Present::Some(bits) => bits.rank(block),
        }
    }

    /// The present block with this rank, counted from 0; `rank` must be less
    /// than [`Present::present_count`].
    pub(crate) fn select(&self, rank: u64) -> u64 {
        match self {
            Present::All(_) => rank,
            Present::Some(bits) => bits.select(rank),
        }
    }

    /// The length of the run of present blocks that begins at `block`, which
    /// must be present. Counting stops at about `limit`.
    pub(crate) fn run(&self, block: u64, limit: u64) -> u64 {
        match self {
            Present::All(count) => count - block,
            Present::Some(bits) => bits.run(block, limit),
        }
    }
}

impl Bits {
    fn rank(&self, block: u64) -> Option<u64> {
        let word = (block / WORD_BITS) as usize;
        let bit = block % WORD_BITS;
        let bits = *self.words.get(word)?;
        if bits >> bit & 1 == 0 {
            return None;
        }
        let group = word / GROUP_WORDS;
        let below = u64::from((bits & !(u64::MAX << bit)).count_ones());
        Some(u64::from(self.before[group]) + ones(&self.words[group * GROUP_WORDS..word]) + below)
    }

    fn select(&self, rank: u64) -> u64 {
        let group = self.before.partition_point(|before| u64::from(*before) <= rank) - 1;
        let mut left = rank - u64::from(self.before[group]);
        let mut word = group * GROUP_WORDS;
        while u64::from(self.words[word].count_ones()) <= left {
            left -= u64::from(self.words[word].count_ones());
            word += 1;
        }
        let mut bits = self.words[word];
        for _ in 0..left {
            bits &= bits - 1;
        }
        word as u64 * WORD_BITS + u64::from(bits.trailing_zeros())
    }

    fn run(&self, block: u64, limit: u64) -> u64 {
        let mut end = block;
        while end - block < limit {
            let Some(word) = self.words.get((end / WORD_BITS) as usize) else { break };
            let ones = u64::from((word >> (end % WORD_BITS)).trailing_ones());
            end += ones;
            if ones == 0 || end % WORD_BITS != 0 {
                break;
            }
        }
        end - block
    }
}

fn ones(words: &[u64]) -> u64 {
    words.iter().map(|word| u64::from(word.count_ones())).sum()
}

/// Sets a non-empty range of bits.
fn set(words: &mut [u64], range: Range<u64>) {
    let (first, last) = (range.start / WORD_BITS, (range.end - 1) / WORD_BITS);
    let head = u64::MAX << (range.start % WORD_BITS);
    let tail = u64::MAX >> (WORD_BITS - 1 - (range.end - 1) % WORD_BITS);
    if first == last {
        words[first as usize] |= head & tail;
        return;
    }
    words[first as usize] |= head;
    words[first as usize + 1..last as usize].fill(u64::MAX);
    words[last as usize] |= tail;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: u64 = 64 << 10;

    proptest! {
        #[test]
        fn present_blocks_match_a_plain_list(
            blocks in 1u64..3000,
            ranges in prop::collection::vec((0u64..3000, 1u64..700), 0..8),
        ) {
            let size = blocks * BLOCK - 1;
            let ranges = ranges.into_iter().map(|(start, length)| {
                (start * BLOCK).min(size)..((start + length) * BLOCK - 5).min(size)
            });
            let ranges: Vec<_> = ranges.collect();
            let touched = |block: u64| ranges.iter().any(|range| {
                range.start < range.end
                    && range.start < (block + 1) * BLOCK
                    && range.end > block * BLOCK
            });
            let list: Vec<u64> = (0..blocks).filter(|block| touched(*block)).collect();
            let present = Present::from_stored(size, BLOCK, ranges.clone()).unwrap();
            prop_assert_eq!(present.block_count(), blocks);
            prop_assert_eq!(present.present_count(), list.len() as u64);
            for (rank, block) in list.iter().enumerate() {
                prop_assert_eq!(present.rank(*block), Some(rank as u64));
                prop_assert_eq!(present.select(rank as u64), *block);
                let run = (*block..).zip(&list[rank..]).take_while(|(a, b)| a == *b).count();
                prop_assert_eq!(present.run(*block, u64::MAX), run as u64);
            }
            for block in (0..blocks + 70).filter(|block| !list.contains(block)) {
                prop_assert_eq!(present.rank(block), None);
            }
        }
    }

    #[test]
    fn a_range_that_leaves_the_disk_is_refused() {
        let refused =
            Present::from_stored(BLOCK, BLOCK, std::iter::once(0..BLOCK + 1)).unwrap_err();
        assert!(matches!(refused, Error::RangeOutside { .. }));
    }
}
