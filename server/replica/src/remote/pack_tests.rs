use super::*;
use crate::remote::unpack::Unpacker;
use crate::remote::unpack::tests::{CHUNK, frames, plain, random, wanted};

fn take_level(packer: &mut Packer, place: usize) {
    packer.effort.place = place;
    packer.change_level().unwrap();
}

#[test]
fn a_stream_comes_back_in_any_order_and_remembers() {
    let mut packer = Packer::new(3).unwrap();
    let seeds = [1, 2, 3, 1, 4, 5];
    let batches: Vec<_> = seeds.iter().map(|seed| random(60 * CHUNK, *seed)).collect();
    let mut all = Vec::new();
    let mut lengths = Vec::new();
    for (number, batch) in batches.iter().enumerate() {
        match number {
            0 => take_level(&mut packer, 3),
            4 => take_level(&mut packer, 1),
            _ => {}
        }
        let made = frames(&mut packer, &wanted(number as u32, batch.clone(), None));
        lengths.push(made.iter().map(|frame| frame.body.len()).sum::<usize>());
        all.extend(made);
    }
    // What came before in the stream is not sent again. The level is not thought over before a MiB.
    assert!(lengths[0] > 60 * CHUNK && lengths[3] < 6 * CHUNK, "{lengths:?}");
    let first = all.remove(0);
    let mut unpacker = Unpacker::default();
    for frame in all.into_iter().rev() {
        assert_eq!(unpacker.take(frame, CHUNK).unwrap(), []);
    }
    let contents = unpacker.take(first, CHUNK).unwrap();
    for (number, batch) in batches.iter().enumerate() {
        let own = contents.iter().filter(|content| content.number == number as u32);
        assert!(own.flat_map(plain).eq(batch), "{number}");
    }
}

#[test]
fn the_level_follows_the_slower_part() {
    let mut effort = Effort::default();
    let (short, long) = (Duration::from_millis(1), Duration::from_millis(20));
    let levels: Vec<_> = (0..5)
        .map(|_| {
            // Once for each MiB.
            assert!(!effort.spent(LEVEL_BYTES - 1, short, long));
            effort.spent(1, short, long);
            effort.level()
        })
        .collect();
    assert_eq!(levels, [3, 6, 9, 9, 9]);
    assert!(!effort.spent(LEVEL_BYTES, long, long / 2) && effort.level() == 9);
    assert!(effort.spent(LEVEL_BYTES, long, short) && effort.level() == 6);
}
