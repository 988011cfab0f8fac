//! Tests writes to every byte of every writable image.

use super::*;
use coldrise_formats::{DiskShape, Format, Identity, Names, Presentation};
use parking_lot::Mutex;
use proptest::prelude::*;

/// A writable disk in memory that counts its flushes.
struct Memory {
    content: Mutex<Vec<u8>>,
    flushes: Mutex<u32>,
}

impl Memory {
    fn of(content: Vec<u8>) -> Arc<Memory> {
        Arc::new(Memory { content: Mutex::new(content), flushes: Mutex::new(0) })
    }
}

impl Disk for Memory {
    fn size_bytes(&self) -> u64 {
        self.content.lock().len() as u64
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, _: &mut ReadContext) -> Result<()> {
        check_range(self.size_bytes(), offset_bytes, buffer.len() as u64)?;
        buffer.copy_from_slice(&self.content.lock()[offset_bytes as usize..][..buffer.len()]);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        check_range(self.size_bytes(), offset_bytes, bytes.len() as u64)?;
        self.content.lock()[offset_bytes as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn write_zeroes(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.write_at(&vec![0; length_bytes as usize], offset_bytes)
    }

    fn trim(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.write_zeroes(offset_bytes, length_bytes)
    }

    fn flush(&self) -> Result<()> {
        *self.flushes.lock() += 1;
        Ok(())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, _: usize) -> Result<Vec<Extent>> {
        check_range(self.size_bytes(), offset_bytes, length_bytes)?;
        Ok(vec![Extent { offset_bytes, length_bytes, kind: ExtentKind::Stored }])
    }
}

/// The files of the disk in one format, and the side file of each.
fn files(disk: &Arc<Memory>, format: Format) -> Vec<(ImageFile, Arc<Memory>)> {
    let identity = Identity { seed: [3; 32], created_unix_seconds: 1_800_000_000 };
    let shape = DiskShape::new(disk.size_bytes(), identity);
    let names = Names::in_tree(format, "vda").unwrap();
    let image = Presentation::new(&names, &shape, []).unwrap();
    let mut files = Vec::new();
    for file in image.into_files() {
        let mut side = None;
        let opened = ImageFile::live(file.layout, disk.clone(), |size_bytes, below| {
            let mut content = vec![0; size_bytes as usize];
            below.read_at(&mut content, 0)?;
            let memory = Memory::of(content);
            side = Some(memory.clone());
            Ok(memory)
        });
        files.push((opened.unwrap(), side.unwrap()));
    }
    files
}

fn whole(file: &ImageFile) -> Vec<u8> {
    let mut content = vec![0xee; file.size_bytes() as usize];
    file.read_at(&mut content, 0).unwrap();
    content
}

#[derive(Clone, Debug)]
enum Request {
    Write(u8),
    Zero,
    Trim,
}

/// A request near a border of the file: the border, the distance before it and the length.
fn any_request() -> impl Strategy<Value = (Request, usize, u64, u64)> {
    let what = prop_oneof![
        3 => (1..=255u8).prop_map(Request::Write),
        1 => Just(Request::Zero),
        1 => Just(Request::Trim)
    ];
    let before = prop_oneof![Just(0), 0..700u64, 0..200_000u64];
    let length = prop_oneof![1..700u64, 1..300_000u64];
    (what, 0..64usize, before, length)
}

fn writable() -> impl Strategy<Value = Format> {
    let all = Format::ALL.into_iter().filter(|f| f.access() == coldrise_formats::Access::Writable);
    prop::sample::select(all.collect::<Vec<_>>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Compares with a model of the file. Each byte goes where its segment says. A partly
    /// refused request changes nothing. What another format shows is the disk.
    #[test]
    fn every_write_ends_where_its_segment_says(
        format in writable(),
        size in prop_oneof![1..3_000_000u64, (1..6000u64).prop_map(|sectors| sectors * 512)],
        requests in prop::collection::vec(any_request(), 1..30),
    ) {
        let disk = Memory::of((0..size).map(|i| (i % 249) as u8).collect());
        for (file, _side) in files(&disk, format) {
            let mut model = whole(&file);
            let segments: Vec<_> = file.segments(0..file.size_bytes()).collect();
            for (request, border, before, length) in &requests {
                let border = segments[border % segments.len()].offset_bytes;
                let start = border.saturating_sub(*before);
                let end = (start + length).min(file.size_bytes());
                let range = start as usize..end as usize;
                let bytes = match request {
                    Request::Write(byte) => vec![*byte; range.len()],
                    Request::Zero | Request::Trim => vec![0; range.len()],
                };
                let done = match request {
                    Request::Write(_) => file.write_at(&bytes, start),
                    Request::Zero => file.write_zeroes(start, end - start),
                    Request::Trim => file.trim(start, end - start),
                };
                let is_trim = matches!(request, Request::Trim);
                let changes_a_table = file.segments(start..end).any(|segment| {
                    let place = segment.offset_bytes as usize..;
                    let place = place.start..place.start + segment.length_bytes as usize;
                    segment.writes == Writes::Refused
                        && model[place.clone()] != bytes[place.start - range.start..][..place.len()]
                });
                prop_assert_eq!(done.is_err(), changes_a_table && !is_trim);
                if done.is_err() {
                    prop_assert_eq!(done.unwrap_err().kind(), ErrorKind::ReadOnly);
                } else {
                    for segment in file.segments(start..end) {
                        let to_disk = segment.writes == Writes::ToDisk;
                        if to_disk || (segment.writes == Writes::Kept && !is_trim) {
                            let at = segment.offset_bytes as usize;
                            let part = &bytes[at - range.start..][..segment.length_bytes as usize];
                            model[at..][..part.len()].copy_from_slice(part);
                        }
                    }
                }
                prop_assert!(whole(&file) == model);
            }
            let is_disk = |segment: &&Segment| matches!(segment.source, Source::Disk { .. });
            if let Some(shown) = segments.iter().find(is_disk) {
                let at = shown.offset_bytes as usize;
                prop_assert!(model[at..][..size as usize] == disk.content.lock()[..]);
            }
        }
    }

    /// Clients rewrite a descriptor as a whole, longer or shorter, like any file.
    #[test]
    fn a_descriptor_behaves_as_a_file(
        steps in prop::collection::vec((0..3u8, 0..70_000u64, 1..5000usize, 1..=255u8), 1..40),
    ) {
        const LIMIT: u64 = 64 << 10;
        let disk = Memory::of(vec![1; 1 << 20]);
        let (file, side) = files(&disk, Format::Vmdk).swap_remove(0);
        let mut model = whole(&file);
        for (step, at, length, byte) in steps {
            let done = match step {
                0 => file.set_size_bytes(at),
                1 => file.write_at(&vec![byte; length], at % LIMIT),
                _ => file.write_at(&vec![byte; length], at % (model.len() as u64 + 1)),
            };
            let end = match step {
                0 => at,
                1 => at % LIMIT + length as u64,
                _ => at % (model.len() as u64 + 1) + length as u64,
            };
            if end > LIMIT {
                prop_assert_eq!(done.unwrap_err().kind(), ErrorKind::OutOfRange);
                continue;
            }
            done.unwrap();
            if step == 0 {
                model.resize(at as usize, 0);
            } else {
                let start = end as usize - length;
                model.resize(model.len().max(end as usize), 0);
                model[start..end as usize].fill(byte);
            }
            prop_assert_eq!(file.size_bytes(), model.len() as u64);
            prop_assert!(whole(&file) == model);
            // The next opening finds the same content.
            let length = length_of(&file.layout, &(side.clone() as Arc<dyn Disk>)).unwrap();
            prop_assert_eq!(length.get(), model.len() as u64);
        }
    }
}

#[test]
fn only_descriptors_change_their_size() {
    let disk = Memory::of(vec![1; 1 << 20]);
    for format in [Format::Raw, Format::Vhd, Format::Vhdx, Format::Qcow2] {
        let (file, _) = files(&disk, format).swap_remove(0);
        let size = file.size_bytes();
        file.set_size_bytes(size).unwrap();
        let refused = file.set_size_bytes(size - 1).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert_eq!(file.write_at(&[1, 2], size - 1).unwrap_err().kind(), ErrorKind::OutOfRange);
        assert_eq!(file.size_bytes(), size);
    }
}

#[test]
fn a_flush_reaches_the_disk_and_the_side_file() {
    let disk = Memory::of(vec![1; 1 << 20]);
    let (file, side) = files(&disk, Format::Vhd).swap_remove(0);
    file.flush().unwrap();
    assert_eq!((*disk.flushes.lock(), *side.flushes.lock()), (1, 1));
}

#[test]
fn images_over_read_only_files_are_read_only() {
    struct Point(Arc<Memory>);
    impl Disk for Point {
        fn size_bytes(&self) -> u64 {
            self.0.size_bytes()
        }
        fn read(&self, buffer: &mut [u8], offset_bytes: u64, _: &mut ReadContext) -> Result<()> {
            self.0.read_at(buffer, offset_bytes)
        }
        fn extents(&self, at: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
            self.0.extents(at, length, limit)
        }
    }
    let disk = Memory::of(vec![1; 1 << 20]);
    let identity = Identity { seed: [3; 32], created_unix_seconds: 0 };
    let names = Names::in_tree(Format::Vhd, "vda").unwrap();
    let shape = DiskShape::new(disk.size_bytes(), identity);
    let layout = || {
        let image = Presentation::new(&names, &shape, []).unwrap();
        image.into_files().swap_remove(0).layout
    };
    let of_point = Arc::new(Point(disk.clone()));
    let over_point = ImageFile::live(layout(), of_point, |_, below| Ok(below)).unwrap();
    let over_side = ImageFile::live(layout(), disk, |_, below| Ok(below)).unwrap();
    for file in [over_point, over_side] {
        assert!(file.is_read_only());
        assert_eq!(file.write_at(&[9], 0).unwrap_err().kind(), ErrorKind::ReadOnly);
        assert_eq!(file.set_size_bytes(0).unwrap_err().kind(), ErrorKind::ReadOnly);
    }
}
