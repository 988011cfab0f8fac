//! Whole machines: an OVA that is written is read again, by others and as a source.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Disk, ErrorKind, NoProgress, Result};
use coldrise_ingest::source::{SourceOptions, open_source};
use coldrise_ingest::{
    Appliance, Ova, OvaDisk, RestoreOptions, RestoreTarget, open_appliance, restore_ova,
};
use coldrise_inventory::{Hardware, VirtualSystem};

use crate::common::memory::{MemoryDisk, names};
use crate::common::{MIB, assert_same, folder, noise, read_all, run, sparse_disk, text};

fn written(path: &Path, disks: &[Vec<u8>], threads: usize) -> Result<u64> {
    let disks: Vec<_> = disks.iter().map(|content| MemoryDisk::new(content.clone())).collect();
    let disks = disks.iter().zip(1..).map(|(disk, seed)| {
        let disk: &dyn Disk = disk;
        OvaDisk { name: "vda", disk, seed: [seed; 32] }
    });
    let system = VirtualSystem::of(None).unwrap();
    let ova =
        Ova { name: "acme", system: &system, disks: disks.collect(), modified_unix_seconds: 1 };
    let options = RestoreOptions { threads, ..RestoreOptions::default() };
    let target = RestoreTarget::Path(path.to_path_buf());
    restore_ova(&ova, &target, &options, &NoProgress, &AtomicBool::new(false))
}

fn opened(path: &Path) -> Result<Appliance> {
    open_appliance(path, &NoProgress, &AtomicBool::new(false))
}

#[test]
fn a_written_ova_is_read_in_place() {
    let folder = folder();
    let disks = [sparse_disk(7, 9 * MIB + 512), noise(8, 3 * MIB), vec![0; 5 * MIB]];
    let path = folder.path().join("out.ova");
    written(&path, &disks, 1).unwrap();
    let appliance = opened(&path).unwrap();
    assert_eq!(appliance.remarks, Vec::<String>::new());
    assert_eq!(Hardware::of(Some(&appliance.configuration)).unwrap().cpus, 2);
    let cancel = AtomicBool::new(false);
    for (spec, content) in appliance.disks.iter().zip(&disks) {
        let source = open_source(spec, &SourceOptions::default(), &cancel).unwrap();
        let (read, stored_bytes) = read_all(source.as_ref());
        assert_same(&read, content);
        assert!(stored_bytes <= 4 * MIB as u64, "holes are not read");
    }
    let found: Vec<_> = appliance.disks.iter().map(|spec| spec.disk.as_str()).collect();
    assert_eq!(found, ["vda", "vdb", "vdc"]);
    // Others read it, too.
    run("tar", &["-C", text(folder.path()), "-xf", text(&path)]);
    let check = format!(
        "cd {} && sed -E 's/SHA256.(.*).= (.*)/\\2  \\1/' acme.mf | sha256sum -c",
        text(folder.path())
    );
    assert_eq!(run("sh", &["-c", &check]).matches(": OK\n").count(), 4);
    // The same machine gives the same bytes, however many threads compress.
    let again = folder.path().join("again.ova");
    written(&again, &disks, 8).unwrap();
    assert!(std::fs::read(&path).unwrap() == std::fs::read(&again).unwrap());
    let ErrorKind::AlreadyExists = written(&path, &disks, 0).unwrap_err().kind() else {
        panic!("it was replaced")
    };
}

#[test]
fn a_changed_byte_is_found_before_the_backup() {
    let folder = folder();
    let path = folder.path().join("out.ova");
    written(&path, &[noise(9, MIB)], 0).unwrap();
    let mut content = std::fs::read(&path).unwrap();
    let last = content.len() - 4096;
    content[last] ^= 1;
    std::fs::write(&path, &content).unwrap();
    assert!(opened(&path).unwrap_err().to_string().contains("its digest differs"));
    std::fs::write(&path, &content[..last]).unwrap();
    assert!(opened(&path).unwrap_err().to_string().contains("truncated"));
    assert_eq!(names(folder.path()), ["out.ova"]);
}
