use super::*;
use coldrise_block::StoredRanges;
use coldrise_formats::{DiskShape, Format, Identity, Names, Presentation};
use proptest::prelude::*;

const BLOCK: u64 = 4096;

/// A disk in memory that knows its stored blocks and answers with few extents at a time.
struct Memory {
    content: Vec<u8>,
    stored: Vec<(u64, u64)>,
    most_extents: usize,
}

/// Shown in failures instead of megabytes of content.
impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "({}, {:?}, {})", self.content.len(), self.stored, self.most_extents)
    }
}

impl Memory {
    fn new(size: u64, stored: &[(u64, u64)], most_extents: usize) -> Memory {
        let mut content = vec![0; size as usize];
        for (first, count) in stored {
            let start = (first * BLOCK).min(size) as usize;
            let end = ((first + count) * BLOCK).min(size) as usize;
            for (i, byte) in content[start..end].iter_mut().enumerate() {
                *byte = ((start + i) % 251) as u8 + 1;
            }
        }
        Memory { content, stored: stored.to_vec(), most_extents }
    }
}

impl Disk for Memory {
    fn size_bytes(&self) -> u64 {
        self.content.len() as u64
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, _: &mut ReadContext) -> Result<()> {
        check_range(self.size_bytes(), offset_bytes, buffer.len() as u64)?;
        buffer.copy_from_slice(&self.content[offset_bytes as usize..][..buffer.len()]);
        Ok(())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        check_range(self.size_bytes(), offset_bytes, length_bytes)?;
        let (mut at, end) = (offset_bytes, offset_bytes + length_bytes);
        let mut extents = Vec::new();
        while at < end && extents.len() < limit.min(self.most_extents) {
            let stop = (at / BLOCK * BLOCK + BLOCK).min(end);
            let is_stored = self.content[at as usize] != 0;
            let kind = if is_stored { ExtentKind::Stored } else { ExtentKind::Hole };
            push_extent(&mut extents, Extent { offset_bytes: at, length_bytes: stop - at, kind });
            at = stop;
        }
        Ok(extents)
    }
}

/// Every file of the disk in every served format.
fn files(memory: Memory) -> Vec<ImageFile> {
    let disk = Arc::new(memory);
    let identity = Identity { seed: [3; 32], created_unix_seconds: 1_800_000_000 };
    let shape = DiskShape::new(disk.size_bytes(), identity);
    let mut files = Vec::new();
    for format in Format::ALL {
        let mut stored = StoredRanges::of(&*disk);
        let names = Names::in_tree(format, "vda").unwrap();
        let Ok(image) = Presentation::new(&names, &shape, &mut stored) else { continue };
        stored.end().unwrap();
        let shared: Arc<dyn Disk> = disk.clone();
        let of_layout =
            |file: coldrise_formats::File| ImageFile::read_only(file.layout, shared.clone());
        files.extend(image.into_files().into_iter().map(of_layout));
    }
    assert!(files.len() > Format::ALL.len(), "all but the streamed, and data files");
    files
}

fn any_disk() -> impl Strategy<Value = Memory> {
    let size = prop_oneof![1..9_000_000u64, (1..2000u64).prop_map(|sectors| sectors * 512)];
    let stored = prop::collection::vec((0..2500u64, 1..600u64), 0..6);
    (size, stored, 1..4usize).prop_map(|(size, stored, most)| Memory::new(size, &stored, most))
}

/// Reads that cross the borders of segments, and one byte at each border.
fn places(file: &ImageFile, lengths: &[u64]) -> Vec<(u64, u64)> {
    let size = file.size_bytes();
    let mut places = Vec::new();
    for segment in file.layout.segments(0..size).take(24) {
        for length in lengths {
            let start = segment.offset_bytes.saturating_sub(length / 2);
            places.push((start, (*length).min(size - start)));
        }
    }
    places.push((size, 0));
    places
}

fn read(file: &ImageFile, offset: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0xee; length as usize];
    file.read_at(&mut bytes, offset).unwrap();
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_read_in_pieces_is_the_read_of_the_whole(
        memory in any_disk(),
        lengths in prop::collection::vec(1..9000u64, 1..4),
    ) {
        for file in files(memory) {
            for (offset, length) in places(&file, &lengths) {
                let whole = read(&file, offset, length);
                let mut pieces = Vec::new();
                for part in (0..length).step_by(lengths[0] as usize / 3 + 1) {
                    let piece = (lengths[0] / 3 + 1).min(length - part);
                    pieces.extend(read(&file, offset + part, piece));
                }
                prop_assert!(whole == pieces);
            }
        }
    }

    #[test]
    fn the_disk_is_in_the_file_where_it_says(memory in any_disk()) {
        let content = memory.content.clone();
        for file in files(memory) {
            for segment in file.layout.segments(0..file.size_bytes()) {
                let Source::Disk { offset_bytes } = segment.source else { continue };
                let range = offset_bytes..offset_bytes + segment.length_bytes;
                let bytes = read(&file, segment.offset_bytes, segment.length_bytes);
                prop_assert!(bytes == content[range.start as usize..range.end as usize]);
                let place = segment.offset_bytes..segment.offset_bytes + segment.length_bytes;
                prop_assert_eq!(file.disk_ranges(place).collect::<Vec<_>>(), [range]);
            }
        }
    }

    #[test]
    fn extents_tile_the_file_and_holes_read_as_zeroes(
        memory in any_disk(),
        limit in 1..5usize,
        from in 0..6_000_000u64,
    ) {
        for file in files(memory) {
            let mut at = from.min(file.size_bytes());
            while at < file.size_bytes() {
                let extents = file.extents(at, file.size_bytes() - at, limit).unwrap();
                prop_assert!(!extents.is_empty() && extents.len() <= limit);
                for extent in extents {
                    prop_assert_eq!(extent.offset_bytes, at);
                    prop_assert!(extent.length_bytes > 0);
                    at += extent.length_bytes;
                    if extent.kind.reads_zero() {
                        let bytes = read(&file, extent.offset_bytes, extent.length_bytes);
                        prop_assert!(bytes.iter().all(|byte| *byte == 0));
                    }
                }
            }
            prop_assert_eq!(at.max(file.size_bytes()), file.size_bytes());
        }
    }

    #[test]
    fn stored_ranges_are_found_whatever_a_disk_says_at_once(memory in any_disk()) {
        let content = memory.content.clone();
        let mut stored = StoredRanges::of(&memory);
        let mut at = 0;
        for range in &mut stored {
            prop_assert!(range.start >= at && range.end > range.start);
            prop_assert!(content[at as usize..range.start as usize].iter().all(|byte| *byte == 0));
            at = range.end;
        }
        stored.end().unwrap();
        prop_assert!(content[at as usize..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn reads_beyond_the_end_and_writes_are_refused() {
    for file in files(Memory::new(1 << 20, &[(0, 3)], 1)) {
        let size = file.size_bytes();
        let mut byte = [0];
        for offset in [size, u64::MAX] {
            let refused = file.read_at(&mut byte, offset).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::OutOfRange);
        }
        assert_eq!(file.extents(size, 1, 1).unwrap_err().kind(), ErrorKind::OutOfRange);
        assert!(file.is_read_only());
        assert_eq!(file.write_at(&[1], 0).unwrap_err().kind(), ErrorKind::ReadOnly);
        assert_eq!(file.write_zeroes(0, 1).unwrap_err().kind(), ErrorKind::ReadOnly);
        assert_eq!(file.trim(0, 1).unwrap_err().kind(), ErrorKind::ReadOnly);
    }
}

/// A disk that cannot report extents from some byte on.
struct Failing(Result<()>);

impl Disk for Failing {
    fn size_bytes(&self) -> u64 {
        1 << 20
    }

    fn read(&self, _: &mut [u8], _: u64, _: &mut ReadContext) -> Result<()> {
        Ok(())
    }

    fn extents(&self, offset_bytes: u64, _: u64, _: usize) -> Result<Vec<Extent>> {
        match &self.0 {
            _ if offset_bytes == 0 => {
                Ok(vec![Extent { offset_bytes, length_bytes: BLOCK, kind: ExtentKind::Stored }])
            }
            Ok(()) => Ok(Vec::new()),
            Err(error) => Err(Error::new(error.kind(), error.to_string())),
        }
    }
}

#[test]
fn stored_ranges_end_with_an_error_if_extents_fail_or_are_empty() {
    let corrupt = Err(Error::new(ErrorKind::Corrupt, "a damaged page"));
    for (answer, kind) in [(corrupt, ErrorKind::Corrupt), (Ok(()), ErrorKind::Internal)] {
        let disk = Arc::new(Failing(answer));
        let mut stored = StoredRanges::of(&*disk);
        assert_eq!((stored.next(), stored.next()), (Some(0..BLOCK), None));
        assert_eq!(stored.end().unwrap_err().kind(), kind);

        let names = Names::in_tree(Format::Raw, "vda").unwrap();
        let identity = Identity { seed: [0; 32], created_unix_seconds: 0 };
        let shape = DiskShape::new(disk.size_bytes(), identity);
        let raw = Presentation::new(&names, &shape, []).unwrap().into_files().swap_remove(0);
        let file = ImageFile::read_only(raw.layout, disk);
        assert_eq!(file.extents(0, file.size_bytes(), 9).unwrap_err().kind(), kind);
    }
}
