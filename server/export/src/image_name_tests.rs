use super::*;
use coldrise_formats::Identity;

fn disks(names: &[&str]) -> Vec<DiskName> {
    names.iter().map(|name| DiskName::parse(name).unwrap()).collect()
}

/// The meaning of a file name among disks, as `disk`, `disk:format` or the kind of error.
fn found(file: &str, disks: &[DiskName]) -> String {
    let there: Vec<_> = disks.iter().collect();
    match find(file, &there) {
        Ok(Named { disk, image: None }) => disk.to_string(),
        Ok(Named { disk, image: Some(ImagePart { format, index: 0 }) }) => {
            format!("{disk}:{format:?}")
        }
        Ok(Named { disk, image: Some(_) }) => format!("{disk}:data"),
        Err(error) => format!("{:?}", error.kind()),
    }
}

#[test]
fn every_format_has_a_name() {
    let disks = disks(&["vda", "vdb"]);
    for format in Format::ALL {
        assert_eq!(found(&format!("vda{}", format.suffix()), &disks), format!("vda:{format:?}"));
    }
    assert_eq!(found("vda", &disks), "vda");
    assert_eq!(found("vda-flat.vmdk", &disks), "vda:data");
    for file in ["vdc", "vda.iso", "vda.", "vdavhdx", "vdc.vhdx", "vda-flat", "vda.vhdx.vhdx"] {
        assert_eq!(found(file, &disks), "NotFound", "{file}");
    }
}

#[test]
fn a_disk_is_never_hidden_by_an_image() {
    let disks = disks(&["vda", "vda.vhdx", "vda.raw", "vda.dynamic", "vda-flat"]);
    assert_eq!(found("vda.vhdx", &disks), "vda.vhdx");
    assert_eq!(found("vda.raw", &disks), "vda.raw");
    assert_eq!(found("vda.raw.raw", &disks), "vda.raw:Raw");
    // The longest valid name of a disk.
    assert_eq!(found("vda.dynamic.vhd", &disks), "vda.dynamic:Vhd");
    assert_eq!(found("vda.vhd", &disks), "vda:Vhd");
    assert_eq!(found("vda-flat.vmdk", &disks), "vda-flat:Vmdk");
    assert_eq!(found("vda-flat-flat.vmdk", &disks), "vda-flat:data");
    // The names of their data files already mean something else.
    for file in ["vda.vmdk", "vda.hosted.vmdk", "vda.external.qcow2"] {
        assert_eq!(found(file, &disks), "Unsupported", "{file}");
    }
    // The order of the disks changes nothing.
    let reversed: Vec<_> = disks.iter().rev().cloned().collect();
    for file in ["vda.vhdx", "vda.dynamic.vhd", "vda-flat.vmdk", "vda.vmdk"] {
        assert_eq!(found(file, &disks), found(file, &reversed));
    }
}

#[test]
fn listed_image_names_are_found() {
    let disks = disks(&["vda", "vda.raw", "vda.dynamic"]);
    let there: Vec<_> = disks.iter().collect();
    let identity = Identity { seed: [0; 32], created_unix_seconds: 0 };
    let small = DiskShape::new(1 << 20, identity);
    let files = images(ImageOwner::Point, &disks[0], &small, &there);
    assert_eq!(
        files,
        [
            "vda-flat.vmdk",
            "vda.hosted.vmdk",
            "vda.qcow2",
            "vda.sparse.qcow2",
            "vda.sparse.vmdk",
            "vda.vhd",
            "vda.vhdx",
            "vda.vmdk"
        ]
    );
    for file in files {
        assert!(found(&file, &disks).starts_with("vda:"));
    }
    let large = DiskShape::new(63 << 40, identity);
    let files = images(ImageOwner::Point, &disks[2], &large, &there);
    assert!(files.contains(&"vda.dynamic-flat.vmdk".to_owned()), "of the hosted VMDK");
    assert!(!files.iter().any(|file| file.ends_with(".vhd") || file == "vda.dynamic.vmdk"));
}

#[test]
fn a_disk_of_the_longest_name_has_images_too() {
    let long = "a".repeat(MAX_NAME_BYTES);
    for file in ["vda", "vda.vhdx", "vda-flat.vmdk", &format!("{long}.external.qcow2")] {
        check(file).unwrap();
    }
    let upper = format!("{}.vhdx", "A".repeat(MAX_NAME_BYTES));
    for file in ["", ".", "..", ".vhdx", "VDA.vhdx", "v\u{e4}.vhdx", &upper, &format!("{long}a")] {
        assert_eq!(check(file).unwrap_err().kind(), ErrorKind::InvalidInput, "{file}");
    }
    let disks = disks(&[&long]);
    assert_eq!(found(&format!("{long}-flat.vmdk"), &disks), format!("{long}:data"));
}
