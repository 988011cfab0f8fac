//! For arbitrary bytes, the checks of an image end with an answer or an error, and never
//! report more of a disk than there is.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use coldrise_host::Host;
use proptest::prelude::*;

use super::qcow2::check_qcow2;
use super::raw::file_length;
use super::raw_signs::{refuse_fixed_vhd, remark_on_start};
use super::vhd::check_vhd;
use super::vhdx::VhdxMap;
use super::vmdk::vmdk_extents;

const MIB: u64 = 1 << 20;
/// The offsets of the tables in [`vhdx`].
const METADATA: u64 = 2 * MIB;
const BAT: u64 = 3 * MIB;

/// A file of these parts.
fn file(parts: &[(u64, Vec<u8>)]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let file = std::fs::File::create(&path).unwrap();
    for (offset, part) in parts {
        file.write_all_at(part, *offset).unwrap();
    }
    (folder, path)
}

/// The part with its checksum at byte 4.
fn summed(mut part: Vec<u8>, length: usize) -> Vec<u8> {
    part.resize(length, 0);
    part[4..8].fill(0);
    let checksum = crc32c::crc32c(&part);
    part[4..8].copy_from_slice(&checksum.to_le_bytes());
    part
}

fn guid(text: u128) -> Vec<u8> {
    let bytes = text.to_be_bytes();
    let mut out = bytes;
    out[..4].reverse();
    out[4..6].reverse();
    out[6..8].reverse();
    out.to_vec()
}

/// A VHDX with these numbers: the sizes of disk, block and sector, the offset and length
/// of the BAT, the counts of both tables.
fn vhdx(sizes: (u64, u32, u32), bat: (u64, u32), counts: (u32, u16)) -> Vec<(u64, Vec<u8>)> {
    let mut head = b"head\0\0\0\0".to_vec();
    head.resize(66, 0);
    head.extend(1u16.to_le_bytes());
    let head = summed(head, 4096);
    let mut regions = b"regi\0\0\0\0".to_vec();
    regions.extend(counts.0.to_le_bytes());
    regions.extend([0; 4]);
    let named = [
        (0x2DC27766_F623_4200_9D64_115E9BFD4A08, bat.0, bat.1),
        (0x8B7CA206_4790_4B9A_B8FE_575F050F886E, METADATA, 1 << 20),
    ];
    for (name, offset, length) in named {
        regions.extend(guid(name));
        regions.extend(offset.to_le_bytes());
        regions.extend(u32::to_le_bytes(length));
        regions.extend(1u32.to_le_bytes());
    }
    let mut metadata = b"metadata\0\0".to_vec();
    metadata.extend(counts.1.to_le_bytes());
    metadata.resize(32, 0);
    let items = [
        (0xCAA16737_FA36_4D43_B3B6_33F0AA44E76B_u128, u64::from(sizes.1)),
        (0x2FA54224_CD1B_4876_B211_5DBED83BF4B8, sizes.0),
        (0x8141BF1D_A96F_4709_BA47_F233A8FAAB5F, u64::from(sizes.2)),
    ];
    for (index, (name, _)) in items.iter().enumerate() {
        metadata.extend(guid(*name));
        metadata.extend((65536 + 8 * index as u32).to_le_bytes());
        metadata.extend([8, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
    }
    metadata.resize(65536, 0);
    metadata.extend(items.iter().flat_map(|(_, value)| value.to_le_bytes()));
    vec![
        (0, b"vhdxfile".to_vec()),
        (64 << 10, head),
        (128 << 10, vec![0; 4096]),
        (192 << 10, summed(regions, 65536)),
        (METADATA, metadata),
    ]
}

proptest! {
    #[test]
    fn arbitrary_numbers_in_a_vhdx_are_handled(
        size in prop_oneof![any::<u64>(), 0..1u64 << 47],
        block_shift in 18u32..32,
        block_off in 0u32..2,
        sector in prop_oneof![Just(512u32), Just(4096), Just(0), any::<u32>()],
        bat in prop_oneof![Just(BAT), any::<u64>(), Just(u64::MAX - 7)],
        bat_length in prop_oneof![Just(u32::MAX), any::<u32>(), 0..4096u32],
        regions in prop_oneof![Just(2u32), any::<u32>()],
        items in prop_oneof![Just(3u16), any::<u16>()],
        entries in prop::collection::vec(any::<u64>(), 0..64),
        offset in any::<u64>(),
        length in any::<u64>(),
    ) {
        let block = (1u32 << block_shift) - block_off;
        let mut parts = vhdx((size, block, sector), (bat, bat_length), (regions, items));
        parts.push((BAT, entries.iter().flat_map(|entry| entry.to_le_bytes()).collect()));
        let (_folder, path) = file(&parts);
        if let Ok(map) = VhdxMap::open(&path) {
            prop_assert_eq!(map.size_bytes(), size);
            prop_assert!(size <= coldrise_block::MAX_DISK_SIZE_BYTES);
            for offset in [0, offset % (size + 1)] {
                let Ok(extents) = map.extents(offset, length) else { continue };
                let mut at = offset;
                for extent in &extents {
                    prop_assert_eq!(extent.offset_bytes, at);
                    prop_assert!(extent.length_bytes > 0);
                    at += extent.length_bytes;
                }
                prop_assert!(at <= size.min(offset.saturating_add(length)));
                prop_assert!(at > offset || length == 0 || offset == size);
            }
        }
    }

    #[test]
    fn arbitrary_image_headers_are_handled(
        start in prop_oneof![
            Just(b"QFI\xfb".to_vec()), Just(b"KDMV".to_vec()), Just(b"COWD".to_vec()),
            Just(b"conectix".to_vec()), Just(b"vhdxfile".to_vec()), Just(Vec::new()),
            Just(b"# Disk DescriptorFile\nRW ".to_vec()),
        ],
        bytes in prop::collection::vec(any::<u8>(), 0..2048),
        end in prop_oneof![Just(Vec::new()), Just(b"conectix".to_vec())],
        last in prop::collection::vec(any::<u8>(), 504),
    ) {
        let mut content = [start, bytes].concat();
        if !end.is_empty() {
            content.extend(end);
            content.extend(last);
        }
        let (_folder, path) = file(&[(0, content)]);
        // Each may refuse it; none may panic.
        let _ = check_qcow2(&path, &Host::here().look_at_file(&path).unwrap());
        let _ = check_vhd(&path);
        let _ = vmdk_extents(&path);
        prop_assert!(VhdxMap::open(&path).is_err());
        let opened = std::fs::File::open(&path).unwrap();
        let length = file_length(&opened).unwrap();
        let _ = refuse_fixed_vhd(&opened, &path, length);
        remark_on_start(&opened, &path).unwrap();
    }

    #[test]
    fn vmdk_extents_stay_in_the_folder_of_the_image(
        lines in prop::collection::vec(
            ("(RW|RDONLY|NOACCESS|#|)", "[0-9]{0,24}", "(FLAT|VMFS|SPARSE|ZERO|)",
             "[a-z./\"\\\\ é\u{1}-]{0,12}", "[0-9]{0,24}"), 0..8),
    ) {
        let text: Vec<String> = lines
            .iter()
            .map(|(access, sectors, kind, name, offset)| {
                format!("{access} {sectors} {kind} \"{name}\" {offset}\n")
            })
            .collect();
        let (folder, path) = file(&[(0, text.concat().into_bytes())]);
        if let Ok(extents) = vmdk_extents(&path) {
            // Only files of the image's own folder.
            for extent in extents {
                prop_assert_eq!(extent.parent(), Some(folder.path()));
            }
        }
    }
}

#[test]
fn generated_vhdx_headers_are_accepted() {
    let mut parts = vhdx((64 * MIB, 1 << 20, 512), (BAT, 1 << 20), (2, 3));
    parts.push((
        BAT,
        [6 | 4 << 20, 0, 6 | 5 << 20].iter().flat_map(|e: &u64| e.to_le_bytes()).collect(),
    ));
    parts.push((4 * MIB - 1, vec![0]));
    let (_folder, path) = file(&parts);
    let map = VhdxMap::open(&path).unwrap();
    let stored: Vec<u64> = map
        .extents(0, 64 * MIB)
        .unwrap()
        .iter()
        .filter(|extent| extent.kind == coldrise_block::ExtentKind::Stored)
        .map(|extent| extent.offset_bytes / MIB)
        .collect();
    assert_eq!(stored, [0, 2]);
}
