use super::*;

fn hardware(format: &str, text: &str) -> Result<Hardware> {
    Hardware::of(Some(&Configuration { format: format.to_owned(), text: text.to_owned() }))
}

#[test]
fn without_a_configuration_there_is_a_default() {
    assert_eq!(Hardware::of(None).unwrap(), Hardware::default());
    assert_eq!(hardware("plist", "<plist/>").unwrap(), Hardware::default());
    assert_eq!(Hardware::default().network, Network::None);
}

#[test]
fn our_own_description_may_leave_things_out() {
    let text = r#"{"cpus":4,"firmware":"uefi","disk_bus":"sata","network":"user","note":"x"}"#;
    let expected = Hardware {
        cpus: 4,
        memory_mib: 2048,
        firmware: Firmware::Uefi,
        disk_bus: DiskBus::Sata,
        network: Network::User,
    };
    assert_eq!(hardware(COLDRISE_JSON, text).unwrap(), expected);
    assert_eq!(hardware(COLDRISE_JSON, "{}").unwrap(), Hardware::default());
}

#[test]
fn invalid_hardware_descriptions_are_refused() {
    for (format, text) in [
        (COLDRISE_JSON, r#"{"cpus":0}"#),
        (COLDRISE_JSON, r#"{"cpus":256}"#),
        (COLDRISE_JSON, r#"{"cpus":-1}"#),
        (COLDRISE_JSON, r#"{"memory_mib":1}"#),
        (COLDRISE_JSON, r#"{"memory_mib":99999999999}"#),
        (COLDRISE_JSON, r#"{"firmware":"coreboot"}"#),
        (COLDRISE_JSON, "["),
        (LIBVIRT_XML, "<network/>"),
        (LIBVIRT_XML, "<domain><memory>"),
        (LIBVIRT_XML, "<domain><memory unit='PiB'>1</memory></domain>"),
        (LIBVIRT_XML, "<domain><memory unit='TiB'>99999999999</memory></domain>"),
        (LIBVIRT_XML, "<domain><vcpu>many</vcpu></domain>"),
        (VMX, "memsize = \"lots\"\n"),
        (VMX, "numvcpus = \"0\"\n"),
    ] {
        let error = hardware(format, text).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{text}");
        assert!(error.to_string().contains(format), "{error}");
    }
}

#[test]
fn hardware_is_read_from_libvirt_xml() {
    let text = "<?xml version='1.0'?>
        <domain type='kvm'>
          <name>web01</name>
          <memory unit='KiB'>4194304</memory>
          <vcpu placement='static'>3</vcpu>
          <os><loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE.fd</loader></os>
          <devices>
            <disk type='file' device='cdrom'><target dev='sda' bus='sata'/></disk>
            <disk type='file' device='disk'><source file='/x'/><target dev='sdb' bus='scsi'/></disk>
          </devices>
        </domain>";
    let expected = Hardware {
        cpus: 3,
        memory_mib: 4096,
        firmware: Firmware::Uefi,
        disk_bus: DiskBus::Scsi,
        network: Network::None,
    };
    assert_eq!(hardware(LIBVIRT_XML, text).unwrap(), expected);
    let small = "<domain><memory>1048576</memory><os firmware='efi'/></domain>";
    let hardware = hardware(LIBVIRT_XML, small).unwrap();
    assert_eq!((hardware.memory_mib, hardware.firmware), (1024, Firmware::Uefi));
    assert_eq!(hardware.disk_bus, DiskBus::Virtio);
}

#[test]
fn hostile_xml_opens_nothing_and_ends_soon() {
    let outside =
        "<!DOCTYPE d [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><domain><vcpu>&x;</vcpu></domain>";
    assert!(hardware(LIBVIRT_XML, outside).is_err());
    let many = format!("<domain>{}</domain>", "<a/>".repeat(200_000));
    assert!(hardware(LIBVIRT_XML, &many).is_err());
    let deep = format!("{}{}", "<domain>".repeat(50_000), "</domain>".repeat(50_000));
    // Accepted or refused, but without a crash.
    let _ = hardware(LIBVIRT_XML, &deep);
}

#[test]
fn hardware_is_read_from_a_vmx() {
    let text = ".encoding = \"UTF-8\"\r\nnumvcpus = \"4\"\r\nmemSize = \"8192\"\r\n\
                firmware = \"efi\"\r\nscsi0:0.present = \"TRUE\"\r\nscsi0:0.fileName = \"a.vmdk\"\r\n";
    let found = hardware(VMX, text).unwrap();
    assert_eq!((found.cpus, found.memory_mib), (4, 8192));
    assert_eq!((found.firmware, found.disk_bus), (Firmware::Uefi, DiskBus::Sata));
    let ide = "ide0:0.present = \"TRUE\"\nide1:0.present = \"TRUE\"\n";
    assert_eq!(hardware(VMX, ide).unwrap().disk_bus, DiskBus::Ide);
    let cdrom = "sata0:0.present = \"TRUE\"\nide1:0.present = \"TRUE\"\n\
                 ide1:0.deviceType = \"cdrom-raw\"\n";
    assert_eq!(hardware(VMX, cdrom).unwrap().disk_bus, DiskBus::Sata);
}

#[test]
fn a_tpm_is_seen() {
    let has = |format: &str, text: &str| {
        has_tpm(&Configuration { format: format.to_owned(), text: text.to_owned() })
    };
    assert!(has(LIBVIRT_XML, "<domain><devices><tpm model='tpm-crb'/></devices></domain>"));
    assert!(!has(LIBVIRT_XML, "<domain/>") && !has(LIBVIRT_XML, "<domain"));
    assert!(has(VMX, "vtpm.present = \"TRUE\"\n") && !has(VMX, "vtpm.present = \"FALSE\"\n"));
}
