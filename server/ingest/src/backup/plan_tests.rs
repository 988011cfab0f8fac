//! The plan against a plain array of bytes.

use coldrise_block::ExtentKind;

use super::*;
use crate::source::Reader;

const UNIT: u64 = 8;

/// A source with a letter for every byte: `d` dirty content, `z` dirty zeroes, `c` clean
/// content, `h` a clean hole. It answers in short runs.
struct Letters(Vec<u8>);

impl Letters {
    fn runs(&self, offset: u64, length: u64, same: fn(u8) -> bool) -> Vec<(u64, u64, bool)> {
        let mut runs: Vec<(u64, u64, bool)> = Vec::new();
        for at in offset..offset + length {
            let value = same(self.0[at as usize]);
            let count = runs.len();
            match runs.last_mut() {
                Some(last) if last.2 == value => last.1 += 1,
                _ if count == 2 => break,
                _ => runs.push((at, 1, value)),
            }
        }
        runs
    }
}

impl Source for Letters {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }
    fn alignment_bytes(&self) -> u64 {
        1
    }
    fn useful_readers(&self) -> usize {
        1
    }
    fn useful_read_bytes(&self) -> u64 {
        3 * UNIT
    }
    fn reader(&self) -> Result<Box<dyn Reader + '_>> {
        Err(Error::new(ErrorKind::Internal, "nothing is read here"))
    }
    fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        let runs = self.runs(offset, length, |letter| matches!(letter, b'd' | b'c'));
        let extent = |(offset_bytes, length_bytes, stored)| Extent {
            offset_bytes,
            length_bytes,
            kind: if stored { ExtentKind::Stored } else { ExtentKind::Hole },
        };
        Ok(runs.into_iter().map(extent).collect())
    }
    fn dirty_runs(&self, offset: u64, length: u64) -> Result<Vec<DirtyRun>> {
        let runs = self.runs(offset, length, |letter| matches!(letter, b'd' | b'z'));
        let run = |(offset_bytes, length_bytes, is_dirty)| DirtyRun {
            offset_bytes,
            length_bytes,
            is_dirty,
        };
        Ok(runs.into_iter().map(run).collect())
    }
    fn check_after_reading(&self) -> Result<Option<String>> {
        Ok(None)
    }
}

/// The action for a unit, computed byte by byte.
fn expected(letters: &[u8], from: u64, bitmap_end: u64) -> Action {
    let actions: Vec<Action> = letters
        .iter()
        .zip(from..)
        .map(|(&letter, at)| match letter {
            b'c' | b'h' if at < bitmap_end => Action::Keep,
            b'z' | b'h' => Action::Hole,
            _ => Action::Read,
        })
        .collect();
    if actions.iter().all(|&action| action == actions[0]) { actions[0] } else { Action::Read }
}

fn check(letters: &str, bitmap_end: u64) {
    let source = Letters(letters.as_bytes().to_vec());
    let mut plan = Plan::new(&source, UNIT, bitmap_end);
    let mut at = 0;
    while let Some(span) = plan.next().unwrap() {
        assert_eq!(span.offset_bytes, at, "{letters}: spans have no gaps");
        assert!(span.length_bytes > 0);
        let end = at + span.length_bytes;
        assert!(end % UNIT == 0 || end == source.size_bytes(), "{letters}: {span:?}");
        if span.action == Action::Read {
            assert!(span.length_bytes <= 3 * UNIT, "{letters}: {span:?}");
        }
        while at < end {
            let next = (at + UNIT).min(end);
            let unit = &source.0[at as usize..next as usize];
            assert_eq!(span.action, expected(unit, at, bitmap_end), "{letters} at {at}");
            at = next;
        }
    }
    assert_eq!(at, source.size_bytes(), "{letters}");
}

#[test]
fn every_mixture_is_planned_as_byte_by_byte() {
    let mut state = 7u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    for _ in 0..3000 {
        let mut letters = String::new();
        let runs = 1 + random(8);
        for _ in 0..runs {
            let letter = ["d", "z", "c", "h"][random(4) as usize];
            let length = if random(2) == 0 { random(4) * UNIT } else { random(20) } + 1;
            letters.push_str(&letter.repeat(length as usize));
        }
        let units = letters.len() as u64 / UNIT;
        let bitmap_end = random(units + 1) * UNIT;
        check(&letters, bitmap_end);
        check(&letters, letters.len() as u64);
    }
}

#[test]
fn a_source_without_extents_is_an_error() {
    struct Silent;
    impl Source for Silent {
        fn size_bytes(&self) -> u64 {
            100
        }
        fn alignment_bytes(&self) -> u64 {
            1
        }
        fn useful_readers(&self) -> usize {
            1
        }
        fn useful_read_bytes(&self) -> u64 {
            UNIT
        }
        fn reader(&self) -> Result<Box<dyn Reader + '_>> {
            Err(Error::new(ErrorKind::Internal, "nothing is read here"))
        }
        fn extents(&self, _: u64, _: u64) -> Result<Vec<Extent>> {
            Ok(Vec::new())
        }
        fn dirty_runs(&self, _: u64, _: u64) -> Result<Vec<DirtyRun>> {
            Ok(Vec::new())
        }
        fn check_after_reading(&self) -> Result<Option<String>> {
            Ok(None)
        }
    }
    assert_eq!(Plan::new(&Silent, UNIT, 0).next().unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(Plan::new(&Silent, UNIT, 96).next().unwrap_err().kind(), ErrorKind::Io);
}
