use std::process::Command;

use coldrise_block::{Extent, ReadContext, check_range};

use super::*;
use crate::variables::{have_keys, new_variables};

const START: usize = 1 << 20;

struct Memory(Vec<u8>);

impl Disk for Memory {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, _: &mut ReadContext) -> Result<()> {
        check_range(self.size_bytes(), offset_bytes, buffer.len() as u64)?;
        let at = usize::try_from(offset_bytes).unwrap();
        buffer.copy_from_slice(&self.0[at..at + buffer.len()]);
        Ok(())
    }

    fn extents(&self, _: u64, _: u64, _: usize) -> Result<Vec<Extent>> {
        unreachable!()
    }
}

fn run(program: &str, words: &[&str]) {
    let done = Command::new(program).args(words).output().unwrap();
    assert!(done.status.success(), "{program} {words:?}: {done:?}");
}

/// A file system of mkfs.vfat with these files.
fn file_system(size_mib: usize, options: &[&str], paths: &[&str]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let (image, file) = (folder.path().join("fat"), folder.path().join("file"));
    let (image, file) = (image.to_str().unwrap(), file.to_str().unwrap());
    std::fs::File::create(image).unwrap().set_len((size_mib << 20) as u64).unwrap();
    std::fs::write(file, "MZ").unwrap();
    run("mkfs.vfat", &[options, &[image]].concat());
    for path in paths {
        let mut folder = String::from("::");
        for part in path.split('/').take(path.matches('/').count()) {
            folder = format!("{folder}/{part}");
            let _ = Command::new("mmd").args(["-i", image, &folder]).output().unwrap();
        }
        run("mcopy", &["-i", image, file, &format!("::/{path}")]);
    }
    std::fs::read(image).unwrap()
}

fn gpt_disk(file_system: &[u8], block_bytes: usize) -> Vec<u8> {
    let mut disk = vec![0; START];
    disk[block_bytes..block_bytes + 8].copy_from_slice(b"EFI PART");
    disk[block_bytes + 72] = 2;
    disk[block_bytes + 80] = 128;
    disk[block_bytes + 84] = 128;
    // The second entry, so that its number is not the first.
    let entry = &mut disk[2 * block_bytes + 128..][..128];
    entry[..16].copy_from_slice(&[
        0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b,
    ]);
    entry[16..32].copy_from_slice(b"partition's guid");
    let first = (START / block_bytes) as u64;
    let last = first + (file_system.len() / block_bytes) as u64 - 1;
    entry[32..40].copy_from_slice(&first.to_le_bytes());
    entry[40..48].copy_from_slice(&last.to_le_bytes());
    disk.extend_from_slice(file_system);
    disk
}

fn found(disk: Vec<u8>) -> (Vec<Loader>, bool) {
    let mut ranked = Vec::new();
    let has_fallback =
        of_disk(&Memory(disk), &DiskName::parse("vda").unwrap(), &mut ranked).unwrap();
    (best(ranked, has_fallback), has_fallback)
}

fn paths(disk: Vec<u8>) -> Vec<String> {
    found(disk).0.into_iter().map(|loader| loader.path).collect()
}

#[test]
fn loaders_are_found_on_every_kind_of_fat_and_table() {
    let long = "EFI/A vendor with a long name/grubx64.efi";
    for (size_mib, options, block_bytes) in
        [(4, &["-F", "12"][..], 512), (32, &["-F", "16"], 512), (64, &["-F", "32"], 4096)]
    {
        let file_system =
            file_system(size_mib, options, &[long, "EFI/acme/SHIMX64.EFI", "efi.txt"]);
        let (loaders, has_fallback) = found(gpt_disk(&file_system, block_bytes));
        let paths: Vec<&str> = loaders.iter().map(|loader| loader.path.as_str()).collect();
        assert_eq!(paths[0].to_ascii_lowercase(), r"\efi\acme\shimx64.efi");
        assert_eq!(paths[1], r"\EFI\A vendor with a long name\grubx64.efi");
        assert!(paths.len() == 2 && !has_fallback);
        assert_eq!(loaders[0].partition.number, 2);
        assert_eq!(loaders[0].partition.start_block, (START / block_bytes) as u64);
    }
    let mut mbr = vec![0; START];
    mbr[440..444].copy_from_slice(&[1, 2, 3, 4]);
    mbr[510..512].copy_from_slice(&[0x55, 0xaa]);
    mbr[446 + 16 + 4] = 0xef;
    mbr[446 + 16 + 8..][..4].copy_from_slice(&((START / 512) as u32).to_le_bytes());
    mbr.extend_from_slice(&file_system(4, &[], &["EFI/acme/grubx64.efi"]));
    assert_eq!(paths(mbr), [r"\EFI\acme\grubx64.efi"]);
}

#[test]
fn the_best_loader_is_first_and_tools_are_skipped() {
    let files = [
        "EFI/Microsoft/Boot/bootmgfw.efi",
        "EFI/Microsoft/Boot/memtest.efi",
        "EFI/debian/grubx64.efi",
        "EFI/debian/shimx64.efi",
        "EFI/debian/mmx64.efi",
        "EFI/debian/fbx64.efi",
        "EFI/acme/start.efi",
        "EFI/BOOT/BOOTX64.EFI",
    ];
    let disk = |files: &[&str]| gpt_disk(&file_system(4, &[], files), 512);
    let usual = [
        r"\EFI\Microsoft\Boot\bootmgfw.efi",
        r"\EFI\debian\shimx64.efi",
        r"\EFI\debian\grubx64.efi",
    ];
    assert_eq!(paths(disk(&files)), usual);
    // Without the fallback, a file of an unknown name may be the loader.
    assert_eq!(paths(disk(&files[..7]))[3..], [r"\EFI\acme\start.efi"]);
    assert_eq!(found(disk(&["EFI/BOOT/BOOTX64.EFI"])), (vec![], true));
    assert_eq!(found(vec![0; START]), (vec![], false));
}

#[test]
fn a_damaged_disk_ends_the_search() {
    let whole = gpt_disk(&file_system(4, &["-F", "12"], &["EFI/acme/grubx64.efi"]), 512);
    let mut state = 7_u64;
    let mut random = |below: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for _ in 0..3000 {
        let mut disk = whole.clone();
        // Tables and folders are in the first blocks of the disk and of the file system.
        for _ in 0..8 {
            let at = [random(2048), START + random(512), START + 512 + random(64 << 10)][random(3)];
            disk[at] = [0, 1, 0x40, 0xff, random(256) as u8][random(5)];
        }
        disk.truncate(disk.len() - random(2) * random(4 << 20));
        let mut ranked = Vec::new();
        let _ = of_disk(&Memory(disk), &DiskName::parse("vda").unwrap(), &mut ranked);
        assert!(ranked.len() <= 4 * MAX_FOLDERS * MAX_PROGRAMS);
    }
}

/// Empty variables as OVMF has them, with these variables: name, state and data.
fn store(variables: &[(&str, u8, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0xff; 8192];
    bytes[40..44].copy_from_slice(b"_FVH");
    bytes[48..50].copy_from_slice(&72_u16.to_le_bytes());
    bytes[72..88].copy_from_slice(&[
        0x78, 0x2c, 0xf3, 0xaa, 0x7b, 0x94, 0x9a, 0x43, 0xa1, 0x80, 0x2e, 0x14, 0x4e, 0xc3, 0x77,
        0x92,
    ]);
    bytes[88..92].copy_from_slice(&2000_u32.to_le_bytes());
    bytes[92..94].copy_from_slice(&[0x5a, 0xfe]);
    let mut at: usize = 100;
    for (name, state, data) in variables {
        let name: Vec<u8> = name.encode_utf16().chain([0]).flat_map(u16::to_le_bytes).collect();
        let mut stored = vec![0xaa, 0x55, *state, 0, 7, 0, 0, 0];
        stored.resize(36, 0);
        stored.extend_from_slice(&(name.len() as u32).to_le_bytes());
        stored.extend_from_slice(&(data.len() as u32).to_le_bytes());
        stored.extend_from_slice(&[
            0x61, 0xdf, 0xe4, 0x8b, 0xca, 0x93, 0xd2, 0x11, 0xaa, 0x0d, 0, 0xe0, 0x98, 0x03, 0x2b,
            0x8c,
        ]);
        stored.extend_from_slice(&[&name[..], data].concat());
        bytes[at..at + stored.len()].copy_from_slice(&stored);
        at = (at + stored.len()).next_multiple_of(4);
    }
    bytes
}

/// The variables that count, with their data.
fn read(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let (mut at, mut found) = (100, Vec::new());
    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    while bytes[at..at + 2] == [0xaa, 0x55] {
        let (name, data) = (at + 60, at + 60 + number(at + 36));
        let units =
            bytes[name..data - 2].chunks(2).map(|unit| u16::from_le_bytes([unit[0], unit[1]]));
        if bytes[at + 2] == 0x3f {
            let name = char::decode_utf16(units).map(|c| c.unwrap()).collect();
            found.push((name, bytes[data..data + number(at + 40)].to_vec()));
        }
        at = (data + number(at + 40)).next_multiple_of(4);
    }
    found
}

#[test]
fn boot_entries_stand_before_those_of_the_firmware() {
    let (loaders, _) = found(gpt_disk(&file_system(4, &[], &["EFI/acme/grubx64.efi"]), 512));
    let variables = [
        ("Boot0000", 0x3f, &b"old"[..]),
        ("BootOrder", 0x3c, &[9, 9]),
        ("BootOrder", 0x3f, &[0, 0]),
    ];
    let made = read(&new_variables(&store(&variables), &loaders).unwrap());
    let names: Vec<&str> = made.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["Boot0000", "Boot0001", "BootOrder"]);
    assert_eq!(made[2].1, [1, 0, 0, 0]);
    let entry = &made[1].1;
    let place = entry.windows(4).position(|bytes| bytes == [4, 1, 42, 0]).unwrap();
    assert_eq!(entry[..6], [1, 0, 0, 0, (entry.len() - place) as u8, 0]);
    assert_eq!(entry[place + 4..place + 8], [2, 0, 0, 0]);
    assert_eq!(&entry[place + 24..place + 42], b"partition's guid\x02\x02");
    assert!(entry.ends_with(&[b'i', 0, 0, 0, 0x7f, 0xff, 4, 0]));
    assert!(have_keys(&store(&[("PK", 0x3f, &[1])])) && !have_keys(&store(&[("PK", 0x3d, &[1])])));
    // Without loaders nothing changes; without space, or in another form, nothing is written.
    assert_eq!(new_variables(&store(&variables), &[]).unwrap(), store(&variables));
    let full = [("Full", 0x3f, &[0; 1700][..])];
    assert!(new_variables(&store(&full), &loaders).is_err());
    assert!(
        new_variables(&[0xff; 8192], &loaders).is_err() && new_variables(&[], &loaders).is_err()
    );
}
