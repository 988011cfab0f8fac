use super::*;

fn disks(names: &[&str]) -> Vec<DiskName> {
    names.iter().map(|name| DiskName::parse(name).unwrap()).collect()
}

fn rewritten(stored: &str, names: &[&str]) -> String {
    let disks = disks(names);
    with_disks(stored, &disks.iter().collect::<Vec<_>>())
}

#[test]
fn a_stored_file_keeps_everything_but_the_names_of_its_disks() {
    let stored = r#".encoding = "UTF-8"
displayName = "Web 01"
scsi0:1.fileName = "web01_1-000002.vmdk"
scsi0:1.present = "TRUE"
SCSI0:0.FileName="web01.vmdk"
scsi0:0.present = "TRUE"
ide1:0.fileName = "/vmfs/volumes/iso/install.iso"
ide1:0.deviceType = "cdrom-image"
ethernet0.networkName = "a = b"
# web01.vmdk
"#;
    let expected = stored
        .replace("web01_1-000002.vmdk", "data.vmdk")
        .replace(r#"SCSI0:0.FileName="web01.vmdk""#, r#"scsi0:0.fileName = "system.vmdk""#);
    assert_eq!(rewritten(stored, &["system", "data"]), expected);
}

#[test]
fn disks_are_counted_by_their_places() {
    let line = |place: &str| format!("{place}.fileName = \"{place}.vmdk\"\n");
    let stored: String = ["scsi1:0", "scsi0:10", "scsi0:2", "sata0:0"].map(line).concat();
    let found = rewritten(&stored, &["a", "b", "c", "d"]);
    for (place, disk) in [("sata0:0", "a"), ("scsi0:2", "b"), ("scsi0:10", "c"), ("scsi1:0", "d")] {
        assert!(found.contains(&format!("{place}.fileName = \"{disk}.vmdk\"\n")), "{found}");
    }
}

#[test]
fn a_disk_too_many_is_not_present_and_one_more_gets_a_place() {
    let stored = "scsi0:0.present = \"TRUE\"\nscsi0:0.fileName = \"a.vmdk\"\n\
                  scsi0:1.present = \"TRUE\"\nscsi0:1.fileName = \"b.vmdk\"\n";
    let fewer = rewritten(stored, &["vda"]);
    assert!(fewer.contains("scsi0:0.fileName = \"vda.vmdk\"\n"), "{fewer}");
    assert!(fewer.contains("scsi0:1.present = \"FALSE\"\n"), "{fewer}");
    let more = rewritten(stored, &["vda", "vdb", "vdc", "vdd"]);
    let added = more.lines().skip(4).collect::<Vec<_>>();
    assert_eq!(
        added,
        [
            "sata0.present = \"TRUE\"",
            "sata0:0.present = \"TRUE\"",
            "sata0:0.deviceType = \"sata-hardDisk\"",
            "sata0:0.fileName = \"vdc.vmdk\"",
            "sata0:1.present = \"TRUE\"",
            "sata0:1.deviceType = \"sata-hardDisk\"",
            "sata0:1.fileName = \"vdd.vmdk\"",
        ]
    );
}

#[test]
fn a_vmx_is_generated_from_hardware_and_disks() {
    let disks = disks(&["vda", "vdb"]);
    let disks: Vec<_> = disks.iter().collect();
    let hardware = Hardware {
        cpus: 3,
        memory_mib: 1022,
        firmware: Firmware::Uefi,
        disk_bus: DiskBus::Scsi,
        network: Network::User,
    };
    let text = made("trial", &hardware, &disks);
    for line in [
        "displayName = \"trial\"",
        "firmware = \"efi\"",
        "memSize = \"1024\"",
        "numvcpus = \"3\"",
        "scsi0.present = \"TRUE\"",
        "scsi0.virtualDev = \"lsilogic\"",
        "scsi0:0.fileName = \"vda.vmdk\"",
        "scsi0:1.fileName = \"vdb.vmdk\"",
        "ethernet0.present = \"TRUE\"",
    ] {
        assert!(text.lines().any(|there| there == line), "{line} in\n{text}");
    }
    let plain = made("trial", &Hardware::default(), &disks);
    assert!(plain.contains("sata0:1.fileName = \"vdb.vmdk\"\n"), "{plain}");
    assert!(!plain.contains("ethernet0"), "no network unasked");
    // Every name appears once, and every line is a name and a value.
    for text in [&text, &plain] {
        let mut names: Vec<_> = text.lines().map(|line| parse_line(line).unwrap().0).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}

#[test]
fn many_disks_are_spread_over_several_controllers() {
    let names: Vec<_> = (0..20).map(|number| format!("d{number}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let disks = disks(&names);
    let hardware = Hardware { disk_bus: DiskBus::Scsi, ..Hardware::default() };
    let text = made("trial", &hardware, &disks.iter().collect::<Vec<_>>());
    assert!(text.contains("scsi0:8.fileName = \"d7.vmdk\"") && !text.contains("scsi0:7."));
    assert!(text.contains("scsi1.present = \"TRUE\"\nscsi1.virtualDev"), "{text}");
    assert!(text.contains("scsi1:4.fileName = \"d19.vmdk\""), "{text}");
}
