//! What holds for every layout, whatever the format.

use std::ops::Range;

use coldrise_formats::{
    Access, Adapter, DiskShape, Error, File, Format, Identity, Layout, Names, Presentation,
    SectorSize, Segment, Source, Writes,
};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

fn disk(size_bytes: u64, seed: u8) -> DiskShape {
    DiskShape::new(size_bytes, Identity { seed: [seed; 32], created_unix_seconds: 1_800_000_000 })
}

fn files(format: Format, disk: &DiskShape, stored: &[Range<u64>]) -> Result<Vec<File>, Error> {
    let names = Names::in_tree(format, "vda")?;
    Ok(Presentation::new(&names, disk, stored.iter().cloned())?.into_files())
}

fn served() -> impl Iterator<Item = Format> {
    Format::ALL.into_iter().filter(|format| format.access() != Access::Streamed)
}

/// The segments of a whole file, checked to tile it.
fn tiles(layout: &Layout) -> Vec<Segment> {
    let segments: Vec<_> = layout.segments(0..u64::MAX).collect();
    let mut at = 0;
    for segment in &segments {
        assert_eq!(segment.offset_bytes, at);
        assert!(segment.length_bytes > 0);
        at += segment.length_bytes;
    }
    assert_eq!(at, layout.size_bytes());
    assert!(layout.segment_at(at).is_none());
    segments
}

/// The disk's ranges in a file, in the order of the file: joined, with the
/// place of each.
fn disk_ranges(segments: &[Segment]) -> Vec<(u64, Range<u64>)> {
    let mut ranges: Vec<(u64, Range<u64>)> = Vec::new();
    for segment in segments {
        let Source::Disk { offset_bytes } = segment.source else { continue };
        let end = offset_bytes + segment.length_bytes;
        match ranges.last_mut() {
            Some((place, last))
                if last.end == offset_bytes
                    && *place + (last.end - last.start) == segment.offset_bytes =>
            {
                last.end = end;
            }
            _ => ranges.push((segment.offset_bytes, offset_bytes..end)),
        }
    }
    ranges
}

fn any_size() -> impl Strategy<Value = u64> {
    prop_oneof![
        30 => 1..32 * MIB,
        20 => (1..64u64).prop_map(|count| count * MIB),
        10 => (1..2000u64).prop_map(|count| count * 512),
        20 => 1..2040 * GIB,
        // The largest take time: one bit for each of 2^30 grains.
        1 => 1..64 * TIB,
        1 => Just(64 * TIB),
    ]
}

fn any_sector() -> impl Strategy<Value = SectorSize> {
    prop_oneof![Just(SectorSize::B512), Just(SectorSize::B4096)]
}

/// Stored ranges of a disk, given by thousandths of it.
fn stored_of(size: u64, parts: &[(u64, u64)]) -> Vec<Range<u64>> {
    let scale = |part: u64| (u128::from(size) * u128::from(part) / 1000) as u64;
    let ranges = parts.iter().map(|(start, length)| {
        let start = scale(*start);
        start..(start + length).min(size)
    });
    ranges.collect()
}

fn any_parts() -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((0..1000u64, 0..12 * MIB), 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_writable_file_holds_the_disk_in_one_piece(size in any_size(), sector in any_sector()) {
        let disk = DiskShape { sector_size: sector, ..disk(size, 1) };
        for format in served().filter(|format| format.access() == Access::Writable) {
            let Ok(files) = files(format, &disk, &[]) else {
                prop_assert!(format.check(&disk).is_err());
                continue;
            };
            let data = files.last().unwrap();
            let segments = tiles(&data.layout);
            let ranges = disk_ranges(&segments);
            prop_assert_eq!(ranges.len(), 1);
            prop_assert_eq!(&ranges[0].1, &(0..size));
            let place = ranges[0].0;
            prop_assert!(place % 4096 == 0, "{} at {}", format, place);
            for segment in segments {
                let is_disk = matches!(segment.source, Source::Disk { .. });
                prop_assert_eq!(is_disk, segment.writes == Writes::ToDisk);
            }
            if files.len() == 2 {
                prop_assert!(disk_ranges(&tiles(&files[0].layout)).is_empty());
            }
        }
    }

    #[test]
    fn compact_files_hold_only_blocks_with_stored_data(
        size in any_size(),
        sector in any_sector(),
        parts in any_parts(),
    ) {
        let disk = DiskShape { sector_size: sector, ..disk(size, 1) };
        let stored = stored_of(size, &parts);
        for format in served().filter(|format| format.is_compact()) {
            let Ok(files) = files(format, &disk, &stored) else {
                prop_assert!(format.check(&disk).is_err());
                continue;
            };
            let segments = tiles(&files[0].layout);
            prop_assert!(segments.iter().all(|segment| segment.writes == Writes::Refused));
            let ranges = disk_ranges(&segments);
            for pair in ranges.windows(2) {
                prop_assert!(pair[0].1.end <= pair[1].1.start);
            }
            for (_, range) in &ranges {
                prop_assert!(range.end <= size);
                let near = |stored: &Range<u64>| {
                    stored.start < range.end && range.start < stored.end
                };
                prop_assert!(stored.iter().any(near));
            }
            for range in stored.iter().filter(|range| !range.is_empty()) {
                let mut at = range.start;
                for (_, held) in &ranges {
                    if held.start <= at {
                        at = at.max(held.end);
                    }
                }
                prop_assert!(at >= range.end, "{} lacks {:?} from {}", format, range, at);
            }
        }
    }

    #[test]
    fn a_read_in_pieces_equals_a_read_of_the_whole(
        size in any_size(),
        parts in any_parts(),
        place in 0..1000u64,
        cuts in prop::collection::vec(1..5000usize, 1..30),
    ) {
        let disk = disk(size, 1);
        let stored = stored_of(size, &parts);
        for format in served() {
            let Ok(files) = files(format, &disk, &stored) else { continue };
            for File { layout, .. } in files {
                let segments: Vec<_> = layout.segments(0..u64::MAX).take(64).collect();
                let edge = segments[place as usize % segments.len()];
                let start = edge.offset_bytes.saturating_sub(place * 40);
                let mut whole = vec![1; 60_000];
                layout.read_metadata(start, &mut whole);
                let mut at = 0;
                for cut in cuts.iter().cycle() {
                    let end = (at + cut).min(whole.len());
                    let mut piece = vec![2; end - at];
                    layout.read_metadata(start + at as u64, &mut piece);
                    prop_assert!(piece == whole[at..end], "{} at {}", format, start + at as u64);
                    at = end;
                    if at == whole.len() {
                        break;
                    }
                }
                for segment in layout.segments(start..start + whole.len() as u64) {
                    if segment.source != Source::Metadata {
                        let from = (segment.offset_bytes - start) as usize;
                        let bytes = &whole[from..from + segment.length_bytes as usize];
                        prop_assert!(bytes.iter().all(|byte| *byte == 0));
                    }
                }
            }
        }
    }

    #[test]
    fn places_are_the_segments_seen_from_the_disk(
        size in any_size(),
        parts in any_parts(),
        probe in 0..1000u64,
    ) {
        for format in served() {
            let Ok(files) = files(format, &disk(size, 1), &stored_of(size, &parts)) else {
                continue;
            };
            for File { layout, .. } in files {
                let ranges = disk_ranges(&layout.segments(0..u64::MAX).take(64).collect::<Vec<_>>());
                for (place, range) in &ranges {
                    for at in [range.start, range.start + probe.min(range.end - 1 - range.start)] {
                        let found = layout.place_of(at).unwrap();
                        prop_assert_eq!(found.offset_bytes, Some(place + at - range.start));
                        prop_assert!(found.length_bytes > 0);
                    }
                }
                prop_assert_eq!(layout.place_of(size), None);
                let holds_disk = layout.segments(0..u64::MAX).any(|segment| {
                    matches!(segment.source, Source::Disk { .. })
                });
                let at = size / 1000 * probe;
                match layout.place_of(at) {
                    Some(found) => {
                        prop_assert!(at + found.length_bytes <= size);
                        if let Some(offset) = found.offset_bytes {
                            let segment = layout.segment_at(offset).unwrap();
                            prop_assert_eq!(segment.source, Source::Disk { offset_bytes: at });
                        }
                    }
                    None => prop_assert!(!holds_disk),
                }
            }
        }
    }

    #[test]
    fn a_segment_does_not_depend_on_where_one_asks(
        size in any_size(),
        parts in any_parts(),
        place in 0..1000u64,
        within in 0..1000u64,
    ) {
        for format in served() {
            let Ok(files) = files(format, &disk(size, 1), &stored_of(size, &parts)) else {
                continue;
            };
            for File { layout, .. } in files {
                let segments: Vec<_> = layout.segments(0..u64::MAX).take(64).collect();
                let segment = segments[place as usize % segments.len()];
                let skipped = within * segment.length_bytes / 1000;
                let found = layout.segment_at(segment.offset_bytes + skipped).unwrap();
                prop_assert_eq!(found.writes, segment.writes);
                match (segment.source, found.source) {
                    (Source::Disk { offset_bytes: a }, Source::Disk { offset_bytes: b }) => {
                        prop_assert_eq!(a + skipped, b);
                    }
                    (a, b) => prop_assert_eq!(a, b),
                }
            }
        }
    }
}

fn metadata_of(format: Format, disk: &DiskShape) -> Vec<Vec<u8>> {
    let files = files(format, disk, std::slice::from_ref(&(0..1))).unwrap();
    let read = files.iter().map(|file| {
        let mut bytes = vec![0; file.layout.size_bytes() as usize];
        file.layout.read_metadata(0, &mut bytes);
        bytes
    });
    read.collect()
}

#[test]
fn identity_decides_the_ids_and_nothing_else_changes() {
    for format in served() {
        let first = metadata_of(format, &disk(3 * MIB, 1));
        assert_eq!(first, metadata_of(format, &disk(3 * MIB, 1)), "{format}");
        let other = metadata_of(format, &disk(3 * MIB, 2));
        let has_ids = !matches!(
            format,
            Format::Raw | Format::Qcow2 | Format::Qcow2Sparse | Format::Qcow2External
        );
        assert_eq!(first != other, has_ids, "{format}");
    }
}

#[test]
fn only_a_descriptor_may_grow() {
    for format in served() {
        for file in files(format, &disk(MIB, 1), &[]).unwrap() {
            let layout = &file.layout;
            let grows = layout.growth_limit_bytes() > layout.size_bytes();
            let is_text = file.name == "vda.vmdk" || file.name == "vda.hosted.vmdk";
            assert_eq!(grows, is_text, "{}", file.name);
        }
    }
}

#[test]
fn a_qcow2_takes_no_writes_that_would_move_data() {
    let writes = |format| {
        let files = files(format, &disk(MIB, 1), &[]).unwrap();
        let metadata = tiles(&files[0].layout).into_iter();
        let metadata = metadata.filter(|segment| segment.source == Source::Metadata);
        metadata.map(|segment| segment.writes).collect::<Vec<_>>()
    };
    use Writes::{Dropped, Kept, Refused};
    // Header, refcount table, refcounts, L1, L2.
    assert_eq!(writes(Format::Qcow2), [Kept, Refused, Refused, Refused, Refused]);
    assert_eq!(writes(Format::Qcow2External), [Kept, Refused, Refused, Refused, Dropped]);
}

#[test]
fn disks_beyond_the_limits_of_a_format_are_refused() {
    let refused = |format, disk: &DiskShape, stored: &[Range<u64>]| {
        files(format, disk, stored).expect_err("has to be refused")
    };
    let large = disk(2 * TIB + 512, 1);
    for format in [Format::Vhd, Format::VhdDynamic] {
        assert!(matches!(refused(format, &large, &[]), Error::DiskTooLarge { .. }));
    }
    let sectors = DiskShape { sector_size: SectorSize::B4096, ..disk(MIB, 1) };
    assert!(matches!(refused(Format::Vmdk, &sectors, &[]), Error::SectorSize { .. }));
    let dense = refused(Format::VmdkSparse, &large, std::slice::from_ref(&(0..2 * TIB)));
    assert!(matches!(dense, Error::ImageTooLarge { .. }), "{dense}");
    assert!(
        files(Format::VmdkSparse, &large, std::slice::from_ref(&(2 * TIB..2 * TIB + 1))).is_ok()
    );
    assert_eq!(
        refused(Format::VmdkStream, &disk(MIB, 1), &[]),
        Error::Streamed { format: Format::VmdkStream }
    );
    for format in served() {
        let result = files(format, &disk(64 * TIB + 1, 1), &[]);
        assert!(matches!(result, Err(Error::DiskTooLarge { .. })), "{format}");
    }
    let outside = refused(Format::VhdxDynamic, &disk(MIB, 1), std::slice::from_ref(&(0..MIB + 1)));
    assert!(outside.to_string().contains("not within the disk"), "{outside}");
}

#[test]
fn the_adapter_stands_in_the_descriptor() {
    let disk = DiskShape { adapter: Adapter::Ide, ..disk(MIB, 1) };
    let text = metadata_of(Format::Vmdk, &disk).remove(0);
    assert!(String::from_utf8(text).unwrap().contains("ddb.adapterType = \"ide\"\n"));
}
