//! The domain of a machine without stored XML: the same hardware as `coldrise boot` gives it.

use coldrise_inventory::{DiskBus, Firmware, Hardware};

use super::devices::disk_element;
use super::domain_xml::{DomainOptions, DomainXml, NetworkChoice, escaped};
use super::uefi::Boot;

/// Makes the domain.
pub fn default_domain(name: &str, hardware: &Hardware, options: &DomainOptions<'_>) -> DomainXml {
    let name = options.name.unwrap_or(name).to_owned();
    let kind = if options.has_kvm { "kvm" } else { "qemu" };
    let boot = Boot::plain(hardware.firmware == Firmware::Uefi, options);
    let (bus, prefix) = match hardware.disk_bus {
        DiskBus::Virtio => ("virtio", "vd"),
        DiskBus::Scsi => ("scsi", "sd"),
        DiskBus::Sata => ("sata", "sd"),
        DiskBus::Ide => ("ide", "hd"),
    };
    let mut text = format!(
        "<domain type='{kind}'>\n<name>{}</name>\n<memory unit='MiB'>{}</memory>\n\
         <vcpu>{}</vcpu>\n{}\n\
         <features><acpi/><apic/></features>\n<devices>\n",
        escaped(&name),
        hardware.memory_mib,
        hardware.cpus,
        boot.text
    );
    if hardware.disk_bus == DiskBus::Scsi {
        text.push_str("<controller type='scsi' model='virtio-scsi'/>\n");
    }
    for (i, (_, export)) in options.disks.iter().enumerate() {
        let device = format!("{prefix}{}", letters(i));
        let parts = format!("<target dev='{device}' bus='{bus}'/><boot order='{}'/>", i + 1);
        text.push_str(&disk_element(export, options, &parts));
        text.push('\n');
    }
    if let NetworkChoice::Named(network) = options.network {
        text.push_str(&format!(
            "<interface type='network'><source network='{}'/><model type='virtio'/></interface>\n",
            escaped(network)
        ));
    }
    text.push_str(
        "<serial type='pty'/>\n<graphics type='vnc' autoport='yes'><listen type='address' \
         address='127.0.0.1'/></graphics>\n<video><model type='vga'/></video>\n</devices>\n\
         </domain>\n",
    );
    let remarks = vec![
        "the machine has the hardware of coldrise boot: there is no stored XML, or it is not used"
            .to_owned(),
    ];
    DomainXml { text, name, uuid: None, has_tpm: false, variables: boot.variables, remarks }
}

/// `a` to `z`, then `aa` and so on.
fn letters(number: usize) -> String {
    let last = char::from(b'a' + (number % 26) as u8);
    match number / 26 {
        0 => last.to_string(),
        more => format!("{}{last}", letters(more - 1)),
    }
}
