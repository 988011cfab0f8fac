//! A format's table, computed from a formula.

use std::sync::Arc;

use super::Present;

/// How an entry is stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Width {
    U16Be,
    U32Be,
    U32Le,
    U64Be,
    U64Le,
}

impl Width {
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Width::U16Be => 2,
            Width::U32Be | Width::U32Le => 4,
            Width::U64Be | Width::U64Le => 8,
        }
    }

    /// The stored entry, in the first [`Width::bytes`] bytes. A value fits its
    /// width: the format's limits are checked before a table is created.
    fn store(self, value: u64) -> [u8; 8] {
        let mut stored = [0; 8];
        match self {
            Width::U16Be => stored[..2].copy_from_slice(&(value as u16).to_be_bytes()),
            Width::U32Be => stored[..4].copy_from_slice(&(value as u32).to_be_bytes()),
            Width::U32Le => stored[..4].copy_from_slice(&(value as u32).to_le_bytes()),
            Width::U64Be => stored = value.to_be_bytes(),
            Width::U64Le => stored = value.to_le_bytes(),
        }
        stored
    }
}

/// Entry `i` is `first + rank(i) * step` if block `i` is present, where
/// `rank(i)` is the number of present blocks before it. All other entries, also
/// those after the last block, are `absent`.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) width: Width,
    pub(crate) present: Arc<Present>,
    pub(crate) first: u64,
    pub(crate) step: u64,
    pub(crate) absent: u64,
    /// An extra `absent` entry follows each group of this many entries.
    pub(crate) spacer_after: Option<u64>,
}

impl Table {
    /// A table in which all `count` entries are present.
    pub(crate) fn full(width: Width, count: u64, first: u64, step: u64) -> Self {
        let present = Arc::new(Present::All(count));
        Table { width, present, first, step, absent: 0, spacer_after: None }
    }

    /// Fills `buffer` with the table's bytes from `offset_bytes` on.
    pub(crate) fn read(&self, offset_bytes: u64, buffer: &mut [u8]) {
        let width = self.width.bytes();
        let mut entry = offset_bytes / width as u64;
        let mut skip = (offset_bytes % width as u64) as usize;
        let mut rest = buffer;
        while !rest.is_empty() {
            let stored = self.width.store(self.entry(entry));
            let length = (width - skip).min(rest.len());
            let (part, behind) = rest.split_at_mut(length);
            part.copy_from_slice(&stored[skip..skip + length]);
            rest = behind;
            entry += 1;
            skip = 0;
        }
    }

    fn entry(&self, entry: u64) -> u64 {
        let block = match self.spacer_after {
            None => entry,
            Some(group) if entry % (group + 1) == group => return self.absent,
            Some(group) => entry / (group + 1) * group + entry % (group + 1),
        };
        match self.present.rank(block) {
            Some(rank) => self.first + rank * self.step,
            None => self.absent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(table: &Table, count: usize) -> Vec<u64> {
        (0..count as u64).map(|entry| table.entry(entry)).collect()
    }

    #[test]
    fn present_blocks_follow_each_other() {
        let stored = [0..1, (2 << 20)..(2 << 20) + 1];
        let present = Arc::new(Present::from_stored(4 << 20, 1 << 20, stored).unwrap());
        let mut table = Table {
            width: Width::U32Be,
            present,
            first: 7,
            step: 10,
            absent: 99,
            spacer_after: None,
        };
        assert_eq!(entries(&table, 5), [7, 99, 17, 99, 99]);
        table.spacer_after = Some(2);
        assert_eq!(entries(&table, 7), [7, 99, 99, 17, 99, 99, 99]);
    }

    #[test]
    fn bytes_do_not_depend_on_where_a_read_begins() {
        let widths = [Width::U16Be, Width::U32Be, Width::U32Le, Width::U64Be, Width::U64Le];
        for width in widths {
            let table = Table::full(width, 20, 258, 3);
            let mut whole = vec![0; 22 * width.bytes()];
            table.read(0, &mut whole);
            for start in 0..whole.len() {
                let mut part = vec![0; (whole.len() - start).min(11)];
                table.read(start as u64, &mut part);
                assert_eq!(part, whole[start..start + part.len()]);
            }
        }
    }
}
