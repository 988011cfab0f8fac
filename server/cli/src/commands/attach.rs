//! `coldrise attach` and `detach`: a disk beside those of a running machine.

use std::fmt;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use coldrise_block::{Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind};
use coldrise_hypervisors::attach::{self, AttachDomain, AttachedDisk, Device, MAX_NAME_CHARS};
use coldrise_hypervisors::virsh::Virsh;
use coldrise_store::{default_cache_bytes, Address};
use serde_json::json;

use super::restore::open_disk;
use crate::invocation::Invocation;
use crate::report::{print_line, Report};
use coldrise_hosting::nbdkit::{Endpoint, Nbdkit, ServeOptions};
use coldrise_hosting::signals::ChildSignals;
use coldrise_hosting::socket_access::SocketAccess;
use coldrise_runs::process_run;

/// How often the command looks after its server and its end.
const INTERVAL: Duration = Duration::from_millis(200);
/// The command ends if the machine has not been connected for this long.
const GONE: Duration = Duration::from_secs(5);
/// Time for the guest to release the disk.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running machine.
#[derive(Clone, Debug)]
pub(crate) enum Machine {
    /// The monitor of its QEMU.
    Qemu(PathBuf),
    /// The name of a domain.
    Libvirt(String),
}

impl FromStr for Machine {
    type Err = Error;

    fn from_str(text: &str) -> Result<Machine> {
        match text.split_once(':') {
            Some(("qmp", path)) if !path.is_empty() => Ok(Machine::Qemu(PathBuf::from(path))),
            Some(("libvirt", name)) if !name.is_empty() => Ok(Machine::Libvirt(name.to_owned())),
            _ if text == "host" => Err(Error::new(
                ErrorKind::InvalidInput,
                "on this host every disk is a file: coldrise mount DIR, then \
                 DIR/MACHINE/POINT/DISK.raw",
            )),
            _ => Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "'{text}': write libvirt:DOMAIN, or qmp:SOCKET with the socket of QEMU's monitor (-qmp)"
                ),
            )),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Machine::Qemu(path) => write!(f, "qmp:{}", path.display()),
            Machine::Libvirt(name) => write!(f, "libvirt:{name}"),
        }
    }
}

/// The options that `attach` and `detach` share.
#[derive(Debug, Args)]
struct GuestArguments {
    /// With libvirt: the URI of libvirt on this host. Default: $LIBVIRT_DEFAULT_URI, else qemu:///system.
    #[arg(long, value_name = "URI")]
    connect: Option<String>,

    /// With qmp: the socket of the guest agent's port. Before it is detached, the agent is asked
    /// whether the guest has mounted the disk. libvirt knows its own.
    #[arg(long, value_name = "SOCKET")]
    agent: Option<PathBuf>,
}

/// A machine that is there.
enum Found {
    Qemu { monitor: PathBuf, agent: Option<PathBuf> },
    Libvirt(AttachDomain),
}

impl GuestArguments {
    fn find(&self, machine: &Machine) -> Result<Found> {
        match machine {
            Machine::Qemu(_) if self.connect.is_some() => {
                Err(Error::new(ErrorKind::InvalidInput, "--connect is for libvirt:DOMAIN"))
            }
            Machine::Qemu(monitor) => {
                Ok(Found::Qemu { monitor: monitor.clone(), agent: self.agent.clone() })
            }
            Machine::Libvirt(_) if self.agent.is_some() => Err(Error::new(
                ErrorKind::InvalidInput,
                "--agent: libvirt knows the agent's socket; leave it out",
            )),
            Machine::Libvirt(name) => {
                AttachDomain::find(&Virsh::local(self.connect.as_deref())?, name)
                    .map(Found::Libvirt)
            }
        }
    }
}

impl Found {
    /// Lets its QEMU enter the folder of the socket. Returns who may connect.
    fn share(&self, folder: &Path) -> Result<SocketAccess> {
        let group = match self {
            Found::Qemu { .. } => None,
            Found::Libvirt(domain) => domain.group()?,
        };
        let Some(group) = group else { return Ok(SocketAccess::default()) };
        let what = || format!("giving {} to QEMU's group", folder.display());
        std::os::unix::fs::chown(folder, None, Some(group)).context(what).map_err(|error| {
            error.advise(format!("run the command as root, or as a member of group {group}"))
        })?;
        std::fs::set_permissions(folder, Permissions::from_mode(0o710)).context(what)?;
        let owner = format!("{}:{group}", rustix::process::geteuid().as_raw());
        Ok(SocketAccess { owner: Some(owner.parse()?), mode: None })
    }

    fn attach(&self, disk: &AttachedDisk<'_>) -> Result<()> {
        match self {
            Found::Qemu { monitor, .. } => attach::attach(monitor, disk),
            Found::Libvirt(domain) => domain.attach(disk),
        }
    }

    /// Detaches a disk. Unless `force`, the guest agent is asked first, where there is one.
    fn detach(&self, invocation: &Invocation, name: &str, force: bool) -> Result<()> {
        let asked = match self {
            _ if force => Ok(()),
            Found::Qemu { agent: None, .. } => Ok(()),
            Found::Qemu { agent: Some(agent), .. } => attach::check_unmounted(agent, name),
            Found::Libvirt(domain) => domain.check_unmounted(name),
        };
        match asked {
            Err(error) if error.kind() == ErrorKind::Busy => return Err(error),
            Err(error) => invocation.remark(&format!(
                "warning: whether the guest has mounted the disk is unknown: {}",
                error.full_message()
            )),
            Ok(()) => {}
        }
        match self {
            Found::Qemu { monitor, .. } => attach::detach(monitor, name, PATIENCE),
            Found::Libvirt(domain) => domain.detach(name, PATIENCE),
        }
    }
}

/// How the guest sees the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DeviceWord {
    /// virtio-blk-pci.
    Virtio,
    /// A disk of the machine's SCSI controller.
    Scsi,
}

/// Attach a disk of a restore point or session to a running machine, until Ctrl-C or detach.
///
/// The guest sees a further disk, whose serial number is its name. A restore point's disk is
/// read-only; a session's disk is writable. Ctrl-C detaches it: unmount it in the guest first.
/// The command also ends when the machine ends. See docs/recovery.md.
#[derive(Debug, Args)]
pub(crate) struct AttachArguments {
    /// MACHINE/POINT/DISK or live/SESSION/DISK; /DISK is optional if there is only one disk.
    #[arg(value_name = "ADDRESS")]
    address: Address,

    /// The machine: libvirt:DOMAIN, or qmp:SOCKET with the socket of QEMU's monitor, to which no other program may
    /// be connected at the same moment.
    #[arg(long, value_name = "MACHINE")]
    to: Machine,

    #[command(flatten)]
    guest: GuestArguments,

    /// Name of the disk: up to 20 letters, digits and '-', '_', '.'. Default: MACHINE-DISK or
    /// SESSION-DISK, cut to 20 characters.
    #[arg(long = "as", value_name = "NAME")]
    name: Option<String>,

    /// How the guest sees the disk.
    #[arg(long, value_name = "KIND", default_value = "virtio")]
    device: DeviceWord,
}

/// Detach a disk that `attach` attached. Unmount it in the guest first.
///
/// Also removes what a killed `attach` left in the machine.
#[derive(Debug, Args)]
pub(crate) struct DetachArguments {
    /// The disk's name, as `attach` printed it.
    #[arg(value_name = "NAME")]
    name: String,

    /// The machine: libvirt:DOMAIN, or qmp:SOCKET with the socket of QEMU's monitor.
    #[arg(long, value_name = "MACHINE")]
    from: Machine,

    #[command(flatten)]
    guest: GuestArguments,

    /// Detach even if the guest has mounted the disk: its programs get errors, and unwritten data is lost.
    #[arg(long)]
    force: bool,
}

pub(crate) fn attach(invocation: &Invocation, arguments: &AttachArguments) -> Result<Report> {
    let mut signals = ChildSignals::catch()?;
    let machine = arguments.guest.find(&arguments.to)?;
    let repository = invocation.open()?;
    let (export, disk, held) = open_disk(invocation, &repository, &arguments.address)?;
    drop((disk, held));
    let name = arguments.name.clone().unwrap_or_else(|| default_name(&export));
    attach::check_name(&name)?;
    let scratch = ScratchFolder::new(ScratchKind::Nbdkit)?;
    let socket = scratch.path().join("disk");
    let options = ServeOptions {
        endpoint: Endpoint::Socket(socket.clone(), machine.share(scratch.path())?),
        tls: None,
        cache_bytes: default_cache_bytes(),
        is_read_only: false,
        lists_formats: false,
        // A killed command must not leave it: it would serve on until the guest disconnects.
        disconnects_at_end: true,
        only: vec![export.clone()],
    };
    let mut server = Nbdkit::start(invocation.caller()?, &options, &mut signals)?;
    let is_read_only = matches!(arguments.address, Address::Point { .. });
    let device = match arguments.device {
        DeviceWord::Virtio => Device::VirtioBlk,
        DeviceWord::Scsi => Device::Scsi,
    };
    let disk = AttachedDisk { name: &name, socket: &socket, export: &export, is_read_only, device };
    // Before: doctor looks for what a killed command has left.
    process_run::progress(json!({ "phase": "attaching", "name": name, "address": export,
                                 "is_read_only": is_read_only, "machine": recorded(&arguments.to)?,
                                 "connect": arguments.guest.connect }));
    machine.attach(&disk)?;
    let elapsed_ms = invocation.elapsed_ms();
    process_run::progress(json!({ "phase": "attached", "name": name, "address": export,
                                 "is_read_only": is_read_only }));
    if invocation.is_json() {
        let ready = json!({ "event": "ready", "name": name, "address": export,
                            "is_read_only": is_read_only, "elapsed_ms": elapsed_ms });
        print_line(&ready.to_string());
    } else {
        let kind = if is_read_only { "read-only" } else { "writable" };
        print_line(&format!(
            "ready: {export} is attached, {kind}, with the serial number {name} \
             (/dev/disk/by-id/…-{name}; Ctrl-C detaches it)"
        ));
    }
    let how = serve(invocation, &mut server, &mut signals, &machine, &name, &socket)?;
    let object = json!({ "name": name, "address": export, "end": how,
                         "elapsed_ms": invocation.elapsed_ms() });
    Ok(Report::done(&object, format!("{name}: {how}")))
}

/// A machine in words that hold in any folder.
fn recorded(machine: &Machine) -> Result<String> {
    Ok(match machine {
        Machine::Qemu(path) => {
            let path = std::path::absolute(path).context(|| "finding the monitor")?;
            Machine::Qemu(path).to_string()
        }
        Machine::Libvirt(_) => machine.to_string(),
    })
}

/// Whether a machine has a disk of ours.
///
/// # Errors
/// `NotFound` if it does not run; those of its monitor or of libvirt.
pub(super) fn is_attached(machine: &str, connect: Option<&str>, name: &str) -> Result<bool> {
    match machine.parse()? {
        Machine::Qemu(monitor) => attach::is_attached(&monitor, name),
        Machine::Libvirt(domain) => {
            AttachDomain::find(&Virsh::local(connect)?, &domain)?.is_attached(name)
        }
    }
}

/// The command that removes it.
pub(super) fn detach_command(machine: &str, connect: Option<&str>, name: &str) -> String {
    let connect = connect.map(|uri| format!(" --connect {uri}")).unwrap_or_default();
    format!("coldrise detach {name} --from {machine}{connect}")
}

/// `web01/20261120T100000Z/vda` becomes `web01-vda`.
fn default_name(export: &str) -> String {
    let parts: Vec<&str> = export.split('/').collect();
    let (owner, disk) = match parts[..] {
        ["live", session, disk] => (session, disk),
        [machine, .., disk] => (machine, disk),
        _ => ("disk", export),
    };
    format!("{owner}-{disk}").chars().take(MAX_NAME_CHARS).collect()
}

/// Serves the disk until it is detached. Returns how that came.
fn serve(
    invocation: &Invocation,
    server: &mut Nbdkit,
    signals: &mut ChildSignals,
    machine: &Found,
    name: &str,
    socket: &Path,
) -> Result<&'static str> {
    let mut connected = Instant::now();
    let mut was_refused = false;
    loop {
        std::thread::sleep(INTERVAL);
        if signals.was_asked_to_end() {
            match machine.detach(invocation, name, false) {
                Ok(()) => break server.stop(None).map(|()| "detached"),
                Err(error) if !was_refused => {
                    was_refused = true;
                    invocation.remark(&format!(
                        "{}; the disk is still served: Ctrl-C again tries again and then ends anyway",
                        error.full_message()
                    ));
                }
                Err(error) => {
                    server.stop(None)?;
                    break Err(error.context("ended, and the guest's requests fail now"));
                }
            }
            connected = Instant::now();
        }
        let before = Instant::now();
        if server.keep_up(invocation.caller()?, signals)?.is_some() {
            let text = "nbdkit ended while the disk was attached";
            break Err(Error::new(ErrorKind::ToolFailed, text));
        }
        if before.elapsed() > INTERVAL {
            // It was started again, after a pause: the machine needs a moment to connect.
            connected = Instant::now();
        }
        if is_connected(socket) {
            connected = Instant::now();
        } else if connected.elapsed() > GONE {
            break server.stop(None).map(|()| "the machine has disconnected");
        }
    }
}

/// Whether a client is connected to a Unix socket of this network namespace.
fn is_connected(socket: &Path) -> bool {
    let Ok(sockets) = std::fs::read_to_string("/proc/net/unix") else { return true };
    let path = socket.to_string_lossy();
    // The sixth column is the state; 03 is connected.
    sockets
        .lines()
        .filter(|line| line.ends_with(path.as_ref()))
        .any(|line| line.split_whitespace().nth(5) == Some("03"))
}

pub(crate) fn detach(invocation: &Invocation, arguments: &DetachArguments) -> Result<Report> {
    let machine = arguments.guest.find(&arguments.from)?;
    machine.detach(invocation, &arguments.name, arguments.force)?;
    let object = json!({ "name": arguments.name, "elapsed_ms": invocation.elapsed_ms() });
    Ok(Report::done(&object, format!("detached {}", arguments.name)))
}

#[cfg(test)]
mod tests {
    use super::default_name;

    #[test]
    fn default_names_fit_into_a_serial_number() {
        assert_eq!(default_name("web01/20261120T100000Z/vda"), "web01-vda");
        assert_eq!(default_name("live/rescue/vdb"), "rescue-vdb");
        assert_eq!(default_name(&format!("{}/20261120T100000Z/vda", "m".repeat(63))).len(), 20);
    }
}
