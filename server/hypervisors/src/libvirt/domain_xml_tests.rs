use super::*;

const XML: &str = "<domain type='kvm' id='3' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>web&amp;01</name><uuid>5d7a5f44-1d7e-4a1e-9a63-000000000001</uuid>
  <memory unit='MiB'>64</memory><vcpu placement='static' cpuset='40-47' current='1'>2</vcpu>
  <os><type arch='x86_64' machine='pc'>hvm</type><kernel>/etc/shadow</kernel><boot dev='hd'/></os>
  <cpu mode='host-passthrough'/>
  <devices>
    <emulator>/tmp/evil</emulator>
    <disk type='block' device='lun'><source dev='/dev/sda'/><backingStore/><target dev='vda' bus='virtio'/>
      <serial>ab</serial><address type='pci' domain='0x0000' bus='0x00' slot='0x07' function='0x0'/></disk>
    <disk type='file'><source file='/etc/shadow'/><target dev='vdz' bus='virtio'/></disk>
    <disk type='file' device='cdrom'><source file='/root/x.iso'/><target dev='hdc' bus='ide'/><readonly/></disk>
    <interface type='bridge'><mac address='52:54:00:00:00:01'/><source bridge='br0'/><model type='virtio'/></interface>
    <hostdev mode='subsystem' type='pci'><source><address bus='0x06'/></source></hostdev>
    <filesystem type='mount'><source dir='/'/><target dir='root'/></filesystem>
    <serial type='file'><source path='/etc/passwd'/><target port='0'/></serial>
    <channel type='unix'><source mode='bind' path='/etc/x'/><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <rng model='virtio'><backend model='egd' type='tcp'><source host='h'/></backend></rng>
    <graphics type='vnc' port='5900' passwd='secret' listen='0.0.0.0'/>
    <controller type='pci' model='pci-root'/>
  </devices>
  <seclabel type='none'/>
  <qemu:commandline><qemu:arg value='-evil'/></qemu:commandline>
</domain>";

fn options(network: &NetworkChoice) -> DomainOptions<'_> {
    static HERE: std::sync::LazyLock<Host> = std::sync::LazyLock::new(Host::here);
    DomainOptions {
        host: &HERE,
        name: None,
        has_new_uuid: false,
        new_uuid: None,
        tpm: Ok(()),
        network,
        disks: vec![(DiskName::parse("vda").unwrap(), "live/r/vda".to_owned())],
        socket: Path::new("/run/it's"),
        has_kvm: true,
        uefi: &[],
        variables_bytes: None,
        variables: VariablesPlace { file: "/own/it's.fd".into(), template: "/own/new".into() },
    }
}

#[test]
fn nothing_of_the_host_survives() {
    let domain = rewrite(XML, &options(&NetworkChoice::None)).unwrap();
    for word in [
        "/etc",
        "/tmp",
        "/root",
        "/dev/sd",
        "evil",
        "hostdev",
        "filesystem",
        "seclabel",
        "br0",
        "passwd",
        "0.0.0.0",
        "cpuset",
        "vdz",
        "egd",
    ] {
        assert!(!domain.text.contains(word), "{word}: {}", domain.text);
    }
    for word in [
        "<name>web&amp;01</name>",
        "<serial>ab</serial>",
        "slot='0x07'",
        "name='live/r/vda'",
        "socket='/run/it&apos;s'",
        "error_policy='stop'",
        "52:54:00:00:00:01",
        "state='down'",
        "current='1'>2</vcpu>",
        "<target dev='hdc' bus='ide'/><readonly/>",
        "org.qemu.guest_agent.0",
        "host-passthrough",
        "model='pci-root'",
    ] {
        assert!(domain.text.contains(word), "{word}: {}", domain.text);
    }
    // It is well-formed, and a second pass changes nothing.
    let again = rewrite(&domain.text, &options(&NetworkChoice::None)).unwrap();
    assert_eq!(again.text, domain.text);
    let remarks = domain.remarks.join("\n");
    for word in
        ["hostdev pci", "filesystem mount", "disk vdz", "drive hdc is empty", "kernel of os"]
    {
        assert!(remarks.contains(word), "{word}: {remarks}");
    }
}

#[test]
fn a_second_machine_has_its_own_identity() {
    let network = NetworkChoice::Named("lab'".to_owned());
    let own = DomainOptions { has_new_uuid: true, has_kvm: false, ..options(&network) };
    let domain = rewrite(XML, &own).unwrap();
    assert_eq!((domain.name.as_str(), domain.uuid), ("web&01-recovered", None));
    assert!(!domain.text.contains("<uuid>") && !domain.text.contains("<mac"));
    assert!(domain.text.contains("network='lab&apos;'") && domain.text.contains("mode='maximum'"));
    let same = rewrite(XML, &options(&NetworkChoice::Same)).unwrap();
    assert!(same.text.contains("br0") && same.text.contains("<mac"));
}

#[test]
fn disks_of_other_names_keep_their_order() {
    let network = NetworkChoice::None;
    let disk = |name: &str| (DiskName::parse(name).unwrap(), format!("live/r/{name}"));
    let two = DomainOptions { disks: vec![disk("one"), disk("two")], ..options(&network) };
    let text = rewrite(XML, &two).unwrap().text;
    let place = |word: &str| text.find(word).unwrap();
    assert!(place("live/r/one") < place("dev='vda'") && place("live/r/two") < place("dev='vdz'"));
    let other = DomainOptions { disks: vec![disk("vda"), disk("two")], ..options(&network) };
    let domain = rewrite(XML, &other).unwrap();
    assert!(!domain.text.contains("live/r/two"));
    assert!(
        domain.remarks.iter().any(|remark| remark.contains("disk two is not in the stored XML"))
    );
}

#[test]
fn invalid_domain_xml_is_refused() {
    let bomb =
        "<!DOCTYPE d [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;'>]><domain><name>&b;</name></domain>";
    for text in ["", "<network/>", "<domain>", bomb] {
        let error = rewrite(text, &options(&NetworkChoice::None)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{text}");
    }
}

#[test]
fn uefi_machines_get_variables_of_their_own() {
    let network = NetworkChoice::None;
    let (file, template) = ("/own/it&apos;s.fd", "/own/new");
    let os = |os: &str| {
        let text = XML.replace("<os><type", &format!("{os}<type"));
        rewrite(&text, &options(&network)).unwrap()
    };
    let original = "<nvram template='/root/vars'>/var/lib/libvirt/qemu/nvram/web01_VARS.fd</nvram>";
    let network_file = "<nvram type='network'><source protocol='nbd' name='web01_VARS'/></nvram>";
    for (start, chosen) in [
        (format!("<os><loader type='pflash' secure='yes'>/lost/CODE.fd</loader>{original}"), false),
        (
            format!(
                "<os firmware='efi'><firmware><feature enabled='yes' name='secure-boot'/></firmware>{network_file}"
            ),
            false,
        ),
        (
            format!("<os><loader type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>{original}"),
            true,
        ),
    ] {
        let domain = os(&start);
        assert!(
            !domain.text.contains("web01_VARS") && !domain.text.contains("/root"),
            "{}",
            domain.text
        );
        assert!(domain.text.contains(&format!(">{file}</nvram>")), "{}", domain.text);
        let variables = domain.variables.unwrap();
        assert_eq!(variables.place, options(&network).variables);
        // By its name, without a descriptor.
        let empty = chosen.then(|| PathBuf::from("/usr/share/OVMF/OVMF_VARS_4M.fd"));
        assert_eq!(variables.empty, empty);
        assert_eq!(domain.text.contains(&format!("<nvram template='{template}'>")), chosen);
        assert_eq!(domain.text.contains("firmware='efi'"), !chosen);
    }
    for bios in ["<os>", "<os><loader type='rom'>/usr/share/seabios/bios.bin</loader>"] {
        let domain = os(bios);
        assert!(!domain.text.contains("nvram") && domain.variables.is_none(), "{}", domain.text);
    }
}

#[test]
fn a_tpm_stays_if_its_state_can_be_placed() {
    let tpm = "<tpm model='tpm-tis'><backend type='emulator' version='2.0'><encryption secret='s'/>\
               <active_pcr_banks/></backend><address x='y'/></tpm><serial type='file'>";
    let source = XML.replacen("<serial type='file'>", tpm, 1);
    let network = NetworkChoice::None;
    let beside = DomainOptions { has_new_uuid: true, new_uuid: Some("u-2"), ..options(&network) };
    let domain = rewrite(&source, &beside).unwrap();
    let own = "<tpm model='tpm-tis'><backend type='emulator' version='2.0' persistent_state='yes'>\
               <encryption secret='s'/></backend></tpm>";
    assert!(domain.has_tpm && domain.text.contains(own), "{}", domain.text);
    assert!(domain.text.contains("<uuid>u-2</uuid>"), "{}", domain.text);
    let without = DomainOptions { tpm: Err("why".to_owned()), ..options(&network) };
    let domain = rewrite(&source, &without).unwrap();
    assert!(!domain.has_tpm && !domain.text.contains("tpm"), "{}", domain.text);
    assert!(domain.remarks.contains(&"why".to_owned()), "{:?}", domain.remarks);
    // A TPM of the host has no state to place.
    let passed = source.replace("type='emulator'", "type='passthrough'");
    let domain = rewrite(&passed, &options(&network)).unwrap();
    assert!(!domain.has_tpm && !domain.text.contains("tpm"), "{}", domain.text);
    assert!(domain.remarks.iter().any(|remark| remark.contains("left out: tpm")));
}
