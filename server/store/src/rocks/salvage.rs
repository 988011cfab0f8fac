//! A file of the database of which the end is lost: its blocks of data are found one after
//! another, and the end is made anew.
//!
//! All that leads to the data stands behind it, and most of that in the last few KiB: one bad
//! sector there, or a file that is cut short, would take chunks of 256 MiB with it, or the
//! documents of hundreds of restore points. But blocks of data follow each other from the
//! beginning on, and each tells where it ends: its entries have their lengths in front, the
//! number of its restart points follows from that of its entries, and its checksum says
//! whether that is so. Where one is damaged the next is looked for byte by byte; a bit that
//! flipped between two of them is put right.
//!
//! The new end has an index, properties and no filter, and so is not longer than the old one.
//! Where only the index was lost the properties stay: RocksDB knows a file by what is in there,
//! and by its length. Otherwise it becomes another file, with those properties that RocksDB
//! needs and this crate reads. Sequence numbers stay in the keys. That of a file that was
//! handed over stood in its properties, and its keys have 0, which makes its chunks older than
//! others with the same id: those have the same content.

use super::blocks::{checked, TRAILER_BYTES};
use super::internal_key::{
    split, user_key, END_BYTES, KIND_DELETION, KIND_VALUE, MAX_BYTES, ORDER,
};
use super::mend::{block_of, has_corrected, index_row, name_row, trailer, Mended};
use super::table::{put_varint, varint, Footer, Handle, PROPERTIES};
use super::{Family, FAMILIES};

/// Blocks to which one part of an index leads, as many as RocksDB puts there.
const PART_ROWS: usize = 200;
/// Stretches between sound blocks that are tried bit by bit.
const MAX_TRIED: u64 = 64;

/// The blocks that were found in a file.
pub(super) struct Salvaged {
    pub(super) done: Mended,
    /// Place and bytes of those that were put right.
    pub(super) patches: Vec<(u64, Vec<u8>)>,
    blocks: Vec<Block>,
    /// Where the last one ends.
    pub(super) end: usize,
}

/// A block of data in a file.
struct Block {
    place: Handle,
    first: Vec<u8>,
    last: Vec<u8>,
    counts: Counts,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    entries: u64,
    deletions: u64,
    key_bytes: u64,
    value_bytes: u64,
    lowest_sequence: u64,
    highest_sequence: u64,
}

/// Finds the blocks in what is left of a file. `ends` are its first and its last key, if they
/// are known: what lies outside is of another file. None where there is no block.
pub(super) fn salvage(
    content: &[u8],
    family: Family,
    ends: Option<(&[u8], &[u8])>,
) -> Option<Salvaged> {
    let is_inside = |block: &Block| {
        ends.is_none_or(|(first, last)| *block.first >= *first && *block.last <= *last)
    };
    let interval = restart_interval(family);
    let mut done = Mended { corrected: 1, lost: 0 };
    let (mut patches, mut blocks, mut at) = (Vec::new(), Vec::<Block>::new(), 0);
    while at < content.len() {
        let before = blocks.last().map_or(&[][..], |block| &block.last);
        let found = (at..content.len()).find_map(|from| {
            let block = block_at(content, from, interval)?;
            (block.first.as_slice() > before && is_inside(&block)).then_some((from, block))
        });
        let Some((from, block)) = found else { break };
        if from > at {
            let mut between = content[at..from].to_vec();
            let tried = done.lost < MAX_TRIED && has_corrected(&mut between);
            let whole = tried.then(|| block_at(&between, 0, interval)).flatten();
            let fits = |found: &Block| {
                *found.first > *before && found.last < block.first && is_inside(found)
            };
            match whole.filter(fits) {
                Some(found) => {
                    done.corrected += 1;
                    blocks.push(Block { place: (at as u64, found.place.1), ..found });
                    patches.push((at as u64, between));
                }
                None => done.lost += 1,
            }
        }
        at = (block.place.0 + block.place.1) as usize + TRAILER_BYTES;
        blocks.push(block);
    }
    let found_last = blocks.last().map(|block| block.last.as_slice())?;
    if ends.is_some_and(|(_, last)| last != found_last) {
        done.lost += 1;
    }
    Some(Salvaged { done, patches, blocks, end: at })
}

/// Whether the first block is one of this family.
pub(super) fn starts_as(content: &[u8], family: Family) -> bool {
    block_at(content, 0, restart_interval(family)).is_some()
}

/// Entries from one restart point to the next.
fn restart_interval(family: Family) -> usize {
    if family == Family::Chunks {
        1
    } else {
        16
    }
}

impl Salvaged {
    /// The blocks, without what follows each; those that were put right are left out.
    pub(super) fn data<'a>(&'a self, content: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let blocks = self.blocks.iter().filter_map(|block| {
            let (offset, bytes) = block.place;
            content.get(offset as usize..(offset + bytes) as usize + TRAILER_BYTES)
        });
        blocks.filter_map(checked)
    }

    pub(super) fn entries(&self) -> u64 {
        self.blocks.iter().map(|block| block.counts.entries).sum()
    }

    /// The lowest and the highest sequence number in it.
    pub(super) fn sequences(&self) -> (u64, u64) {
        let lowest = self.blocks.iter().map(|block| block.counts.lowest_sequence).min();
        let highest = self.blocks.iter().map(|block| block.counts.highest_sequence).max();
        (lowest.unwrap_or(0), highest.unwrap_or(0))
    }
}

/// The block that begins here, if it is sound.
fn block_at(content: &[u8], from: usize, interval: usize) -> Option<Block> {
    let all = content.get(from..)?;
    let (mut rest, mut key, mut count) = (all, Vec::new(), 0_usize);
    let (mut first, mut counts) = (Vec::new(), Counts::default());
    counts.lowest_sequence = u64::MAX;
    loop {
        let is_restart = count % interval == 0;
        let mut length = || usize::try_from(varint(&mut rest)?).ok();
        let (shared, unshared, value_bytes) = (length()?, length()?, length()?);
        let is_key = shared <= key.len() && unshared <= MAX_BYTES;
        if !is_key || is_restart && shared != 0 || shared + unshared <= END_BYTES {
            return None;
        }
        let (own, after) = rest.split_at_checked(unshared)?;
        rest = after.get(value_bytes..)?;
        let before = user_key(&key).to_vec();
        key.truncate(shared);
        key.extend_from_slice(own);
        let (_, sequence, kind) = split(&key)?;
        match kind {
            KIND_VALUE => {}
            KIND_DELETION => counts.deletions += 1,
            _ => return None,
        }
        counts.lowest_sequence = counts.lowest_sequence.min(sequence);
        counts.highest_sequence = counts.highest_sequence.max(sequence);
        match count {
            0 => first = user_key(&key).to_vec(),
            _ if user_key(&key) <= before.as_slice() => return None,
            _ => {}
        }
        count += 1;
        counts.entries += 1;
        counts.key_bytes += key.len() as u64;
        counts.value_bytes += value_bytes as u64;
        let restarts = count.div_ceil(interval);
        let end = restarts * 4;
        let stored = rest.get(end..end + 4);
        if stored == Some(&(restarts as u32).to_le_bytes()[..]) && rest[..4] == [0; 4] {
            let bytes = all.len() - rest.len() + end + 4;
            if all.get(..bytes + TRAILER_BYTES).and_then(checked).is_some() {
                let place = (from as u64, bytes as u64);
                return Some(Block { place, first, last: user_key(&key).to_vec(), counts });
            }
        }
    }
}

/// A key that is not before the last one of a block, and before the first of the next; as
/// short as RocksDB makes it.
fn cut_between(last: &[u8], next: Option<&[u8]>) -> Vec<u8> {
    let Some(next) = next else {
        // Anything behind it.
        return match last.first() {
            Some(byte) if *byte < u8::MAX => vec![byte + 1],
            _ => last.to_vec(),
        };
    };
    let same = last.iter().zip(next).take_while(|(a, b)| a == b).count();
    match next.len() > same + 1 {
        true => next[..=same].to_vec(),
        false => last.to_vec(),
    }
}

impl Salvaged {
    /// Index, the block of `properties`, and footer, to stand behind the blocks.
    pub(super) fn new_end(&self, family: Family, properties: &[u8]) -> NewEnd {
        let (blocks, at) = (&self.blocks, self.end);
        let mut end = Vec::new();
        let mut put = |block: &[u8]| -> Handle {
            let place = ((at + end.len()) as u64, block.len() as u64);
            end.extend_from_slice(block);
            end.extend_from_slice(&trailer(block));
            place
        };
        let next = blocks.iter().skip(1).map(|block| Some(block.first.as_slice())).chain([None]);
        let cuts = blocks.iter().zip(next).map(|(block, next)| cut_between(&block.last, next));
        let mut rows: Vec<_> = cuts.zip(blocks.iter().map(|block| block.place)).collect();
        if family == Family::Chunks {
            // Its top leads to parts.
            rows = rows
                .chunks(PART_ROWS)
                .map(|part| (part[part.len() - 1].0.clone(), put(&block_of(index_rows(part)))))
                .collect();
        }
        let index = put(&block_of(index_rows(&rows)));
        let properties = put(properties);
        let mut handle = Vec::new();
        put_varint(&mut handle, properties.0);
        put_varint(&mut handle, properties.1);
        let metaindex = put(&block_of([name_row(&(PROPERTIES, &handle))].into_iter()));
        NewEnd { bytes: end, footer: Footer::new(metaindex, index).bytes() }
    }

    /// The block of properties for a file that has lost it, in the order of their names.
    pub(super) fn properties(&self, family: Family) -> Option<Vec<u8>> {
        let blocks = &self.blocks;
        let sum =
            |of: fn(&Counts) -> u64| blocks.iter().map(|block| of(&block.counts)).sum::<u64>();
        let number = |number: u64| {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, number);
            bytes
        };
        let position = FAMILIES.iter().position(|(candidate, _)| *candidate == family)?;
        let index_type = if family == Family::Chunks { 2_u32 } else { 0 };
        let data: u64 = blocks.iter().map(|block| block.place.1 + TRAILER_BYTES as u64).sum();
        let rows: [(&[u8], Vec<u8>); 12] = [
            (b"rocksdb.block.based.table.index.type", index_type.to_le_bytes().to_vec()),
            (b"rocksdb.column.family.id", number(position as u64)),
            (b"rocksdb.column.family.name", FAMILIES[position].1.to_bytes().to_vec()),
            (b"rocksdb.comparator", ORDER.to_vec()),
            (b"rocksdb.data.size", number(data)),
            (b"rocksdb.deleted.keys", number(sum(|counts| counts.deletions))),
            (b"rocksdb.index.key.is.user.key", number(1)),
            (b"rocksdb.index.value.is.delta.encoded", number(1)),
            (b"rocksdb.num.data.blocks", number(blocks.len() as u64)),
            (b"rocksdb.num.entries", number(sum(|counts| counts.entries))),
            (b"rocksdb.raw.key.size", number(sum(|counts| counts.key_bytes))),
            (b"rocksdb.raw.value.size", number(sum(|counts| counts.value_bytes))),
        ];
        Some(block_of(rows.iter().map(|(name, value)| name_row(&(name, value)))))
    }
}

fn index_rows(rows: &[(Vec<u8>, Handle)]) -> impl Iterator<Item = Vec<u8>> + '_ {
    rows.iter().map(|(cut, place)| index_row(&(cut, *place)))
}

/// What stands behind the blocks of data.
pub(super) struct NewEnd {
    bytes: Vec<u8>,
    footer: Vec<u8>,
}

impl NewEnd {
    /// All of it, at the end of a file.
    pub(super) fn whole(mut self) -> Vec<u8> {
        self.bytes.extend(self.footer);
        self.bytes
    }

    /// The same in so many bytes; none where it has no room in there.
    pub(super) fn filling(mut self, bytes: usize) -> Option<Vec<u8>> {
        let room = bytes.checked_sub(self.footer.len()).filter(|room| *room >= self.bytes.len())?;
        self.bytes.resize(room, 0);
        Some(self.whole())
    }
}
