//! QEMU's arguments for a machine with served disks.

use std::ffi::OsString;
use std::path::PathBuf;

use coldrise_block::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use crate::qemu_host::QemuHost;
use crate::uefi::{self, Flash};
use coldrise_host::{QEMU, kvm_works};
use coldrise_inventory::{DiskBus, Firmware, Hardware, Network};

/// The program.
pub const PROGRAM: &str = QEMU;

/// The names of the disks' block nodes begin with this.
pub(crate) const DISK_NODE: &str = "disk";

/// A thread for the server's answers. QEMU's main loop takes half a millisecond for an
/// answer while emulated processors keep it busy; IDE and SATA can use only that loop.
const IO_THREAD: &str = "iothread,id=io";

/// QEMU's NFS driver.
const NFS_DRIVER: &str = "block-nfs.so";

/// QEMU's monitor for `coldrise move`, a socket in QEMU's folder. It serves one client at a time, so nothing
/// else uses it.
pub const MOVE_MONITOR: &str = "qmp-move";

/// How long a machine's requests wait for a restarting server, in seconds.
pub(crate) const RECONNECT_DELAY_S: u32 = 60;

/// Maximum number of disks of a machine with that bus.
const MAX_IDE_DISKS: usize = 4;
const MAX_SATA_DISKS: usize = 6;

fn accelerator(has_kvm: bool) -> [&'static str; 2] {
    match has_kvm {
        true => ["-accel", "kvm"],
        false => ["-accel", "tcg,thread=multi"],
    }
}

/// The processor. Emulation copies byte by byte what `rep movsb` copies: guests that do not see
/// fast string operations boot 8 % sooner.
fn processor(has_kvm: bool) -> [&'static str; 2] {
    match has_kvm {
        true => ["-cpu", "max"],
        false => ["-cpu", "max,erms=off"],
    }
}

/// The console of a booted machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// The first serial port, on this terminal.
    Serial,
    /// A window with a screen.
    Window,
    /// A screen without a window. The caller adds the serial port, and who sees the screen.
    Observed,
}

/// Checks the requirements before anything is published or started.
///
/// # Errors
/// `Unsupported` for more disks than the bus takes and if UEFI is not installed on the host,
/// `ToolFailed` if QEMU is not installed.
pub fn check(on: &QemuHost, hardware: &Hardware, disks: usize) -> Result<()> {
    check_bus(hardware.disk_bus, disks)?;
    if hardware.firmware == Firmware::Uefi {
        uefi::plain(&on.host)?;
    }
    if on.facts.program.is_none() {
        let prefix = on.prefix();
        let text =
            format!("{prefix}{PROGRAM} is not installed (Debian: apt install qemu-system-x86)");
        return Err(Error::new(ErrorKind::ToolFailed, text));
    }
    Ok(())
}

fn check_bus(bus: DiskBus, disks: usize) -> Result<()> {
    let most = match bus {
        DiskBus::Ide => MAX_IDE_DISKS,
        DiskBus::Sata => MAX_SATA_DISKS,
        DiskBus::Virtio | DiskBus::Scsi => usize::MAX,
    };
    if disks > most {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("the bus takes {most} disks, not {disks}: use --disk-bus scsi"),
        ));
    }
    Ok(())
}

/// Checks that QEMU's NFS driver is installed; it is a separate file.
///
/// # Errors
/// `ToolFailed` if it is not.
pub fn check_nfs_driver() -> Result<()> {
    let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let mut folders = folders.map(|folder| folder.path()).chain([PathBuf::from("/usr/lib")]);
    if folders.any(|folder| folder.join("qemu").join(NFS_DRIVER).is_file()) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::ToolFailed,
        "QEMU's driver for NFS is not installed (Debian: apt install qemu-block-extra)",
    ))
}

/// All arguments. `disks` are block nodes without names. A machine that `stops` does so when a part of its disks cannot be
/// read, and continues with the monitor's `cont`. `flash` is the firmware of a machine that starts by UEFI.
pub fn arguments(
    hardware: &Hardware,
    has_kvm: bool,
    console: Console,
    disks: Vec<Value>,
    stops: bool,
    flash: Option<&Flash>,
) -> Vec<OsString> {
    let mut words: Vec<OsString> = Vec::new();
    let mut add = |more: &[&str]| words.extend(more.iter().map(OsString::from));
    add(&accelerator(has_kvm));
    add(&processor(has_kvm));
    add(&["-m", &hardware.memory_mib.to_string(), "-smp", &hardware.cpus.to_string()]);
    add(&["-nodefaults", "-no-user-config", "-device", "virtio-rng-pci"]);
    match console {
        Console::Serial => add(&["-display", "none", "-serial", "mon:stdio"]),
        Console::Window => {
            add(&["-vga", "std", "-serial", "none", "-usb", "-device", "usb-tablet"])
        }
        Console::Observed => add(&["-vga", "std", "-display", "none"]),
    }
    let network = match hardware.network {
        Network::None => None,
        Network::Isolated => Some("user,id=net0,restrict=on"),
        Network::User => Some("user,id=net0"),
    };
    if let Some(network) = network {
        let card = match hardware.disk_bus {
            DiskBus::Virtio | DiskBus::Scsi => "virtio-net-pci",
            DiskBus::Sata | DiskBus::Ide => "e1000",
        };
        add(&["-netdev", network, "-device", &format!("{card},netdev=net0,romfile=")]);
    }
    if matches!(hardware.disk_bus, DiskBus::Virtio | DiskBus::Scsi) {
        add(&["-object", IO_THREAD]);
    }
    match hardware.disk_bus {
        DiskBus::Scsi => add(&["-device", "virtio-scsi-pci,id=bus,iothread=io"]),
        DiskBus::Sata => add(&["-device", "ich9-ahci,id=bus"]),
        DiskBus::Virtio | DiskBus::Ide => {}
    }
    for (i, mut node) in disks.into_iter().enumerate() {
        node["node-name"] = format!("{DISK_NODE}{i}").into();
        node["discard"] = "unmap".into();
        let device = match hardware.disk_bus {
            DiskBus::Virtio => format!("virtio-blk-pci,drive=disk{i},discard=on,iothread=io"),
            DiskBus::Scsi => {
                format!("scsi-hd,bus=bus.0,scsi-id={},lun={},drive=disk{i}", i / 8, i % 8)
            }
            DiskBus::Sata => format!("ide-hd,bus=bus.{i},drive=disk{i}"),
            DiskBus::Ide => format!("ide-hd,bus=ide.{},unit={},drive=disk{i}", i / 2, i % 2),
        };
        let mut device = format!("{device},bootindex={}", i + 1);
        if console == Console::Observed {
            // Its writes are bounded: it sees a full drive, and is not stopped.
            device.push_str(",werror=report");
        }
        if stops {
            device.push_str(",rerror=stop");
        }
        add(&["-blockdev", &node.to_string(), "-device", &device]);
    }
    if let Some(Flash { code, variables }) = flash {
        for (unit, file, is_read_only) in [(0, code, true), (1, variables, false)] {
            let node = json!({
                "driver": "raw",
                "node-name": format!("firmware{unit}"),
                "read-only": is_read_only,
                "file": { "driver": "file", "filename": file },
            });
            add(&["-blockdev", &node.to_string()]);
        }
        add(&["-machine", "pc,pflash0=firmware0,pflash1=firmware1"]);
    } else {
        add(&["-machine", "pc"]);
    }
    words
}

/// A command line for people to copy: the short form of [`arguments`].
pub fn plain_command(hardware: &Hardware, uris: &[String], stops: bool) -> String {
    let [option, accelerator] = accelerator(kvm_works().is_ok());
    let mut text = format!(
        "{PROGRAM} {option} {accelerator} -m {} -smp {} -nographic",
        hardware.memory_mib, hardware.cpus
    );
    text.push_str(&match hardware.disk_bus {
        DiskBus::Virtio => format!(" -object {IO_THREAD}"),
        DiskBus::Scsi => format!(" -object {IO_THREAD} -device virtio-scsi-pci,iothread=io"),
        DiskBus::Sata | DiskBus::Ide => String::new(),
    });
    for (i, uri) in uris.iter().enumerate() {
        text.push_str(&format!(
            " -drive file={uri},format=raw,file.reconnect-delay={RECONNECT_DELAY_S},"
        ));
        text.push_str(&match hardware.disk_bus {
            DiskBus::Virtio => {
                format!("if=none,id=disk{i} -device virtio-blk-pci,drive=disk{i},iothread=io")
            }
            DiskBus::Scsi => format!("if=none,id=disk{i} -device scsi-hd,drive=disk{i}"),
            DiskBus::Sata | DiskBus::Ide => "if=ide".to_owned(),
        });
        if stops {
            text.push_str(",rerror=stop");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(hardware: Hardware, disks: usize) -> Vec<String> {
        let disks = (0..disks).map(|i| json!({ "driver": "nbd", "export": format!("a,vd{i}") }));
        let words = arguments(&hardware, false, Console::Serial, disks.collect(), false, None);
        words.into_iter().map(|word| word.into_string().unwrap()).collect()
    }

    #[test]
    fn every_disk_has_a_node_and_a_device() {
        for (bus, device) in [
            (DiskBus::Virtio, "virtio-blk-pci,drive=disk1,"),
            (DiskBus::Scsi, "scsi-hd,bus=bus.0,scsi-id=0,lun=1,drive=disk1,"),
            (DiskBus::Sata, "ide-hd,bus=bus.1,drive=disk1,"),
            (DiskBus::Ide, "ide-hd,bus=ide.0,unit=1,drive=disk1,"),
        ] {
            let words = words(Hardware { disk_bus: bus, ..Hardware::default() }, 2);
            assert!(words.iter().any(|word| word.starts_with(device)), "{words:?}");
            let node = words.iter().find(|word| word.contains("\"disk1\"")).unwrap();
            let node: serde_json::Value = serde_json::from_str(node).unwrap();
            // A comma in a name is not a separator.
            assert_eq!(node["export"], "a,vd1");
            assert_eq!(node["discard"], "unmap");
        }
    }

    #[test]
    fn a_bus_takes_a_limited_number_of_disks() {
        for (bus, most) in [(DiskBus::Ide, 4), (DiskBus::Sata, 6)] {
            assert!(check_bus(bus, most).is_ok());
            assert_eq!(check_bus(bus, most + 1).unwrap_err().kind(), ErrorKind::Unsupported);
        }
        assert!(check_bus(DiskBus::Scsi, 60).is_ok());
    }

    #[test]
    fn a_machine_has_no_network_unless_asked_for() {
        let quiet = words(Hardware::default(), 1);
        assert!(
            quiet.contains(&"-nodefaults".to_owned()) && !quiet.contains(&"-netdev".to_owned())
        );
        for (network, option) in
            [(Network::User, "user,id=net0"), (Network::Isolated, "user,id=net0,restrict=on")]
        {
            let open = words(Hardware { network, ..Hardware::default() }, 1);
            let place = open.iter().position(|word| word == "-netdev").unwrap();
            assert_eq!(open[place + 1], option);
        }
    }
}
