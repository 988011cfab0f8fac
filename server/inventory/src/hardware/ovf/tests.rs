use coldrise_store::{COLDRISE_JSON, Configuration, LIBVIRT_XML, OVF, VMX};

use super::*;
use crate::hardware::Firmware;

fn configuration(format: &str, text: &str) -> Configuration {
    Configuration { format: format.to_owned(), text: text.to_owned() }
}

/// A descriptor with these references, disks and hardware.
fn envelope(files: &str, disks: &str, hardware: &str) -> String {
    format!(
        "<ovf:Envelope xmlns:ovf='http://schemas.dmtf.org/ovf/envelope/1' xmlns:rasd='r' xmlns:vmw='v' \
         xmlns:vbox='b'><ovf:References>{files}</ovf:References><ovf:DiskSection>{disks}</ovf:DiskSection>\
         <ovf:VirtualSystem ovf:id='acme'>{hardware}</ovf:VirtualSystem></ovf:Envelope>"
    )
}

const FILES: &str = "<ovf:File ovf:id='f1' ovf:href='a.vmdk' ovf:size='7'/><ovf:File ovf:id='f2' ovf:href='b.vmdk'/>";
const DISKS: &str = "<ovf:Disk ovf:diskId='d1' ovf:fileRef='f1' ovf:format='x/vmdk.html#streamOptimized'/>\
                     <ovf:Disk ovf:diskId='d2' ovf:fileRef='f2' ovf:format='x/VMDK.html#sparse'/>";

fn hardware_of(items: &str) -> String {
    format!("<ovf:VirtualHardwareSection>{items}</ovf:VirtualHardwareSection>")
}

fn item(fields: &[(&str, &str)]) -> String {
    let fields: String =
        fields.iter().map(|(name, value)| format!("<rasd:{name}>{value}</rasd:{name}>")).collect();
    format!("<ovf:Item>{fields}</ovf:Item>")
}

fn disk_item(id: &str) -> String {
    item(&[("ResourceType", "17"), ("HostResource", id), ("Parent", "3")])
}

#[test]
fn disks_come_in_the_order_of_the_machine() {
    let items = disk_item("ovf:/disk/d2") + &disk_item("/disk/d1");
    let read = Envelope::parse(&envelope(FILES, DISKS, &hardware_of(&items))).unwrap();
    let found: Vec<_> = read.disks.iter().map(|d| (d.href.as_str(), d.length_bytes)).collect();
    assert_eq!(found, [("b.vmdk", None), ("a.vmdk", Some(7))]);
    let read =
        Envelope::parse(&envelope(FILES, DISKS, &hardware_of(&disk_item("/disk/d2")))).unwrap();
    assert_eq!((read.disks.len(), read.unattached), (1, vec!["d1".to_owned()]));
}

#[test]
fn unsupported_ovf_descriptors_are_refused() {
    let both = hardware_of(&(disk_item("/disk/d1") + &disk_item("/disk/d2")));
    let refused = |text: &str| Envelope::parse(text).unwrap_err().full_message();
    for href in ["../a.vmdk", "/etc/a.vmdk", "http://host/a.vmdk", "x\\a.vmdk", ".."] {
        let files = FILES.replace("a.vmdk", href);
        assert!(refused(&envelope(&files, DISKS, &both)).contains("only files beside"), "{href}");
    }
    for (from, to, words) in [
        ("ovf:id='f2'", "ovf:id='f1'", "two files have the id 'f1'"),
        ("ovf:diskId='d2'", "ovf:diskId='d1'", "two disks have the id 'd1'"),
        ("fileRef='f2'", "fileRef='f9'", "not among its references"),
        ("ovf:fileRef='f2'", "", "has no file"),
        ("ovf:fileRef='f2'", "ovf:fileRef='f1'", "two disks have the file 'a.vmdk'"),
        ("ovf:fileRef='f2'", "ovf:fileRef='f2' ovf:parentRef='d1'", "snapshot"),
        ("x/VMDK.html#sparse", "x/vhd", "only VMDK"),
        ("ovf:id='f2'", "ovf:id='f2' ovf:compression='gzip'", "compressed as a whole (gzip)"),
        ("ovf:id='f2'", "ovf:id='f2' ovf:chunkSize='9'", "without chunks"),
        ("ovf:size='7'", "ovf:size='seven'", "not a number"),
        ("/disk/d2", "/disk/d1", "twice"),
        ("/disk/d2", "/disk/d3", "does not describe"),
        ("</ovf:VirtualSystem>", "</ovf:VirtualSystem><ovf:VirtualSystem/>", "2 machines"),
        ("<ovf:Envelope", "<!DOCTYPE x [<!ENTITY a 'aa'>]><ovf:Envelope", "XML"),
        ("ovf:Envelope", "ovf:Other", "<Envelope>"),
    ] {
        let text = envelope(FILES, DISKS, &both).replace(from, to);
        assert!(refused(&text).contains(words), "{to}: {}", refused(&text));
    }
    assert!(refused(&envelope(FILES, DISKS, &hardware_of(""))).contains("no disk"));
}

#[test]
fn the_hardware_of_vmware_and_virtualbox() {
    let controller = |resource, model| {
        item(&[("InstanceID", "3"), ("ResourceType", resource), ("ResourceSubType", model)])
    };
    let plain = item(&[("ResourceType", "3"), ("VirtualQuantity", "4")])
        + &item(&[
            ("ResourceType", "4"),
            ("AllocationUnits", "byte * 2^20"),
            ("VirtualQuantity", "3072"),
        ])
        + &item(&[("ResourceType", "10"), ("Connection", "LAN"), ("ResourceSubType", "VmxNet3")])
        + &disk_item("/disk/d1");
    let read = |items: &str, rest: &str| {
        let text = envelope(FILES, DISKS, &(hardware_of(items) + rest));
        VirtualSystem::of(Some(&configuration(OVF, &text))).unwrap()
    };
    let efi = "<vmw:Config vmw:key='firmware' vmw:value='efi'/>";
    let vmware =
        read(&(controller("6", "VirtualSCSI") + &plain + efi), "<ovf:Name>Acme 1</ovf:Name>");
    assert_eq!((vmware.hardware.cpus, vmware.hardware.memory_mib), (4, 3072));
    assert_eq!(
        (vmware.hardware.firmware, vmware.hardware.disk_bus),
        (Firmware::Uefi, DiskBus::Sata)
    );
    assert_eq!(
        (vmware.controller, vmware.name.as_deref()),
        (Controller::Scsi("VirtualSCSI"), Some("Acme 1"))
    );
    assert_eq!(vmware.cards, [NetworkCard { network: "LAN".into(), model: "VmxNet3".into() }]);
    let section =
        "<vbox:Machine><vbox:Hardware><vbox:Firmware type='EFI64'/></vbox:Hardware></vbox:Machine>";
    let virtualbox = read(&(controller("5", "PIIX4") + &plain), section);
    assert_eq!(
        (virtualbox.controller, virtualbox.hardware.firmware),
        (Controller::Ide, Firmware::Uefi)
    );
    assert_eq!(virtualbox.name.as_deref(), Some("acme"));
    let virtio = read(&(controller("20", "VirtioSCSI") + &plain), "");
    assert_eq!(
        (virtio.hardware.disk_bus, virtio.hardware.firmware),
        (DiskBus::Scsi, Firmware::Bios)
    );
    for (unit, quantity) in [("parsec", "1"), ("byte * 2^40", "99999999999"), ("MB", "much")] {
        let memory = item(&[
            ("ResourceType", "4"),
            ("AllocationUnits", unit),
            ("VirtualQuantity", quantity),
        ]);
        let text = envelope(FILES, DISKS, &hardware_of(&memory));
        assert!(VirtualSystem::of(Some(&configuration(OVF, &text))).is_err(), "{unit}");
    }
}

#[test]
fn a_written_descriptor_is_read_as_it_was_meant() {
    let domain = "<domain><name>acme</name><title>A &amp; B</title><vcpu>3</vcpu><memory unit='GiB'>2</memory>\
                  <os firmware='efi'/><devices><disk device='disk'><target bus='virtio'/></disk><interface/>\
                  <interface/></devices></domain>";
    let vmx = "displayName = \"Acme\"\nnumvcpus = \"2\"\nmemsize = \"1024\"\nscsi0.virtualDev = \"lsisas1068\"\n\
               scsi0:0.present = \"TRUE\"\nethernet0.present = \"TRUE\"\n";
    for (format, text, cards) in [
        (LIBVIRT_XML, domain, 2),
        (VMX, vmx, 1),
        (COLDRISE_JSON, r#"{"disk_bus": "ide", "cpus": 1}"#, 1),
    ] {
        let system = VirtualSystem::of(Some(&configuration(format, text))).unwrap();
        assert_eq!(system.cards.len(), cards, "{format}");
        let disk = |number: u64| DescribedDisk {
            file: format!("acme-disk{number}.vmdk"),
            length_bytes: number,
            capacity_bytes: 512,
        };
        // More than one controller of each kind holds.
        let written = descriptor(&system, "acme", &Vec::from_iter((1..=40).map(disk)));
        let again = Envelope::parse(&written).unwrap();
        let places: Vec<_> = again.disks.iter().map(|disk| disk.length_bytes).collect();
        assert_eq!(places, Vec::from_iter((1..=40).map(Some)));
        assert_eq!(again.system.controller, system.controller, "{format}");
        assert_eq!((&again.system.guest, &again.system.cards), (&system.guest, &system.cards));
        let of = |hardware: &Hardware| (hardware.cpus, hardware.memory_mib, hardware.firmware);
        assert_eq!(of(&again.system.hardware), of(&system.hardware), "{format}");
        assert_eq!(again.system.name.as_deref(), Some("acme"));
    }
}
